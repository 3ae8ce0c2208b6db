"""One rank's process: how it is started, what it is asked, what it has said, how it ended."""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.errors import ArtifactError, K3Error, TargetError, UnsoundError
from k3tool.runtime import records
from k3tool.runtime.records import RECORD_DTYPE, Fault

_EXIT_ERRORS: dict[int, type[K3Error]] = {3: ArtifactError, 5: TargetError}


class RankProcess:
    """One process and its two pipes. It must be stopped; `answers` are records not yet taken."""

    def __init__(self, number: int, command: Sequence[str], passed: Sequence[int]) -> None:
        """Start it; `passed` are descriptors that the command names. Raises: OSError."""
        self.number = number
        self.answers: deque[Any] = deque()
        self.leaves = ""
        self.ended = False
        self.end: Any = None  # the END record
        self.is_direct = False
        self._pending = b""
        asked, self._requests = os.pipe()
        self.records, said = os.pipe()
        pipes = ["--requests", str(asked), "--records", str(said)]
        try:
            self.process = subprocess.Popen(
                [*command, *pipes], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                pass_fds=[*passed, asked, said],
            )  # fmt: skip
        except BaseException:
            os.close(self._requests)
            os.close(self.records)
            raise
        finally:
            os.close(asked)
            os.close(said)

    def ask(self, request: bytes) -> None:
        """Send a request. Of a rank that has gone its other pipe says so."""
        done = 0
        try:
            while done < len(request):
                done += os.write(self._requests, request[done:])
        except BrokenPipeError:
            return

    def close_requests(self) -> None:
        """Say that nothing more will be asked."""
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    def stop(self) -> None:
        """Kill it and close what belongs to it."""
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.close_requests()
        os.close(self.records)

    @property
    def peak_bytes(self) -> int:
        """Return its peak resident memory, 0 before it has ended."""
        return 0 if self.end is None else int(self.end["peak_bytes"])

    def listen(self) -> Sequence[Fault] | None:
        """Take what the pipe has: faults in it, or None where the pipe is closed."""
        data = os.read(self.records, RECORD_DTYPE.itemsize * 64)
        if not data:
            return None
        data = self._pending + data
        whole = len(data) // RECORD_DTYPE.itemsize * RECORD_DTYPE.itemsize
        self._pending = data[whole:]
        return [
            fault
            for row in np.frombuffer(data[:whole], RECORD_DTYPE)
            if (fault := self._take(row)) is not None
        ]

    def _take(self, row: Any) -> Fault | None:
        kind = int(row["kind"])
        if kind == records.READY:
            self.leaves = bytes(row["name"]).decode()
            self.is_direct = bool(row["is_direct"])
        elif kind in (records.PROMPT, records.TOKEN, records.DONE):
            self.answers.append(row)
        elif kind == records.END:
            self.ended, self.end = True, row
        elif kind == records.FAULT:
            self.ended = True
            return records.parse_fault(row)
        return None

    def stderr_line(self) -> str:
        """Return the first line it said that says something; it must have ended."""
        assert self.process.stderr is not None
        lines = self.process.stderr.read().decode(errors="replace").splitlines()
        # A sanitizer draws a rule above its report.
        return next((line.strip() for line in lines if line.strip().strip("=")), "")

    def death(self, said: str) -> K3Error:
        """Return the error for a rank whose pipe closed before its last record."""
        code = self.process.wait()
        if code in _EXIT_ERRORS:
            return _EXIT_ERRORS[code](f"rank {self.number}", got=said, need="what it can run")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return UnsoundError(
            f"rank {self.number}", got=f"{how} {said}".strip(), need="all ranks until the end"
        )


def silent(ranks: Sequence[RankProcess], seconds: float) -> UnsoundError:
    """Name the ranks that did not advance, stopped ones first: the others wait for them."""
    stopped = [rank for rank in ranks if _state(rank.process.pid) in "Tt"]
    named = ", ".join(str(rank.number) for rank in stopped or ranks)
    got = "stopped by a signal" if stopped else f"no progress in {seconds:g} s"
    return UnsoundError(
        f"rank {named}", got=got, need="all ranks to advance",
        hint="let it run, or raise --deadline where one step takes longer",
    )  # fmt: skip


def _state(pid: int) -> str:
    """Return a process's state as the system names it (T: stopped), "?" where it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "?"
    return text.rpartition(")")[2].split()[0]

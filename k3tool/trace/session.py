"""A run's trace from before its first step to the file: asked for, recorded, published."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from k3tool.artifact import InputRef
from k3tool.atomic import is_full
from k3tool.errors import K3Error, UnsoundError
from k3tool.isa.stream import Isa
from k3tool.tables import count_text
from k3tool.trace.file import Given, write_trace
from k3tool.trace.kept import Kept, describe_kept
from k3tool.trace.recorder import Recorder

_FIRST_SHARE = (
    0.45  # of the steps that filled a disk: as much again, and what a trace says of itself
)


class HashTrace:
    """A trace of a run, or of nothing where `path` is None; a context manager.

    A run that ends because its result must not be trusted leaves the steps before that: they are
    what a diff needs.
    """

    def __init__(
        self,
        path: Path | None,
        kept: Kept | None,
        isa: Isa,
        given: Given,
        inputs: Iterable[InputRef],
        note: Callable[[str], None],
    ) -> None:
        """Open the files that ranks write. Raises: K3Error where they cannot be made.

        What the run chooses is appended to `chosen` as it comes.
        """
        self.chosen: list[int] = []
        self.recorder = None if path is None else Recorder(path, isa, kept)
        self._isa, self._given, self._inputs, self._note = isa, given, list(inputs), note
        self.is_published = False

    def publish(self, is_whole: bool = True) -> None:
        """Write the trace; say so where a full disk has ended it. Raises: K3Error."""
        recorder = self.recorder
        if recorder is None:
            return
        error, path = recorder.error, recorder.path
        if error:
            self._note(f"{path}: {os.strerror(error)}: the trace ends here, the run goes on")
        params: dict[str, object] = {
            "tp": self._isa.tp,
            "numerics": self._isa.params["numerics"],
            "eps": self._isa.params["eps"],
            "kept": describe_kept(recorder.kept),
            "is_whole": is_whole and error == 0,
        }
        digest = self._write_what_fits(recorder, params)
        self.is_published = digest is not None
        if digest is None:
            self._note(f"{path}: no step was recorded: no trace is written")

    def _write_what_fits(self, recorder: Recorder, params: dict[str, object]) -> str | None:
        """Write the trace; on a disk that has no room for it, of as many first steps as it has.

        What was recorded lies on the same disk until then: about half of what filled it fits.
        Raises: K3Error where not even one step fits, or for another reason.
        """
        given = self._given._replace(chosen=tuple(self.chosen))
        n_steps = n_recorded = sum(1 for _ in recorder.steps())
        share = _FIRST_SHARE
        while True:
            try:
                digest = write_trace(
                    recorder.path, recorder, given, params=params, inputs=self._inputs,
                    target=self._isa.target,
                )  # fmt: skip
            except K3Error as refused:
                n_steps, share = int(n_steps * share), 0.5
                if not is_full(refused) or n_steps == 0:
                    raise
                recorder.cut(n_steps)
                params = {**params, "is_whole": False}
                continue
            if n_steps < n_recorded:
                self._note(
                    f"{recorder.path}: no space left on the disk: the trace keeps the first "
                    f"{count_text(n_steps, 'step')} of {n_recorded}"
                )
            return digest

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; keep what led to an unsound end."""
        try:
            if isinstance(error, UnsoundError):
                self.publish(is_whole=False)
        finally:
            if self.recorder is not None:
                self.recorder.close()

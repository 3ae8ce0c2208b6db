"""A run's trace from before its first step to the file: asked for, recorded, published."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from k3tool.artifact import InputRef
from k3tool.errors import UnsoundError
from k3tool.isa.stream import Isa
from k3tool.trace.file import Given, write_trace
from k3tool.trace.kept import Kept, describe_kept
from k3tool.trace.recorder import Recorder


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
        params = {
            "tp": self._isa.tp,
            "numerics": self._isa.params["numerics"],
            "eps": self._isa.params["eps"],
            "kept": describe_kept(recorder.kept),
            "is_whole": is_whole and error == 0,
        }
        if error:
            self._note(f"{path}: {os.strerror(error)}: the trace ends here, the run goes on")
        given = self._given._replace(chosen=tuple(self.chosen))
        digest = write_trace(
            path, recorder, given, params=params, inputs=self._inputs,
            target=self._isa.target,
        )  # fmt: skip
        self.is_published = digest is not None
        if digest is None:
            self._note(f"{path}: no step was recorded: no trace is written")

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

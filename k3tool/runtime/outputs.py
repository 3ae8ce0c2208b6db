"""The files that a run was asked to keep: their room is held before the first step, and what cannot
be written at the end takes none of the others with it.

Room is held by a file without a name beside each output: others that write to the disk meanwhile, a
trace of this run among them, find less. Traces are not held: how long one gets is not known, and a
full disk ends it without a loss but its own.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from k3tool.atomic import TEMPORARY, disk_hint, system_words
from k3tool.compiler.meaning import model_of
from k3tool.errors import K3Error, listed
from k3tool.isa.stream import Isa
from k3tool.runtime.options import RunOptions
from k3tool.runtime.slots import saved_bytes, state_rows
from k3tool.runtime.tokens import TOKEN_DTYPE
from k3tool.tables import need_text

_BESIDE_BYTES = 1 << 16  # of a file: what it says of itself
_ID_BYTES = 4
_LOGIT_BYTES = 4


class Outputs:
    """Files that are written one by one, all of them tried; a context manager, as is its room."""

    def __init__(self) -> None:
        """Hold no room yet."""
        self._room: dict[Path, int] = {}  # descriptors of files without a name
        self._written: list[Path] = []
        self._failed: dict[Path, K3Error] = {}

    def hold(self, path: Path, n_bytes: int) -> None:
        """Take a file's room before it is written. Raises: K3Error where the disk has it not."""
        try:
            folder = path.absolute().parent
            self._room[path], name = tempfile.mkstemp(TEMPORARY, ".room.", folder)
            os.unlink(name)
            os.posix_fallocate(self._room[path], 0, n_bytes)
        except OSError as error:
            need = f"{need_text(n_bytes)}, what it may take"
            hint = disk_hint(error)
            raise K3Error(str(path), got=system_words(error), need=need, hint=hint) from None

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Write one file inside; that it cannot be written is kept for `require_all`."""
        room = self._room.pop(path, None)
        if room is not None:
            os.close(room)
        try:
            yield
        except K3Error as error:
            self._failed[path] = error
        else:
            self._written.append(path)

    def require_all(self) -> None:
        """Refuse where one could not be written, saying which were. Raises: K3Error, the first."""
        for error in self._failed.values():
            others = [path for path, other in self._failed.items() if other is not error]
            parts = []
            if self._written:
                parts.append(f"written: {listed(map(str, self._written))}")
            if others:
                parts.append(f"not written: {listed(map(str, others))}")
            error.hint = "; ".join([*([error.hint] if error.hint else []), *parts]) or None
            raise error

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Give back the room of what was not written."""
        for room in self._room.values():
            os.close(room)


def hold_room(outputs: Outputs, options: RunOptions, isa: Isa) -> None:
    """Hold what tokens, state and logits take if every token comes that was asked for.

    Raises: K3Error naming the file that has no room.
    """
    n_read = options.start + len(options.ids)
    ids_bytes = _ID_BYTES * (n_read + options.gen)
    if options.output is not None:
        rows = options.gen * isa.tp * TOKEN_DTYPE.itemsize
        outputs.hold(options.output, rows + ids_bytes + _BESIDE_BYTES)
    if options.save_state is not None:
        ranks = isa.tp * saved_bytes(state_rows(isa), n_read + options.gen - 1)
        outputs.hold(options.save_state, ranks + ids_bytes + _BESIDE_BYTES)
    model = model_of(isa.params)
    if options.logits_output is not None and model is not None:
        row_bytes = _LOGIT_BYTES * model.vocab_size
        n_rows = len(options.ids) + options.gen
        outputs.hold(options.logits_output, n_rows * row_bytes + _BESIDE_BYTES)

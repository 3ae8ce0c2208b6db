"""Which bytes a look at every value reads: the tensors of all files, in order, in whole rows.

A tensor is cut into pieces, small ones are joined to batches. What is looked for is values.py's.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from k3tool.checkpoint.headers import Header, TensorInfo
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.scan_library import KEPT_BYTES, MAX_JOBS
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config
from k3tool.model.vision import is_vision
from k3tool.model.weights import SpecFinder, TensorSpec

PIECE_BYTES = 32 << 20  # of whole rows; part of what a fingerprint means
BATCH_BYTES = 256 << 20  # a unit of work: long calls, so that threads seldom wait for each other
LAST_BATCH_BYTES = 8 << 20  # the last ones are short, so that threads end together
OTHER, BF16, F32, PACKED, SCALE = range(5)  # K3_SCAN_*
GROUP_BYTES = 16  # of 32 codes, which have one scale byte
_PLAIN = {"BF16": BF16, "F32": F32}
Place = tuple[int | None, str]  # layer (None: outside) and module


class Piece(NamedTuple):
    """Whole rows of one tensor that one thread reads at a time."""

    tensor: "Target"
    number: int
    offset: int
    n_bytes: int
    keep: bool = False  # scales, whose codes are the next piece


@dataclass(slots=True)
class Target:
    """One tensor to be looked at, and what its pieces added up to."""

    info: TensorInfo
    place: Place
    kind: int
    row_bytes: int
    piece_rows: int
    n_pieces: int
    scales: "Target | None" = None  # of codes, where the same file has them
    is_read_with_codes: bool = False
    n_done: int = 0
    fingers: list[bytes] | None = None
    n_zero_rows: int = 0
    n_nonfinite: int = 0
    first_bad: int = -1
    first_high: int = -1

    @property
    def n_rows(self) -> int:
        """Return the rows, at least one."""
        return max(1, self.info.n_bytes // self.row_bytes) if self.row_bytes else 1


class Targets:
    """The tensors to be looked at, in the order of files and offsets, made as they are reached.

    `layers` None means all, the image side's too. Files that cannot be read are left out: coverage
    has named them.
    """

    def __init__(self, checkpoint: Checkpoint, layers: Collection[int] | None = None) -> None:
        """Read the headers."""
        self.folder = checkpoint.path
        self._config = checkpoint.config
        self._layers = layers
        self._headers = [header for header in _headers(checkpoint) if self._may_hold(header)]
        self._known: dict[object, list[tuple[Place, TensorSpec | None]]] = {}
        self.n_bytes = sum(map(self._bytes_of, self._headers))

    def _may_hold(self, header: Header) -> bool:
        return self._layers is None or header.layer is None or header.layer in self._layers

    def _bytes_of(self, header: Header) -> int:
        if self._layers is None:
            return header.table.n_bytes
        return sum(target.info.n_bytes for target in self._of(header))

    def __iter__(self) -> Iterator[Target]:
        """Yield them, each new."""
        for header in self._headers:
            targets = sorted(self._of(header), key=lambda target: target.info.offset)
            _pair(targets)
            yield from targets

    def _of(self, header: Header) -> Iterator[Target]:
        key = header.table.layout
        if key not in self._known:
            self._known[key] = _places(self._config, header)
        for info, (place, spec) in zip(header.infos(), self._known[key], strict=True):
            if header.layer is not None and place[0] is not None:
                place = (header.layer, place[1])  # the table may have been another layer's first
            if (self._layers is None or place[0] in self._layers) and info.n_bytes:
                yield _target(info, place, spec)


def _headers(checkpoint: Checkpoint) -> Iterator[Header]:
    for file in checkpoint.index.files:
        with contextlib.suppress(ArtifactError):
            yield checkpoint.header(file)


def _places(config: K3Config, header: Header) -> list[tuple[Place, TensorSpec | None]]:
    found: list[tuple[Place, TensorSpec | None]] = []
    finder = SpecFinder(config)
    for name in header.names():
        spec = finder.find(name)
        other = "vision" if is_vision(name) else "unclaimed"
        found.append(((spec.layer, spec.row.module), spec) if spec else ((None, other), None))
    return found


def _target(info: TensorInfo, place: Place, spec: TensorSpec | None) -> Target:
    kind = _PLAIN.get(info.dtype, OTHER)
    if spec is not None and spec.row.dtype == "U8":
        kind = SCALE if spec.row.pattern.endswith("weight_scale") else PACKED
    row_bytes = info.n_bytes // info.shape[0] if len(info.shape) > 1 else info.n_bytes
    # Scales are cut where their codes are.
    piece_rows = max(1, PIECE_BYTES // (row_bytes * (GROUP_BYTES if kind == SCALE else 1)))
    n_rows = info.n_bytes // row_bytes
    return Target(info, place, kind, row_bytes, piece_rows, -(-n_rows // piece_rows))


def _pair(targets: Iterable[Target]) -> None:
    """Give codes the scales that belong to them, so that a thread reads both after each other."""
    scales = {target.info.name: target for target in targets if target.kind == SCALE}
    for codes in targets:
        if codes.kind != PACKED:
            continue
        found = scales.get(codes.info.name.removesuffix("weight_packed") + "weight_scale")
        if found is None or found.row_bytes * GROUP_BYTES != codes.row_bytes:
            continue  # absent or mis-shaped: coverage says so
        if found.n_rows == codes.n_rows and codes.piece_rows * found.row_bytes <= KEPT_BYTES:
            codes.scales, found.is_read_with_codes = found, True


def pieces_of(targets: Iterable[Target]) -> Iterator[list[Piece]]:
    """Yield pieces in order, those of codes with their scales before them."""
    for target in targets:
        if target.is_read_with_codes:
            continue
        for number in range(target.n_pieces):
            kept = [_piece(target.scales, number, keep=True)] if target.scales else []
            yield [*kept, _piece(target, number)]


def _piece(target: Target, number: int, *, keep: bool = False) -> Piece:
    step = target.piece_rows * target.row_bytes
    n_bytes = min(step, target.info.n_bytes - number * step)
    return Piece(target, number, target.info.offset + number * step, n_bytes, keep)


def batches_of(pieces: Iterable[list[Piece]], n_bytes: int, jobs: int) -> Iterator[list[Piece]]:
    """Join pieces, of `n_bytes` in all, to what is worth one call of one of `jobs` threads."""
    batch: list[Piece] = []
    size = 0
    for group in pieces:
        more = sum(piece.n_bytes for piece in group)
        most = max(LAST_BATCH_BYTES, min(BATCH_BYTES, n_bytes // (4 * jobs)))
        if batch and (size + more > most or len(batch) + len(group) > MAX_JOBS):
            yield batch
            n_bytes -= size
            batch, size = [], 0
        batch += group
        size += more
    if batch:
        yield batch

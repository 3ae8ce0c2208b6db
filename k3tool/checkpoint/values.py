"""Look at every byte of a checkpoint: non-finite values, scales, codes, zeros, fingerprints.

Files are read once, in order, by several threads; the compiled scan (scan_library) does the looking
in the block that read() has just filled. It decides nothing about names and shapes: coverage has
done that, and what coverage could not read is not looked at here either.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.findings import Finding
from k3tool.checkpoint.headers import Header, TensorInfo
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.scan_library import (
    DONE,
    ENDED,
    KEPT_BYTES,
    MAX_JOBS,
    NONE,
    STOPPED,
    Job,
    Scanner,
    StopFlag,
    product_of,
)
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config
from k3tool.model.vision import is_vision
from k3tool.model.weights import TensorSpec, find_spec
from k3tool.ref.formats import SCALE_LIMIT

PIECE_BYTES = 32 << 20  # a unit of work, whole rows; part of what a fingerprint means
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


@dataclass(slots=True)
class PlaceValues:
    """What was seen in the tensors of one module of one layer.

    `scales` counts scale bytes; `codes` counts E2M1 codes in low and in high nibbles. `absmax` is
    of BF16 and F32 tensors, inf or NaN not hidden, `product_absmax` of codes times their scales.
    """

    n_tensors: int = 0
    n_bytes: int = 0
    n_zero_rows: int = 0
    n_nonfinite: int = 0
    absmax_bits: int = 0
    product_key: int = -1
    codes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros((2, 16), np.uint64))
    scales: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(256, np.uint64))

    @property
    def absmax(self) -> float:
        """Return the largest magnitude."""
        return float(np.array(self.absmax_bits, dtype=np.uint32).view(np.float32))

    @property
    def product_absmax(self) -> float | None:
        """Return the largest |code x scale|; None where no codes were read with their scales."""
        return product_of(self.product_key) if self.product_key >= 0 else None

    def add(self, scans: Any) -> None:
        """Add what some pieces held: rows of Scanner.results."""
        self.n_bytes += int(scans["n_bytes"].sum())
        self.n_zero_rows += int(scans["n_zero_rows"].sum())
        self.n_nonfinite += int(scans["n_nonfinite"].sum())
        self.absmax_bits = max(self.absmax_bits, int(scans["absmax_bits"].max()))
        self.product_key = max(self.product_key, int(scans["product_key"].max()))
        self.codes += scans["codes"].sum(axis=0).reshape(2, 16)
        self.scales += scans["histogram"].sum(axis=0)

    def merge(self, other: "PlaceValues") -> None:
        """Add what another thread, layer or module held."""
        self.n_tensors += other.n_tensors
        self.n_bytes += other.n_bytes
        self.n_zero_rows += other.n_zero_rows
        self.n_nonfinite += other.n_nonfinite
        self.absmax_bits = max(self.absmax_bits, other.absmax_bits)
        self.product_key = max(self.product_key, other.product_key)
        self.codes += other.codes
        self.scales += other.scales


@dataclass(slots=True)
class Values:
    """The result: by place, what is wrong, and the fingerprint of each tensor where asked for."""

    places: dict[Place, PlaceValues]
    findings: list[Finding]
    fingerprints: dict[str, str]
    n_bytes: int


# -- what to read ------------------------------------------------------------------------------


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
    for name in header.names():
        spec = find_spec(config, name)
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


def _pieces(targets: Iterable[Target]) -> Iterator[list[Piece]]:
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


def _batches(pieces: Iterable[list[Piece]]) -> Iterator[list[Piece]]:
    """Join small pieces to what is worth one call."""
    batch: list[Piece] = []
    n_bytes = 0
    for group in pieces:
        more = sum(piece.n_bytes for piece in group)
        if batch and (n_bytes + more > PIECE_BYTES or len(batch) + len(group) > MAX_JOBS):
            yield batch
            batch, n_bytes = [], 0
        batch += group
        n_bytes += more
    if batch:
        yield batch


# -- reading -----------------------------------------------------------------------------------


class ValueScan:
    """Runs the threads; `n_done` says how many bytes have been looked at so far."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: Iterable[Target],
        *,
        jobs: int,
        fingerprint: bool = False,
        loops: str = "auto",
    ) -> None:
        """Open what has to be read. Raises: TargetError if the scan library is absent or stale."""
        self._checkpoint = checkpoint
        self._batches = _batches(_pieces(targets))
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._stop = StopFlag()
        self._files: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._places: list[dict[Place, PlaceValues]] = [{} for _ in range(jobs)]
        self._scanners = [Scanner(self._stop, loops) for _ in range(jobs)]
        self._findings: list[Finding] = []
        self._fingerprints: dict[str, str] = {}
        self.n_done = 0

    def run(self, on_tick: Any = None, tick_s: float = 0.2) -> Values:
        """Read everything; `on_tick(n_done)` is called now and then from this thread.

        Raises: ArtifactError naming the file and tensor that cannot be read.
        """
        jobs = zip(self._scanners, self._places, strict=True)
        threads = [threading.Thread(target=self._work, args=job, daemon=True) for job in jobs]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(tick_s)
                    if on_tick is not None:
                        on_tick(self.n_done)
        finally:
            self._stop.set()  # Ctrl-C: the threads come back within a block
            for thread in threads:
                thread.join()
            for descriptor in self._files.values():
                os.close(descriptor)
        if self._failure is not None:
            raise self._failure
        return self._result()

    def _work(self, scanner: Scanner, places: dict[Place, PlaceValues]) -> None:
        try:
            while True:
                with self._lock:
                    batch = next(self._batches, None)
                    if batch is None or self._failure is not None:
                        return
                    jobs = [self._job(piece) for piece in batch]
                if not self._scan(scanner, jobs, batch):
                    return
                with self._lock:
                    self.n_done += sum(piece.n_bytes for piece in batch)
                    self._note(scanner.results[: len(batch)], batch)
                _add(places, scanner.results[: len(batch)], batch)
        except BaseException as failure:
            self._failure = self._failure or failure

    def _job(self, piece: Piece) -> Job:
        target = piece.tensor
        descriptor = self._descriptor(target.info)
        return Job(
            piece.offset, piece.n_bytes, target.row_bytes, descriptor, target.kind, piece.keep
        )

    def _descriptor(self, info: TensorInfo) -> int:
        if info.file not in self._files:
            path = self._checkpoint.path / info.file
            try:
                self._files[info.file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ArtifactError(str(path), got=error.strerror, need="a readable file") from None
        return self._files[info.file]

    def _scan(self, scanner: Scanner, jobs: list[Job], batch: list[Piece]) -> bool:
        """Scan some pieces; return False if the scan was told to stop."""
        code = scanner.scan_all(jobs, high_scale=SCALE_LIMIT, fingerprint=self._fingerprint)
        if code == STOPPED:
            return False
        if code != DONE:
            piece, result = batch[scanner.n_done - 1], scanner.result
            info, where = piece.tensor.info, piece.offset + result.n_bytes
            got = f"end of file at byte {where}" if code == ENDED else os.strerror(result.error)
            raise ArtifactError(
                f"{self._checkpoint.path / info.file}: {info.name}",
                got=got,
                need=f"{piece.n_bytes - result.n_bytes} more bytes",
                hint="the file became shorter: fetch it again" if code == ENDED else None,
            )
        return True

    def _note(self, scans: Any, batch: list[Piece]) -> None:
        """Keep what belongs to the tensor and not to its place; called under the lock."""
        columns = ("n_zero_rows", "n_nonfinite", "first_bad", "first_high")
        rows = zip(*(scans[name].tolist() for name in columns), strict=True)
        for number, (piece, row) in enumerate(zip(batch, rows, strict=True)):
            target = piece.tensor
            n_zero_rows, n_nonfinite, first_bad, first_high = row
            target.n_zero_rows += n_zero_rows
            target.n_nonfinite += n_nonfinite
            byte0 = piece.number * target.piece_rows * target.row_bytes
            if first_bad != NONE:
                element = byte0 // (2 if target.kind == BF16 else 4) + first_bad
                target.first_bad = _first(target.first_bad, element)
            if first_high != NONE:
                target.first_high = _first(target.first_high, byte0 + first_high)
            if self._fingerprint:
                target.fingers = target.fingers or [b""] * target.n_pieces
                target.fingers[piece.number] = scans["fingerprint"][number].tobytes()
            target.n_done += 1
            if target.n_done == target.n_pieces:
                self._finish(target)

    def _finish(self, target: Target) -> None:
        info = target.info
        if target.fingers:
            joined = hashlib.blake2b(b"".join(target.fingers), digest_size=16)
            self._fingerprints[info.name] = joined.hexdigest()
        if target.n_nonfinite:
            where = ", ".join(str(int(at)) for at in np.unravel_index(target.first_bad, info.shape))
            got = f"{target.n_nonfinite} NaN or Inf, the first at [{where}]"
            self._find("non-finite", info, "", got, "finite values")
        if target.first_high >= 0:
            row, group = divmod(target.first_high, info.n_bytes // info.shape[0])
            byte = bytearray(1)
            self._checkpoint.read_into(info, info.offset + target.first_high, memoryview(byte))
            place = f": row {row}, group {group}"
            got, need = f"scale byte {byte[0]}", f"at most {SCALE_LIMIT - 1}"
            self._find("scale byte", info, place, got, need)
        if target.n_rows > 1 and target.n_zero_rows == target.n_rows:
            self._find("all zeros", info, "", "nothing but zeros", "weights")

    def _find(self, kind: str, info: TensorInfo, place: str, got: str, need: str) -> None:
        self._findings.append(Finding(kind, info.file, info.name + place, got, need))

    # -- result --------------------------------------------------------------------------------

    def _result(self) -> Values:
        places: dict[Place, PlaceValues] = {}
        for part in self._places:
            for place, values in part.items():
                places.setdefault(place, PlaceValues()).merge(values)
        ordered = sorted(places, key=lambda place: (place[0] is not None, place))
        findings = sorted(self._findings, key=lambda finding: finding.order)
        by_place = {place: places[place] for place in ordered}
        return Values(by_place, findings, self._fingerprints, self.n_done)


def _first(seen: int, index: int) -> int:
    """Return the lower of two indices, of which the one seen before may be none (-1)."""
    return index if seen < 0 else min(seen, index)


def _add(places: dict[Place, PlaceValues], scans: Any, batch: list[Piece]) -> None:
    """Add results to their places; neighbours mostly share one, and are added at once."""
    start = 0
    for place, group in groupby(batch, key=lambda piece: piece.tensor.place):
        pieces = list(group)
        values = places.setdefault(place, PlaceValues())
        values.n_tensors += sum(piece.number == 0 for piece in pieces)
        values.add(scans[start : start + len(pieces)])
        start += len(pieces)

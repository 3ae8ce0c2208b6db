"""Look at every byte of a checkpoint: non-finite values, scales, codes, zeros, fingerprints.

Files are read once, in order, by several threads; the compiled scan (scan_library) does the looking
in the block that read() has just filled. It decides nothing about names and shapes: coverage has
done that, and what coverage could not read is not looked at here either.
"""

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.findings import Finding
from k3tool.checkpoint.headers import TensorInfo
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.scan_library import (
    DONE,
    ENDED,
    KEPT_BYTES,
    MAX_JOBS,
    NONE,
    RING_BYTES,
    STOPPED,
    Job,
    Scan,
    Scanner,
    StopFlag,
    product_of,
)
from k3tool.checkpoint.value_targets import BF16, Piece, Place, Target, batches_of, pieces_of
from k3tool.errors import ArtifactError, TargetError
from k3tool.memory import THREAD_BYTES, require_room
from k3tool.ref.formats import SCALE_LIMIT


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


# -- reading -----------------------------------------------------------------------------------


def require_threads(jobs: int) -> None:
    """Refuse more threads than there is memory for, before any work. Raises: TargetError."""
    each = RING_BYTES + KEPT_BYTES + MAX_JOBS * ctypes.sizeof(Scan) + THREAD_BYTES
    require_room(jobs * each, f"{jobs} threads of --values (--jobs)")


class ValueScan:
    """Runs the threads; `n_done` says how many bytes have been looked at so far."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: Iterable[Target],
        *,
        n_bytes: int,
        jobs: int,
        fingerprint: bool = False,
        loops: str = "auto",
    ) -> None:
        """Open what has to be read: targets of `n_bytes` in all.

        Raises: TargetError if the scan library is absent or stale.
        """
        self._checkpoint = checkpoint
        self._batches = batches_of(pieces_of(targets), n_bytes, jobs)
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
        """Read everything; `on_tick(n_done)` is called now and then, and at the end.

        Raises: ArtifactError naming the file and tensor that cannot be read.
        """
        jobs = zip(self._scanners, self._places, strict=True)
        threads = [threading.Thread(target=self._work, args=job, daemon=True) for job in jobs]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                _start(thread, len(started))
                started.append(thread)
            for thread in threads:
                while thread.is_alive():
                    thread.join(tick_s)
                    if on_tick is not None:
                        on_tick(self.n_done)
            if on_tick is not None:  # the threads may have been quicker than the first look at them
                on_tick(self.n_done)
        finally:
            self._stop.set()  # Ctrl-C: the threads come back within a block
            for thread in started:
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
            path = self._checkpoint.file_path(info.file)
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
                f"{self._checkpoint.file_path(info.file)}: {info.name}",
                got=got,
                need=f"{piece.n_bytes - result.n_bytes} more bytes",
                hint="the file became shorter: fetch it again" if code == ENDED else None,
            )
        return True

    def _note(self, scans: Any, batch: list[Piece]) -> None:
        """Keep what belongs to the tensor and not to its place; called under the lock."""
        seen = (
            (scans["n_zero_rows"] > 0) | (scans["n_nonfinite"] > 0) | (scans["first_high"] < NONE)
        )
        for number in np.flatnonzero(seen).tolist():
            _keep(batch[number], scans[number])
        fingers = scans["fingerprint"].tobytes() if self._fingerprint else b""
        for number, piece in enumerate(batch):
            target = piece.tensor
            if fingers:
                target.fingers = target.fingers or [b""] * target.n_pieces
                target.fingers[piece.number] = fingers[16 * number : 16 * number + 16]
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
        if target.n_zero_rows and target.n_rows > 1 and target.n_zero_rows == target.n_rows:
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


def _start(thread: threading.Thread, n_started: int) -> None:
    try:
        thread.start()
    except RuntimeError:  # the user's limit of processes, or address space for a stack
        raise TargetError(
            "--jobs", got=f"{n_started} threads, and no more from the system", need="one more",
            hint=f"--jobs {max(1, n_started // 2)}, or raise the limit (ulimit -u)",
        ) from None  # fmt: skip


def _keep(piece: Piece, scan: Any) -> None:
    """Add what a piece holds that a tensor's finding may be made of: most hold nothing of it."""
    target = piece.tensor
    target.n_zero_rows += int(scan["n_zero_rows"])
    target.n_nonfinite += int(scan["n_nonfinite"])
    byte0 = piece.number * target.piece_rows * target.row_bytes
    if scan["first_bad"] != NONE:
        element = byte0 // (2 if target.kind == BF16 else 4) + int(scan["first_bad"])
        target.first_bad = _first(target.first_bad, element)
    if scan["first_high"] != NONE:
        target.first_high = _first(target.first_high, byte0 + int(scan["first_high"]))


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

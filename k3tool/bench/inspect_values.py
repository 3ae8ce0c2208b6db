"""`bench inspect --values`: looking at every byte against read(2) of the same files."""

import threading
import time
from collections.abc import Collection
from pathlib import Path

from k3tool.bench.frame import BenchReport, Limit, Paired, interleave, machine_line, spread
from k3tool.bench.inspect_headers import drop_cache
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.scan_library import BLOCK_BYTES, Scanner, StopFlag
from k3tool.checkpoint.value_targets import PACKED, PIECE_BYTES, SCALE, Targets
from k3tool.checkpoint.values import ValueScan
from k3tool.errors import K3Error, UsageError
from k3tool.tables import bytes_text, ranges_text

LEAST_SHARE = 0.8
LEAST_BYTES = 500_000_000  # of less, starting threads and opening files is what takes the time
READ_BLOCKS = (128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)


def bench_values(
    checkpoint: Path,
    layers: Collection[int] | None,
    *,
    jobs: int,
    repeats: int,
    cold: bool,
) -> BenchReport:
    """Measure the scan of a checkpoint, or of some layers of it, from page cache or from disk.

    Once as it is and once with the fingerprints that `--fingerprint` and `--against` need.

    Raises: UsageError where there is nothing to read; K3Error if the two sides read other amounts.
    """
    with Checkpoint.open(checkpoint) as opened:
        sides = _Sides(opened, layers, jobs, cold)
        trials = {block: max(sides.read(block) for _ in range(2)) for block in READ_BLOCKS}
        best = max(trials, key=lambda block: trials[block])
        plain = interleave(lambda: sides.read(best), lambda: sides.scan(False), repeats)
        printed = interleave(lambda: sides.read(best), lambda: sides.scan(True), repeats)
    return _report(sides, best, plain, printed)


class _Sides:
    """Both ways to pass over the bytes; each returns GB/s."""

    def __init__(
        self, opened: Checkpoint, layers: Collection[int] | None, jobs: int, cold: bool
    ) -> None:
        self.opened, self.layers, self.jobs, self.cold = opened, layers, jobs, cold
        self._ranges = _ranges(Targets(opened, layers))
        self.n_bytes = sum(length for _, _, length in self._ranges)
        if not self.n_bytes:
            raise UsageError("--layers", got="no tensors", need="layers that have some")
        self._paths = sorted({path for path, _, _ in self._ranges})

    def scan(self, fingerprint: bool) -> float:
        start = self._start()
        targets = Targets(self.opened, self.layers)
        run = ValueScan(
            self.opened, targets, n_bytes=self.n_bytes, jobs=self.jobs, fingerprint=fingerprint
        )
        found = run.run(tick_s=10.0)
        if found.n_bytes != self.n_bytes:
            got = f"{found.n_bytes} bytes"
            raise K3Error(str(self.opened.path), got=got, need=f"{self.n_bytes}")
        return self.n_bytes / (time.perf_counter() - start) / 1e9

    def read(self, block_bytes: int) -> float:
        start = self._start()
        _read_all(self._ranges, self.jobs, block_bytes)
        return self.n_bytes / (time.perf_counter() - start) / 1e9

    def _start(self) -> float:
        if self.cold:
            drop_cache(self._paths)
        return time.perf_counter()


def _report(sides: _Sides, block: int, plain: Paired, printed: Paired) -> BenchReport:
    sizes = [(t.kind, t.info.n_bytes) for t in Targets(sides.opened, sides.layers)]
    packed = sum(size for kind, size in sizes if kind in (PACKED, SCALE)) / sides.n_bytes
    what = "whole" if sides.layers is None else f"layers {ranges_text(sorted(sides.layers))}"
    rows = [
        ("read(2)", spread(plain.first + printed.first), "GB/s"),
        ("inspect --values", spread(plain.second), "GB/s"),
        ("inspect --values --fingerprint", spread(printed.second), "GB/s"),
        ("scan / read", plain.ratio, "times"),
        ("scan with fingerprints / read", printed.ratio, "times"),
    ]
    definition = [
        f"{sides.opened.path}, {what}: {bytes_text(sides.n_bytes)} from "
        f"{'disk' if sides.cold else 'page cache'}, {sides.jobs} threads on both sides, "
        "interleaved;",
        f"tensors of {bytes_text(sides.n_bytes / len(sizes))} on the average, {packed:.0%} of the "
        "bytes MXFP4;",
        f"read(2): each thread takes the next {PIECE_BYTES >> 20} MiB of the same files and ranges "
        "and looks at nothing, with",
        f"the quickest of five block sizes, {block >> 10} KiB; the scan reads blocks of "
        f"{BLOCK_BYTES >> 10} KiB",
        machine_line(),
    ]
    limits = [
        Limit("scan / read", plain.ratio.median, at_least=LEAST_SHARE),
        Limit("scan with fingerprints / read", printed.ratio.median, at_least=LEAST_SHARE),
    ]
    name = "inspect --values"
    if sides.n_bytes < LEAST_BYTES:
        few = f"{sides.n_bytes} bytes are too few to judge (need at least {LEAST_BYTES})"
        return BenchReport(name, definition, rows, not_judged=few)
    return BenchReport(name, definition, rows, limits)


def _ranges(targets: Targets) -> list[tuple[Path, int, int]]:
    """Return the bytes of the targets as long ranges, as one reads who knows no tensors."""
    merged: list[tuple[Path, int, int]] = []
    for target in targets:
        path = targets.folder / target.info.file
        offset, n_bytes = target.info.offset, target.info.n_bytes
        if merged and merged[-1][0] == path and sum(merged[-1][1:]) == offset:
            merged[-1] = (path, merged[-1][1], merged[-1][2] + n_bytes)
        else:
            merged.append((path, offset, n_bytes))
    return merged


def _read_all(ranges: list[tuple[Path, int, int]], jobs: int, block_bytes: int) -> None:
    pieces = iter(
        [
            (path, offset + start, min(PIECE_BYTES, n_bytes - start))
            for path, offset, n_bytes in ranges
            for start in range(0, n_bytes, PIECE_BYTES)
        ]
    )
    lock = threading.Lock()
    failures: list[str] = []

    def work() -> None:
        scanner = Scanner(StopFlag())
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            path, offset, n_bytes = piece
            with path.open("rb") as file:
                if scanner.read_only(file.fileno(), offset, n_bytes, block_bytes) != n_bytes:
                    failures.append(str(path))

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise K3Error(failures[0], got="fewer bytes than its header says", need="the whole file")

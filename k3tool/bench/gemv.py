"""`bench gemv`: what share of the read bandwidth a product of weights and one token's x reaches.

Every kernel is paired with a pass of reading in the same run (k3tool/bench/probe.py says how). It
does not measure a whole token; `bench decode` does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3tool.bench.frame import (
    BenchReport,
    Limit,
    Spread,
    interleave,
    machine_line,
    other_line,
    rows_of_both,
    spread,
)
from k3tool.bench.probe import CACHES, PEER, Probe, Product, last_level_cache_bytes
from k3tool.ref.formats import FP4_VALUES
from k3tool.runtime.interpreter import load

SHAPES = (
    Product("bf16", 7168), Product("bf16", 3072, 8),
    Product("mxfp4", 3584), Product("mxfp4", 3072, 8),
)  # fmt: skip
LEAST = {"f32": (0.88, 0.88, 0.65, 0.50), "bf16": (0.93, 0.93, 0.82, 0.60)}  # by SHAPES
QUICKEST = "avx512_bf16"  # the leaf set LEAST is for; avx512 shares its f32 leaves
AVX2_PART = 0.5  # of the f32 column, in both modes
NUMPY = "numpy"
NUMPY_BYTES = 64 << 20
_FP4 = FP4_VALUES.astype(np.float32)


class Measured(NamedTuple):
    """One kernel: its share of the read bandwidth run by run, its GB/s, and those of reading."""

    leaves: str
    mode: str
    product: Product
    share: Spread
    rate: Spread
    reading: Sequence[float]

    @property
    def label(self) -> str:
        """Return it in words."""
        return f"{self.product.label}, mode {self.mode}, {self.leaves}"

    def as_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "leaves": self.leaves, "mode": self.mode, **self.product._asdict(),
            "bandwidth_share": self.share.median, "least": self.share.least,
            "most": self.share.most, "n": self.share.n, "gb_per_s": self.rate.median,
            "read_gb_per_s": spread(self.reading).median,
        }  # fmt: skip


def bench_gemv(
    leaves: str,
    modes: Sequence[str],
    *,
    threads: int | None,
    repeats: int,
    n_bytes: int | None = None,
    versus: Path | None = None,
) -> BenchReport:
    """Measure one leaf set; `auto` is the quickest, AVX2 and the peers.

    `versus` is another interpreter, whose products are timed in turn with this one's.
    Raises: TargetError for leaves this CPU lacks; UnsoundError where a kernel's bits are wrong.
    """
    if versus is not None:
        load(versus, any_source=True)  # refused before memory is filled
    with (
        Probe(threads, n_bytes) as probe,
        nullcontext() if versus is None else Probe(threads, n_bytes, versus) as other,
    ):
        way = probe.choose_read()
        sets = [probe.auto if leaves == "auto" else leaves]
        if leaves == "auto" and "avx2" in probe.interpreter.leaves and sets[0] != "avx2":
            sets.append("avx2")
        cases = [(name, mode, product) for name in sets for mode in modes for product in SHAPES]
        measured = [_measure(probe, *case, repeats) for case in cases]
        if leaves == "auto" and "f32" in modes:  # the peers know no other activations
            measured += _peers(probe, repeats)
        both = [] if other is None else list(_beside_other(other, probe, cases, repeats))
        definition = [
            f"share of the read bandwidth (best way here: {way}) that a product with one token "
            f"reaches, in bytes of weights and scales;",
            f"{probe.n_bytes / (1 << 30):.3g} GiB, {min(probe.huge_share, 1.0):.0%} in huge pages, "
            f"{probe.threads} threads on both sides, each kernel interleaved with reading; "
            f"{PEER}: the starting engine's order, 16 double lanes, in C of ours;",
            f"{NUMPY}: dequantise and multiply, {numpy_bytes() >> 20} MiB",
            *([] if versus is None else [other_line(versus)]),
            machine_line(),
        ]
        facts = {
            "threads": probe.threads, "bytes": probe.n_bytes, "read_way": way,
            "huge_share": min(probe.huge_share, 1.0), "kernels": [m.as_dict() for m in measured],
        }  # fmt: skip
    reading = spread([rate for m in measured for rate in m.reading])
    rows: list[tuple[str, Spread, str]] = [("read bandwidth", reading, "GB/s")]
    for m in measured:
        rows += [(m.label, m.rate, "GB/s"), (f"{m.label} / read bandwidth", m.share, "share")]
    return BenchReport("gemv", definition, rows + both, list(limits_of(measured)), facts)


def limits_of(measured: Sequence[Measured]) -> Iterator[Limit]:
    """Yield what each kernel is to reach; none for scalar leaves, peers, or avx512 on bf16 x."""
    for m in measured:
        column = None
        if m.leaves == QUICKEST or (m.leaves == "avx512" and m.mode == "f32"):
            column = [1.0 * least for least in LEAST[m.mode]]
        elif m.leaves == "avx2":
            column = [AVX2_PART * least for least in LEAST["f32"]]
        if column is not None:
            yield Limit(m.label, m.share.median, at_least=column[SHAPES.index(m.product)])


def _measure(probe: Probe, leaves: str, mode: str, product: Product, repeats: int) -> Measured:
    probe.check(leaves, product, mode)
    return _pair(
        probe, lambda: probe.product(leaves, product, mode), (leaves, mode, product), repeats
    )


def _pair(
    probe: Probe, kernel: Callable[[], float], what: tuple[str, str, Product], repeats: int
) -> Measured:
    paired = interleave(probe.read, kernel, repeats)
    reading, rates = ([value / 1e9 for value in side] for side in paired)
    return Measured(*what, paired.ratio, spread(rates), reading)


def _beside_other(
    other: Probe, probe: Probe, cases: Sequence[tuple[str, str, Product]], repeats: int
) -> Iterator[tuple[str, Spread, str]]:
    """Yield the rows of two interpreters' passes over the memory, in turn, case by case."""
    for leaves, mode, product in cases:
        other.check(leaves, product, mode)
        theirs, ours = (_seconds(each, leaves, product, mode) for each in (other, probe))
        yield from rows_of_both(
            f"{product.label}, mode {mode}, {leaves}", interleave(theirs, ours, repeats)
        )


def _seconds(probe: Probe, leaves: str, product: Product, mode: str) -> Callable[[], float]:
    """Return what takes the seconds of one pass over the memory."""
    return lambda: probe.n_bytes / probe.product(leaves, product, mode)


def _peers(probe: Probe, repeats: int) -> Iterator[Measured]:
    for product in SHAPES:
        yield _measure(probe, PEER, "f32", product, repeats)
    for product in SHAPES:
        yield _pair(probe, numpy_product(product), (NUMPY, "f32", product), repeats)


# -- NumPy -----------------------------------------------------------------------------------------


def numpy_bytes() -> int:
    """Return the bytes of weights that NumPy gets: more than the last-level cache holds."""
    return max(NUMPY_BYTES, CACHES // 2 * last_level_cache_bytes())


def numpy_product(product: Product, n_bytes: int | None = None) -> Callable[[], float]:
    """Return a function that dequantises and multiplies once; it returns bytes of weights a second.

    NumPy adds a whole row in an order of its own, so blocks are no concern of it.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, product.k).astype(np.float32)
    if product.kind == "bf16":
        rows = (n_bytes or numpy_bytes()) // (2 * product.k)
        words = rng.integers(0x3D00, 0x3E00, (rows, product.k), dtype=np.uint16)
        return _timed(words.nbytes, lambda: bf16_product(words, x))
    rows = (n_bytes or numpy_bytes()) // (product.k // 2)
    packed = rng.integers(0, 256, (rows, product.k // 2), dtype=np.uint8)
    scales = rng.integers(112, 128, (rows, product.k // 32), dtype=np.uint8)
    return _timed(packed.nbytes + scales.nbytes, lambda: mxfp4_product(packed, scales, x))


def bf16_product(words: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Widen and multiply: words (R, K) of bf16, x (K,) -> (R,)."""
    return np.asarray((words.astype(np.uint32) << 16).view(np.float32) @ x)


def mxfp4_product(packed: np.ndarray, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Decode and multiply: packed (R, K/2), low nibble first, scales (R, K/32), x (K,) -> (R,)."""
    rows, half = packed.shape
    weights = np.empty((rows, half, 2), np.float32)
    weights[:, :, 0] = _FP4[packed & 15]
    weights[:, :, 1] = _FP4[packed >> 4]
    grouped = weights.reshape(rows, -1, 32)
    grouped *= (scales.astype(np.uint32) << 23).view(np.float32)[:, :, None]
    return np.asarray(grouped.reshape(rows, -1) @ x)


def _timed(n_bytes: int, call: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        call()
        return n_bytes / (time.perf_counter() - start)

    return run

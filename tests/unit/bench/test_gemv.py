"""bench gemv: its peers compute what they claim, its limits are the table's, its probe refuses.

Speed is not looked at.
"""

from __future__ import annotations

import numpy as np
import pytest

from k3tool.bench import gemv
from k3tool.bench.frame import Spread
from k3tool.bench.gemv import SHAPES, Measured, bench_gemv, bf16_product, limits_of, mxfp4_product
from k3tool.bench.probe import PEER, Probe, Product, last_level_cache_bytes
from k3tool.errors import TargetError, UnsoundError
from k3tool.runtime.build import executable_path
from tests.kernels import rule3

SMALL = 64 << 20


@pytest.fixture(scope="module")
def probe():
    """A probe with little memory."""
    with Probe(2, SMALL) as running:
        yield running


def test_numpy_computes_the_product():
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, 96).astype(np.float32)
    words = rng.integers(0x3D00, 0x3E00, (7, 96), dtype=np.uint16)
    np.testing.assert_allclose(bf16_product(words, x), rule3.bf16(words) @ x, rtol=1e-5)
    packed = rng.integers(0, 256, (7, 48), dtype=np.uint8)
    scales = rng.integers(112, 128, (7, 3), dtype=np.uint8)
    want = rule3.mxfp4(packed, scales) @ x
    np.testing.assert_allclose(mxfp4_product(packed, scales, x), want, rtol=1e-4, atol=1e-5)
    swapped = rule3.mxfp4(packed, scales, low_is_even=False) @ x
    assert not np.allclose(mxfp4_product(packed, scales, x), swapped, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("product", SHAPES, ids=lambda p: p.label)
def test_every_leaf_set_passes_its_check(probe, product, mode):
    for leaves in probe.interpreter.leaves:
        probe.check(leaves, product, mode)


@pytest.mark.parametrize("product", SHAPES, ids=lambda p: p.label)
def test_the_peer_computes_the_product(probe, product):
    probe.check(PEER, product, "f32")
    with pytest.raises(UnsoundError, match="values differ"):  # it does not round x: it must show
        probe.check(PEER, product, "bf16")


def test_rates_are_of_the_bytes_walked(probe):
    assert 0 < probe.read() < 1e13
    assert 0 < probe.product("scalar", Product("bf16", 7168), "f32") < probe.read() * 2


def test_what_the_probe_does_not_know_is_refused(probe):
    with pytest.raises(TargetError, match="not a command"):
        probe.product("scalar", Product("bf16", 33), "f32")
    with pytest.raises(TargetError, match="not on this CPU"):
        probe.product("neon", SHAPES[0], "f32")
    with pytest.raises(TargetError, match="exit code 2"):
        Probe(2, 1 << 20)


def made(leaves, mode, product, share):
    return Measured(leaves, mode, product, *[Spread(share, share, share, 1)] * 2, [1.0])


def test_limits_are_the_tables():
    every = [made(name, mode, product, 0.7) for name in ("avx512_bf16", "avx512", "avx2", "scalar",
             PEER) for mode in ("f32", "bf16") for product in SHAPES]  # fmt: skip
    found = [(limit.at_least, limit.is_held) for limit in limits_of(every)]
    f32 = [(0.88, False), (0.88, False), (0.65, True), (0.50, True)]
    bf16 = [(0.93, False), (0.93, False), (0.82, False), (0.60, True)]
    avx2 = [(0.44, True), (0.44, True), (0.325, True), (0.25, True)]
    assert found == [*f32, *bf16, *f32, *avx2, *avx2]


def test_a_report_has_a_row_for_each_kernel(monkeypatch):
    monkeypatch.setattr(gemv, "NUMPY_BYTES", 4 << 20)
    monkeypatch.setattr(gemv, "last_level_cache_bytes", lambda: 0)
    report = bench_gemv("avx2", ("f32",), threads=2, repeats=1, n_bytes=SMALL)
    labels = [f"{p.label}, mode f32, avx2" for p in SHAPES]
    names = [name for label in labels for name in (label, f"{label} / read bandwidth")]
    assert [(row[0], row[2]) for row in report.rows] == [
        ("read bandwidth", "GB/s"), *zip(names, ["GB/s", "share"] * 4, strict=True)
    ]  # fmt: skip
    assert len(report.limits) == 4
    kernels = report.as_dict()["kernels"]
    for kernel in kernels:
        rate = kernel["gb_per_s"] / kernel["read_gb_per_s"]
        assert kernel["bandwidth_share"] == pytest.approx(rate), "one run: the ratio of both rates"
    assert 0 < report.rows[1][1].median < 1e4


def test_another_build_is_timed_in_turn(k3tool, tmp_path):
    """The same interpreter stands for the other build; one that is none is refused first."""
    ours = executable_path()
    report = bench_gemv(
        "scalar", ("f32",), threads=2, repeats=1, n_bytes=SMALL, versus=ours
    )  # fmt: skip
    rows = {name: found.median for name, found, _ in report.rows}
    for product in SHAPES:
        label = f"{product.label}, mode f32, scalar"
        this, other = rows[f"{label}, this one in turn"], rows[f"{label}, the other interpreter"]
        assert rows[f"{label}, this / the other interpreter"] == pytest.approx(this / other)
    assert any(str(ours) in line for line in report.definition)
    none = k3tool("bench", "gemv", "--versus", tmp_path / "none")
    assert (none.code, "none: got no such file" in none.err) == (5, True)


def test_peers_are_of_binary32_and_run_as_often(monkeypatch):
    monkeypatch.setattr(gemv, "NUMPY_BYTES", 4 << 20)
    monkeypatch.setattr(gemv, "last_level_cache_bytes", lambda: 0)
    asked = []

    def counted(probe, kernel, what, repeats):
        asked.append((what[0], what[1], repeats))
        return made(*what, 0.5)

    monkeypatch.setattr(gemv, "_pair", counted)
    bench_gemv("auto", ("f32",), threads=2, repeats=5, n_bytes=SMALL)
    assert {repeats for _, _, repeats in asked} == {5}
    assert [mode for name, mode, _ in asked if name in (PEER, gemv.NUMPY)] == ["f32"] * 8
    asked.clear()
    bench_gemv("auto", ("bf16",), threads=2, repeats=5, n_bytes=SMALL)
    assert {mode for _, mode, _ in asked} == {"bf16"}, "nobody asked for binary32"


def test_last_level_cache_is_counted_once(tmp_path):
    def cache(cpu, index, level, size, shared):
        folder = tmp_path / f"cpu{cpu}/cache/index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{text}\n")

    assert last_level_cache_bytes(tmp_path) == 0
    for cpu in range(4):
        cache(cpu, 0, 2, "1024K", cpu)
        cache(cpu, 1, 3, "32M", "0-1" if cpu < 2 else "2-3")
    assert last_level_cache_bytes(tmp_path) == 2 * (32 << 20)

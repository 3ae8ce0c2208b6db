"""Measures of a device on emulated blocks: the chains compute what they say, times come out.

How long anything takes here says nothing of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.bench import gpu_measures
from k3tool.bench.gpu_chain import Loaded, nop_chain
from k3tool.bench.gpu_measures import PRODUCTS, Product, Sizes, handoff, load_products
from k3tool.errors import UnsoundError
from k3tool.ref.formats import decode_mxfp4
from k3tool.runtime.gpu_cupy import open_device
from tests.kernels.emulated_device import EmulatedDevice
from tests.kernels.fake_cupy import fake_cupy, hip_library, refuse
from tests.runtime.test_gpu_group import double_signal, patch

Code = Callable[[str], bytes]
CUDA, HIP = "cuda:sm_90a", "hip:gfx942"
SMALL = Sizes(packets=3, repeats=2, copy_bytes=1 << 16, products=3, copies=2)


@pytest.fixture(params=[CUDA, HIP])
def device_and_target(request: pytest.FixtureRequest, device_code: Code) -> tuple[Any, str]:
    target = request.param
    vendor, _, arch = target.partition(":")
    domains = {} if vendor == "cuda" else {"n_domains": 8, "arch": arch}
    return EmulatedDevice(device_code(vendor), **domains), target


def test_a_hand_off_beside_barriers_and_launches(
    device_and_target: tuple[Any, str], tmp_path: Path
) -> None:
    device, target = device_and_target
    found = handoff(device, target, 9, tmp_path, SMALL)
    assert found.graph is not None
    assert {found.packet.n, found.barrier.n, found.graph.n} == {SMALL.repeats}
    kinds = [which for which, _ in device.launched]
    turns = 1 + SMALL.repeats  # of two chains, two barriers and two graphs, with a warm-up
    assert kinds.count(0) == 2 * turns
    assert kinds.count(2) == turns * (2 + 3 * SMALL.packets)


@pytest.mark.parametrize("experts", [0, 3])
def test_a_chain_of_products_computes_them(
    device_and_target: tuple[Any, str], tmp_path: Path, experts: int
) -> None:
    """Of every copy in turn, by all blocks, in the weights' own bytes."""
    device, target = device_and_target
    product, rng = Product("a product", 40, 64, experts), np.random.default_rng(3)
    for n_products in (1, 2):
        sizes = SMALL._replace(products=n_products)
        loaded = load_products(device, target, 9, tmp_path, product, sizes)
        x = rng.normal(size=64).astype("<f4")
        device.upload(loaded.address("x"), x.tobytes())
        want = []
        for n in range(sizes.copies):
            data = rng.integers(0, 256, product.n_bytes).astype("u1")
            if experts:
                each = data.reshape(experts, -1)
                packed, scale = each[:, : 40 * 32].reshape(-1, 40, 32), each[:, 40 * 32 :]
                scale[:] = 120 + scale % 8
                decoded = [
                    decode_mxfp4(p, s.reshape(40, 2)) for p, s in zip(packed, scale, strict=True)
                ]
                rows = np.concatenate(decoded)
            else:
                words = (rng.normal(size=(40, 64)).astype("<f4").view("<u4") >> 16).astype("<u2")
                data = words.reshape(-1).view("u1")
                rows = (words.astype("<u4") << 16).view("<f4").astype("f8")
            device.upload(loaded.address(f"w{n}"), data.tobytes())
            want.append(rows @ x.astype("f8"))
        assert loaded.seconds() > 0
        width = 40 * max(experts, 1)
        got = np.frombuffer(device.download(loaded.address("y"), 4 * width), "<f4")
        assert np.allclose(got, want[n_products - 1], rtol=1e-4, atol=1e-4)
        assert not np.allclose(got, want[n_products % 2], rtol=1e-4, atol=1e-4)


def test_bandwidths_come_out(device_and_target: tuple[Any, str], tmp_path: Path) -> None:
    device, target = device_and_target
    assert gpu_measures.copy_bandwidth(device, SMALL).n == SMALL.repeats
    product = Product("a product", 32, 64)
    found = gpu_measures.product_bandwidth(device, target, 9, tmp_path, product, SMALL)
    assert found.n == SMALL.repeats
    assert all(one.n_bytes > 64 << 20 for one in PRODUCTS)  # what the aim is for


def test_control_what_goes_wrong_in_a_chain_is_no_number(device_code: Code, tmp_path: Path) -> None:
    device = EmulatedDevice(device_code("cuda"), spoil=double_signal)
    with pytest.raises(UnsoundError, match="a chain: got fault 6"):
        Loaded(device, nop_chain(CUDA, 4, 3), tmp_path).seconds()


def test_control_a_barrier_that_was_not_kept_is_no_number(
    device_code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Lossy(EmulatedDevice):
        """One block of the barrier is not started, so the others give up."""

        def launch(self, kernel: Any, n_blocks: int, *more: Any) -> None:
            EmulatedDevice.launch(self, kernel, n_blocks - (kernel[1] == 2), *more)

    device = Lossy(device_code("cuda"))
    loaded = Loaded(device, nop_chain(CUDA, 4, 3), tmp_path)
    barrier = gpu_measures._Barrier(device, loaded, 4)

    def ask(rounds: int) -> None:
        patch(device, barrier._asked, np.array([4, rounds, 50], "<u4"))

    monkeypatch.setattr(barrier, "_ask", ask)
    with pytest.raises(UnsoundError, match="a barrier: got 6, need 8 arrivals"):
        barrier.seconds(2)


def test_through_the_calls_of_cupy(
    device_code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulated = EmulatedDevice(device_code("cuda"))
    monkeypatch.setitem(__import__("sys").modules, "cupy", fake_cupy(emulated))
    device = open_device(CUDA)
    monkeypatch.setattr(type(device), "build", lambda self, *asked: emulated.code)
    found = handoff(device, CUDA, 4, tmp_path, SMALL)
    assert found.graph is not None
    assert gpu_measures.copy_bandwidth(device, SMALL).n == SMALL.repeats
    device.close()
    assert sorted(emulated.freed) == sorted(at for at, _ in emulated.pieces)


@pytest.mark.parametrize("has_graphs", [True, False])
def test_where_no_graph_can_be_had_the_rest_is_measured(
    device_code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_graphs: bool
) -> None:
    refused = refuse(900, "hipErrorStreamCaptureUnsupported: operation not permitted")
    changed = {} if has_graphs else {"streamBeginCapture": refused}
    emulated = replace(EmulatedDevice(device_code("hip")), arch="gfx942", n_domains=8)
    cupy = fake_cupy(emulated, is_hip=True, **changed)
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    device = open_device(HIP, load=hip_library)
    monkeypatch.setattr(type(device), "build", lambda self, *asked: emulated.code)
    found = handoff(device, HIP, 9, tmp_path, SMALL)
    assert (found.graph is not None) == has_graphs
    assert ("got hipErrorStreamCaptureUnsupported" in found.refused) != has_graphs

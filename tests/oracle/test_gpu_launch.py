"""A run on a device from options to tokens: the launch, on emulated blocks, against the CPU's bits.

All of it is the code that a GPU runs but for the driver's calls (k3tool/runtime/gpu_cupy.py). No
GPU has run it.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.emulated_device import EmulatedDevice

CUDA = "cuda:sm_90a"


def run_both(engine, device, name, prompt="p7", **given):
    """Run on the device and on the CPU; a GPU's own program is laid out for as many workgroups."""
    found = engine(name, prompt, interpreter=None, target=CUDA, device=device, **given)
    want = engine(name, prompt, leaves="scalar", **given)
    return found, want


def assert_same(found, want) -> None:
    assert found.tokens == want.tokens
    assert np.array_equal(found.prefill.view("u4"), want.prefill.view("u4"))
    assert np.array_equal(found.steps.view("u4"), want.steps.view("u4"))
    for ours, theirs in zip(found.records, want.records, strict=True):
        for field in ("step", "position", "id", "best", "second", "logits_digest"):
            assert (ours[field] == theirs[field]).all(), field


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tiny13", {"tp": 1, "workgroups": 4, "chunk": 3}),
        ("tiny_tp8", {"tp": 2, "workgroups": 4}),
        ("tiny_tp8", {"tp": 1, "workgroups": 5, "prefill": "decode"}),
    ],
    ids=["chunks", "two-ranks", "by-decode"],
)
def test_a_device_gives_the_bits_of_the_cpu(engine, device_code, name, given):
    device = EmulatedDevice(device_code("cuda"))
    found, want = run_both(engine, device, name, gen=3, **given)
    assert_same(found, want)
    assert device.is_closed
    assert found.leaves == device.name

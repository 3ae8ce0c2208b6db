"""Several sequences at once on a device: on emulated blocks, against the CPU's bits of each alone.

No GPU has run it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.runtime.options import RunOptions
from k3tool.runtime.prepare import prepare, running
from k3tool.runtime.scheduler import Scheduler
from tests.kernels.emulated_device import EmulatedDevice
from tests.runtime.test_engine import Kept, prompt_of, run_alone, tokens_of

LENGTHS, SLOTS, GEN = (3, 1, 2), 2, 2


def silent(text: str) -> None:
    """Say nothing."""


def test_each_sequence_has_the_bits_of_running_alone(
    oracle: Callable[[str], Path], device_code: Callable[[str], bytes], tmp_path: Path
) -> None:
    """Mixed steps, one more than there are slots, then a slot that is saved and rolled back."""
    source = oracle("tiny_tp8")
    common: dict[str, Any] = {
        "tp": 2, "numerics": "bf16", "cache": tmp_path, "ctx": 256, "chunk": 4,
    }  # fmt: skip
    options = RunOptions(source, (), 1, batch=SLOTS, target="cuda:sm_90a", workgroups=3,
                         **common)  # fmt: skip
    device = EmulatedDevice(device_code("cuda"))
    job = prepare(options, silent, silent, device, is_engine=True, logits_rows=SLOTS)
    prompts = [prompt_of(n, 8) for n in LENGTHS]
    kept = [Kept(prompt, GEN) for prompt in prompts]
    single = prepare(
        RunOptions(source, (), 1, **common), silent, silent, is_engine=True, logits_rows=1
    )
    with running(single, silent) as cpu, running(job, silent) as engine:
        assert engine.n_slots == SLOTS
        scheduler = Scheduler(engine)
        for one in kept:
            scheduler.submit(one.request)
        scheduler.run()
        want = [run_alone(cpu, prompt, GEN) for prompt in prompts]
        for alone, one in zip(want, kept, strict=True):
            assert one.is_as(alone)
        engine.step(tokens_of(prompts[0], 0, 1), 0)
        state = engine.save_slot(1)
        engine.step(tokens_of(prompts[1], len(prompts[0]), 1), 0)  # tried
        engine.restore_slot(1, state)
        engine.restore_slot(0, state)
        for slot in (1, 0):
            found = engine.step(tokens_of(want[0].ids[:1], len(prompts[0]), slot), 1, True)
            assert found.logits is not None
            assert np.array_equal(found.logits[0].view("<u4"), want[0].logits[1])
    assert device.is_closed

"""A budget's least, and who sets it; what a run under one leaves behind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan
from k3tool.errors import TargetError
from k3tool.page_cache import cached_bytes, evict
from k3tool.runtime.budget import Floor, fit, least_running
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import run_model
from k3tool.tables import need_text


def test_the_minimum_names_the_step_that_sets_it(oracle: Callable[[str], Path]) -> None:
    """Compiling where it takes more than running, with both said; else running, alone."""
    with Checkpoint.open(oracle("tiny_tp8")) as checkpoint:
        config = checkpoint.config

    def compile_chunk(chunk: int) -> Plan:
        return compile_plan(config, tp=1, target="cpu", workgroups=8, chunk=chunk, batch=1, ctx=256)

    running = least_running(compile_chunk)
    for before, need in (
        (running + 1, f"{need_text(running + 1)} for this model: baking takes that, running "
                      f"{need_text(running)}"),
        (running, f"{need_text(running)} for this model: running takes that"),
    ):  # fmt: skip
        with pytest.raises(TargetError) as refused:
            fit(compile_chunk, 4, running - 1, floor=Floor(0, before, "baking"))
        assert refused.value.need == f"at least {need}"
        fit(compile_chunk, 4, before, floor=Floor(0, before, "baking"))


def test_a_budget_leaves_the_page_cache_as_it_was(tmp_path: Path) -> None:
    """Small files are read whole for the identity; without a budget they stay, to be mapped."""
    folder = tmp_path / "wide"
    write_sample(folder, "wide")
    files = list(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    left = {}
    for memory in (None, 300_000_000):
        evict(files)
        if cached_bytes(files):
            pytest.skip("NOT RUN: this file system keeps its pages")
        asked = RunOptions(folder, (5, 9, 2), 3, cache=tmp_path / "cache", ignore_eos=True)
        run_model(replace(asked, memory_bytes=memory))
        left[memory is not None] = cached_bytes(files)
    assert left[False] >= 0.9 * size, "the control"
    assert left[True] <= 0.2 * size

"""Runs on a device whose bits are all compared with the CPU's: one sequence, several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k3tool.errors import UsageError, listed
from k3tool.model.config import K3Config
from k3tool.runtime.engine import Engine, StepResult, StepToken
from k3tool.runtime.gpu_runtime import Device, Devices
from k3tool.runtime.options import RunOptions
from k3tool.runtime.prepare import prepare, running
from k3tool.runtime.run import RunResult, run_model

PROMPT = (3, 1, 4, 1, 5, 9, 2)


class Case(NamedTuple):
    """One comparison: a model, how it is run, and in words."""

    model: Path
    given: dict[str, Any]

    @property
    def name(self) -> str:
        """Return it in words."""
        words = " ".join(f"{key} {value}" for key, value in self.given.items())
        return f"bits of {self.model.name}, {words}"


class Row(NamedTuple):
    """Tokens a second of a case that ran, device and CPU."""

    case: Case
    device: RunResult
    cpu: RunResult


@dataclass(frozen=True, slots=True)
class Asked:
    """What to check: small `models` in every way, a `large` one at TP 1.

    `units` are the device's: two ranks get half of them each. `batch` sequences run at once.
    """

    target: str
    models: tuple[Path, ...]
    large: Path | None
    cache: Path
    gen: int = 8
    workgroups: int | None = None
    units: int = 0
    batch: int = 8


def cases(asked: Asked) -> Iterator[Case]:
    """Yield prefill in one step and in chunks, by decode, one rank and two."""
    half = {"workgroups": asked.units // 2} if asked.units else {}
    for model in asked.models:
        yield Case(model, {"tp": 1})
        yield Case(model, {"tp": 1, "chunk": 3, "numerics": "bf16"})
        yield Case(model, {"tp": 1, "prefill": "decode"})
        if _has_degree(model, 2):
            yield Case(model, {"tp": 2} | half)
    if asked.large is not None:
        yield Case(asked.large, {"tp": 1})
        yield Case(asked.large, {"tp": 1, "numerics": "bf16"})


def batches(asked: Asked) -> Iterator[Case]:
    """Yield what is run with several sequences in a step."""
    for model in (asked.models[0], *([asked.large] if asked.large is not None else [])):
        yield Case(model, {"tp": 1, "batch": asked.batch})


def _has_degree(model: Path, tp: int) -> bool:
    try:
        K3Config.load(model / "config.json").check_tp(tp)
    except UsageError:
        return False
    return True


def options_of(asked: Asked, case: Case) -> RunOptions:
    """Return a case's options, for the CPU."""
    fixed: dict[str, Any] = {"workgroups": asked.workgroups, "logits": True, "ignore_eos": True}
    return RunOptions(case.model, PROMPT, asked.gen, cache=asked.cache, **fixed | case.given)


def run_case(asked: Asked, case: Case, device: Devices) -> tuple[Row, str]:
    """Run a case on both and return it, and where they differ. Raises: as a run."""
    options = options_of(asked, case)
    on_device = run_model(replace(options, target=asked.target), device=device)
    row = Row(case, on_device, run_model(replace(options, devices=1)))
    return row, difference(row.device, row.cpu)


def difference(found: RunResult, want: RunResult) -> str:
    """Return where two runs first differ, empty where all tokens and logits have equal bits."""
    if found.tokens != want.tokens:
        pairs = zip(found.tokens, want.tokens, strict=False)
        step = next((i for i, (a, b) in enumerate(pairs) if a != b), len(found.tokens))
        got, need = (listed(run.tokens[step : step + 1]) for run in (found, want))
        return f"token {step}: got {got}, need {need}"
    for name in ("prefill", "steps"):
        a, b = (np.asarray(getattr(run, name)).view("<u4") for run in (found, want))
        wrong = np.argwhere(a != b)
        if len(wrong):
            row, column = wrong[0].tolist()
            return f"{len(wrong)} of {a.size} logits differ, first {name} {row}, id {column}"
    return ""


# ---- several sequences --------------------------------------------------------------------------


def run_batch(asked: Asked, case: Case, device: Device) -> str:
    """Run sequences of several lengths at once on both; return where they differ.

    Raises: as an engine.
    """
    options = replace(options_of(asked, case), logits=False)
    prompts = [PROMPT[: 1 + slot % len(PROMPT)] for slot in range(asked.batch)]

    def steps(options: RunOptions, device: Device | None) -> list[StepResult]:
        job = prepare(options, _quiet, _quiet, device, is_engine=True, logits_rows=asked.batch)
        with running(job, _quiet) as group:
            return list(decode(group, prompts, asked.gen))

    found, want = steps(replace(options, target=asked.target), device), steps(options, None)
    for number, (ours, theirs) in enumerate(zip(found, want, strict=True)):
        assert ours.logits is not None
        assert theirs.logits is not None
        if ours.choices != theirs.choices:
            return f"step {number}: got {ours.choices}, need {theirs.choices}"
        wrong = np.argwhere(ours.logits.view("<u4") != theirs.logits.view("<u4"))
        if len(wrong):
            return f"step {number}: {len(wrong)} logits differ, first row and id {wrong[0]}"
    return ""


def decode(group: Engine, prompts: Sequence[Sequence[int]], gen: int) -> Iterator[StepResult]:
    """Read each prompt in a slot of its own, then take `gen` tokens of all slots a step."""
    last = []
    for slot, prompt in enumerate(prompts):
        read = group.step([StepToken(t, at, slot) for at, t in enumerate(prompt)], 1, True)
        last.append(read.choices[0].id)
        yield read
    for number in range(gen):
        at = [len(prompt) + number for prompt in prompts]
        tokens = [StepToken(t, at[slot], slot) for slot, t in enumerate(last)]
        found = group.step(tokens, len(tokens), True)
        last = [choice.id for choice in found.choices]
        yield found


def _quiet(text: str) -> None:
    """Say nothing."""

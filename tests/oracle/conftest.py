"""Runs of the compiled engine on the oracles, with one cache for the whole session."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.errors import TargetError
from k3tool.runtime.build import build
from k3tool.runtime.gpu_runtime import Device
from k3tool.runtime.interpreter import load
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import RunResult, run_model


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of these sources: the built one if it is not stale."""
    try:
        return load().path
    except TargetError:
        return build(tmp_path_factory.mktemp("interpreter") / "k3-cpu")


@pytest.fixture(scope="session")
def engine(
    oracle: Callable[[str], Path],
    prompts: Callable[[str], dict[str, list[int]]],
    interpreter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., RunResult]:
    """Return a function that runs a prompt of an oracle, or ids, and gives logits and tokens."""
    cache = tmp_path_factory.mktemp("cache")

    def run(
        name: str, prompt: str | tuple[int, ...], device: Device | None = None, **options: Any
    ) -> RunResult:
        fixed = {"interpreter": interpreter, "cache": cache, "ignore_eos": True, "logits": True}
        ids = tuple(prompts(name)[prompt]) if isinstance(prompt, str) else prompt
        return run_model(RunOptions(oracle(name), ids, **(fixed | options)), device=device)

    return run


def digest(result: RunResult) -> str:
    """Return the SHA-256 of every logit of a run: of each prompt position, then of each step."""
    assert result.prefill is not None
    assert result.steps is not None
    assert result.prefill.dtype == result.steps.dtype == np.float32
    return hashlib.sha256(result.prefill.tobytes() + result.steps[1:].tobytes()).hexdigest()

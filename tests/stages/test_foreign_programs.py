"""Programs whose own words are forged: checks and `run` compare them with what they say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.compiler.checks import check_program
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.proved import save_proved_isa, save_proved_plan
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa, load_isa, save_isa
from k3tool.model.config import K3Config

Run = Callable[..., Any]


@pytest.fixture
def isa(k3tool: Run, oracle: Run, tmp_path: Path) -> Isa:
    plan, path = tmp_path / "plan.h5", tmp_path / "isa.h5"
    assert k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 1, "-o", plan).code == 0
    assert k3tool("emit-isa", plan, "-o", path).code == 0
    return load_isa(path)


def failed(isa: Isa) -> dict[str, str]:
    return {c.name: c.detail for c in check_program(isa, "isa.h5") if c.status == "FAIL"}


def test_a_program_of_another_config_is_refused(
    k3tool: Run, oracle: Run, tmp_path: Path, isa: Isa
) -> None:
    """It is sound, and says that it was made for this checkpoint."""
    raw = dict(isa.params["config"])
    section = dict(raw.get("text_config", raw))
    section["routed_scaling_factor"] *= 1.5
    raw = {**raw, "text_config": section} if "text_config" in raw else section
    plan = compile_plan(
        K3Config.from_dict(raw), tp=1, target="cpu", inputs=[isa.inputs[-1]],
        checkpoint_identity=isa.params["checkpoint_identity"],
        **{name: isa.params[name] for name in ("ctx", "workgroups", "chunk", "batch")},
    )  # fmt: skip
    plan = save_proved_plan(plan, tmp_path / "forged-plan.h5")
    forged = tmp_path / "forged.h5"
    save_proved_isa(emit(plan, "cpu", "forged-plan.h5"), forged)
    run = ("run", oracle("tiny_tp8"), "--ids", "1,2,3", "--gen", 2, "--ignore-eos", "--isa")
    done = k3tool(*run, forged)
    assert (done.code, done.out) == (3, "")
    assert "config: routed_scaling_factor: got" in done.err
    assert k3tool(*run, tmp_path / "isa.h5").code == 0


@pytest.mark.parametrize("numerics", [{"mode": "f32", "version": 2}, {"mode": "f32"}, {}, None])
def test_another_arithmetic_is_refused(isa: Isa, numerics: object) -> None:
    assert not failed(isa)
    found = failed(replace(isa, params={**isa.params, "numerics": numerics}))
    assert "recorded numerics" in found["F meaning"]


@pytest.mark.parametrize("change", [{"ctx": 10**6}, {"batch": 2}])
def test_states_too_small_for_what_is_promised_are_found(isa: Isa, change: dict) -> None:
    found = failed(replace(isa, params={**isa.params, **change}))
    assert any("batch and ctx need" in detail for detail in found.values()), found


@pytest.mark.parametrize("leaf", ["", "nonsense"])
def test_an_unknown_weight_is_a_finding_not_an_error(
    k3tool: Run, tmp_path: Path, isa: Isa, leaf: str
) -> None:
    tensors = list(isa.tensors)
    at = next(i for i, tensor in enumerate(tensors) if tensor.is_weight)
    tensors[at] = tensors[at]._replace(leaf=leaf)
    altered = replace(isa, tensors=tuple(tensors))
    assert f"the model has no weight {leaf!r}" in failed(altered)["F meaning"]
    save_isa(altered, tmp_path / "altered.h5")
    done = k3tool("verify", "plan", tmp_path / "plan.h5", tmp_path / "altered.h5")
    assert done.code == 4, done.err

"""The plan's file: what is written is read back, and what is damaged is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.artifact import InputRef
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan, Tensor, load_plan, save_plan
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config


@pytest.fixture
def plan(oracle: Callable[[str], Path]) -> Plan:
    config = K3Config.load(oracle("tiny13") / "config.json", {"q_a_layernorm": 1e-5})
    ref = InputRef("checkpoint", "checkpoint", "tiny13", "ab" * 32)
    return compile_plan(
        config, tp=1, target="cpu", workgroups=4, chunk=3, batch=1, ctx=100,
        without=("situ-fuse",), inputs=[ref], checkpoint_identity="ab" * 32,
    )  # fmt: skip


def test_a_plan_is_read_back_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    saved = save_plan(plan, tmp_path / "plan.h5")
    back = load_plan(tmp_path / "plan.h5")
    assert back.digest == saved.digest != ""
    assert (back.tensors, back.fired, back.inputs) == (plan.tensors, plan.fired, plan.inputs)
    assert back.params == plan.params
    for name, phase in plan.phases.items():
        other = back.phases[name]
        assert phase.packets.tobytes() == other.packets.tobytes()
        assert phase.waits.tobytes() == other.waits.tobytes()
        for field in ("max_tokens", "made_by", "n_gates", "arena_bytes", "peer_bytes"):
            assert getattr(phase, field) == getattr(other, field)


def test_params_say_what_went_in(plan: Plan) -> None:
    assert plan.params["eps"]["q_a_layernorm"] == 1e-5
    assert plan.params["eps"]["kv_a_layernorm"] == 1e-6
    assert plan.params["rules_off"] == ["situ-fuse"]
    assert "situ-fuse" not in plan.params["rules"]
    assert "glu-situ-fuse" not in plan.params["rules"], "it matches what situ-fuse makes"
    assert plan.params["numerics"] == {"mode": "f32", "version": 1}
    assert plan.params["ctx"] == 256


def test_an_altered_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.h5"
    save_plan(plan, path)
    data = bytearray(path.read_bytes())
    where = data.find(b"K3PK")
    assert where > 0
    data[where + 40] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match="need an intact file"):
        load_plan(path)


def test_two_tensors_of_one_name_are_our_bug() -> None:
    row = Tensor("x", "arena", "f32", (1,), (1,), 4)
    with pytest.raises(AssertionError, match="two tensors"):
        Plan((row, row), {}, {"tp": 1})

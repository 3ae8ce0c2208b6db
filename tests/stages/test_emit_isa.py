"""emit-isa: determinism, refusals with their exit codes, nothing half-written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.artifact import open_artifact
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import load_plan, save_plan
from k3tool.model.config import K3Config

Run = Callable[..., Any]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    plan = compile_plan(config, tp=2, target="cpu", workgroups=4, chunk=4, batch=1, ctx=512)
    save_plan(plan, tmp_path / "plan.h5")
    return tmp_path / "plan.h5"


def test_a_plan_becomes_streams_with_the_plan_as_their_input(
    k3tool: Run, plan: Path, tmp_path: Path
) -> None:
    done = k3tool("emit-isa", plan, "--target", "cpu", "-o", tmp_path / "isa.h5")
    assert done.code == 0, done.err
    phase = load_plan(plan).phases["decode"]
    n_entries = int(phase.packets["n_slices"].sum())
    assert f"decode: {len(phase.packets)} instructions, {n_entries} entries in 4 queues" in done.out
    with open_artifact(tmp_path / "isa.h5", "isa") as file:
        assert [(ref.role, ref.content_sha256) for ref in file.inputs] == [
            ("plan", load_plan(plan).digest)
        ]
        assert file.target == "cpu"
        assert file.read("decode/rank-01/instructions").shape == (len(phase.packets), 16)
        assert file.read("decode/entries").shape == (n_entries, 8)


def test_the_same_plan_gives_the_same_digest(k3tool: Run, plan: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("a.h5", "b.h5"):
        done = k3tool("emit-isa", plan, "-o", tmp_path / name, "--json")
        assert done.code == 0, done.err
        digests.append(json.loads(done.out)["digest"])
    assert digests[0] == digests[1]


def test_another_target_than_the_plans_is_refused_and_writes_nothing(
    k3tool: Run, plan: Path, tmp_path: Path
) -> None:
    done = k3tool("emit-isa", plan, "--target", "cuda:sm_90a", "-o", tmp_path / "isa.h5")
    assert done.code == 2
    assert "k3tool emit-isa: --target: got cuda:sm_90a, need cpu" in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.h5"]


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (lambda path: path.unlink(), 3, "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:4000]), 3, "plan.h5: sha256: got"),
        (lambda path: path.write_bytes(b"x" * 100), 3, "plan.h5: got"),
    ],
)
def test_a_damaged_plan_is_refused(
    k3tool: Run, plan: Path, tmp_path: Path,
    damage: Callable[[Path], object], code: int, message: str,
) -> None:  # fmt: skip
    damage(plan)
    done = k3tool("emit-isa", plan, "-o", tmp_path / "isa.h5")
    assert done.code == code
    assert message in done.err
    assert not (tmp_path / "isa.h5").exists()


def test_streams_are_no_plan(k3tool: Run, plan: Path, tmp_path: Path) -> None:
    assert k3tool("emit-isa", plan, "-o", tmp_path / "isa.h5").code == 0
    done = k3tool("emit-isa", tmp_path / "isa.h5", "-o", tmp_path / "again.h5")
    assert done.code == 3
    assert "kind: got isa, need plan" in done.err
    assert "hint: one is made by: k3tool compile-plan " in done.err


def test_a_plan_of_another_table_is_refused_with_both_hashes(
    k3tool: Run, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3tool.compiler import plan as module

    monkeypatch.setattr(module, "isa_hash", lambda: "f" * 64)
    done = k3tool("emit-isa", plan, "-o", tmp_path / "isa.h5")
    assert done.code == 3
    assert "isa_hash: got" in done.err
    assert "f" * 64 in done.err


def test_what_does_not_prove_itself_is_refused_and_not_left(
    k3tool: Run, plan: Path, tmp_path: Path
) -> None:
    """The control is every test above: the same plan less one wait is accepted there."""
    made = load_plan(plan)
    phase = made.phases["decode"]
    packets = phase.packets.copy()
    packets["n_waits"][len(packets) - 1] = 0
    phases = {**made.phases, "decode": replace(phase, packets=packets)}
    save_plan(replace(made, phases=phases), plan)
    done = k3tool("emit-isa", plan, "-o", tmp_path / "isa.h5")
    assert done.code == 4
    assert "F ordered decode" in done.err or "G gates decode" in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.h5"]

"""`k3tool compile-plan`: inputs it takes, what it says, what it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.compiler.plan import load_plan
from k3tool.compiler.rules import RULE_NAMES
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import run_model

DATA = Path(__file__).resolve().parents[1] / "data"
Run = Callable[..., Any]


def test_a_checkpoint_a_config_and_shards_give_the_same_packets(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = oracle("tiny_tp8")
    shards = tmp_path / "shards"
    assert k3tool("shard", checkpoint, "--tp", 2, "-o", shards).code == 0
    sources = {
        "shards": [shards],
        "checkpoint": [checkpoint, "--tp", 2],
        "config": [checkpoint / "config.json", "--tp", 2],
    }
    plans = {}
    for name, arguments in sources.items():
        done = k3tool("compile-plan", *arguments, "-o", tmp_path / f"{name}.h5")
        assert (done.code, done.err) == (0, "")
        assert "one for each rule used" in done.out
        assert ("bound to no checkpoint" in done.out) == (name == "config")
        plans[name] = load_plan(tmp_path / f"{name}.h5")
    first = plans["shards"]
    for plan in plans.values():
        assert plan.tensors == first.tensors
        for phase in plan.phases.values():
            assert phase.packets.tobytes() == first.phases[phase.name].packets.tobytes()
    assert [ref.kind for plan in plans.values() for ref in plan.inputs] == ["shards", "checkpoint"]
    identities = {name: plan.params["checkpoint_identity"] for name, plan in plans.items()}
    assert identities["shards"] == identities["checkpoint"] != ""
    assert identities["config"] == ""


def test_json_carries_the_same_facts_as_the_plan(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "plan.h5"
    done = k3tool(
        "compile-plan", oracle("tiny13"), "--tp", 1, "--batch", 2, "--chunk", 7, "--ctx", 300,
        "--workgroups", 3, "--without", "situ-fuse", "--eps", "q_a_layernorm=1e-5", "--json",
        "-o", path,
    )  # fmt: skip
    assert done.code == 0
    said, plan = json.loads(done.out), load_plan(path)
    assert said["digest"] == plan.digest
    assert said["params"] == plan.params
    assert said["params"]["eps"]["q_a_layernorm"] == 1e-5
    assert set(said["params"]["theorems"]) == set(said["params"]["rules"])
    assert said["rules"]["situ-fuse"] == {"fired": 0, "used": 0}
    assert said["rules"]["conv-silu-fuse"]["used"] > 0
    for name, phase in plan.phases.items():
        assert said["phases"][name]["packets"] == len(phase.packets)
        assert said["phases"][name]["critical_path"] == phase.critical_path
    assert plan.phases["decode"].max_tokens == 2
    assert plan.phases["prefill"].max_tokens == 7


def test_explain_names_every_rule_and_every_op(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    done = k3tool("compile-plan", oracle("tiny13"), "--tp", 1, "--explain", "-o", tmp_path / "p.h5")
    assert done.code == 0
    for rule in RULE_NAMES:
        assert rule in done.out
    assert "KDA_GATED_NORM" in done.out
    assert "kda-gated-norm-fuse" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "say"),
    [
        (["{ckpt}"], 2, "--tp: got none"),
        (["{ckpt}", "--tp", "3"], 2, "of a row-parallel sum, need one of 1, 2, 4, 8"),
        (["{ckpt}", "--tp", "1", "--without", "x"], 2, "--without: got x, need one of"),
        (["{ckpt}", "--tp", "1", "--eps", "nowhere=1e-5"], 2, "nowhere: got no such site"),
        (["{ckpt}", "--tp", "1", "--eps", "norm"], 2, "--eps: got norm, need SITE=VALUE"),
        (["{ckpt}", "--tp", "1", "--ctx", "99999999"], 2, "max_position_embeddings"),
        (["{ckpt}", "--tp", "1", "--chunk", "0"], 2, "--chunk: got 0, need 1 to 4096"),
        (["{ckpt}", "--tp", "1", "--target", "abacus"], 2, "got abacus, need cpu"),
        (["{tmp}/nothing", "--tp", "1"], 3, "nothing"),
        (["{tmp}/nothing"], 3, "nothing: got absent"),
        (["{tmp}/empty", "--tp", "1"], 3, "no config.json"),
        (["{tmp}/broken.json", "--tp", "1"], 3, "broken.json"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(
    arguments: list[str],
    code: int,
    say: str,
    k3tool: Run,
    oracle: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    places = {"ckpt": str(oracle("tiny_tp8")), "tmp": str(tmp_path)}
    out = tmp_path / "plan.h5"
    words = [word.format(**places) for word in arguments]
    done = k3tool("compile-plan", *words, "-o", out)
    assert done.code == code, done.err
    assert done.err.startswith("k3tool compile-plan: ")
    assert say in done.err
    assert len(done.err.strip().splitlines()) <= 2, "one line and a hint"
    assert done.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.json", "empty"]


def test_the_degree_of_shards_is_not_overruled(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", shards).code == 0
    done = k3tool("compile-plan", shards, "--tp", 4, "-o", tmp_path / "plan.h5")
    assert done.code == 2
    assert "--tp: got 4, need 2" in done.err
    rank = shards / "rank-00-of-02"
    done = k3tool("compile-plan", rank, "--tp", 2, "-o", tmp_path / "plan.h5")
    assert done.code == 3
    assert "rank 0 of 2" in done.err


def test_the_same_command_gives_the_same_digest(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    digests = set()
    for name in ("a.h5", "b.h5"):
        path = tmp_path / name
        assert k3tool("compile-plan", oracle("tiny13"), "--tp", 1, "-o", path).code == 0
        digests.add(load_plan(path).digest)
    assert len(digests) == 1


# ru_maxrss would be the parent's peak where that is larger: it outlives fork and exec.
CHILD = """
import re, sys
from pathlib import Path
from stages.cli import run_command
code = run_command(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(code, peak, file=sys.stderr)
"""


def test_the_released_model_compiles_within_its_budget(tmp_path: Path) -> None:
    """93 layers at TP8, both phases: at most 1 GB. Speed is a benchmark's to say."""
    config = DATA / "kimi-k3-config.json"
    arguments = ["compile-plan", str(config), "--tp", "8", "-o", str(tmp_path / "plan.h5")]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, timeout=300
    )
    code, peak_kib = done.stderr.splitlines()[-1].split()  # progress comes before, where it is slow
    assert code == "0"
    assert int(peak_kib) < 1_000_000
    plan = load_plan(tmp_path / "plan.h5")
    decode = plan.phases["decode"]
    # The system we start from: 2,459 packets, 1,739 on the longest chain.
    assert len(decode.packets) < 2459
    assert decode.critical_path < 1739


def test_one_phase_alone_is_a_plan_that_a_run_refuses(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    plan, isa = tmp_path / "plan.h5", tmp_path / "isa.h5"
    source = oracle("tiny_tp8")
    done = k3tool("compile-plan", source, "--tp", 2, "--phase", "decode", "-o", plan)
    assert done.code == 0
    assert "decode: " in done.out
    assert "prefill: " not in done.out
    assert list(load_plan(plan).phases) == ["decode"]
    assert {tensor.phase for tensor in load_plan(plan).tensors} == {"", "decode"}
    assert k3tool("emit-isa", plan, "--target", "cpu", "-o", isa).code == 0
    done = k3tool("run", source, "--tp", 2, "--isa", isa, "--ids", "5,9", "--gen", 2)
    assert done.code == 3
    assert "need decode and prefill" in done.err
    decode = k3tool(
        "run", source, "--tp", 2, "--isa", isa, "--ids", "5,9", "--gen", 2, "--prefill", "decode"
    )
    assert decode.code == 0, decode.err


def test_a_plan_with_a_memory_budget_runs_and_is_proved(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    source, plan = oracle("tiny_tp8"), tmp_path / "plan.h5"
    assert k3tool("compile-plan", source, "--tp", 2, "--memory", "200MB", "-o", plan).code == 0
    assert k3tool("verify", "plan", plan).code == 0
    asked = RunOptions(source, (5, 9, 2), 5, tp=2, cache=tmp_path, ignore_eos=True)
    loaded = run_model(replace(asked, plan=plan))
    assert loaded.reading is not None
    assert loaded.tokens == run_model(asked).tokens


@pytest.mark.parametrize(
    ("words", "need"),
    [
        (("--memory", "1MB"), "need at least"),
        (("--memory", "200MB", "--phase", "decode"), "got also --phase decode"),
        (("--memory", "200MB", "--target", "hip:gfx950"), "got also --target hip:gfx950"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path, words: tuple[str, ...], need: str
) -> None:
    out = tmp_path / "plan.h5"
    done = k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 2, *words, "-o", out)
    assert done.code in (2, 5)
    assert need in done.err
    assert not out.exists()

"""run --plan-only: rates that no device has and options that it would drop are refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.compiler.compile import compile_plan
from k3tool.errors import UsageError
from k3tool.runtime import foresee
from k3tool.runtime.foresee import check_rate
from k3tool.runtime.options import parse_size
from k3tool.tables import need_text
from k3tool.targets import get_target

Run = Callable[..., Any]
RATES = ("--storage-rate", 1, "--memory-rate", 10)
BUDGET = ("--memory", "250MB", "--plan-only")


def test_it_prints_a_split_and_writes_nothing(k3tool: Run, oracle: Run) -> None:
    done = k3tool("run", oracle("tiny_tp8"), *BUDGET, *RATES)
    assert done.code == 0, done.err
    assert "storage rate      1.00 GB/s" in done.out
    assert "seconds a token" in done.out
    least = k3tool("run", oracle("tiny_tp8"), *BUDGET, "--storage-rate", 1e-6, *RATES[2:], "--json")
    assert least.code == 0, least.err
    assert json.loads(least.out)["storage_rate"] == 1000


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_of_one_rank_says_so(k3tool: Run, oracle: Run, tp: int) -> None:
    """Else a token's bytes of one rank stand beside those of a folder, which are of all ranks."""
    done = k3tool("run", oracle("tiny_tp8"), *BUDGET, *RATES, "--tp", tp)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if " B" in line or "MB" in line]
    named = [line.split("  ")[0] for line in lines if "a rank" in line]
    of_each = ["pinned", "expert slots", "everything else", "bytes a token"]
    assert named == (of_each if tp > 1 else [])


@pytest.mark.parametrize("tp", [1, 2])
def test_the_parts_add_up_and_the_least_is_said_with_its_step(
    k3tool: Run, oracle: Run, tp: int
) -> None:
    """What is printed is four digits of each, so the sum is right to a half of the last of all."""
    asked = ("run", oracle("tiny_tp8"), *BUDGET, *RATES, "--tp", tp)
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in k3tool(*asked).out.splitlines())
    sizes = {name: _first_size(text) for name, text in lines.items() if _SIZE.match(text)}
    each = sizes["pinned"] + sizes["expert slots"] + sizes["everything else"] + sizes.get("ring", 0)
    assert tp * each + sizes["the driver"] == pytest.approx(sizes["predicted peak"], abs=3e5)
    found = json.loads(k3tool(*asked, "--json").out)
    step = "compiling" if tp == 1 else "compiling and copying the weights"
    assert found["least_set_by"] == found["before_ranks"] == step
    assert found["least_bytes"] == found["before_ranks_bytes"] > found["least_running_bytes"]
    running = need_text(found["least_running_bytes"])
    words = f"{need_text(found['least_bytes'])}, for {step}; running takes {running}"
    assert lines["minimum"] == words
    refused = k3tool(*asked[:2], "--memory", "1MB", "--plan-only", *RATES, "--tp", tp)
    assert (refused.code, refused.out) == (5, "")
    assert f": {step} takes that, running {running}\n" in refused.err
    size = refused.err.split("hint: --memory ")[1].split()[0]
    assert k3tool(*asked[:2], "--memory", size, "--plan-only", *RATES, "--tp", tp).code == 0


_SIZE = re.compile(r"([\d.]+ [KMG]?B)\b")


def _first_size(text: str) -> int:
    found = _SIZE.match(text)
    assert found is not None
    return parse_size(found[1])


@pytest.mark.parametrize("option", ["--storage-rate", "--memory-rate"])
@pytest.mark.parametrize("rate", ["nan", "inf", "-inf", "-1", "0", "1e-320", "1e300"])
def test_rates_that_no_device_has(k3tool: Run, oracle: Run, option: str, rate: str) -> None:
    given = dict(zip(RATES[::2], RATES[1::2], strict=True)) | {option: rate}
    words = [word for pair in given.items() for word in pair]
    for memory in ("200MB", "140MB"):
        done = k3tool("run", oracle("tiny_tp8"), "--memory", memory, "--plan-only", *words)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"k3tool run: {option}: got ")


def test_the_ends_of_the_range_are_in_it() -> None:
    check_rate("--storage-rate", 1e3)
    check_rate("--storage-rate", 1e15)
    for rate in (999.0, 1.1e15):
        with pytest.raises(UsageError, match="GB/s from 1e-06 to 1e"):
            check_rate("--storage-rate", rate)


@pytest.mark.parametrize(
    "words",
    [
        ("--ids", "99999"), ("--gen", 16), ("-o", "tokens.h5"), ("--logits", "x.npz"),
        ("--isa", "isa.h5"), ("--plan", "plan.h5"), ("--expert-trace", "x"), ("--cache", "c"),
        ("--threads", 1), ("--target", "gpu"), ("--leaves", "scalar"), ("--weights", "copied"),
        ("--prefill", "decode"), ("--ignore-eos",), ("--deadline", 60),
    ],
)  # fmt: skip
def test_options_of_a_run_are_not_dropped(
    k3tool: Run, oracle: Run, tmp_path: Path, words: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = k3tool("run", oracle("tiny_tp8"), *BUDGET, *RATES, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"k3tool run: {words[0]}: got also --plan-only, need one of the two")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--storage-rate", "--memory-rate"])
def test_rates_without_plan_only_are_not_dropped(
    k3tool: Run, oracle: Run, tmp_path: Path, option: str
) -> None:
    done = k3tool("run", oracle("tiny_tp8"), "--ids", "1", "--cache", tmp_path / "c", option, 1)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"k3tool run: {option}: got no --plan-only")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [(), ("--numerics", "bf16"), ("--workgroups", 3)])
def test_the_program_is_the_one_that_would_run(
    k3tool: Run, oracle: Run, words: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def compile_noted(config: object, **given: Any) -> Any:
        made.append(given)
        return compile_plan(config, **given)

    monkeypatch.setattr(foresee, "compile_plan", compile_noted)
    done = k3tool("run", oracle("tiny_tp8"), *BUDGET, *RATES, *words)
    assert done.code == 0, done.err
    usual = {"numerics": "f32", "workgroups": get_target("cpu").workgroups}
    want = usual | {str(words[0])[2:]: words[1]} if words else usual
    assert made
    assert all({name: one[name] for name in usual} == want for one in made)


def test_degree_and_length_are_held_against_the_source(
    k3tool: Run, oracle: Run, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", shards).code == 0
    assert k3tool("run", shards, *BUDGET, *RATES, "--tp", 2).code == 0
    done = k3tool("run", shards, *BUDGET, *RATES, "--tp", 4)
    assert (done.code, done.out) == (2, "")
    assert "--tp: got 4, need 2" in done.err
    done = k3tool("run", shards, *BUDGET, *RATES, "--ctx", 1 << 40)
    assert (done.code, done.out) == (2, "")
    assert "max_position_embeddings" in done.err

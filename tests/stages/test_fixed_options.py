"""Options that say otherwise than a given program are refused by name; nothing is ignored."""

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "object"]
IDS = ("--ids", "1,2,3", "--gen", 2, "--ignore-eos")


@pytest.fixture
def program(k3tool: Run, oracle: Run, tmp_path: Path) -> tuple[Path, Path]:
    plan, isa = tmp_path / "plan.h5", tmp_path / "isa.h5"
    sizes = ("--tp", 2, "--workgroups", 4, "--chunk", 4, "--ctx", 512)
    assert k3tool("compile-plan", oracle("tiny_tp8"), *sizes, "-o", plan).code == 0
    assert k3tool("emit-isa", plan, "-o", isa).code == 0
    return plan, isa


@pytest.mark.parametrize("way", ["--plan", "--isa"])
def test_what_a_program_fixes_is_not_asked_otherwise(
    k3tool: Run, oracle: Run, tmp_path: Path, program: tuple[Path, Path], way: str
) -> None:
    given = program[0] if way == "--plan" else program[1]
    run = ("run", oracle("tiny_tp8"), *IDS, way, given, "--cache", tmp_path / "c")
    agreeing = ("--tp", 2, "--workgroups", 4, "--chunk", 4, "--ctx", 512)
    control = k3tool(*run, *agreeing)
    assert control.code == 0, control.err
    assert k3tool(*run, "--chunk", 2).out == control.out  # a step's own, as long as it fits
    for option, value in (
        ("--workgroups", 3), ("--workgroups", 5), ("--tp", 1), ("--tp", 4), ("--chunk", 5),
        ("--ctx", 256), ("--ctx", 513),
    ):  # fmt: skip
        done = k3tool(*run, option, value)
        assert (done.code, done.out) == (2, ""), (option, value, done)
        assert f"{option}: got {value}" in done.err
        assert f"what {way} was compiled with" in done.err


@pytest.mark.parametrize("given", [False, True])
def test_a_chunk_of_a_prompt_that_decode_reads_is_refused(
    k3tool: Run, oracle: Run, tmp_path: Path, program: tuple[Path, Path], given: bool
) -> None:
    isa = ("--isa", program[1]) if given else ()
    run = ("run", oracle("tiny_tp8"), *IDS, *isa, "--prefill", "decode", "--cache", tmp_path / "c")
    done = k3tool(*run, "--chunk", 4)
    assert (done.code, done.out) == (2, "")
    assert "--chunk: got 4, need 1 with --prefill decode" in done.err
    assert k3tool(*run, "--chunk", 1).code == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("--workgroups", 4097), ("--chunk", 4097), ("--batch", 4097), ("--ctx", 1 << 40),
     ("--workgroups", 0), ("--chunk", 0), ("--batch", 0), ("--ctx", 0)],
)  # fmt: skip
def test_compiling_and_running_hold_the_same_limits(
    k3tool: Run, oracle: Run, tmp_path: Path, option: str, value: int
) -> None:
    compile_ = ("compile-plan", oracle("tiny_tp8"), "--tp", 1, "-o", tmp_path / "plan.h5")
    done = k3tool(*compile_, option, value)
    assert (done.code, done.out) == (2, "")
    assert f"{option}: got {value}, need" in done.err
    assert not (tmp_path / "plan.h5").exists()
    if option != "--batch" and value:  # of a zero the command line's own range speaks
        also = k3tool("run", oracle("tiny_tp8"), *IDS, option, value, "--cache", tmp_path / "c")
        assert also.code == 2
        assert _reason(also.err) == _reason(done.err)


def _reason(text: str) -> str:
    return text.splitlines()[0].partition(": ")[2]

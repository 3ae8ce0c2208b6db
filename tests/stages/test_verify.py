"""verify ranks and verify coverage on the command line: lines, JSON, exit codes."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.artifact import InputRef
from k3tool.compiler.plan import save_plan
from k3tool.isa.emit import emit
from k3tool.isa.stream import save_isa
from k3tool.isa.table import SPECS, Op
from k3tool.runtime.tokens import TOKEN_DTYPE, write_tokens
from stages.verify import coverage
from tests.isa import plans

Run = Callable[..., Any]


def tokens(path: Path, ids: list[list[int]], tp: int | None = None) -> Path:
    """Write one stream of ids a rank."""
    ranks = []
    for row in ids:
        stream = np.zeros(len(row), TOKEN_DTYPE)
        stream["step"], stream["id"] = np.arange(len(row)), row
        stream["best"], stream["second"] = 1.5, 1.25
        ranks.append(stream)
    refs = [InputRef(role, role, role, "a" * 64) for role in ("checkpoint", "isa")]
    params = {"tp": len(ids) if tp is None else tp, "numerics": "f32 1"}
    write_tokens(path, ranks, [1, 2], params=params, inputs=refs)
    return path


def test_equal_streams_pass_with_a_line_a_check(k3tool: Run, tmp_path: Path) -> None:
    a, b = tokens(tmp_path / "a.h5", [[5, 6]] * 2), tokens(tmp_path / "b.h5", [[5, 6]] * 2)
    done = k3tool("verify", "ranks", a, b)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[-2:] == ["verdict: identical", "PASS: 7 PASS, 0 FAIL, 0 NOT RUN"]
    assert [line.split()[0] for line in lines[4:-2]] == ["PASS"] * 7


def test_a_difference_exits_4_and_says_where(k3tool: Run, tmp_path: Path) -> None:
    done = k3tool("verify", "ranks", tokens(tmp_path / "a.h5", [[5, 6, 7], [5, 9, 7]]))
    assert done.code == 4
    line = next(line for line in done.out.splitlines() if line.startswith("FAIL  "))
    assert "first difference at step 1 in id: rank 0 has id 6 (logit 1.5, margin 0.25)" in line
    assert "rank 1 has id 9" in line
    assert done.err.startswith("k3tool verify ranks: checks: got 2 PASS, 1 FAIL")


@pytest.mark.parametrize("streams", [[], [[]], [[], []]])
def test_nothing_to_compare_exits_4(k3tool: Run, tmp_path: Path, streams: list[list[int]]) -> None:
    done = k3tool("verify", "ranks", tokens(tmp_path / "a.h5", streams))
    assert done.code == 4


def test_a_missing_rank_exits_4_and_is_named(k3tool: Run, tmp_path: Path) -> None:
    done = k3tool("verify", "ranks", tokens(tmp_path / "a.h5", [[5]] * 7, tp=8))
    assert done.code == 4
    assert "missing 7" in done.out


def test_damaged_and_absent_files_exit_3_and_no_file_2(k3tool: Run, tmp_path: Path) -> None:
    path = tokens(tmp_path / "a.h5", [[5], [5]])
    assert k3tool("verify", "ranks", path).code == 0
    alone = k3tool("verify", "ranks", tokens(tmp_path / "b.h5", [[5]]))
    assert alone.code == 4
    assert "one stream only" in alone.out
    path.write_bytes(path.read_bytes()[:-50])
    assert k3tool("verify", "ranks", path).code == 3
    assert k3tool("verify", "ranks", tmp_path / "none.h5").code == 3
    assert k3tool("verify", "ranks").code == 2


def test_json_carries_checks_and_verdict(k3tool: Run, tmp_path: Path) -> None:
    done = k3tool("verify", "ranks", tokens(tmp_path / "a.h5", [[5], [6]]), "--json")
    assert done.code == 4
    data = json.loads(done.out)
    assert data["sound"] is False
    assert [check["status"] for check in data["checks"]] == ["PASS", "PASS", "FAIL"]


def test_a_plan_and_its_stream_in_either_order(k3tool: Run, isa: Path) -> None:
    plan, one = isa.parent / "plan.h5", k3tool("verify", "plan", isa)
    done = k3tool("verify", "plan", plan, isa)
    swapped = k3tool("verify", "plan", isa, plan)
    assert (swapped.code, swapped.out, swapped.err) == (done.code, done.out, done.err)
    assert one.out != done.out
    made = plans.plan()
    save_plan(replace(made, params=dict(made.params) | {"ctx": 7}), plan)
    for files in ((plan, isa), (isa, plan)):  # of another plan: refused in either order too
        assert k3tool("verify", "plan", *files).code == 3
    assert "order does not matter" in " ".join(k3tool("verify", "plan", "--help").out.split())


def test_records_of_any_engine_are_tabled_and_compared(k3tool: Run, tmp_path: Path) -> None:
    ours = tokens(tmp_path / "a.h5", [[5, 6, 7]] * 2)
    theirs, odd = tmp_path / "b.txt", tmp_path / "c.jsonl"
    theirs.write_text("5, 6, 7\r\n")
    odd.write_text('{"token_id": 5}\n{"token_id": 6}\n{"token_id": 8, "margin": 0.01}\n')
    done = k3tool("verify", "ranks", ours, theirs)
    assert done.code == 0, done
    assert [line.split()[1:] for line in done.out.splitlines()[:3]] == [
        ["kind", "ranks", "tokens", "prompt"], ["tokens.h5", "2", "3", "2", "ids"],
        ["ids", "-", "3", "unknown"],
    ]  # fmt: skip
    done = k3tool("verify", "ranks", ours, theirs, odd)
    assert done.code == 4
    assert f"majority: 2 of 3 streams are equal; apart: {odd} from step 2 on" in done.out
    assert "\nverdict: real\n" in done.out
    near = k3tool("verify", "ranks", theirs, odd, "--near-tie", "0.01", "--json")
    assert near.code == 4
    data = json.loads(near.out)
    assert (data["verdict"], data["sound"], data["near_tie"]) == ("near tie", False, 0.01)
    assert (data["differences"][0]["step"], data["differences"][0]["right"]["margin"]) == (2, 0.01)
    assert [stream["tokens"] for stream in data["streams"]] == [{"0": 3}, {"0": 3}]


def test_a_difference_is_shown_as_text_where_a_tokenizer_is_given(
    k3tool: Run, tmp_path: Path
) -> None:
    assert k3tool("sample", tmp_path / "ckpt").code == 0
    for name, ids in (("a", "72 105 33"), ("b", "72 105 46"), ("c", "72 105 99999")):
        (tmp_path / name).write_text(ids)
    done = k3tool("verify", "ranks", tmp_path / "a", tmp_path / "b", "--tokenizer",
                  tmp_path / "ckpt")  # fmt: skip
    assert (done.code, 'step 2 in id, behind "' in done.out) == (4, True), done
    assert re.search(r'a has id 33 ".+" \(margin unknown\); \S+b has id 46 ".+" \(', done.out)
    done = k3tool("verify", "ranks", tmp_path / "a", tmp_path / "c", "--tokenizer",
                  tmp_path / "ckpt")  # fmt: skip
    assert "id 99999 at step 2: the vocabulary has 512" in done.out
    done = k3tool("verify", "ranks", tmp_path / "a", tmp_path / "b", "--tokenizer", tmp_path)
    assert done.code == 3


def test_a_file_given_twice_compares_nothing_and_is_refused(k3tool: Run, tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("5 6")
    link.symlink_to(path)
    for other in (path, link):
        assert k3tool("verify", "ranks", path, other).code == 2
        assert "it equals itself" in k3tool("verify", "ranks", path, other).err
    for bound in ("-1", "nan", "inf"):
        assert k3tool("verify", "ranks", path, path, "--near-tie", bound).code == 2
    path.write_text("5,,6")
    assert k3tool("verify", "ranks", path).code == 3


def test_of_a_file_with_several_answers_one_is_chosen(k3tool: Run, tmp_path: Path) -> None:
    many, one = tmp_path / "many.jsonl", tmp_path / "one.txt"
    many.write_text('{"request": "x", "ids": [5, 6]}\n{"request": 1, "ids": [7, 8, 9]}\n')
    one.write_text("7 8 9")
    done = k3tool("verify", "ranks", many, one)
    assert done.code == 2
    assert "got one answer beside 2 requests, need one request" in done.err
    assert k3tool("verify", "ranks", many, one, "--request", 1).code == 0
    assert k3tool("verify", "ranks", many, one, "--request", "x").code == 4
    missing = k3tool("verify", "ranks", many, one, "--request", "y")
    assert (missing.code, "need one of 1, x" in missing.err) == (2, True)
    assert k3tool("verify", "ranks", one, one.with_name("none"), "--request", "x").code == 3


def test_a_file_that_lacks_the_chosen_request_fails_however_many_others_agree(
    k3tool: Run, tmp_path: Path
) -> None:
    a, b, lacking = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "lacking.jsonl"))
    for path in (a, b):
        path.write_text('{"request": "b", "ids": [5, 6]}\n{"request": 1, "ids": [7, 8]}\n')
    lacking.write_text('{"request": "a", "ids": [5, 6]}\n')
    assert k3tool("verify", "ranks", a, b, "--request", "b").code == 0  # the control
    for files in ((a, b, lacking), (lacking, a, b), (a, lacking)):
        done = k3tool("verify", "ranks", *files, "--request", "b")
        assert done.code == 4
        assert f"{lacking} request b" in done.out + done.err
        assert "absent: only" in done.out + done.err


def test_a_number_and_a_word_that_read_alike_are_not_one_request(
    k3tool: Run, tmp_path: Path
) -> None:
    both, word = tmp_path / "both.jsonl", tmp_path / "word.jsonl"
    both.write_text('{"request": 1, "ids": [5, 6]}\n{"request": "1", "ids": [5, 6]}\n')
    word.write_text('{"request": "1", "ids": [5, 6]}\n')
    for files in ((both,), (both, word)):
        done = k3tool("verify", "ranks", *files, "--request", 1)
        assert done.code == 3
        assert f"{both}: request 1: got two of this name, a number and a word" in done.err
    assert k3tool("verify", "ranks", word, "--request", 1).code != 3  # the control: one of them


# -- logits --------------------------------------------------------------------------------------


def test_logits_of_a_run_are_those_of_the_released_code(
    k3tool: Run, tmp_path: Path, oracle: Callable[[str], Path], prompts: Run
) -> None:
    ids = ",".join(map(str, prompts("tiny13")["p7"]))
    run, gold = tmp_path / "run.npz", oracle("tiny13").parent / "tiny13.gold.npz"
    done = k3tool("run", oracle("tiny13"), "--ids", ids, "--gen", 4, "--ignore-eos",
                  "--cache", tmp_path / "cache", "--logits", run)  # fmt: skip
    assert done.code == 0, done.err
    done = k3tool("verify", "logits", run, gold, "--name", "p7")
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[0].split() == ["position", "step", "max", "at", "id", "rms/dev", "KL", "run",
                                "ref", "margin"]  # fmt: skip
    worst = re.compile(r"PASS    largest \|difference\|: worst=0\.\d\dx tol at \(position .*")
    assert any(map(worst.fullmatch, lines))
    assert "NOT RUN steps, positions 10-37: not in" in done.out
    assert lines[-1] == "PASS: 5 PASS, 0 FAIL, 1 NOT RUN"
    assert len([line for line in lines if line[:8].strip().isdigit()]) == 10
    whole = k3tool("verify", "logits", run, gold, "--name", "p7", "--all").out.splitlines()
    assert len([line for line in whole if line[:8].strip().isdigit()]) == 11
    data = json.loads(k3tool("verify", "logits", run, gold, "--name", "p7", "--json").out)
    assert (len(data["positions"]), data["tolerances"]["max_abs"], data["sound"]) == (
        11,
        2e-4,
        True,
    )
    # Controls: strictness, a tolerance that nothing keeps, another prompt, no name, no file.
    assert k3tool("verify", "logits", run, gold, "--name", "p7", "--strict").code == 4
    tight = k3tool("verify", "logits", run, gold, "--name", "p7", "--max-abs", "1e-9")
    assert (tight.code, "FAIL    largest |difference|: worst=" in tight.out) == (4, True)
    refused: list[tuple[list[object], int]] = [
        ([gold, "--name", "p40"], 3),
        ([gold], 3),
        ([tmp_path / "none"], 3),
        ([run], 2),
        ([gold, "--rms", "0"], 2),
        ([gold, "--kl", "nan"], 2),
    ]
    for arguments, code in refused:
        assert k3tool("verify", "logits", run, *arguments).code == code


# -- coverage ------------------------------------------------------------------------------------


@pytest.fixture
def isa(tmp_path: Path) -> Path:
    save_isa(emit(save_plan(plans.plan(), tmp_path / "plan.h5"), "cpu"), tmp_path / "isa.h5")
    return tmp_path / "isa.h5"


def pretend(monkeypatch: pytest.MonkeyPatch, without: set[Op]) -> None:
    """Let the interpreter have all handlers but these."""
    have = {int(op) for op, spec in SPECS.items() if spec.is_emitted and op not in without}
    monkeypatch.setattr(coverage, "handlers", lambda target: {"decode": have, "prefill": have})


def test_coverage_passes_and_counts_what_was_not_run(
    k3tool: Run, isa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, set())
    done = k3tool("verify", "coverage", isa)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "PASS: 8 PASS, 0 FAIL, 3 NOT RUN"
    assert k3tool("verify", "coverage", isa, "--strict").code == 4


def test_coverage_names_an_op_whose_handler_was_removed(
    k3tool: Run, isa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {Op.RMSNORM})
    done = k3tool("verify", "coverage", isa)
    assert done.code == 4
    assert "FAIL    opcodes handled, decode: no handler for RMSNORM (instruction 1 on)" in done.out


def test_coverage_names_weights_that_the_program_does_not_read(
    k3tool: Run, isa: Path, oracle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, set())
    done = k3tool("verify", "coverage", isa, "--weights", oracle("tiny13"))
    assert done.code == 4
    assert "FAIL    weights of the model read, decode:" in done.out
    assert "read by no instruction of any rank" in done.out


def test_coverage_says_which_checkpoint_a_program_is_bound_to(
    k3tool: Run, tmp_path: Path, oracle: Callable[[str], Path]
) -> None:
    source = oracle("tiny13")
    for made_of, line in (
        (source / "config.json", "NOT RUN program bound to a checkpoint: compiled from a config"),
        (source, "PASS    program bound to a checkpoint: "),
    ):
        plan, isa = tmp_path / "plan.h5", tmp_path / "isa.h5"
        assert k3tool("compile-plan", made_of, "--tp", 1, "-o", plan).code == 0
        assert k3tool("emit-isa", plan, "-o", isa).code == 0
        done = k3tool("verify", "coverage", isa, "--weights", source)
        assert (done.code, line in done.out) == (0, True), done
        strict = k3tool("verify", "coverage", isa, "--weights", source, "--strict")
        assert (strict.code == 4) == line.startswith("NOT RUN")


def test_coverage_refuses_a_program_made_from_other_weights(
    k3tool: Run, tmp_path: Path, oracle: Callable[[str], Path]
) -> None:
    plan = plans.plan()
    refs = (InputRef("checkpoint", "checkpoint", "other", "b" * 64),)
    plan = type(plan)(plan.tensors, plan.phases, plan.params, (), refs)
    save_isa(emit(plan, "cpu"), tmp_path / "isa.h5")
    done = k3tool("verify", "coverage", tmp_path / "isa.h5", "--weights", oracle("tiny13"))
    assert done.code == 3
    assert "checkpoint other: got bbbbbbbbbbbbbbbb.." in done.err
    # Of a program made from shards the params alone say of which checkpoint they are.
    plan.params["checkpoint_identity"] = "c" * 64
    save_isa(emit(type(plan)(plan.tensors, plan.phases, plan.params), "cpu"), tmp_path / "isa.h5")
    done = k3tool("verify", "coverage", tmp_path / "isa.h5", "--weights", oracle("tiny13"))
    assert done.code == 3
    assert "checkpoint: got cccccccccccccccc.." in done.err


def test_coverage_refuses_shards_of_another_degree_and_takes_those_of_its_own(
    k3tool: Run, tmp_path: Path, oracle: Callable[[str], Path]
) -> None:
    source, plan, isa = oracle("tiny_tp8"), tmp_path / "plan.h5", tmp_path / "isa.h5"
    assert k3tool("compile-plan", source, "--tp", 4, "-o", plan).code == 0
    assert k3tool("emit-isa", plan, "-o", isa).code == 0
    for tp in (2, 4):
        assert k3tool("shard", source, "--tp", tp, "-o", tmp_path / f"s{tp}").code == 0
    done = k3tool("verify", "coverage", isa, "--weights", tmp_path / "s2")
    assert (done.code, done.out) == (3, "")
    assert "isa.h5: tp: got 4, need 2" in done.err
    for own in (tmp_path / "s4", source):  # a whole checkpoint is of no degree
        assert k3tool("verify", "coverage", isa, "--weights", own).code == 0


# name -> what is done to shards of two ranks
DAMAGED_SHARDS: dict[str, Callable[[Path], object]] = {
    "a rank file cut": lambda folder: os.truncate(_weights(folder / "rank-01-of-02"), 1000),
    "a rank file gone": lambda folder: _weights(folder / "rank-01-of-02").unlink(),
    "a rank gone": lambda folder: shutil.rmtree(folder / "rank-01-of-02"),
    "a rank's config gone": lambda folder: (folder / "rank-00-of-02" / "config.json").unlink(),
    "a bit flipped": lambda folder: _flip(_weights(folder / "rank-00-of-02")),
    "a side file added": lambda folder: (folder / "tokenizer.json").write_text("{}"),
}


def _weights(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def program(k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path) -> Path:
    plan, isa = tmp_path / "plan.h5", tmp_path / "isa.h5"
    assert k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 2, "-o", plan).code == 0
    assert k3tool("emit-isa", plan, "-o", isa).code == 0
    return isa


def test_coverage_passes_no_weights_that_run_refuses(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path, program: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pretend(monkeypatch, set())
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", tmp_path / "whole").code == 0
    coverage = ("verify", "coverage", program, "--weights")
    assert k3tool(*coverage, tmp_path / "whole").code == 0  # the control
    for number, (kind, damage) in enumerate(DAMAGED_SHARDS.items()):
        shards = tmp_path / f"s{number}"
        shutil.copytree(tmp_path / "whole", shards)
        damage(shards)
        done = k3tool(*coverage, shards)
        assert (done.code, done.out) == (3, ""), (kind, done)
        assert str(shards) in done.err, kind
        assert "hint: " in done.err, kind


def test_coverage_refuses_a_damaged_checkpoint_in_the_words_of_inspect(
    k3tool: Run, writable: Callable[[str], Path], program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, set())
    source = writable("tiny_tp8")
    coverage = ("verify", "coverage", program, "--weights", source)
    assert k3tool(*coverage).code == 0
    _weights(source).unlink()
    done, shard = k3tool(*coverage), k3tool("shard", source, "--tp", 2, "-o", program / "x")
    assert (done.code, done.out) == (3, "")
    assert "need a file of the index" in done.err
    assert done.err.replace("k3tool verify coverage:", "k3tool shard:") == shard.err

"""tokens.h5 against tokens.h5: every kind of difference is found, and nothing is no pass."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from k3tool.compare.ranks import compare
from k3tool.compare.records import of_tokens
from k3tool.errors import ArtifactError
from k3tool.runtime.tokens import TokenFile
from k3tool.verdict import Check, count, is_sound
from tests.unit.compare.streams import stream, write


def checks_of(files: Sequence[TokenFile]) -> list[Check]:
    return compare([of_tokens(file) for file in files]).checks


def test_equal_runs_at_tp_1_and_8_pass(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{tp}.h5", tp) for tp in (1, 8)]
    checks = checks_of(files)
    assert [check.status for check in checks] == ["PASS"] * 6
    assert "other programs" in checks[-1].detail


def test_one_stream_compares_nothing_and_is_no_pass(tmp_path: Path) -> None:
    file = write(tmp_path / "1.h5", 1)
    checks = checks_of([file])
    assert [check.status for check in checks] == ["NOT RUN"]
    assert "one stream only" in checks[0].detail
    assert not is_sound(checks, strict=False)
    assert is_sound(checks_of([file, file]), strict=False)  # the control: two files compare


def test_equal_ranks_say_that_tokens_and_bits_are(tmp_path: Path) -> None:
    last = checks_of([write(tmp_path / "2.h5", 2)])[-1]
    assert "tokens and bits equal on all ranks" in last.name


def test_the_same_program_also_compares_the_step_digest(tmp_path: Path) -> None:
    other = [stream(rank, 2) for rank in range(2)]
    for rows in other:
        rows["digest"][3] += 1
    files = [write(tmp_path / "a.h5", 2), write(tmp_path / "b.h5", 2, other)]
    last = checks_of(files)[-1]
    assert last.status == "FAIL"
    assert "step 3 in digest (equal ids, other bits)" in last.detail


@pytest.mark.parametrize(("isa", "status"), [("", "PASS"), ("7" * 64, "FAIL")])
def test_programs_without_a_digest_are_no_one_program(
    tmp_path: Path, isa: str, status: str
) -> None:
    """Streams of two plans emitted in memory have none; those of one file are the control."""
    other = stream(0, 1)
    other["digest"] += 1
    files = [write(tmp_path / "a.h5", 1, isa=isa), write(tmp_path / "b.h5", 1, [other], isa=isa)]
    last = checks_of(files)[-1]
    assert last.status == status
    assert ("other programs" in last.detail) == (status == "PASS")


@pytest.mark.parametrize("field", ["position", "id", "best", "second", "digest"])
def test_one_rank_with_one_other_value_is_named(tmp_path: Path, field: str) -> None:
    ranks = [stream(rank, 4) for rank in range(4)]
    if ranks[2][field].dtype.kind == "f":
        ranks[2][field][3] = np.nextafter(ranks[2][field][3], np.float32(9))
    else:
        ranks[2][field][3] += 1
    checks = checks_of([write(tmp_path / "t.h5", 4, ranks)])
    assert [check.status for check in checks] == ["PASS", "PASS", "FAIL"]
    assert f"step 3 in {field}" in checks[2].detail
    assert "rank 2 has id" in checks[2].detail
    assert "margin 0.25" in checks[2].detail
    assert ("equal ids" in checks[2].detail) == (field != "id")


def test_the_first_of_several_differences_is_reported(tmp_path: Path) -> None:
    ranks = [stream(rank, 2) for rank in range(2)]
    ranks[1]["id"][[4, 2]] = 99
    found = checks_of([write(tmp_path / "t.h5", 2, ranks)])[2]
    assert "first difference at step 2 in id: rank 0 has id 12" in found.detail
    assert "rank 1 has id 99" in found.detail


def test_a_rank_whose_logits_differ_is_found_across_tp(tmp_path: Path) -> None:
    ranks = [stream(rank, 8) for rank in range(8)]
    ranks[5]["logits_digest"][1] += 1
    files = [write(tmp_path / "1.h5", 1), write(tmp_path / "8.h5", 8, ranks)]
    checks = checks_of(files)
    assert [check.status for check in checks] == ["PASS"] * 5 + ["FAIL"]
    assert "step 1 in logits_digest (equal ids, other bits)" in checks[-1].detail


def test_another_length_is_a_difference(tmp_path: Path) -> None:
    ranks = [stream(rank, 2) for rank in range(2)]
    ranks[1] = ranks[1][:4]
    found = checks_of([write(tmp_path / "t.h5", 2, ranks)])
    assert "rank 0 has 5 steps, rank 1 4" in found[2].detail
    short = write(tmp_path / "s.h5", 2, [stream(rank, 2)[:2] for rank in range(2)])
    found = checks_of([write(tmp_path / "u.h5", 2), short])
    assert found[-1].status == "FAIL"


def test_a_missing_rank_an_empty_stream_and_no_file_are_no_pass(tmp_path: Path) -> None:
    missing = write(tmp_path / "m.h5", 4, [stream(rank, 4) for rank in range(3)])
    found = checks_of([missing])
    assert "missing 3" in found[0].detail
    assert count(found, "FAIL") == 1
    empty = write(tmp_path / "e.h5", 2, [stream(rank, 2)[:0] for rank in range(2)])
    assert not is_sound(checks_of([empty]), strict=False)
    nobody = write(tmp_path / "n.h5", 2, [])
    assert not is_sound(checks_of([nobody]), strict=False)
    assert not is_sound(checks_of([nobody, nobody]), strict=False)
    assert not is_sound(checks_of([]), strict=False)


def test_runs_of_other_questions_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.h5", 1)
    for other, said in (
        (write(tmp_path / "b.h5", 1, checkpoint="d" * 64), f"checkpoint: got {'d' * 16}.., need "),
        (
            write(tmp_path / "c.h5", 1, prompt=[1, 2]),
            r"prompt: got \[1, 2\], need \[1, 2, 3\], as ",
        ),
        (write(tmp_path / "d.h5", 1, prompt=[*range(99), 1]), "prompt: got .{60}, need "),
        (
            write(tmp_path / "e.h5", 1, mode="bf16"),
            "numerics: got mode bf16, version 1, need mode f32, version 1, as .*one --numerics",
        ),
    ):
        with pytest.raises(ArtifactError, match=f"(?s){other.name}: {said}"):
            checks_of([first, other])

"""tokens.h5 and its comparison: every kind of difference is found, and nothing is no pass."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from k3tool.artifact import Dataset, InputRef, write_artifact
from k3tool.errors import ArtifactError
from k3tool.runtime.tokens import (
    TOKEN_DTYPE,
    Columns,
    TokenFile,
    read_tokens,
    verify_ranks,
    write_tokens,
)
from k3tool.verdict import count, is_sound

N = 5


def stream(rank: int, tp: int) -> Columns:
    """One rank's rows; the logits digests of all ranks add up to the same at every tp."""
    rows = np.zeros(N, TOKEN_DTYPE)
    rows["step"] = np.arange(N)
    rows["position"] = 3 + np.arange(N)
    rows["id"] = 10 + np.arange(N)
    rows["best"], rows["second"] = 2.5, 2.25
    rows["digest"] = 77 * tp + np.arange(N)
    whole = np.uint64(2**64 - 5)
    share = np.uint64(2**63 + 11)
    rows["logits_digest"] = whole - share * np.uint64(tp - 1) if rank == 0 else share
    return rows


def write(
    path: Path,
    tp: int,
    ranks: list[Columns] | None = None,
    *,
    checkpoint: str = "c" * 64,
    prompt: Sequence[int] = (1, 2, 3),
    mode: str = "f32",
) -> TokenFile:
    write_tokens(
        path,
        [stream(rank, tp) for rank in range(tp)] if ranks is None else ranks,
        prompt,
        params={"tp": tp, "numerics": {"mode": mode, "version": 1}},
        inputs=[
            InputRef("checkpoint", "checkpoint", "tiny", checkpoint),
            InputRef("isa", "isa", "isa.h5", f"{tp}" * 64),
        ],
    )
    return read_tokens(path)


@pytest.fixture(autouse=True)
def _wrapping() -> object:
    with np.errstate(over="ignore"):
        yield


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "t.h5", 2)
    assert file.prompt == (1, 2, 3)
    assert file.tp == 2
    for rank in range(2):
        assert file.ranks[rank].tobytes() == stream(rank, 2).tobytes()


def test_equal_runs_at_tp_1_and_8_pass(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{tp}.h5", tp) for tp in (1, 8)]
    checks = verify_ranks(files)
    assert [check.status for check in checks] == ["PASS"] * 4
    assert "other programs" in checks[-1].detail


def test_one_stream_compares_nothing_and_is_no_pass(tmp_path: Path) -> None:
    file = write(tmp_path / "1.h5", 1)
    checks = verify_ranks([file])
    assert [check.status for check in checks] == ["NOT RUN"]
    assert "one stream only" in checks[0].detail
    assert not is_sound(checks, strict=False)
    assert is_sound(verify_ranks([file, file]), strict=False)  # the control: two files compare


def test_equal_ranks_say_that_tokens_and_bits_are(tmp_path: Path) -> None:
    last = verify_ranks([write(tmp_path / "2.h5", 2)])[-1]
    assert "tokens and bits equal on all ranks" in last.name


def test_the_same_program_also_compares_the_step_digest(tmp_path: Path) -> None:
    other = [stream(rank, 2) for rank in range(2)]
    for rows in other:
        rows["digest"][3] += 1
    files = [write(tmp_path / "a.h5", 2), write(tmp_path / "b.h5", 2, other)]
    last = verify_ranks(files)[-1]
    assert last.status == "FAIL"
    assert "step 3 in digest (equal ids, other bits)" in last.detail


@pytest.mark.parametrize("field", ["position", "id", "best", "second", "digest"])
def test_one_rank_with_one_other_value_is_named(tmp_path: Path, field: str) -> None:
    ranks = [stream(rank, 4) for rank in range(4)]
    if ranks[2][field].dtype.kind == "f":
        ranks[2][field][3] = np.nextafter(ranks[2][field][3], np.float32(9))
    else:
        ranks[2][field][3] += 1
    checks = verify_ranks([write(tmp_path / "t.h5", 4, ranks)])
    assert [check.status for check in checks] == ["PASS", "FAIL"]
    assert f"step 3 in {field}" in checks[1].detail
    assert "rank 2 has id" in checks[1].detail
    assert "margin 0.25" in checks[1].detail
    assert ("equal ids" in checks[1].detail) == (field != "id")


def test_the_first_of_several_differences_is_reported(tmp_path: Path) -> None:
    ranks = [stream(rank, 2) for rank in range(2)]
    ranks[1]["id"][[4, 2]] = 99
    found = verify_ranks([write(tmp_path / "t.h5", 2, ranks)])[1]
    assert "first difference at step 2 in id: rank 0 has id 12" in found.detail
    assert "rank 1 has id 99" in found.detail


def test_a_rank_whose_logits_differ_is_found_across_tp(tmp_path: Path) -> None:
    ranks = [stream(rank, 8) for rank in range(8)]
    ranks[5]["logits_digest"][1] += 1
    files = [write(tmp_path / "1.h5", 1), write(tmp_path / "8.h5", 8, ranks)]
    checks = verify_ranks(files)
    assert [check.status for check in checks] == ["PASS"] * 3 + ["FAIL"]
    assert "step 1 in logits_digest (equal ids, other bits)" in checks[-1].detail


def test_another_length_is_a_difference(tmp_path: Path) -> None:
    ranks = [stream(rank, 2) for rank in range(2)]
    ranks[1] = ranks[1][:4]
    found = verify_ranks([write(tmp_path / "t.h5", 2, ranks)])
    assert "rank 0 has 5 steps, rank 1 4" in found[1].detail
    short = write(tmp_path / "s.h5", 2, [stream(rank, 2)[:2] for rank in range(2)])
    found = verify_ranks([write(tmp_path / "u.h5", 2), short])
    assert found[-1].status == "FAIL"


def test_a_missing_rank_an_empty_stream_and_no_file_are_no_pass(tmp_path: Path) -> None:
    missing = write(tmp_path / "m.h5", 4, [stream(rank, 4) for rank in range(3)])
    found = verify_ranks([missing])
    assert "missing 3" in found[0].detail
    assert count(found, "FAIL") == 1
    empty = write(tmp_path / "e.h5", 2, [stream(rank, 2)[:0] for rank in range(2)])
    assert not is_sound(verify_ranks([empty]), strict=False)
    nobody = write(tmp_path / "n.h5", 2, [])
    assert not is_sound(verify_ranks([nobody]), strict=False)
    assert not is_sound(verify_ranks([nobody, nobody]), strict=False)
    assert not is_sound(verify_ranks([]), strict=False)


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
            verify_ranks([first, other])


def test_a_record_without_a_column_is_refused(tmp_path: Path) -> None:
    write_artifact(
        tmp_path / "t.h5",
        "tokens",
        1,
        {"rank-00/step": Dataset(np.zeros(2, "<u4"), ("step",), "")},
    )
    with pytest.raises(ArtifactError, match="rank-00/position: got absent"):
        read_tokens(tmp_path / "t.h5")


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    columns = {name: Dataset(np.zeros(2, TOKEN_DTYPE[name]), ("step",), "") for name in
               TOKEN_DTYPE.names or ()}  # fmt: skip
    columns["id"] = Dataset(np.zeros(3, "<u4"), ("step",), "")
    write_artifact(tmp_path / "t.h5", "tokens", 1,
                   {f"rank-00/{name}": data for name, data in columns.items()})  # fmt: skip
    with pytest.raises(ArtifactError, match="rank-00/id"):
        read_tokens(tmp_path / "t.h5")

"""Records of any form and engine: equal ones are, one other id is found in its step, and what is
cut, doubled, absent or no number is never a pass.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from k3tool.compare import id_lists, spill
from k3tool.compare.differences import NEAR_TIE
from k3tool.compare.ranks import Comparison, Terms, compare
from k3tool.compare.records import read_records
from k3tool.errors import ArtifactError, listed
from k3tool.verdict import is_sound
from tests.unit.compare.streams import FORMS, START, events, lines

IDS = [10, 11, 12, 163_839, 0]
small = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def verdict(paths: Sequence[Path], **terms: Any) -> Comparison:
    found = compare([record for path in paths for record in read_records(path)], Terms(**terms))
    assert (found.verdict == "identical") == is_sound(found.checks, strict=False)
    return found


def details(found: Comparison) -> str:
    return "\n".join(check.detail for check in found.checks if check.status == "FAIL")


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations_with_replacement(FORMS, 2)])
def test_every_form_equals_every_other(tmp_path: Path, one: str, other: str) -> None:
    paths = [FORMS[one](tmp_path / "a", IDS), FORMS[other](tmp_path / "b", IDS)]
    found = verdict(paths)
    assert found.verdict == "identical", found
    assert found.checks[-1].name == f"{paths[0]} and {paths[1]}: same " + (
        "bits" if {one, other} <= {"tokens.h5", "events"} else "tokens"
    )


@small
@given(
    ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    forms=st.tuples(st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(FORMS))),
    data=st.data(),
)
def test_one_other_id_anywhere_is_found_in_its_step(
    tmp_path: Path, ids: list[int], forms: tuple[str, str], data: st.DataObject
) -> None:
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    folder.mkdir()
    step = data.draw(st.integers(0, len(ids) - 1))
    token = data.draw(st.integers(0, 2**32 - 1).filter(lambda other: other != ids[step]))
    a, b = (FORMS[form](folder / name, ids) for form, name in zip(forms, "ab", strict=True))
    assert verdict([a, b]).verdict == "identical"
    other = FORMS[forms[1]](folder / "c", [*ids[:step], token, *ids[step + 1 :]])
    found = verdict([a, other])
    assert found.verdict == "real"
    assert found.differences[-1].step == found.differences[-1].ids_step == step
    assert f"at step {step} in id: " in details(found)
    assert f"has id {token} " in details(found)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_stream_that_ends_sooner_is_a_difference_and_said_to_be(
    tmp_path: Path, form: str
) -> None:
    whole, short = FORMS[form](tmp_path / "a", IDS), FORMS[form](tmp_path / "b", IDS[:-1])
    for paths in ([whole, short], [short, whole]):
        found = verdict(paths)
        assert found.verdict == "prefix"
        assert f"{short} is a prefix of the other" in details(found)


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"ranks"}))
def test_an_empty_stream_and_one_alone_are_no_pass(tmp_path: Path, form: str) -> None:
    empty, whole = FORMS[form](tmp_path / "e", []), FORMS[form](tmp_path / "a", IDS)
    for paths in ([empty], [empty, empty], [whole, empty], [empty, whole]):
        found = verdict(paths)
        assert found.verdict == "unsound"
        assert "no token: nothing to compare" in details(found)
    alone = verdict([whole])
    assert [check.status for check in alone.checks] == ["NOT RUN"]
    assert alone.verdict == "nothing compared"


@pytest.mark.parametrize("text", ["", " \n\n", "\ufeff", "\ufeff\r\n", " " * 10_000])
def test_files_of_nothing_but_space_are_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(text.encode())
    assert "no token" in details(verdict([path, path]))


def test_words_beside_ids_are_no_ids(tmp_path: Path) -> None:
    plain = FORMS["spaces"](tmp_path / "a", IDS)
    for values in (
        [{"id": "cmpl-1", "token": "x", "token_id": each} for each in IDS],
        [{"token": "x", "id": each} for each in IDS],
        [{"tokens": ["x"] * len(IDS), "token_ids": IDS}],
    ):
        assert verdict([plain, lines(tmp_path / "b", values)]).verdict == "identical"


# -- near ties -----------------------------------------------------------------------------------


def flipped(path: Path, margin: float | None, token: int = 99) -> Path:
    values = [{"token_id": each, "margin": 1.0} for each in IDS]
    values[2] = {"token_id": token} if margin is None else {"token_id": token, "margin": margin}
    return lines(path, values)


@pytest.mark.parametrize(
    ("margins", "expected"),
    [
        ((NEAR_TIE, NEAR_TIE), "near tie"),
        ((NEAR_TIE, None), "near tie"),
        ((0.0, 1e-5), "near tie"),
        ((np.nextafter(NEAR_TIE, 1), 0.0), "real"),
        ((0.5, 0.0), "real"),
        ((None, None), "real"),
    ],
)
def test_a_near_tie_needs_every_known_margin_within_the_bound(
    tmp_path: Path, margins: tuple[float | None, float | None], expected: str
) -> None:
    paths = [flipped(tmp_path / "a", margins[0], 12), flipped(tmp_path / "b", margins[1])]
    found = verdict(paths)
    assert found.verdict == expected
    assert not is_sound(found.checks, strict=False)
    if margins == (None, None):
        assert "no margin known" in details(found)
    elif margins[0] is not None:
        assert verdict(paths, near_tie=2.0).verdict == "near tie"


def test_other_bits_before_other_ids_are_real_and_say_where_ids_part(tmp_path: Path) -> None:
    ours = events(IDS)
    ours[2]["margin"] = 0.125  # of step 1
    ours[4]["id"] = ours[5]["id"]
    ours[-1]["tokens"] = [*IDS[:3], ours[4]["id"], IDS[4]]
    found = verdict([FORMS["events"](tmp_path / "a", IDS), lines(tmp_path / "b", ours)])
    assert (found.verdict, found.differences[0].step, found.differences[0].ids_step) == (
        "real", 1, 3,
    )  # fmt: skip
    assert "at step 1 in margin (ids from step 3 on, margins 0.25, 0.25)" in details(found)
    alone = [value | ({"margin": 0.5} if value["event"] == "token" else {}) for value in ours]
    foreign = [{"id": value["id"], "margin": 9.0} for value in alone[1:-1]]
    found = verdict([lines(tmp_path / "c", ours), lines(tmp_path / "d", foreign)])
    assert found.verdict == "identical", "another engine's margins need not be ours"


def test_text_is_shown_where_a_tokenizer_is_given(tmp_path: Path) -> None:
    paths = [flipped(tmp_path / "a", 0.5, 12), flipped(tmp_path / "b", 0.5)]
    assert 'behind "<10, 11>": ' in details(verdict(paths, decode=lambda ids: f"<{listed(ids)}>"))
    assert 'id 12 "<12>"' in details(verdict(paths, decode=lambda ids: f"<{listed(ids)}>"))


# -- three and more ------------------------------------------------------------------------------


def test_of_three_streams_the_one_that_differs_from_most_is_named(tmp_path: Path) -> None:
    odd = FORMS["commas"](tmp_path / "odd", [*IDS[:3], 7, 8])
    short = FORMS["spaces"](tmp_path / "short", IDS[:2])
    most = [FORMS[form](tmp_path / form.replace(" ", "-"), IDS) for form in ("a list", "spaces")]
    found = verdict([odd, *most])
    assert found.majorities[0].others == {str(odd): 3}
    assert found.majorities[0].agree == tuple(map(str, most))
    three = FORMS["events"](tmp_path / "third", IDS)
    assert verdict([*most, three, short, odd]).majorities[0].others == {str(short): 2, str(odd): 3}
    assert verdict([odd, short, *most]).majorities[0].agree == ()  # two of four are not most
    assert verdict([*most, three]).majorities == []
    assert verdict([odd, short]).majorities == []


def test_of_ranks_the_one_that_differs_from_most_is_named(tmp_path: Path) -> None:
    values = [{"rank": rank, "id": token} for token in IDS for rank in range(4)]
    values[2 * 4 + 0]["id"] = 7  # rank 0 itself, which the others are compared with
    found = verdict([lines(tmp_path / "a", values)])
    assert found.majorities[0].others == {f"{tmp_path / 'a'} rank 0": 2}


# -- what a record must not hold -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([0, 1, 1, 3, 4], "step 1 comes again where step 2 is due"),
        ([0, 1, 3, 4, 5], "step 3 comes where step 2 is due"),
        ([1, 2, 3, 4, 5], "step 1 comes where step 0 is due"),
        ([0, 2, 1, 3, 4], "step 2 comes where step 1 is due"),
    ],
)
def test_steps_that_are_doubled_left_out_or_out_of_order(
    tmp_path: Path, steps: list[int], said: str
) -> None:
    values = [{"step": step, "id": token} for step, token in zip(steps, IDS, strict=True)]
    path = lines(tmp_path / "a", values)
    copy = lines(tmp_path / "b", values)
    found = verdict([path, copy])  # equal, and equally wrong
    assert said in details(found)


def test_ranks_that_are_not_there_are_named(tmp_path: Path) -> None:
    values = [{"rank": rank, "id": token} for token in IDS for rank in (0, 1, 3)]
    found = verdict([lines(tmp_path / "a", values)])
    assert "of 4 ranks, missing 2" in details(found)
    uneven = lines(tmp_path / "b", values[:-1])
    assert "missing 2" in details(verdict([uneven]))
    two = [{"rank": rank, "id": token} for token in IDS for rank in (0, 1)]
    assert "rank 1 is a prefix" in details(verdict([lines(tmp_path / "c", two[:-1])]))


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-0.5"])
def test_margins_that_cannot_be_are_no_pass_even_where_equal(tmp_path: Path, bad: str) -> None:
    for form, fields in (("events", '"margin": 0.25'), ("one id a line", '"margin": 0.25')):
        paths = []
        for name in "ab":
            path = FORMS[form](tmp_path / f"{name}-{form[:3]}", IDS)
            path.write_text(path.read_text().replace(fields, f'"margin": {bad}'))
            paths.append(path)
        assert "the margin of step 0 is" in details(verdict(paths))


def test_ids_beyond_the_vocabulary_are_no_pass(tmp_path: Path) -> None:
    paths = [FORMS["spaces"](tmp_path / name, IDS) for name in "ab"]
    found = verdict(paths, vocab_size=163_839)
    assert "id 163839 at step 3: the vocabulary has 163839" in details(found)
    assert verdict(paths, vocab_size=163_840).verdict == "identical"


def test_events_of_a_run_that_did_not_end_or_disagreed(tmp_path: Path) -> None:
    whole = events(IDS, tp=8)
    good = lines(tmp_path / "good", whole)
    assert verdict([good, good]).verdict == "identical"
    cut = lines(tmp_path / "cut", whole[:-1])
    assert "no end event" in details(verdict([cut, cut]))
    fewer = [*whole[:-1], {"event": "end", "tokens": IDS[:-1]}]
    assert "lists 4 ids, not those of the 5" in details(
        verdict([good, lines(tmp_path / "f", fewer)])
    )
    whole[3]["ranks_agree"] = 7
    found = verdict([good, lines(tmp_path / "bad", whole)])
    assert "step 2: 7 of 8 ranks agree" in details(found)


def test_runs_of_other_questions_are_refused_as_far_as_files_say(tmp_path: Path) -> None:
    first = FORMS["tokens.h5"](tmp_path / "a.h5", IDS)
    for changed in ({"checkpoint": "d" * 64}, {"numerics": "bf16"}, {"prompt_tokens": 4}):
        other = lines(tmp_path / "b", [START | changed, *events(IDS)[1:]])
        with pytest.raises(ArtifactError, match=f"{other}: {next(iter(changed))}: got"):
            verdict([first, other])


def test_drawn_tokens_are_compared_with_those_drawn_alike_and_know_no_near_tie(
    tmp_path: Path,
) -> None:
    drawn = START | {"sampling": {"temperature": 1.0, "seed": 5}}
    greedy = FORMS["tokens.h5"](tmp_path / "greedy.h5", IDS)
    paths = [
        lines(tmp_path / name, [drawn, *events(ids, margin=1e-6)[1:]])
        for name, ids in (("a", IDS), ("b", IDS), ("c", [*IDS[:4], 7]))
    ]
    assert verdict(paths[:2]).verdict == "identical"
    found = verdict([paths[0], paths[2]])
    assert found.verdict == "real"
    assert "tokens were drawn" in details(found)
    with pytest.raises(ArtifactError, match=r"sampling: got temperature 1\.0, seed 5, need none"):
        verdict([greedy, paths[0]])
    known = lines(tmp_path / "d", [START | {"sampling": None}, *events(IDS)[1:]])
    assert verdict([greedy, known]).verdict == "identical"


# -- several requests in a file ------------------------------------------------------------------


def batch(path: Path, answers: dict[str, list[int]], margin: float = 0.25) -> Path:
    """Write the events of a run of several requests, their tokens by turns."""
    values: list[dict[str, Any]] = [START | {"requests": len(answers), "prompt_tokens": 0}]
    for step in range(max(map(len, answers.values()))):
        values += [
            {"event": "token", "request": name, "step": step, "id": ids[step],
             "position": 2 + step, "margin": margin, "ranks_agree": 1}
            for name, ids in answers.items() if step < len(ids)
        ]  # fmt: skip
    values += [{"event": "finished", "request": name, "ids": ids, "prompt_tokens": 3}
               for name, ids in answers.items()]  # fmt: skip
    return lines(path, [*values, {"event": "end", "tokens": sum(map(len, answers.values()))}])


def test_each_request_is_compared_with_its_own(tmp_path: Path) -> None:
    a = batch(tmp_path / "a", {"x": IDS, "y": [3, 4]})
    b = batch(tmp_path / "b", {"y": [3, 4], "x": IDS})  # in another order, as slots become free
    found = verdict([a, b])
    assert found.verdict == "identical"
    assert found.checks[2].name == f"{a} request x and {b} request x: same bits"
    other = verdict([a, batch(tmp_path / "c", {"x": IDS, "y": [3, 5]})])
    assert (other.verdict, other.differences[0].step) == ("real", 1)
    assert f"{tmp_path / 'c'} request y has id 5" in details(other)
    fewer = verdict([a, batch(tmp_path / "d", {"x": IDS})])
    assert f"absent: only {a} has it" in details(fewer)
    alone = verdict([a])
    assert [check.status for check in alone.checks] == ["NOT RUN", "NOT RUN"]
    plain = lines(tmp_path / "e", [{"request": "y", "ids": [3, 4]}, {"request": "x", "ids": IDS}])
    assert verdict([a, plain]).verdict == "identical"


def test_a_request_that_was_cut_short_or_lists_other_ids_is_no_pass(tmp_path: Path) -> None:
    path = batch(tmp_path / "a", {"x": IDS, "y": [3, 4]})
    whole = path.read_text().splitlines()
    for keep, said in ((whole[:-1], "no end event"), ([*whole[:-2], whole[-1]], "no finished")):
        path.write_text("\n".join(keep))
        assert said in details(verdict([path, path]))
    path.write_text("\n".join(whole).replace('"ids": [3, 4]', '"ids": [3, 5]'))
    assert "lists 2 ids, not those of the 2 events" in details(verdict([path, path]))
    path.write_text("\n".join(whole).replace('"tokens": 7', '"tokens": 8'))
    with pytest.raises(ArtifactError, match="got 7 tokens of all requests, need 8, as end says"):
        read_records(path)


# -- long streams ----------------------------------------------------------------------------------


def test_streams_longer_than_memory_may_hold_are_mapped_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "BLOCK_BYTES", 256)
    monkeypatch.setattr(id_lists, "_BLOCK_BYTES", 7)
    ids = list(range(1000, 1500))
    plain = FORMS["commas"](tmp_path / "a", ids)
    rows = read_records(plain)[0].ranks[0]
    assert isinstance(rows, np.memmap)
    assert rows["id"].tolist() == ids
    assert rows["step"].tolist() == list(range(500))
    ranks = FORMS["ranks"](tmp_path / "b", ids)
    assert all(isinstance(each, np.memmap) for each in read_records(ranks)[0].ranks.values())
    assert verdict([plain, ranks]).verdict == "identical"
    other = FORMS["a list"](tmp_path / "c", [*ids[:-1], 7])
    assert verdict([plain, other]).differences[0].step == 499


@small
@given(text=st.lists(st.sampled_from(["12", "3", ",", " ", "\n", "\r\n"]), max_size=12),
       size=st.integers(1, 5))  # fmt: skip
def test_blocks_do_not_change_what_a_list_says(tmp_path: Path, text: list[str], size: int) -> None:
    path = tmp_path / "a"
    path.write_text("".join(text), newline="")

    def answer(n_bytes: int) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(id_lists, "_BLOCK_BYTES", n_bytes)
            try:
                return id_lists.read_ids(path)["id"].tolist()
            except ArtifactError as error:
                return error.got

    assert answer(size) == answer(1 << 20)

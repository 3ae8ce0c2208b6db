"""What a rank is asked is checked in the rank: no request writes outside what is its own."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.errors import UnsoundError
from k3tool.runtime import records, requests
from k3tool.runtime.engine import StepToken
from k3tool.runtime.ranks import FaultError, RankGroup
from k3tool.runtime.requests import REQUEST_DTYPE, Span, Step, encode_spans, encode_step
from k3tool.runtime.slots import StateRow
from tests.runtime import toy

DECODE, PREFILL = 0, 1
BIG = 0xFFFFFFFF
OUTPUT = 9  # a private tensor of 16 bytes: the toy has no state


def tokens(*triples: tuple[int, int, int]) -> list[StepToken]:
    return [StepToken(*triple) for triple in triples]


def step(given: list[StepToken], **fields: int) -> bytes:
    """A step that wants one choice; `fields` are put into its head afterwards."""
    made = Step(PREFILL, given, 1, len(given) - 1)
    data = bytearray(encode_step(made))
    head = np.frombuffer(data, REQUEST_DTYPE, 1).copy()
    for name, value in fields.items():
        head[name] = value
    data[: REQUEST_DTYPE.itemsize] = head.tobytes()
    return bytes(data)


GOOD = tokens((3, 0, 0), (1, 1, 0))
# What is wrong, and the token or span that the fault names.
STEPS: dict[str, tuple[bytes, int]] = {
    "no tokens": (step(GOOD, n=0), BIG),
    "more tokens than the program takes": (step(GOOD, n=5), BIG),
    "a count that wraps": (step(GOOD, n=BIG), BIG),
    "an unknown phase": (step(GOOD, phase=2), BIG),
    "more tokens than decode takes": (step(GOOD, phase=DECODE), BIG),
    "head past the end": (step(GOOD, head_from=3), BIG),
    "choices of tokens without a head": (step(GOOD, head_from=2), BIG),
    "more choices than tokens": (step(GOOD, n_wanted=3), BIG),
    "logits that nobody keeps": (step(GOOD, row=0), BIG),
    "an unknown kind": (step(GOOD, kind=9), BIG),
    "an id of no vocabulary": (step(tokens((3, 0, 0), (toy.VOCAB, 1, 0))), 1),
    "a slot that is not there": (step(tokens((3, 0, 1))), 0),
    "the last slot number there is": (step(tokens((3, 0, BIG))), 0),
    "a position past the context": (step(tokens((3, 4096, 0))), 0),
    "a gap between two tokens": (step(tokens((3, 0, 0), (1, 2, 0))), 1),
    "a token twice": (step(tokens((3, 5, 0), (1, 5, 0))), 1),
}


def group_of(folder: Path, **given: Any) -> RankGroup:
    return RankGroup(toy.launch(toy.images(toy.toy_isa(), folder), **given))


def fault_of(group: RankGroup, request: bytes) -> records.Fault:
    """Send bytes to the one rank and return the fault it answers with."""
    with group:
        group._ask(request)
        with pytest.raises(FaultError) as caught:
            group._answers(1)
    return caught.value.fault


@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_no_image_allows_is_refused(tmp_path: Path, what: str) -> None:
    request, detail = STEPS[what]
    fault = fault_of(group_of(tmp_path), request)
    assert (fault.code, fault.detail) == (records.REQUEST, detail)
    assert "a request that the image does not allow" in str(fault.error())


def test_rows_past_the_kept_logits_are_refused(tmp_path: Path) -> None:
    for row in (1, 2, BIG - 1):  # two rows from row 1 on, of two
        group = group_of(tmp_path, logits_shape=(2, toy.VOCAB))
        assert fault_of(group, step(GOOD, head_from=0, row=row)).code == records.REQUEST
    with group_of(tmp_path, logits_shape=(2, toy.VOCAB)) as group:  # the control: those fit
        group._ask(step(GOOD, head_from=0, row=0))
        assert (group._answers(1)["kind"] == records.TOKEN).all()


def states_of(group_folder: Path) -> RankGroup:
    """A group with an exchange file of 64 bytes."""
    return group_of(group_folder, states=(StateRow(OUTPUT, 64, 0),))


@pytest.mark.parametrize(
    "span",
    [
        Span(BIG, 0, 8, 0), Span(3, 0, 8, 0), Span(OUTPUT, 1 << 40, 8, 0),
        Span(OUTPUT, 8, 1 << 63, 0), Span(OUTPUT, 0, 8, 60), Span(OUTPUT, 0, 8, 1 << 63),
    ],
    ids=["no tensor", "not its own", "past its end", "wraps", "past the file", "far past it"],
)  # fmt: skip
@pytest.mark.parametrize("kind", [requests.SAVE, requests.RESTORE])
def test_bytes_that_are_not_a_state_are_refused(tmp_path: Path, kind: int, span: Span) -> None:
    group = states_of(tmp_path)
    good = Span(OUTPUT, 0, 8, 0)
    with group:
        os.ftruncate(group._exchanges[0], 64)
        group._ask(encode_spans(kind, [good]))
        group._answers(1)  # the control
        group._ask(encode_spans(kind, [good, span]))
        with pytest.raises(FaultError) as caught:
            group._answers(1)
    assert (caught.value.fault.code, caught.value.fault.detail) == (records.REQUEST, 1)


def test_a_request_that_is_cut_ends_the_rank(tmp_path: Path) -> None:
    for cut in (5, REQUEST_DTYPE.itemsize + 7):
        with group_of(tmp_path) as group:
            group._ask(step(GOOD)[:cut])
            with pytest.raises(UnsoundError, match="rank 0: got exit code 1"):
                group.end()


def test_a_group_that_is_asked_nothing_ends(tmp_path: Path) -> None:
    with group_of(tmp_path) as group:
        group.wait_ready()
        group.end()
        assert group.peak_bytes > 0

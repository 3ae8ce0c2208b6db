"""A kept sequence goes on as if it never ended, bit for bit, and under nothing but what it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from k3tool.errors import ArtifactError, UsageError
from k3tool.isa.stream import Isa
from k3tool.runtime import budget
from k3tool.runtime.cache import open_source, program
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import RunResult, run_model
from k3tool.runtime.sampling import Sampler
from k3tool.runtime.state_file import check_state, read_state, write_state
from tests.runtime.test_engine import prompt_of

PROMPT, GEN = prompt_of(17, 1), 9
CASES = (("tiny_tp8", 1, "f32"), ("tiny_tp8", 2, "bf16"), ("tiny13", 1, "f32"))


class Case(NamedTuple):
    """A model in one mode, its run that never ended, and a state after four tokens of it."""

    options: RunOptions
    whole: RunResult
    state: Path


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(
    request: pytest.FixtureRequest, oracle: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:  # fmt: skip
    name, tp, numerics = request.param
    folder = tmp_path_factory.mktemp("states")
    options = RunOptions(
        oracle(name), PROMPT, GEN, tp=tp, threads=1, numerics=numerics, cache=folder,
        ignore_eos=True, logits=True, ctx=512,
    )  # fmt: skip
    state = folder / "state.h5"
    run_model(replace(options, gen=4, save_state=state))
    return Case(options, run_model(options), state)


def go_on(case: Case, ids: tuple[int, ...] = (), gen: int = GEN - 4, **given: Any) -> RunResult:
    """Run from the state; the layout, mode and degree are the state's own."""
    options = replace(
        case.options, ids=ids, gen=gen, tp=None, numerics=None, ctx=None, load_state=case.state
    )
    return run_model(replace(options, **given))


def steps(result: RunResult) -> np.ndarray:
    assert result.steps is not None
    return result.steps.view("<u4")


def test_going_on_equals_never_having_ended(case: Case) -> None:
    found = go_on(case)
    assert found.tokens == case.whole.tokens[4:]
    assert np.array_equal(steps(found), steps(case.whole)[4:])
    positions = found.records[0]["position"].tolist()
    assert positions == case.whole.records[0]["position"][4:].tolist()
    assert not np.array_equal(steps(found), steps(case.whole)[:5])  # the control


def test_the_decode_program_may_read_what_comes_behind_it(case: Case) -> None:
    found = go_on(case, (5, 6), 2, prefill="decode")
    assert found.tokens == go_on(case, (5, 6), 2).tokens


def test_ids_come_behind_what_it_holds(case: Case, tmp_path: Path) -> None:
    """And what is kept then goes on again: two stops, and tokens of somebody else in between."""
    second = tmp_path / "second.h5"
    part = go_on(case, (5, 6, 7), 2, save_state=second)
    assert read_state(second).ids == (*PROMPT, *case.whole.tokens[:4], 5, 6, 7, *part.tokens)
    last = go_on(case._replace(state=second), gen=3)
    ids = (*PROMPT, *case.whole.tokens[:4], 5, 6, 7)
    want = run_model(replace(case.options, ids=ids, gen=5))
    assert part.tokens + last.tokens == want.tokens
    assert np.array_equal(np.concatenate([steps(part), steps(last)]), steps(want))


def test_drawn_tokens_go_on_too(case: Case, tmp_path: Path) -> None:
    drawn = replace(case.options, sampler=Sampler(1.5, seed=4), logits=False)
    whole = run_model(drawn)
    state = tmp_path / "drawn.h5"
    first = run_model(replace(drawn, gen=3, save_state=state))
    found = go_on(case._replace(options=drawn, state=state), gen=GEN - 3)
    assert first.tokens + found.tokens == whole.tokens
    other = replace(drawn, sampler=Sampler(1.5, seed=5))  # the control: another seed
    assert go_on(case._replace(options=other, state=state), gen=GEN - 3).tokens != found.tokens


def test_equal_runs_keep_equal_files(case: Case, tmp_path: Path) -> None:
    again = tmp_path / "again.h5"
    run_model(replace(case.options, gen=4, save_state=again, threads=2, chunk=None))
    assert again.read_bytes() == case.state.read_bytes()


# -- what is refused -------------------------------------------------------------------------------


def program_of(case: Case) -> Isa:
    return program(open_source(case.options), case.options, lambda text: None).isa


def test_a_state_of_something_else_is_refused(case: Case) -> None:
    isa, saved = program_of(case), read_state(case.state)
    identity = open_source(case.options).identity
    check_state(saved, isa, identity)
    other_mode = {**isa.params["numerics"], "mode": "other"}
    other_eps = {**isa.params["eps"], "norm": 0.5}
    places = [n for n, tensor in enumerate(isa.tensors) if tensor.role == "state"]
    swapped = list(isa.tensors)
    swapped[places[0]], swapped[places[1]] = swapped[places[1]], swapped[places[0]]
    mode = f"(--tp {isa.tp}, --numerics {saved.params['numerics']['mode']})"
    wrong: list[tuple[Isa, str, str, str]] = [
        (isa, "0" * 64, "checkpoint", "the checkpoint that"),
        (replace(isa, tensors=tuple(swapped)), identity, "states", "--without"),
        (replace(isa, params={**isa.params, "tp": 4}), identity, "tp", mode),
        (replace(isa, params={**isa.params, "numerics": other_mode}), identity, "numerics", mode),
        (replace(isa, params={**isa.params, "eps": other_eps}), identity, "eps", "--eps"),
    ]
    for other, weights, what, hint in wrong:
        with pytest.raises(ArtifactError, match=rf"state\.h5: {what}: got") as caught:
            check_state(saved, other, weights)
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("given", [{"numerics": "f32"}, {"tp": 1}])
def test_a_run_under_another_program_is_refused(
    case: Case, given: dict[str, Any], tmp_path: Path
) -> None:
    if case.options.tp == 1:
        return  # one case of three is enough to see that a run asks
    with pytest.raises(ArtifactError, match=r"state\.h5: (numerics|tp): got"):
        go_on(case, cache=tmp_path, **given)
    assert list(tmp_path.glob("program-*"))
    assert not list(tmp_path.glob("shards-*")), "weights were copied for a run that is refused"


@pytest.mark.parametrize(
    "given",
    [
        {"memory_bytes": 153_500_000},
        {"ctx": 1024, "workgroups": 5, "chunk": 3, "batch": 2, "without": ("topk-glu-fuse",)},
    ],
    ids=["budget", "layout"],
)
def test_what_bits_do_not_depend_on_may_be_another(
    case: Case, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And back again: a state that was kept under a budget goes on without one."""
    monkeypatch.setattr(budget, "COMPILE_BYTES", 0)  # which is more than so small a model needs
    if case.options.source.name != "tiny_tp8" or case.options.tp != 1:
        return
    found = go_on(case, **given)
    assert found.tokens == case.whole.tokens[4:]
    assert np.array_equal(steps(found), steps(case.whole)[4:])
    kept = case.state.with_name("kept-under-another.h5")
    run_model(replace(case.options, gen=4, save_state=kept, **given))
    back = go_on(case._replace(state=kept))
    assert np.array_equal(steps(back), steps(case.whole)[4:])


def test_a_context_that_is_given_bounds_what_comes(case: Case) -> None:
    with pytest.raises(UsageError, match=r"got 21 \+ 500 = 521 positions, need at most 512"):
        go_on(case, gen=500, ctx=512)


def test_a_context_that_is_not_given_grows(case: Case) -> None:
    saved = read_state(case.state)
    given = replace(case.options, ids=(), ctx=None, tp=None, numerics=None)
    n_before = len(saved.ids)
    assert saved.go_on(replace(given, gen=512 - n_before)).ctx == 512
    assert saved.go_on(replace(given, gen=512 - n_before + 1)).ctx is None
    assert saved.go_on(replace(given, ids=(1,), gen=512 - n_before)).ctx is None


def test_a_damaged_or_cut_one_is_refused(case: Case, tmp_path: Path) -> None:
    data = case.state.read_bytes()
    for name, changed in {
        "cut": data[: len(data) // 2],
        "empty": b"",
        "flipped": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    }.items():
        path = tmp_path / f"{name}.h5"
        path.write_bytes(changed)
        with pytest.raises(ArtifactError):
            go_on(case._replace(state=path))
    with pytest.raises(ArtifactError, match="no such file"):
        go_on(case._replace(state=tmp_path / "absent.h5"))


def test_bytes_of_another_size_are_refused(case: Case, tmp_path: Path) -> None:
    """Whole and well-formed, and still not what the program's slot holds."""
    saved = read_state(case.state)
    path = tmp_path / "short.h5"

    short = replace(saved.slot, ranks=tuple(data[:-4] for data in saved.slot.ranks))
    write_state(path, saved.ids, short, 4, program_of(case), saved.inputs)
    with pytest.raises(ArtifactError, match=r"short\.h5: rank-00: got \d+ bytes, need \d+"):
        go_on(case._replace(state=path))


def test_the_command_keeps_and_goes_on(
    case: Case, k3tool: Callable[..., Any], tmp_path: Path
) -> None:
    state = tmp_path / "kept.h5"
    common = ("run", case.options.source, "--cache", case.options.cache, "--ignore-eos")
    mode = ("--tp", case.options.tp, "--numerics", case.options.numerics, "--ctx", 512)
    first = k3tool(
        *common, *mode, "--ids", ",".join(map(str, PROMPT)), "--gen", 4, "--save-state", state
    )
    assert first.code == 0, first.err
    second = k3tool(
        *common, "--load-state", state, "--gen", 3, "--save-state", state, "--show", "ids"
    )
    third = k3tool(*common, "--load-state", state, "--gen", 2, "--show", "ids")
    assert third.code == 0, third.err
    ids = " ".join(done.out.strip() for done in (first, second, third))
    assert ids == " ".join(map(str, case.whole.tokens))
    note = tmp_path / "note.txt"
    note.write_text("mine")
    refused = k3tool(*common, "--load-state", state, "--gen", 2, "--save-state", note)
    assert refused.code != 0
    assert note.read_text() == "mine"

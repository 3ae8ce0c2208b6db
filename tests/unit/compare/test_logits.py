"""Logits against a reference: what is right passes, each kind of wrong row fails and is named."""

import json
import math
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from k3tool.compare import spill
from k3tool.compare.logits import LogitsComparison, Tolerances, compare_logits, divergence
from k3tool.compare.logits_files import read_logits
from k3tool.errors import ArtifactError
from k3tool.verdict import is_sound

Arrays = dict[str, np.ndarray]
Gold = Callable[[str], Arrays]
N_STEPS = 6


@pytest.fixture
def reference(gold: Gold) -> Arrays:
    """Return the released code's logits on tiny13: float64, prompt of 7, 6 steps."""
    arrays = gold("tiny13")
    return {"prefill": arrays["p7.prefill"], "steps": arrays["p7.steps"][:N_STEPS]}


def npz(path: Path, arrays: Arrays, dtype: str | None = None) -> Path:
    path = path.with_suffix(".npz")
    np.savez(path, **{key: each if dtype is None else each.astype(dtype)
                      for key, each in arrays.items()})  # fmt: skip
    return path


def against(run: Path, reference: Path, name: str | None = None, **tolerances: Any) -> Any:
    return compare_logits(read_logits(run), read_logits(reference, name), Tolerances(**tolerances))


def wrong(found: LogitsComparison) -> dict[str, str]:
    return {check.name: check.detail for check in found.checks if check.status == "FAIL"}


def not_run(found: LogitsComparison) -> dict[str, str]:
    return {check.name: check.detail for check in found.checks if check.status == "NOT RUN"}


# -- the forms of files --------------------------------------------------------------------------


def rows_of(arrays: Arrays) -> np.ndarray:
    return np.concatenate([arrays["prefill"], arrays["steps"][1:]])


def as_lines(path: Path, arrays: Arrays, order: Iterable[int] | None = None) -> Path:
    rows = rows_of(arrays)
    path.write_text("".join(
        json.dumps({"position": int(n), "logits": rows[n].tolist()}) + "\n"
        for n in (range(len(rows)) if order is None else order)
    ))  # fmt: skip
    return path


def as_safetensors(path: Path, arrays: Arrays) -> Path:
    path.write_bytes(b"")
    parts, header, offset = [], {}, 0
    codes = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64"}
    for name, each in arrays.items():
        data = np.ascontiguousarray(each).tobytes()
        header[name] = {"dtype": codes[each.dtype.name], "shape": list(each.shape),
                        "data_offsets": [offset, offset + len(data)]}  # fmt: skip
        parts.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    return path


FORMS: dict[str, Callable[[Path, Arrays], Path]] = {
    "npz": npz,
    "a set of several": lambda path, a: npz(
        path, {f"{name}.{key}": each for name in ("p1", "p7") for key, each in a.items()}
    ),
    "logits from 0": lambda path, a: npz(path, {"logits": rows_of(a)}),
    "a batch of one": lambda path, a: npz(path, {"logits": rows_of(a)[None]}),
    "logits by position": lambda path, a: npz(
        path, {"logits": rows_of(a)[::-1], "positions": np.arange(len(rows_of(a)))[::-1]}
    ),
    "safetensors": as_safetensors,
    "lines": as_lines,
    "lines in another order": lambda path, a: as_lines(path, a, range(len(rows_of(a)))[::-1]),
}


def compressed(path: Path, arrays: Arrays) -> Path:
    np.savez_compressed(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


FORMS["compressed"] = compressed


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_of_the_reference_passes_and_compares_every_row(
    tmp_path: Path, reference: Arrays, form: str
) -> None:
    run = npz(tmp_path / "run", reference, "f4")
    found = against(run, FORMS[form](tmp_path / "ref", reference),
                    "p7" if form == "a set of several" else None)  # fmt: skip
    assert wrong(found) == not_run(found) == {}
    assert is_sound(found.checks, strict=True)
    assert len(found.positions) == 7 + N_STEPS
    assert 0 < found.positions["max_abs"].max() < 1e-6
    assert found.deviation == pytest.approx(rows_of(reference).std(), rel=0.05)


def test_rows_of_bf16_and_of_binary16_are_read_as_what_they_are(
    tmp_path: Path, reference: Arrays
) -> None:
    run = npz(tmp_path / "run", reference, "f4")
    bits = {key: (each.astype("f4").view("u4") >> 16).astype("u2")
            for key, each in reference.items()}  # fmt: skip
    half = {key: each.astype("f2") for key, each in reference.items()}
    for name, arrays in (("bf16", bits), ("half", half)):
        found = against(run, as_safetensors(tmp_path / name, arrays), max_abs=0.1, rms=0.1, kl=0.1)
        assert wrong(found) == {}
        assert found.positions["max_abs"].max() > 1e-3  # rounded, so no longer equal
        assert wrong(against(run, tmp_path / name))  # and the defaults see it


# -- mutants: each is wrong in one way ---------------------------------------------------------


def _change(key: str, change: Callable[[np.ndarray], Any]) -> Callable[[Arrays], Arrays]:
    def mutate(arrays: Arrays) -> Arrays:
        copy = {name: each.copy() for name, each in arrays.items()}
        result = change(copy[key])
        if result is not None:
            copy[key] = result
        return copy

    return mutate


def _put(index: tuple[int, int], value: float, *, add: bool = False) -> Callable[..., None]:
    def change(rows: np.ndarray) -> None:
        rows[index] = rows[index] + value if add else value

    return change


def _reverse(rows: np.ndarray) -> None:
    rows[3] = rows[3][::-1].copy()


MUTANTS = {
    "a flipped row": (_change("prefill", _reverse), "(position 3, id "),
    "rows one position later": (_change("prefill", lambda rows: np.roll(rows, 1, 0)), "position"),
    "steps one later": (_change("steps", lambda rows: np.roll(rows, 1, 0)), "step"),
    "a permuted vocabulary": (
        _change("prefill", lambda rows: np.roll(rows, 1, 1)), "(position ",
    ),
    "two ids swapped in one step": (
        _change("steps", lambda rows: rows.__setitem__((2, [5, 6]), rows[2, [6, 5]])),
        "(position 8, step 2, id 5)",
    ),
    "one logit": (_change("steps", _put((4, 77), 3e-4, add=True)), "(position 10, step 4, id 77)"),
    "a constant": (_change("prefill", lambda rows: rows + 1e-3), "(position "),
    "a scale": (_change("prefill", lambda rows: rows * (1 + 1e-3)), "(position "),
}  # fmt: skip


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
@pytest.mark.parametrize("is_run", [True, False])
def test_a_mutant_fails_and_is_shown_where_it_is(
    tmp_path: Path, reference: Arrays, mutant: str, is_run: bool
) -> None:
    change, said = MUTANTS[mutant]
    other = npz(tmp_path / "mutant", change(reference))
    right = npz(tmp_path / "right", reference, "f4")
    found = against(other, right) if is_run else against(right, other)
    assert not is_sound(found.checks, strict=False)
    assert said in wrong(found)["largest |difference|"]
    assert float(wrong(found)["largest |difference|"].split("=")[1].split("x")[0]) > 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["run", "reference", "both"])
def test_one_value_that_is_not_finite_fails_on_either_side(
    tmp_path: Path, reference: Arrays, value: float, side: str
) -> None:
    bad = npz(tmp_path / "bad", _change("steps", _put((3, 9), value))(reference))
    right = npz(tmp_path / "right", reference)
    pair = {"run": (bad, right), "reference": (right, bad), "both": (bad, bad)}[side]
    found = against(*pair, max_abs=1e9, rms=1e9, kl=1e9, flips=99)
    who = "run" if side == "both" else side
    assert f"{who} has {value} at (position 9, step 3, id 9)" in wrong(found)["every logit finite"]
    assert not is_sound(found.checks, strict=False)


def test_logits_beyond_all_sense_are_compared_and_fail(tmp_path: Path, reference: Arrays) -> None:
    right = npz(tmp_path / "right", reference)
    huge = npz(tmp_path / "huge", _change("steps", _put((3, 9), 1.5e308))(reference))
    for pair in ((right, huge), (huge, right)):
        found = against(*pair, flips=99)
        assert set(wrong(found)) == {"largest |difference|", "rms / deviation",
                                     "KL(reference || run)"}  # fmt: skip
    opposite = npz(tmp_path / "opposite", _change("steps", _put((3, 9), -1.5e308))(reference))
    assert len(wrong(against(huge, opposite, flips=99))) == 3


def test_the_logits_of_another_model_fail(tmp_path: Path, gold: Gold) -> None:
    a, b = ({key: gold(name)[f"p7.{key}"] for key in ("prefill", "steps")}
            for name in ("tiny13", "tiny13_eps"))  # fmt: skip
    assert wrong(against(npz(tmp_path / "a", a), npz(tmp_path / "b", b)))


# -- choices ---------------------------------------------------------------------------------------


def test_a_first_flip_has_margins_and_ends_what_can_be_compared(
    tmp_path: Path, reference: Arrays
) -> None:
    row = reference["steps"][2]
    first, second = np.argsort(-row)[:2]
    run = _change("steps", _put((2, second), row[first] + 1e-4))(reference)
    found = against(npz(tmp_path / "a", run), npz(tmp_path / "b", reference))
    text = wrong(found)["same choices"]
    assert f"9 of 10; first flip at position 8, step 2: run has id {second} (margin 0.0001)" in text
    assert f"reference {first} (margin {row[first] - row[second]:.3g}): real" in text
    assert "steps 3-5" in not_run(found)
    assert "other ids were fed" in not_run(found)["steps 3-5"]
    # The same rows under the reference's name for rows of given ids go on behind the flip.
    given_ids = npz(tmp_path / "c", {"logits": rows_of(reference)})
    found = against(npz(tmp_path / "a", run), given_ids)
    assert not_run(found) == {}
    assert "12 of 13" in wrong(found)["same choices"]


def test_a_flip_within_the_tolerance_is_a_near_tie_and_fails_unless_allowed(
    tmp_path: Path, reference: Arrays
) -> None:
    row = reference["prefill"][4]
    first, second = np.argsort(-row)[:2]
    near = _change("prefill", _put((4, second), row[first] - 1e-4))(reference)
    over = _change("prefill", _put((4, second), row[first] + 5e-5))(reference)
    paths = npz(tmp_path / "a", over), npz(tmp_path / "b", near)
    found = against(*paths)
    assert set(wrong(found)) == {"same choices"}
    assert "near tie" in wrong(found)["same choices"]
    assert wrong(against(*paths, flips=1)) == {}


# -- what is absent --------------------------------------------------------------------------------


def test_absent_positions_are_not_run_on_either_side(tmp_path: Path, reference: Arrays) -> None:
    whole = npz(tmp_path / "whole", reference)
    fewer = npz(tmp_path / "fewer", {**reference, "steps": reference["steps"][:4]})
    for pair in ((whole, fewer), (fewer, whole)):
        found = against(*pair)
        assert not_run(found) == {"steps, positions 10-11": f"not in {fewer}"}
        assert is_sound(found.checks, strict=False)
        assert not is_sound(found.checks, strict=True)
    some = npz(
        tmp_path / "some", {"logits": rows_of(reference)[[2, 9]], "positions": np.array([2, 9])}
    )
    found = against(whole, some)
    assert sorted(not_run(found)) == ["prefill, positions 0-1,3-6", "steps, positions 6-8,10-11"]
    assert found.positions["position"].tolist() == [2, 9]
    beyond = npz(
        tmp_path / "beyond", {"logits": rows_of(reference)[:1], "positions": np.array([99])}
    )
    found = against(whole, beyond)
    assert wrong(found) == {"positions compared": "none: nothing to compare"}
    assert "logits, positions 99" in not_run(found)
    steps = npz(tmp_path / "steps", {"steps": reference["steps"]})
    found = against(whole, steps)
    assert list(not_run(found)) == ["prefill, positions 0-6"]
    assert len(found.positions) == N_STEPS
    empty = npz(tmp_path / "empty", {key: each[:0] for key, each in reference.items()})
    assert wrong(against(empty, empty))


def test_other_vocabularies_and_prompts_are_refused(tmp_path: Path, reference: Arrays) -> None:
    run = npz(tmp_path / "run", reference)
    for name, arrays, said in (
        ("v", {key: each[:, :511] for key, each in reference.items()}, "got 511, need 512, as"),
        ("t", {**reference, "prefill": reference["prefill"][:6]}, "got 6 positions, need 7, as"),
    ):
        with pytest.raises(ArtifactError, match=said):
            against(run, npz(tmp_path / name, arrays))


# -- files that are none -----------------------------------------------------------------------


def _member(path: Path, name: str, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"other": np.zeros((2, 4))}, "arrays: got other, need prefill, steps or logits"),
        ({f"w{nth}": np.zeros(1) for nth in range(9)}, "arrays: got w0, w1, w2, w3 and 5 more, "),
        ({"logits": np.zeros((2, 4), "i4")}, "logits: got int32, need floats"),
        ({"logits": np.zeros(4)}, "logits: got 4, need positions x vocabulary"),
        ({"logits": np.zeros((2, 3, 4))}, "logits: got 2x3x4, need positions x vocabulary"),
        ({"logits": np.zeros((4, 1))}, "vocabulary: got 1, need one vocabulary"),
        ({"prefill": np.zeros((2, 4)), "steps": np.zeros((2, 5))}, "vocabulary: got 4, 5,"),
        ({"logits": np.asfortranarray(np.zeros((2, 4)))}, "by columns, need numbers by rows"),
        ({"logits": np.array([[None]])}, "logits: got object"),
        ({"logits": np.zeros((2, 4)), "positions": np.array([1])}, "need 2 integers, one a row"),
        ({"logits": np.zeros((2, 4)), "positions": np.array([1, 1])}, "each position once"),
        ({"logits": np.zeros((2, 4)), "positions": np.array([-1, 1])}, "each position once"),
        ({"a.prefill": np.zeros((2, 4)), "b.prefill": np.zeros((2, 4))}, "got a, b, need one of"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_logits_are_refused(tmp_path: Path, arrays: Arrays, said: str) -> None:
    with pytest.raises(ArtifactError) as refusal:
        read_logits(npz(tmp_path / "a", arrays))
    assert said in refusal.value.text()


def test_damaged_files_are_refused(tmp_path: Path, reference: Arrays) -> None:
    good = npz(tmp_path / "good", reference).read_bytes()
    flipped = bytearray(good)
    flipped[good.index(b"prefill.npy") + 200] ^= 1
    packed = compressed(tmp_path / "packed", reference).read_bytes()
    broken = bytearray(packed)
    broken[packed.index(b"prefill.npy") + 300] ^= 0xFF
    for n, data in enumerate((b"", b"text", good[:-30], bytes(flipped), bytes(broken), good[:500])):
        path = tmp_path / f"{n}"
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match=str(path)):
            read_logits(path)
    with pytest.raises(ArtifactError, match="prefill: got damaged"):
        read_logits(_member(tmp_path / "m", "prefill.npy", b"\x93NUMPY\x01\x00garbage"))
    twice = _member(tmp_path / "twice", "prefill.npy", b"")
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("prefill.npy", b"")
    with pytest.raises(ArtifactError, match=r"got prefill.npy twice, need each array once"):
        read_logits(twice)
    with pytest.raises(ArtifactError, match="sets: got p1, need a set of p7"):
        read_logits(npz(tmp_path / "s", {"p1.prefill": reference["prefill"]}), "p7")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"position": 0, "logits": [1, 2]}\n{"position": 0, "logits": [1, 2]}', "position once"),
        ('{"position": 0, "logits": [1, 2]}\n{"position": 1, "logits": [1]}', "2: logits: got 1"),
        ('{"position": 0, "logits": [1, "2"]}', "line 1: logits: got a JSON list, need a list of"),
        ('{"position": 0, "logits": [1, true]}', "line 1: logits"),
        ('{"position": "0", "logits": [1, 2]}', 'line 1: got position "0", need an integer from 0'),
        ('{"position": 0}', "line 1: got keys position, need an object with position and logits"),
        ('{"position": 0, "logits": [1, 2]}\n[1, 2]', "line 2: got a JSON list"),
        ('{"position": 0, "logits": [1, 2]', "line 1: got "),
    ],
)  # fmt: skip
def test_lines_that_are_no_logits_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a"
    path.write_text(text)
    with pytest.raises(ArtifactError) as refusal:
        read_logits(path)
    assert said in refusal.value.text()


def test_rows_are_mapped_in_every_form(
    tmp_path: Path, reference: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "BLOCK_BYTES", 4096)
    for form, write in FORMS.items():
        path = write(tmp_path / form.replace(" ", "-"), reference)
        for section in read_logits(path, "p7" if "several" in form else None).sections.values():
            assert isinstance(section.rows, np.memmap), form


# -- the numbers -----------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-9, 1e-6, 1e-3, 0.3, 5.0, 50.0, 900.0]))
def test_divergence_is_that_of_high_precision(seed: int, size: float) -> None:
    import mpmath

    random = np.random.default_rng(seed)
    reference = random.normal(0, 3, 16)
    run = reference + random.normal(0, size, 16)
    with mpmath.workdps(60):

        def log_softmax(row: np.ndarray) -> list[Any]:
            whole = mpmath.log(mpmath.fsum(mpmath.exp(mpmath.mpf(float(x))) for x in row))
            return [mpmath.mpf(float(x)) - whole for x in row]

        p, q = log_softmax(reference), log_softmax(run)
        exact = float(mpmath.fsum(mpmath.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
    assert divergence(run, reference) == pytest.approx(exact, rel=1e-6, abs=1e-22)


def test_the_default_bound_of_kl_follows_from_the_largest_difference() -> None:
    random = np.random.default_rng(5)
    worst = 0.0
    for _ in range(200):
        reference = random.normal(0, 3, 64)
        run = reference + random.choice([-1, 1], 64) * Tolerances().max_abs
        worst = max(worst, divergence(run, reference))
    assert Tolerances().kl / 10 < worst <= Tolerances().kl

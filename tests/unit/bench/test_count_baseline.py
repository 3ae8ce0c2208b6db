"""Earlier counts: what differs is named, what is of something else is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.bench.count_baseline import compare_counts, count_lines, counts_of, read_counts
from k3tool.errors import ArtifactError
from k3tool.isa.emit import emit
from k3tool.isa.stream import save_isa
from tests.isa import plans

NOW: dict[str, Any] = {"bench": "chain", "settings": {"phase": None, "bandwidth": None}}


def counted(**changes: Any) -> dict[str, Any]:
    ops = [{"op": "ADD", "packets": 3}, {"op": "MUL", "packets": 4}]
    found = {"packets": 8, "is_so": True, "name": "x", "floor": {"a": 1.5}, "ops": ops}
    return NOW | found | changes


def test_numbers_are_named_by_what_they_are_of() -> None:
    assert dict(counts_of(counted())) == {
        "packets": 8, "floor.a": 1.5, "ops[ADD].packets": 3, "ops[MUL].packets": 4,
    }  # fmt: skip


def test_what_differs_is_named_and_nothing_else() -> None:
    assert compare_counts(counted(), counted()) == []
    assert count_lines([]) == ["against the baseline: all counts as before"]
    ops = [{"op": "MUL", "packets": 4}, {"op": "NEG", "packets": 1}]  # in another order
    changes = compare_counts(counted(), counted(packets=6, ops=ops, floor={"a": 0}))
    assert [(c.name, c.before, c.now, c.ratio) for c in changes] == [
        ("packets", 8, 6, 0.75), ("floor.a", 1.5, 0, 0.0),
        ("ops[NEG].packets", None, 1, None), ("ops[ADD].packets", 3, None, None),
    ]  # fmt: skip
    (tiny,) = compare_counts(counted(packets=1e-308), counted(packets=8e300))
    assert tiny.ratio is None, "beyond all numbers"
    text = "\n".join(count_lines([*changes, tiny]))
    assert "0.750" in text
    assert "nan" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"), ("[" * 100_000, "no JSON"), ("[]", "no counts"), ("{}", "no counts"),
        (json.dumps(NOW | {"name": "x"}), "no counts"),
        (json.dumps(counted(bench="cache")), 'bench: got "cache", need "chain"'),
        (json.dumps(counted(settings={"phase": "prefill"})), "settings.phase"),
        (json.dumps({"packets": 3}), "bench: got null"),
    ],
)  # fmt: skip
def test_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "before.json"
    path.write_text(text)
    with pytest.raises(ArtifactError) as caught:
        read_counts(path, NOW)
    assert message in str(caught.value)
    path.write_text(json.dumps(counted(packets=10**400)))  # a number nobody divides by
    assert "packets" not in dict(counts_of(read_counts(path, NOW)))


def test_commands_compare(k3tool: Callable, tmp_path: Path) -> None:
    isa, before = tmp_path / "isa.h5", tmp_path / "before.json"
    save_isa(emit(plans.plan(), "cpu"), isa)
    asked = ("bench", "simulate", isa, "--seeds", 1)
    first = k3tool(*asked, "--json")
    said = json.loads(first.out)
    assert (said["bench"], said["settings"]["seeds"]) == ("simulate", 1)
    before.write_text(first.out)
    same = k3tool(*asked, "--baseline", before)
    assert (same.code, "all counts as before" in same.out) == (0, True)
    said["executed"][0]["entries"] += 1
    before.write_text(json.dumps(said))
    (change,) = json.loads(k3tool(*asked, "--baseline", before, "--json").out)["against"]
    assert change["name"] == "executed[0].entries"
    assert change["now"] == change["before"] - 1
    other = k3tool("bench", "simulate", isa, "--seeds", 2, "--baseline", before)
    assert (other.code, "settings.seeds: got 1, need 2" in other.err) == (3, True)
    foreign = k3tool("bench", "chain", tmp_path / "absent.h5", "--baseline", before)
    assert (foreign.code, "before.json: bench" in foreign.err) == (3, True), "looked at first"

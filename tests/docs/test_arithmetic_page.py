"""docs/arithmetic.md's constants are the sources', its bounds the tests'."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "arithmetic.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| (\d+) \| `(\w+)`, `([\w./]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("value", "name", "file"), ROWS, ids=[row[1] for row in ROWS])
def test_constants_are_the_sources(value: str, name: str, file: str) -> None:
    found = re.findall(rf"\b{name}\b[\s=]+(\d+)", (REPO / file).read_text())
    assert found[:1] == [value]


def test_there_are_constants_and_files() -> None:
    assert len(ROWS) >= 6
    named = re.findall(r"`((?:k3tool|kernels_\w+|tests|proofs)/[\w./]*)`", PAGE)
    assert len(named) >= 8
    assert [name for name in named if not (REPO / name).exists()] == []


def test_bounds_are_those_of_the_gate() -> None:
    assert "2e-4 at worst, 1e-5 of their deviation" in PAGE
    gate = (REPO / "tests" / "oracle" / "gate.py").read_text()
    assert re.search(r"\b2e-4\b", gate)
    assert re.search(r"\b1e-5\b", gate)

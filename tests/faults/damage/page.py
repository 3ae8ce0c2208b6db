"""docs/damage.md, written from what the suite found; the suite fails where the page is stale."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.damage.case import Case
from tests.faults.damage.harness import Verdict

PAGE = Path(__file__).resolve().parents[3] / "docs" / "damage.md"


def render(groups: Mapping[str, Sequence[Case]], verdicts: Mapping[str, Verdict]) -> str:
    """Return the page."""
    return "\n".join(str(len(cases)) for cases in groups.values())


def check(text: str, update: bool) -> None:
    """Compare the page with the file, or write it."""
    if update:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    assert PAGE.is_file(), f"no {PAGE.name}: pytest --update-golden writes it"
    assert PAGE.read_text() == text, f"{PAGE.name} is stale: pytest --update-golden, then review"

"""docs/damage.md shows what the tests beside this one found; it runs after them, by its name."""

import pytest

from tests.faults.damage import page
from tests.faults.damage.groups import CASES, GROUPS
from tests.faults.damage.record import DAMAGE, RESOURCES, UNREADABLE, VALUES

N_VALUES, N_ANSWERS = 22, 18


def test_the_page_shows_what_the_suite_found(request: pytest.FixtureRequest) -> None:
    if (
        set(DAMAGE.verdicts) != set(CASES)
        or set(RESOURCES.verdicts) != set(UNREADABLE)
        or len(VALUES.verdicts) != N_VALUES
        or len(RESOURCES.answers) != N_ANSWERS
    ):
        pytest.skip("NOT RUN: only a part of the damage suite ran, or some of it failed")
    text = page.render(GROUPS, DAMAGE.verdicts, VALUES.verdicts, RESOURCES)
    page.check(text, request.config.getoption("--update-golden"))


def test_a_page_with_another_answer_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.PAGE.read_text()
    page.check(text, False)
    with pytest.raises(AssertionError, match="stale"):
        page.check(text.replace("| 3 |", "| 0 |", 1), False)

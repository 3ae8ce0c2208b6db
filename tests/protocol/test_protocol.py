"""The gate protocol at small sizes, every interleaving, and every mistake that must be found."""

import pytest

from tests.protocol.explorer import Op, System, explore
from tests.protocol.programs import CASES

MISTAKES = [(build, mistake) for build, mistakes in CASES.items() for mistake in mistakes]


def name_of(value: object) -> str:
    return value.replace(" ", "-") if isinstance(value, str) else value.__name__


@pytest.mark.parametrize("build", CASES, ids=name_of)
def test_the_protocol_holds_in_every_interleaving(build):
    found = explore(build())
    assert found.fault == ""
    assert found.states > 50  # it went somewhere


@pytest.mark.parametrize(("build", "mistake"), MISTAKES, ids=name_of)
def test_control_a_mistake_is_found(build, mistake):
    assert build(mistake) != build(), "the mistake changes nothing"
    assert explore(build(mistake)).fault != ""


# ---- the explorer itself ----


def two(first, second, **given):
    return System((tuple(first), tuple(second)), (0, 1), (0, 0), (0,), 1, **given)


def test_a_store_is_seen_late_and_out_of_order():
    """Without a fence a counter may be seen before the store that the program writes first."""
    writer = [Op("store", 0, 1), Op("add", 0, 1)]
    reader = [Op("wait", 0, 1), Op("invalidate", "device"), Op("load", 0), Op("expect", 1)]
    assert "read 0, need 1" in explore(two(writer, reader)).fault
    back, wait = Op("write_back", "device"), Op("drain")
    fenced = [Op("store", 0, 1), Op("retire"), back, wait, Op("add", 0, 1)]
    assert explore(two(fenced, reader)).fault == ""
    fenced.remove(wait)  # what a compiler did
    assert "read 0, need 1" in explore(two(fenced, reader)).fault


def test_a_deadlock_names_who_waits():
    fault = explore(two([Op("wait", 0, 1)], [])).fault
    assert fault.startswith("deadlock: block 0 at Op(kind='wait'")


def test_an_audit_names_the_counter():
    fault = explore(two([Op("add", 0, 2)], [], final={0: 1})).fault
    assert fault == "audit: counter 0 ended at 2, need 1"


def test_too_many_states_are_an_error_and_no_pass():
    with pytest.raises(RuntimeError, match="more than 2 states"):
        explore(two([Op("add", 0, 1)] * 4, [Op("add", 0, 1)] * 4), most=2)

"""The frame of benchmarks: what is divided by what, what a limit says, whose memory is counted."""

import os
import sys
from pathlib import Path

import pytest

from k3tool.bench.frame import BenchReport, Limit, interleave, run_child, spread


def test_sides_take_turns_and_each_run_is_divided_by_its_neighbour() -> None:
    order: list[str] = []
    slow = iter([9.0, 1.0, 2.0, 4.0])  # the machine becomes slower; the first run is the warm-up
    fast = iter([5.0, 3.0, 6.0, 12.0])

    def first() -> float:
        order.append("a")
        return next(slow)

    def second() -> float:
        order.append("b")
        return next(fast)

    paired = interleave(first, second, repeats=3)
    assert "".join(order) == "abbaabba"
    assert paired.first == [1.0, 2.0, 4.0]
    assert paired.ratio == (3.0, 3.0, 3.0, 3)


def test_spread_and_limits() -> None:
    assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, 3)
    held, missed = Limit("ratio", 3.9, at_most=4.0), Limit("share", 0.79, at_least=0.8)
    assert (held.is_held, missed.is_held) == (True, False)
    assert held.text() == "held: ratio 3.9, at most 4"
    assert missed.text() == "MISSED: share 0.79, at least 0.8"
    report = BenchReport("x", ["what is measured"], [("time", spread([1.0]), "s")], [missed])
    assert report.lines()[:2] == ["bench x", "what is measured"]
    assert report.lines()[-1] == missed.text()
    assert report.as_dict()["limits"] == [
        {"name": "share", "value": 0.79, "held": False, "at_most": None, "at_least": 0.8}
    ]


def test_a_program_finds_a_row_by_its_name() -> None:
    """Two rows of one name, or one that is set in by blanks, would be read as another."""
    one = ("time", spread([1.0]), "s")
    BenchReport("x", [], [one, ("rate", spread([1.0]), "GB/s")])
    for rows in ([one, ("time", spread([1.0]), "ms")], [("  time", spread([1.0]), "s")]):
        with pytest.raises(AssertionError):
            BenchReport("x", [], rows)


@pytest.mark.parametrize(("code", "megabytes"), [(0, 1), (3, 200)])
def test_a_childs_memory_is_its_own(tmp_path: Path, code: int, megabytes: int) -> None:
    """The largest child so far, which RUSAGE_CHILDREN gives, would hide the small one."""
    program = f"import sys; x = bytearray({megabytes} << 20); print(len(x)); sys.exit({code})"
    with (tmp_path / "out").open("w+b") as file:
        run_child([sys.executable, "-c", "x = bytearray(300 << 20)"], file.fileno())
        child = run_child([sys.executable, "-c", program], file.fileno())
        assert os.fstat(file.fileno()).st_size > 0
    assert child.exit_code == code
    assert megabytes << 20 < child.peak_bytes < (megabytes + 60) << 20
    assert child.seconds > 0

"""Earlier measurements: compared with what is the same, refused where it is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.bench import baseline
from k3tool.bench.baseline import change_lines, compare, machine, read_baseline
from k3tool.bench.frame import BenchReport, spread
from k3tool.errors import ArtifactError
from stages.bench import handoff

NOW: dict[str, Any] = {
    "bench": "gemv", "machine": {"cpu": "x", "cpus": 2}, "settings": {"threads": None, "m": [1]},
}  # fmt: skip


def row(name: str, median: float, least: float, most: float) -> dict[str, Any]:
    return {"name": name, "unit": "s", "median": median, "least": least, "most": most, "n": 3}


def write(path: Path, **changes: Any) -> Path:
    said = NOW | {"measured": [row("time", 2.0, 1.9, 2.1)]} | changes
    path.write_text(json.dumps(said))
    return path


def test_values_stand_beside_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json")
    before = read_baseline(path, NOW)
    (apart,) = compare(path, before, [row("time", 1.0, 0.9, 1.1)])
    assert (apart.before, apart.now, apart.ratio, apart.is_apart) == (2.0, 1.0, 0.5, True)
    (overlap,) = compare(path, before, [row("time", 2.1, 2.05, 2.2)])
    assert not overlap.is_apart
    with pytest.raises(ArtifactError, match="other names or units"):
        compare(path, before, [row("time", 1.0, 0.9, 1.1) | {"unit": "ms"}])
    one_only = compare(path, before, [row("time", 2.0, 1.9, 2.1), row("share", 0.5, 0.4, 0.6)])
    assert [(c.before, c.now, c.ratio) for c in one_only] == [(2.0, 2.0, 1.0), (None, 0.5, None)]
    path = write(tmp_path / "none.json", measured=[row("time", 0.0, 0.0, 0.0)])
    (nothing,) = compare(path, read_baseline(path, NOW), [row("time", 1.0, 0.9, 1.1)])
    assert nothing.ratio is None
    text = "\n".join(change_lines([apart, overlap, *one_only, nothing]))
    assert "nan" not in text
    assert "0.500  apart" in text
    assert "overlap" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bench": "decode"}, 'bench: got "decode", need "gemv"'),
        ({"machine": {"cpu": "y", "cpus": 2}}, 'machine.cpu: got "y", need "x"'),
        ({"settings": {"threads": 4, "m": [1]}}, "settings.threads: got 4, need null"),
        ({"settings": {"threads": None}}, "settings.m: got null"),
        ({"measured": []}, ""),
        ({"measured": "no"}, "no measured values"),
        ({"measured": [{"name": "time"}]}, "no measured values"),
        ({"measured": [row("time", float("nan"), 1.0, 2.0)]}, "no measured values"),
        ({"measured": [row("time", 10**400, 1.0, 2.0)]}, "no measured values"),
        ({"measured": [row("time", True, 1.0, 2.0)]}, "no measured values"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    path = write(tmp_path / "a.json", **changes)
    if not message:  # an empty list is read, and then has other values
        before = read_baseline(path, NOW)
        with pytest.raises(ArtifactError, match="0 values of other names"):
            compare(path, before, [row("time", 1.0, 0.9, 1.1)])
        return
    with pytest.raises(ArtifactError, match=message.replace(".", r"\.")):
        read_baseline(path, NOW)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "[" * 100_000])
def test_what_is_no_measurement_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match="need what bench gemv --json printed"):
        read_baseline(path, NOW)


def test_a_command_compares_and_looks_before_it_measures(
    k3tool: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any benchmark's command does: one whose measurement is made up stands for all."""
    seconds, ran = [2.0], []

    def measured(options: object) -> BenchReport:
        ran.append(options)
        return BenchReport("handoff", ["defined"], [("time", spread(seconds), "s")])

    monkeypatch.setattr(handoff, "run", measured)
    first = k3tool("bench", "handoff", "--packets", "10", "--json")
    assert json.loads(first.out)["machine"] == machine()
    path = tmp_path / "before.json"
    path.write_text(first.out)
    seconds[0] = 3.0
    arguments = ("bench", "handoff", "--packets", "10", "--repeats", "3", "--baseline", path)
    again = k3tool(*arguments)
    assert again.code == 0
    assert "1.500  apart" in again.out
    assert json.loads(k3tool(*arguments, "--json").out)["against"][0]["ratio"] == 1.5
    done = len(ran)
    other = k3tool("bench", "handoff", "--packets", "11", "--baseline", path)
    assert other.code == 3
    assert "settings.packets: got 10, need 11" in other.err
    monkeypatch.setattr(baseline, "cpu_model", lambda: "another")
    assert "machine.cpu" in k3tool(*arguments).err
    assert k3tool(*arguments[:-1], tmp_path / "none").code == 3
    assert len(ran) == done, "nothing is measured for a baseline that is refused"

"""Weights read into memory first: the same bits as mapped ones, from where the option says."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.errors import ArtifactError, TargetError, UsageError
from k3tool.memory import Room
from k3tool.progress import Progress
from k3tool.runtime import copying, ranks
from k3tool.runtime.build import build
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import Event, run_model
from tests.runtime.bits import bits

IDS = (5, 9, 2, 40, 7)


def options(source: Path, cache: Path, **changes: Any) -> RunOptions:
    asked = RunOptions(source, IDS, 4, cache=cache, ignore_eos=True, logits=True)
    return replace(asked, **changes)


@pytest.fixture
def tiny(oracle: Callable[[str], Path]) -> Path:
    return oracle("tiny_tp8")


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return the weight files that each run's ranks have mapped, once they are ready."""
    found: list[set[str]] = []
    wait_ready = ranks.RankGroup.wait_ready

    def look(group: ranks.RankGroup, progress: Progress) -> None:
        wait_ready(group, progress)
        names: set[str] = set()
        for pid in group.pids:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            names |= {Path(line.split()[-1]).name for line in lines if ".safetensors" in line}
        found.append(names)

    monkeypatch.setattr(ranks.RankGroup, "wait_ready", look)
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_copied_weights_give_the_bits_of_mapped_ones(
    tiny: Path, tmp_path: Path, maps: list[set[str]], tp: int
) -> None:
    asked = options(tiny, tmp_path, tp=tp, gen=60, deadline_seconds=30.0)
    events: list[Event] = []
    mapped = run_model(replace(asked, weights="mapped"), events.append)
    copied = run_model(replace(asked, weights="copied"), events.append)
    assert [e["copied"] for e in events if e["event"] == "start"] == [False, True]
    assert bits(copied) == bits(mapped)
    assert len(maps[1]) < len(maps[0])  # only the embedding's file is left


def test_pages_that_are_not_cached_are_read_too(
    writable: Callable[[str], Path], tmp_path: Path
) -> None:
    source = writable("tiny_tp8")
    want = bits(run_model(options(source, tmp_path, weights="mapped")))
    for path in source.glob("*.safetensors"):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert bits(run_model(options(source, tmp_path, weights="copied"))) == want


def test_a_read_error_names_the_file_and_its_bytes(tiny: Path, tmp_path: Path) -> None:
    control = build(tmp_path / "k3-cpu", defines=["K3_CONTROL_READ_ERROR=2"], only=["io"])
    asked = options(tiny, tmp_path, weights="copied", interpreter=control)
    with pytest.raises(ArtifactError, match=r"safetensors: bytes \d+ to \d+: Input/output error"):
        run_model(asked)


def test_auto_copies_a_long_run_where_there_is_room(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(**changes: Any) -> bool:
        events: list[Event] = []
        run_model(options(tiny, tmp_path, **changes), events.append)
        return bool(events[0]["copied"])

    monkeypatch.setattr(copying, "PAYS_FROM", 1)
    assert copied(gen=40)
    assert not copied(gen=40, weights="mapped")
    monkeypatch.setattr(copying, "PAYS_FROM", 1000)
    assert not copied(gen=40)
    monkeypatch.setattr(copying, "PAYS_FROM", 1)
    monkeypatch.setattr(copying, "rooms", lambda: iter([Room(1 << 20, "a limit")]))
    assert not copied(gen=40)


def test_a_copy_that_does_not_fit_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3tool.memory.rooms", lambda: iter([Room(4 << 20, "a limit")]))
    with pytest.raises(TargetError, match="a copy of the weights"):
        run_model(options(tiny, tmp_path, weights="copied"))


def test_a_budget_says_itself_where_weights_lie(tiny: Path, tmp_path: Path) -> None:
    asked = options(tiny, tmp_path, weights="copied", memory_bytes=2 * 10**9)
    with pytest.raises(UsageError, match="--weights: got copied, need auto under --memory"):
        run_model(asked)

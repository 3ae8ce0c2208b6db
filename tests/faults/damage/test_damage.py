"""The damage suite: every case is refused by inspect, shard and run in the same words, or works."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.damage.case import legal, refused
from tests.faults.damage.edit import load, poke, save, shard_name
from tests.faults.damage.groups import CASES, GROUPS
from tests.faults.damage.harness import Bench, Opened
from tests.faults.damage.record import DAMAGE

NOTHING = refused("control", "damage that is none", lambda folder: None, "absent")


@pytest.fixture(scope="session")
def opened() -> Opened:
    return Opened()


@pytest.fixture(scope="session")
def healthy(
    oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> list[Any]:
    """Return the tokens of the oracle as it is: the control that all three commands take."""
    from tests.conftest import Outcome

    def k3tool(*arguments: object) -> Outcome:
        import io

        from stages.cli import run_command

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command([str(argument) for argument in arguments])
        return Outcome(code, out.getvalue(), err.getvalue())

    bench = Bench(k3tool, tmp_path_factory.mktemp("healthy"), cache)
    return bench.acceptance(oracle("tiny_tp8"), None)[1]


@pytest.fixture
def checkpoint(oracle: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy to damage, in a folder of its own."""
    return Path(shutil.copytree(oracle("tiny_tp8"), tmp_path / "place" / "ckpt"))


@pytest.mark.parametrize("name", CASES)
def test_damage(
    name: str, bench: Bench, checkpoint: Path, healthy: list[Any], opened: Opened
) -> None:
    case = CASES[name]
    opened.paths.clear()
    bench.k3tool = opened.during(bench.k3tool)
    DAMAGE.verdicts[name] = bench.check(case, checkpoint, healthy)
    if case.kind == "index leads outside":
        outside = [p for p in opened.paths if os.path.basename(p) == "outside.safetensors"]
        assert not outside, f"opened: {outside}"
        assert any(path.startswith(str(checkpoint)) for path in opened.paths), "nothing was heard"


def test_every_case_has_its_own_name() -> None:
    assert len(CASES) == sum(map(len, GROUPS.values()))


# -- the suite itself --------------------------------------------------------------------------


def test_damage_that_changes_nothing_fails_the_suite(
    bench: Bench, checkpoint: Path, healthy: list[Any]
) -> None:
    with pytest.raises(AssertionError, match="changed nothing"):
        bench.check(NOTHING, checkpoint, healthy)


def test_damage_that_nobody_sees_fails_the_suite(
    bench: Bench, checkpoint: Path, healthy: list[Any]
) -> None:
    harmless = NOTHING._replace(damage=lambda folder: (folder / "notes.txt").write_text("x"))
    with pytest.raises(AssertionError, match=r"left behind|\(0, 0, 0\)"):
        bench.check(harmless, checkpoint, healthy)


def test_damage_that_is_said_in_other_words_fails_the_suite(
    bench: Bench, checkpoint: Path, healthy: list[Any]
) -> None:
    other = refused("control", "x", lambda f: (f / shard_name(6)).unlink(), "no such words")
    with pytest.raises(AssertionError, match="does not say 'no such words'"):
        bench.check(other, checkpoint, healthy)


def test_a_legal_variation_with_other_values_fails_the_suite(
    bench: Bench, checkpoint: Path, healthy: list[Any]
) -> None:
    embed = "language_model.model.embed_tokens.weight"

    def damage(folder: Path) -> None:
        rows = load(folder / shard_name(9))[embed].data
        poke(folder, embed, 5 * 160, rows[2:4])  # the first value of the first prompt token

    with pytest.raises(AssertionError, match="another model's tokens"):
        bench.check(legal("control", "one value", damage), checkpoint, healthy)


def test_a_rewritten_file_is_the_same_to_the_last_byte(checkpoint: Path) -> None:
    """The editor itself damages nothing: a file loaded and saved holds the same tensors."""
    path = checkpoint / shard_name(3)
    before = load(path)
    save(path, before)
    assert load(path) == before

"""A weight file that changes under a run, mapped or read: no token of two models' weights."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import ArtifactError
from k3tool.runtime.build import build
from k3tool.runtime.options import RunOptions
from k3tool.runtime.prepare import prepare, running
from k3tool.runtime.run import Event, RunResult, run_model

SPOILT = 2  # the token at which the file changes
GEN = 60


@pytest.fixture(scope="module")
def sources(
    oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """A function from a degree to a folder of that many ranks; do not write into it."""
    made = {1: oracle("tiny_tp8")}

    def source(tp: int) -> Path:
        if tp not in made:
            made[tp] = tmp_path_factory.mktemp("shards") / "s"
            shard_checkpoint(made[1], tp, made[tp])
        return made[tp]

    return source


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def files(sources: Callable[[int], Path], tmp_path: Path) -> Callable[[int], Path]:
    """A function from a degree to a folder whose files a test may change."""

    def copy_of(tp: int) -> Path:
        shutil.copytree(sources(tp), tmp_path / "files")
        for path in (tmp_path / "files").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return tmp_path / "files"

    return copy_of


def largest(folder: Path) -> Path:
    return max(sorted(folder.rglob("*.safetensors")), key=lambda path: path.stat().st_size)


def cut(file: Path) -> None:
    os.truncate(file, 4096)


def cut_inside_a_page(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def longer(file: Path) -> None:
    with file.open("ab") as out:
        out.write(b"x")


def written(file: Path) -> None:
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start::2] = bytes(byte ^ 4 for byte in data[start::2])  # finite in every dtype
    with file.open("r+b") as out:
        out.write(data)


def written_and_its_time_set_back(file: Path) -> None:
    before = file.stat()
    written(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(bytes(file.stat().st_size))
    os.replace(other, file)


def removed(file: Path) -> None:
    file.unlink()


Change = Callable[[Path], None]


def run(
    source: Path, cache: Path, tp: int, change: Change | None = None, weights: str = "mapped",
    interpreter: Path | None = None,
) -> RunResult:  # fmt: skip
    asked = RunOptions(source, (5, 9, 2), GEN, tp=tp, cache=cache, ignore_eos=True)
    asked = replace(asked, weights=weights, interpreter=interpreter)

    def on_event(event: Event) -> None:
        if change is not None and event["event"] == "token" and event["step"] == SPOILT:
            change(largest(source))

    return run_model(asked, on_event)


STOPPED = (cut, cut_inside_a_page, longer, written, written_and_its_time_set_back)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("change", STOPPED)
def test_a_mapped_file_that_changes_is_named(
    files: Callable[[int], Path], cache: Path, change: Change, tp: int
) -> None:
    source = files(tp)
    name = largest(source).name
    with pytest.raises(ArtifactError, match=rf"{name}(: bytes \d+ to \d+)?: got ") as stop:
        run(source, cache, tp, change)
    got = "the file ends before" if "cut" in change.__name__ else "changed since the run began"
    assert stop.value.got == got
    assert "as they were" in str(stop.value.need)


@pytest.mark.parametrize("change", [replaced, removed])
def test_what_is_mapped_stays_when_another_takes_its_name(
    files: Callable[[int], Path], sources: Callable[[int], Path], cache: Path, change: Change
) -> None:
    want = run(sources(1), cache, 1).tokens
    assert run(files(1), cache, 1, change).tokens == want


def test_a_copy_of_the_weights_does_not_need_their_files(
    files: Callable[[int], Path], sources: Callable[[int], Path], cache: Path
) -> None:
    """But for the file of the embedding, which is a table of rows and stays mapped."""
    want = run(sources(1), cache, 1).tokens
    assert run(files(1), cache, 1, written, "copied").tokens == want


def test_without_the_look_other_tokens_come(
    files: Callable[[int], Path], sources: Callable[[int], Path], cache: Path, tmp_path: Path
) -> None:
    """The control: an interpreter that does not ask goes on, with half of another model."""
    trusting = build(tmp_path / "k3-cpu", defines=["K3_CONTROL_TRUSTING"], only=["io"])
    want = run(sources(1), cache, 1).tokens
    found = run(files(1), cache, 1, written, interpreter=trusting).tokens
    assert found != want
    assert found[: SPOILT + 1] == want[: SPOILT + 1]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("change", "got"),
    [(replaced, "another file than when"), (written, "a file that was written to since")],
)
def test_a_file_that_changes_before_ranks_open_it(
    files: Callable[[int], Path], cache: Path, change: Change, got: str, tp: int
) -> None:
    """Its header has been read by then: another model's bytes would be taken by it."""
    source = files(tp)
    asked = RunOptions(source, (5, 9, 2), 4, tp=tp, cache=cache, ignore_eos=True)

    def silent(text: str) -> None:
        pass

    with running(prepare(asked, silent, silent), silent) as group:
        assert group.leaves, "the control"
    job = prepare(asked, silent, silent)
    change(largest(source))
    refusal = f"{largest(source).name}: got {got} the run began"
    with pytest.raises(ArtifactError, match=refusal), running(job, silent):
        pass

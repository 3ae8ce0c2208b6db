"""What an output may replace: nothing but what the same command writes; and full disks."""

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.artifact import Dataset, open_artifact, write_artifact
from k3tool.atomic import atomic_folder, atomic_path
from k3tool.errors import K3Error

Run = Callable[..., "object"]
REPO = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def plan(k3tool: Run, oracle: Run, tmp_path: Path) -> Path:
    path = tmp_path / "plan.h5"
    assert k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 1, "-o", path).code == 0
    return path


def test_an_output_is_never_an_input(k3tool: Run, writable: Run, plan: Path) -> None:
    folder = writable("tiny_tp8")
    config = folder / "config.json"
    weights = min(folder.glob("*.safetensors"))
    link = folder.parent / "link.h5"
    link.symlink_to(plan)
    cases = [
        (("compile-plan", config, "--tp", 1, "-o", config), config),
        (("compile-plan", folder, "--tp", 1, "-o", config), config),
        (("emit-isa", plan, "-o", plan), plan),
        (("emit-isa", plan, "-o", link), plan),
        (("inspect", folder, "-o", config), config),
        (("run", folder, "--ids", 1, "--plan", plan, "-o", plan), plan),
        (("run", folder, "--ids", 1, "--logits", plan), plan),
        (("run", folder, "--ids", 1, "-o", weights), weights),
    ]
    for arguments, file in cases:
        before = file.read_bytes()
        done = k3tool(*arguments)
        assert (done.code, done.out) == (2, ""), (arguments, done)
        assert "Traceback" not in done.err
        assert file.read_bytes() == before


READ_NAMES = (
    "new.safetensors", "model-00001-of-000011.safetensors.part", "model.safetensors.index.json",
    "generation_config.json", "tokenizer.json", "shards.h5", "rank.h5", "rank-00-of-02",
)  # fmt: skip


@pytest.mark.parametrize("name", READ_NAMES)
def test_no_output_has_a_name_that_a_checkpoint_is_read_by(
    k3tool: Run, writable: Run, plan: Path, name: str
) -> None:
    folder = writable("tiny_tp8")
    out = folder / name
    out.unlink(missing_ok=True)
    before = sorted(folder.iterdir())
    for command in (
        ("inspect", folder, "-o", out),
        ("inspect", folder, "--values", "--fingerprint", out),
        ("compile-plan", folder, "--tp", 1, "-o", out),
        ("emit-isa", plan, "-o", out),
        ("run", folder, "--ids", 1, "-o", out),
        ("run", folder, "--ids", 1, "--logits", out),
        ("shard", folder, "--tp", 2, "-o", out),
        ("sample", out),
    ):
        done = k3tool(*command)
        assert (done.code, done.out) == (2, ""), (command, done)
        assert "a name that the checkpoint in that folder would be read by" in done.err
        assert f"hint: write outside {folder}" in done.err
        assert sorted(folder.iterdir()) == before
    if "index" not in name:  # the controls: another name, another folder
        assert k3tool("inspect", folder, "-o", folder / "coverage.h5").code == 0
        assert k3tool("inspect", folder).code == 0
    assert k3tool("inspect", folder, "-o", plan.parent / name).code in (0, 3)
    assert (plan.parent / name).exists()


def test_two_outputs_are_two_files(k3tool: Run, oracle: Run, tmp_path: Path) -> None:
    same = tmp_path / "x.h5"
    other = tmp_path / "sub" / ".." / "x.h5"
    (tmp_path / "sub").mkdir()
    done = k3tool("run", oracle("tiny_tp8"), "--ids", 1, "-o", same, "--logits", other)
    assert done.code == 2
    assert "the file of -o" in done.err
    assert not same.exists()


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "dot", "text"])
def test_an_output_replaces_no_other_thing(
    k3tool: Run, oracle: Run, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "place"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(place))
    elif kind == "folder":
        place.mkdir()
    elif kind == "dot":
        place = Path(".")
    else:
        place.write_text("notes")
    before = place.stat().st_mode
    done = k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 1, "-o", place)
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert place.stat().st_mode == before


def test_a_command_replaces_what_it_wrote(k3tool: Run, oracle: Run, plan: Path) -> None:
    """The control: the same command twice is no refusal."""
    first = plan.read_bytes()
    assert k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 1, "-o", plan).code == 0
    assert plan.read_bytes() == first
    isa = plan.with_name("isa.h5")
    assert [k3tool("emit-isa", plan, "-o", isa).code for _ in range(2)] == [0, 0]


def test_logits_are_replaced_by_logits(k3tool: Run, oracle: Run, tmp_path: Path) -> None:
    out = tmp_path / "l.npz"
    run = ("run", oracle("tiny_tp8"), "--ids", 1, "--gen", 1, "--logits", out)
    assert [k3tool(*run, "--cache", tmp_path / "c").code for _ in range(2)] == [0, 0]


def test_a_file_size_limit_is_one_line_and_leaves_nothing(plan: Path) -> None:
    """The HDF5 library crashes when a write fails; an artifact is made in memory first."""
    out = plan.with_name("isa.h5")
    done = subprocess.run(
        [sys.executable, "-m", "stages.cli", "emit-isa", plan, "-o", out],
        capture_output=True, text=True, cwd=REPO, check=False, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 2
    assert "hint: write somewhere else" in done.stderr
    assert sorted(path.name for path in plan.parent.iterdir()) == ["plan.h5"]


def test_a_folder_that_grows_hidden_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "ck"
    with pytest.raises(K3Error, match=r"/ck/config\.json: got ") as caught:
        _write_below(out)
    assert ".partial" not in str(caught.value)
    assert "free some room" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_the_hidden_name_is_let_alone(tmp_path: Path) -> None:
    hidden = tmp_path / f".ck.{os.getpid()}.partial"
    hidden.mkdir()
    (hidden / "notes.txt").write_text("x")
    with pytest.raises(K3Error, match="/ck: got File exists"):
        _write_below(tmp_path / "ck")
    assert (hidden / "notes.txt").read_text() == "x"


def test_the_longest_names_can_be_written(tmp_path: Path) -> None:
    names = ["n" * 255, "n" * 254 + "m", "\u00e9" * 127]
    with contextlib.ExitStack() as stack:
        for name in names:  # all at once: those that begin alike have two hidden names
            stack.enter_context(atomic_path(tmp_path / name)).write_text(name)
    with atomic_folder(tmp_path / ("f" * 255)):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "f" * 255])
    assert [(tmp_path / name).read_text() for name in names] == names


def _write_below(out: Path) -> None:
    with atomic_folder(out) as building, atomic_path(building / "config.json"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_mapped_extents_survive_the_way_in_memory(tmp_path: Path) -> None:
    """A reader may map a dataset: its offset counts from the start of the file."""
    path = tmp_path / "p.h5"
    data = bytes(range(200))
    write_artifact(path, "plan", 1, {"d": Dataset(np.frombuffer(data, "u1"), ("byte",))})
    with open_artifact(path) as file:
        offset, size = file.extent("d")
    assert path.read_bytes()[offset : offset + size] == data


@pytest.mark.parametrize("command", ["shard", "sample"])
@pytest.mark.parametrize("kind", ["fifo", "text", "full", "input"])
def test_a_folder_that_is_written_replaces_no_other_thing(
    k3tool: Run, writable: Run, tmp_path: Path, command: str, kind: str
) -> None:
    source, place = writable("tiny_tp8"), tmp_path / "place"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "text":
        place.write_text("notes")
    elif kind == "full":
        place.mkdir()
        (place / "notes").write_text("mine")
    else:
        place = source
    before = {path: path.stat().st_ino for path in [place, *place.glob("*")]}
    arguments = (source, "--tp", 2, "-o", place) if command == "shard" else (place,)
    for force in ((), ("--force",)) if command == "shard" else ((),):
        done = k3tool(command, *arguments, *force)
        assert done.code in (1, 2, 3), done
        assert done.out == ""
        assert "Traceback" not in done.err
        assert {path: path.stat().st_ino for path in [place, *place.glob("*")]} == before

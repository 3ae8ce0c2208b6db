"""What is lacking is not the checkpoint: room on disk, memory, permission, a reader, patience."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3tool.runtime.options import parse_size
from tests.faults.damage.edit import INDEX, all_files, shard_name
from tests.faults.damage.harness import NOTE, Answer, Bench, Verdict, fingerprint
from tests.faults.damage.record import RESOURCES, UNREADABLE, resource_answer

REPO = Path(__file__).resolve().parents[3]
NOBODY = 65534
PLACES = (".cache/huggingface/download", "tokenizer.json")
RUN_COPY = ("run", "--tp", 4, "--ids", 1, "--gen", 1)  # at this degree the cache gets a copy
MB = 1_000_000


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start one command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "stages.cli", *map(str, arguments)], cwd=REPO, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def limited(n_bytes: int) -> Callable[[], None]:
    """Return what sets a limit on a child's address space."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 14 MB: one pair of shards fits, two do not."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("NOT RUN: no right to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def remount(place: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(place)], check=True)


# -- disk --------------------------------------------------------------------------------------


def test_disk_too_small_is_said_before_the_first_byte(
    k3tool: Callable, oracle: Callable, disk: Path
) -> None:
    source, out = oracle("tiny_tp8"), disk / "shards"
    assert k3tool("shard", source, "--tp", 2, "-o", out).code == 0
    older = fingerprint(disk)
    answer = k3tool("shard", source, "--tp", 4, "-o", out, "--force")
    assert answer.code == 1
    assert "B free, need" in answer.err
    assert "hint: " in answer.err
    assert fingerprint(disk) == older, "the older shards changed, or something was left"
    resource_answer("disk too small", "shard", answer)
    shards = fingerprint(out)
    answer = k3tool(*RUN_COPY, source, "--cache", disk / "cache")
    assert answer.code == 1
    assert f"{disk / 'cache'}: got " in answer.err
    assert "B free, need" in answer.err
    assert fingerprint(out) == shards
    assert not list((disk / "cache").glob("*shards*"))
    resource_answer("disk too small", "run", answer)


def test_disk_that_fills_while_writing_keeps_the_older_shards(
    k3tool: Callable, oracle: Callable, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = oracle("tiny_tp8"), disk / "shards"
    assert k3tool("shard", source, "--tp", 2, "-o", out).code == 0
    older = fingerprint(out)
    with monkeypatch.context() as patch:  # another program takes the room after the check
        patch.setattr("k3tool.checkpoint.shard_space.free_bytes", lambda folder: 1 << 40)
        answer = k3tool("shard", source, "--tp", 4, "-o", out, "--force")
    assert answer.code == 1
    assert "no space left on device" in answer.err.lower()
    assert "Traceback" not in answer.err
    assert fingerprint(out) == older
    resource_answer("disk fills while writing", "shard", answer)
    remount(disk, "size=60m")
    assert k3tool("shard", source, "--tp", 4, "-o", out, "--force").code == 0
    assert sorted(path.name for path in disk.iterdir()) == ["shards"]


def test_disk_that_only_reads(k3tool: Callable, oracle: Callable, disk: Path) -> None:
    remount(disk, "ro")
    source = oracle("tiny_tp8")
    for command in (
        ("shard", source, "--tp", 2, "-o", disk / "shards"),
        ("run", source, "--ids", 1, "--gen", 1, "--cache", disk / "cache"),
        ("inspect", source, "-o", disk / "coverage.h5"),
    ):
        answer = k3tool(*command)
        assert answer.code == 1, answer
        assert "read-only file system" in answer.err.lower()
        assert answer.err.startswith(f"k3tool {command[0]}: {disk}")
        assert "Traceback" not in answer.err
        resource_answer("target only reads", command[0], answer)


# -- permission --------------------------------------------------------------------------------


def as_nobody(*arguments: object) -> Answer:
    """Run one command line in a child without privileges: root may read and write everything."""
    from stages.cli import run_command

    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = os.fork()
        if child == 0:
            code = 99
            with contextlib.suppress(BaseException), out.open("w") as o, err.open("w") as e:
                sys.stdout, sys.stderr = o, e
                os.setgroups([])
                os.setegid(NOBODY)
                os.seteuid(NOBODY)
                code = run_command([str(argument) for argument in arguments])
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        return Answer(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())


@pytest.fixture
def open_place(oracle: Callable) -> Iterator[Path]:
    """Yield a folder that everybody reaches, with a copy of the checkpoint in it."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: becoming another user takes root")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(oracle("tiny_tp8"), place / "ckpt")
        (place / "outputs").mkdir()
        for path in (place, place / "outputs", place / "ckpt"):
            path.chmod(0o777)
        for path in (place / "ckpt").iterdir():
            path.chmod(0o644)
        yield place


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable(name: str, open_place: Path) -> None:
    case = UNREADABLE[name]
    control = as_nobody("inspect", open_place / "ckpt")
    assert control.code == 0, control
    bench = Bench(as_nobody, open_place / "outputs", open_place / "outputs")
    case.damage(open_place / "ckpt")
    RESOURCES.verdicts[name] = bench.refusal(case, open_place / "ckpt")


def test_target_folder_of_somebody_else(open_place: Path) -> None:
    (open_place / "outputs").chmod(0o555)
    source, outputs = open_place / "ckpt", open_place / "outputs"
    for command in (
        ("shard", source, "--tp", 2, "-o", outputs / "shards"),
        ("run", source, "--ids", 1, "--gen", 1, "--cache", outputs / "cache"),
        ("inspect", source, "-o", outputs / "coverage.h5"),
    ):
        answer = as_nobody(*command)
        assert answer.code == 1, answer
        assert "permission denied" in answer.err.lower()
        assert list(outputs.iterdir()) == []
        resource_answer("target of somebody else", command[0], answer)


def test_a_run_asks_first_whether_its_outputs_can_be_written(open_place: Path) -> None:
    closed = open_place / "outputs"
    closed.chmod(0o555)
    for option in ("-o", "--save-state", "--logits", "--trace-hashes"):
        answer = as_nobody("run", open_place / "ckpt", "--ids", 1, "--gen", 1, option, closed / "x")
        assert (answer.code, answer.out) == (1, ""), answer
        assert answer.err.startswith(f"k3tool run: {closed}/x: got Permission denied"), answer


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "shard", "run"])
def test_memory_limit_below_need(oracle: Callable, tmp_path: Path, command: str) -> None:
    words = {
        "inspect": (),
        "shard": ("--tp", 2, "-o", tmp_path / "out"),
        "run": ("--ids", 1, "--gen", 1, "--cache", tmp_path / "cache"),
    }[command]
    with start(command, oracle("tiny_tp8"), *words, preexec_fn=limited(300 * MB)) as process:
        out, err = process.communicate(timeout=60)
    answer = Answer(process.returncode, out, err)
    assert answer.code == 5, answer
    assert "under the address space limit of 300.0 MB, need 400.0 MB" in err
    assert err.startswith(f"k3tool {command}: memory: got ")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    resource_answer("memory limit", command, answer)


def test_many_files_at_a_time_ask_for_their_memory(oracle: Callable, tmp_path: Path) -> None:
    arguments = ("shard", oracle("tiny_tp8"), "--tp", 2, "--jobs", 64, "-o", tmp_path / "out")
    with start(*arguments, preexec_fn=limited(900 * MB)) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 5, err
    assert "B for 64 files at a time (--jobs)" in err
    assert list(tmp_path.iterdir()) == []
    resource_answer("memory limit, many jobs", "shard", Answer(5, out, err))


def test_ranks_that_do_not_fit(
    k3tool: Callable, oracle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a rank are mapped: a limit on address space has to hold them."""
    monkeypatch.setattr("k3tool.runtime.room.address_limit", lambda: 8 * MB)
    arguments = ("run", oracle("tiny_tp8"), "--ids", 1, "--gen", 1, "--cache", tmp_path / "cache")
    answer = k3tool(*arguments)
    assert answer.code == 5
    assert "for one rank's weights, activations and state" in answer.err
    need = parse_size(answer.err.split("need ")[1].split(" for ")[0])
    assert need > sum(path.stat().st_size for path in all_files(oracle("tiny_tp8")))
    monkeypatch.setattr("k3tool.runtime.room.address_limit", lambda: need)
    assert k3tool(*arguments).code == 0  # what was asked for is enough


# -- being left alone --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "shard", "run"])
def test_broken_pipe(oracle: Callable, tmp_path: Path, command: str) -> None:
    words = {
        "inspect": ("--json",),
        "shard": ("--tp", 2, "-v", "-o", tmp_path / "out"),
        "run": ("--ids", 1, "--gen", 2000, "--ignore-eos", "--cache", tmp_path / "cache"),
    }[command]
    with start(command, oracle("tiny_tp8"), *words, bufsize=0) as process:
        if command == "run":
            process.stdout.read(1)
        process.stdout.close()  # as `| head` does
        err = process.stderr.read()
        process.wait(timeout=60)
    said = [line for line in err.splitlines() if not NOTE.fullmatch(line)]
    assert (process.returncode, said) == (0, []), err
    resource_answer("broken pipe", command, Answer(0, "", ""))


def _interrupt(process: subprocess.Popen[str], ready: Callable[[], bool]) -> Answer:
    """Send Ctrl-C as soon as something is true of a running command."""
    end = time.monotonic() + 60
    while not ready() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return Answer(process.returncode, out, err)


def _has_begun(work: Path) -> bool:
    """Return whether a shard lies in the work folder, which may go away while it is looked at."""
    try:
        return any(work.glob("**/*.safetensors*"))
    except OSError:
        return False


def test_ctrl_c_in_shard_leaves_nothing_half_written(
    k3tool: Callable, oracle: Callable, tmp_path: Path
) -> None:
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    work = tmp_path / ".out.shard"
    for _ in range(20):  # it may be done before the signal arrives: then it is no test
        with start("shard", source, "--tp", 8, "-o", out) as process:
            answer = _interrupt(process, lambda: _has_begun(work))
        assert "Traceback" not in answer.err
        if not out.exists():
            break
        shutil.rmtree(out)
    assert not out.exists(), "never interrupted in time"
    assert answer.code == 130, answer
    assert k3tool("shard", source, "--tp", 8, "-o", out).code == 0  # goes on, or starts again
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    clean = tmp_path / "clean"
    assert k3tool("shard", source, "--tp", 8, "-o", clean).code == 0
    assert fingerprint(out) == fingerprint(clean)
    resource_answer("Ctrl-C", "shard", answer)


def test_ctrl_c_in_run(oracle: Callable, tmp_path: Path) -> None:
    words = ("--ids", 1, "--gen", 4000, "--ignore-eos", "--cache", tmp_path, "-o", tmp_path / "t")
    with start("run", oracle("tiny_tp8"), *words, bufsize=0) as process:
        process.stdout.read(1)
        answer = _interrupt(process, lambda: True)
    assert answer.code == 130
    assert "Traceback" not in answer.err
    assert not (tmp_path / "t").exists()
    resource_answer("Ctrl-C", "run", answer)


def test_unreadable_cases_name_what_they_close() -> None:
    folder = "need a checkpoint folder"
    closed = {shard_name(6), INDEX, "config.json", folder, *PLACES}
    assert all(closed & {*case.words} for case in UNREADABLE.values())
    assert closed <= {word for case in UNREADABLE.values() for word in case.words}
    assert Verdict._fields == ("inspect", "shard", "run", "words")

"""A cache entry that is damaged, locked, of the wrong kind or on a disk that takes no more."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3tool.errors import K3Error
from k3tool.runtime import cache_entry
from tests.conftest import Outcome

Run = Callable[..., Outcome]
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk that `remount` can make small or read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("NOT RUN: no right to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def remount(place: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(place)], check=True)


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no shards.h5": lambda path: (path / "shards.h5").unlink(),
    "shards.h5 cut, ranks gone": lambda path: (
        (path / "shards.h5").write_bytes(b"k3tool shards\n"),
        [(folder / "rank.h5").unlink() for folder in path.glob("rank-*")],
    ),
    "no config": lambda path: (path / "config.json").unlink(),
    "empty": lambda path: (shutil.rmtree(path), path.mkdir()),
    "a rank gone": lambda path: shutil.rmtree(path / "rank-01-of-02"),
}


def test_shards_that_do_not_open_are_built_again(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    kept = tmp_path / "cache"
    words = ("run", oracle("tiny_tp8"), "--tp", 2, "--cache", kept, "--ids", 1, "--gen", 1)
    first = k3tool(*words)
    assert first.code == 0
    shards = one(kept, "shards-*")
    for name, damage in DAMAGE.items():
        damage(shards)
        again = k3tool(*words)
        assert (again.code, again.out) == (0, first.out), (name, again.err)
    (shards / "shards.h5").unlink()
    (shards / "mine.txt").write_text("not shard's")
    refused = k3tool(*words)
    assert refused.code == 3
    assert "mine.txt, which shard did not write" in refused.err
    assert f"hint: remove it: rm -r {shards}" in refused.err
    assert (shards / "mine.txt").exists()


@pytest.mark.parametrize("pattern", ["program-*.isa.h5", "program-*.plan.h5", ".program-*.lock"])
def test_a_folder_in_the_place_of_a_file_is_refused_with_what_to_remove(
    k3tool: Run, oracle: Callable[[str], Path], tmp_path: Path, pattern: str
) -> None:
    kept = tmp_path / "cache"
    words = ("run", oracle("tiny_tp8"), "--cache", kept, "--ids", 1, "--gen", 1)
    assert k3tool(*words).code == 0
    place = one(kept, pattern)
    one(kept, "program-*.isa.h5").unlink()
    place.unlink(missing_ok=True)
    place.mkdir()
    refused = k3tool(*words)
    assert refused.code == 3
    assert f"{place}: got a folder, need a file of the cache" in refused.err
    assert f"hint: remove it: rm -r {place}" in refused.err
    place.rmdir()
    assert k3tool(*words).code == 0


def test_waiting_for_another_run_is_said_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_entry, "PATIENCE_SECONDS", 0.3)
    hold = (
        "import sys, time; from pathlib import Path\n"
        "from k3tool.runtime.cache_entry import locked\n"
        "with locked(Path(sys.argv[1]), 'k', 'a program'):\n"
        "    print('held', flush=True); time.sleep(1.5)"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with cache_entry.locked(tmp_path, "k", "a program of tp 1"):
            pass
    said = f"waiting for another run (process {other.pid}), which builds a program of tp 1"
    assert capfd.readouterr().err == f"{said} in {tmp_path}\n"
    start = time.monotonic()
    with cache_entry.locked(tmp_path, "k", "a program"):  # free again: nobody is waited for
        assert time.monotonic() - start < 1
        lock = os.open(tmp_path / ".k.lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):  # and it is held
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
    assert capfd.readouterr().err == ""


def test_a_cache_that_only_reads_serves_what_it_holds(
    k3tool: Run, oracle: Callable[[str], Path], disk: Path
) -> None:
    kept, source = disk / "cache", oracle("tiny_tp8")
    words = ("run", source, "--tp", 2, "--cache", kept, "--ids", 1, "--gen", 1)
    first = k3tool(*words)
    assert first.code == 0
    for path in [*kept.glob(".*.lock"), *kept.glob("finite-*")]:
        path.unlink()  # as a copy of a cache may lack them
    remount(disk, "ro")
    again = k3tool(*words)
    assert (again.code, again.out) == (0, first.out), again.err
    other = k3tool(*words[:2], "--cache", kept, "--ids", 1, "--gen", 1)  # what it does not hold
    assert other.code == 1
    assert f"{kept}: got Read-only file system, need a writable folder" in other.err
    assert "hint: name another with --cache FOLDER" in other.err
    assert "free some" not in other.err


def test_a_full_disk_is_told_by_the_names_that_a_user_knows(
    k3tool: Run, oracle: Callable[[str], Path], disk: Path
) -> None:
    source, plan = oracle("tiny_tp8"), disk / "p.h5"
    kept = disk / "cache"
    kept.mkdir()
    left = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "fill").write_bytes(bytes(left - 12_288))
    refused = k3tool("compile-plan", source, "--tp", 1, "-o", plan)
    assert refused.code == 1
    assert f"{plan}: got No space left on device" in refused.err
    cached = k3tool("run", source, "--cache", kept, "--ids", 1, "--gen", 1)
    assert cached.code == 1
    assert f"{kept}: got No space left on device, need a writable folder" in cached.err
    for answer in (refused, cached):
        assert "unproved" not in answer.err
        assert "program-" not in answer.err
    assert sorted(path.name for path in disk.iterdir()) == ["cache", "fill"]
    (disk / "fill").unlink()
    assert k3tool("compile-plan", source, "--tp", 1, "-o", plan).code == 0


def test_a_cache_that_is_removed_while_it_is_built_is_named(tmp_path: Path) -> None:
    kept = tmp_path / "cache"
    kept.mkdir()

    def build() -> None:
        with cache_entry.locked(kept, "k", "it") as entry, entry.building():
            shutil.rmtree(kept)
            (kept / ".k.h5.unproved").write_bytes(b"")

    with pytest.raises(K3Error) as caught:
        build()
    assert (caught.value.object, caught.value.got) == (str(kept), "no such folder any more")
    assert caught.value.exit_code == 1

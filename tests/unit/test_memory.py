"""Limits of control groups, read from trees like the kernel's of both versions."""

import os
from pathlib import Path

import pytest

from k3tool.memory import Room, group_room

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def put(folder: Path, names: tuple[str, str, str], limit: object, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nfile 7\n")


def room(tmp_path: Path, membership: str) -> Room | None:
    (tmp_path / "membership").write_text(membership)
    return group_room(tmp_path / "cgroup", tmp_path / "membership")


def test_version_2_takes_the_least_of_all_above(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    put(root / "a/b", V2, "max", 10, 0)
    put(root / "a", V2, 1000, 700, 100)
    put(root, V2, 5000, 100, 0)
    assert room(tmp_path, "0::/a/b\n") == Room(400, "the control group's limit of 1.000 KB")
    put(root / "a/b", V2, 300, 10, 0)
    assert room(tmp_path, "0::/a/b\n") == Room(290, "the control group's limit of 300 B")
    assert room(tmp_path, "0::/\n") == Room(4900, "the control group's limit of 5.000 KB")


def test_version_1_and_both_mounted(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    put(root / "memory/x/y", V1, 1 << 63, 10, 0)
    put(root / "memory/x", V1, 900, 800, 50)
    put(root / "memory", V1, 9223372036854771712, 0, 0)
    lines = "9:name=systemd:/\n4:cpu,memory:/x/y\n0::/\n"
    assert room(tmp_path, lines) == Room(150, "the control group's limit of 900 B")
    put(root / "unified", V2, 100, 60, 0)
    assert room(tmp_path, lines) == Room(40, "the control group's limit of 100 B")


def test_no_limit_is_none(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/a", V2, "max", 10, 0)
    assert room(tmp_path, "0::/a\n") is None
    assert room(tmp_path, "") is None
    assert room(tmp_path, "4:cpu:/a\n") is None
    assert group_room(tmp_path, tmp_path / "absent") is None


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/memory", V1, 500, 100, 0)
    assert room(tmp_path, "4:memory:/docker/of/the/host\n") == Room(
        400, "the control group's limit of 500 B"
    )


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path / "cgroup", V2, 500, 900, 0)
    found = room(tmp_path, "0::/\n")
    assert found is not None
    assert found.n_bytes == 0


def test_a_real_group() -> None:
    """The kernel's own files, where this process may make a group."""
    folder = Path("/sys/fs/cgroup/memory/k3tool-test")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"NOT RUN: no control group can be made here ({error.strerror})")
    try:
        (folder / V1[0]).write_text(str(64 << 20))
        reader, writer = os.pipe()
        os.write(writer, b"4:memory:/k3tool-test\n")
        os.close(writer)
        membership = Path(f"/proc/self/fd/{reader}")
        found = group_room(membership=membership)
        os.close(reader)
        assert found is not None
        assert 0 < found.n_bytes <= 64 << 20
    finally:
        folder.rmdir()


def test_memory_and_address_space_are_measured_apart() -> None:
    """100 MB left are enough of memory for a start, and too little of address space."""
    assert Room(100_000_000, "a group").is_start_possible
    assert not Room(100_000_000, "ulimit -v", is_address=True).is_start_possible
    assert Room(400_000_000, "ulimit -v", is_address=True).is_start_possible
    assert not Room(50_000_000, "a group").is_start_possible

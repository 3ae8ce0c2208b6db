"""How much memory this process may still take, and the refusal when a step needs more.

Asked before a step starts: an allocation that fails inside a compiled library ends the process
without a word about what would have been enough.
"""

import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from k3tool.errors import TargetError
from k3tool.tables import bytes_text, have_text, need_text

# Address space for Python, NumPy, HDF5, the e-graph and a few threads' stacks, before any work:
# at 300 MB the e-graph's library aborts, at 400 MB the whole pipeline runs (tiny model, 2026-11).
STARTUP_ADDRESS_BYTES = 400_000_000
# Memory that the same takes, as a control group counts it: at most 20 MB for `isa`, 29 for
# `inspect`, 57 for a `run` with its ranks (tiny model, program in the cache, 2026-12), of which 10
# are taken before this is asked.
STARTUP_BYTES = 64_000_000
THREAD_BYTES = 10 << 20  # a thread's stack and its allocator's first pages
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62  # version 1 writes the largest multiple of a page


class Room(NamedTuple):
    """Bytes that may still be taken, and the limit that says so.

    Of address space much more is taken than of memory: libraries and stacks are mapped whole.
    """

    n_bytes: int
    limit: str
    is_address: bool = False

    @property
    def is_start_possible(self) -> bool:
        """Return whether a command can start in it, before any work."""
        return self.n_bytes >= self.startup_bytes

    @property
    def startup_bytes(self) -> int:
        """Return what a command takes of it to start."""
        return STARTUP_ADDRESS_BYTES if self.is_address else STARTUP_BYTES


def address_limit() -> int | None:
    """Return the address space a new process of this user may take, or None without a limit."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def rooms() -> Iterator[Room]:
    """Yield what every limit leaves: address space, control group, the machine's free memory."""
    limit = address_limit()
    if limit is not None:
        left = max(0, limit - _pages(0))
        yield Room(left, f"the address space limit of {bytes_text(limit)}", is_address=True)
    group = group_room()
    if group is not None:
        yield group
    available = _field_kb(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        yield Room(available, "the machine's free memory")


def require_room(need_bytes: int, what: str) -> None:
    """Refuse a step that this process cannot hold. Raises: TargetError saying need and have."""
    least = min(rooms(), default=None)
    if least is not None and least.n_bytes < need_bytes:
        raise too_little(least.n_bytes, least.limit, need_bytes, what)


def require_memory(peak_bytes: int, what: str) -> None:
    """Refuse a step at whose end this process has taken `peak_bytes` in all, by what counts memory.

    A limit of address space is another measure. Raises: TargetError saying need and have.
    """
    need = max(0, peak_bytes - _pages(1))
    least = min((room for room in rooms() if not room.is_address), default=None)
    if least is not None and least.n_bytes < need:
        raise too_little(least.n_bytes, least.limit, need, what)


def require_start(command: str) -> None:
    """Refuse a command that cannot even start. Raises: TargetError saying need and have."""
    for room in sorted(rooms()):
        if not room.is_start_possible:
            what = f"{command} before any work"
            raise too_little(room.n_bytes, room.limit, room.startup_bytes, what)


def too_little(have_bytes: int, limit: str, need_bytes: int, what: str) -> TargetError:
    """Return the refusal for a step that needs more memory than it may have."""
    return TargetError(
        "memory", got=f"{have_text(have_bytes)} under {limit}",
        need=f"{need_text(need_bytes)} for {what}",
        hint="raise the limit (ulimit -v, the container's), or do less at a time",
    )  # fmt: skip


def give_back() -> None:
    """Return freed memory to the system, where the C library keeps it and can be told not to.

    What a compiler's many small objects took stays this process's otherwise: 140 MB on a real
    config.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _pages(nth: int) -> int:
    """Return what the process has, in bytes: mapped (0), or in memory (1)."""
    pages = int(Path("/proc/self/statm").read_text().split()[nth])
    return pages * os.sysconf("SC_PAGE_SIZE")


def group_room(root: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> Room | None:
    """Return what the process's control groups leave: the least of its own and all above it.

    None where no limit is set. Both versions of the kernel's interface are read; a machine may have
    both mounted, with the memory under either. Source: the kernel's cgroup-v1 and cgroup-v2 pages.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found: list[Room] = []
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            files = _Files("memory.max", "memory.current", "inactive_file")
            found += _rooms_upwards(root, name, files)
            found += _rooms_upwards(root / "unified", name, files)
        elif "memory" in controllers.split(","):
            files = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _rooms_upwards(root / "memory", name, files)
    return min(found, default=None)


class _Files(NamedTuple):
    """Names of one version: limit, use, and in memory.stat the pages that can be given back."""

    limit: str
    used: str
    cached: str


def _rooms_upwards(mount: Path, name: str, files: _Files) -> Iterator[Room]:
    """Yield the room of a group and of each group above it that has a limit.

    Inside a container the name may be the host's and not exist below the mount; the root does.
    """
    group = mount / name.strip("/")
    for folder in (group, *group.parents):
        if folder != mount and mount not in folder.parents:
            return
        try:
            limit = (folder / files.limit).read_text().strip()
            if limit == "max" or int(limit) >= _NO_LIMIT:
                continue
            used = int((folder / files.used).read_text())
        except (OSError, ValueError):
            continue
        cached = _field(folder / "memory.stat", files.cached) or 0
        room = max(0, int(limit) - used + cached)
        yield Room(room, f"the control group's limit of {bytes_text(int(limit))}")


def _field_kb(path: Path, name: str) -> int | None:
    value = _field(path, name)
    return None if value is None else value * 1024


def _field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == name:
                return int(words[1])
    except (OSError, ValueError):
        return None
    return None

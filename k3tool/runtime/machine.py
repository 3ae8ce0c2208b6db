"""What this machine has that k3tool uses: one check a thing, each with what was found.

It asks files, drivers and compilers; it knows no model (``k3tool.runtime.advice``) and imports no
library that may be absent. FAIL is what no command can do without; what is merely not here is
NOT RUN, with what to install.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from k3tool.errors import K3Error, TargetError, install_extra, printable
from k3tool.memory import rooms
from k3tool.runtime.gpu_compilers import TARGETS as GPU_TARGETS
from k3tool.runtime.gpu_compilers import find_compiler, needs
from k3tool.runtime.interpreter import load
from k3tool.tables import bytes_text, count_text
from k3tool.verdict import Check, failed, not_run, passed

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# Programs that one command or make target calls: what for, and the Debian package.
_TOOLS = (
    ("gcc", "make build, bench long", "gcc libc6-dev"),
    ("g++", "make test", "g++"),
    ("make", "make build and the other targets", "make"),
    ("mpirun", "shard --mpi on several nodes", "openmpi-bin"),
    ("coqc", "make proofs", "coq"),
)
_PACKAGE = "k3tool"
INTERPRETER = "cpu interpreter"  # the check that running and measuring need
_OWN_EXTRAS = {"dev"}  # for working on k3tool: no command needs them


def machine_checks(cache: Path) -> Iterator[Check]:
    """Yield what this machine can do without a model; `cache` is where a run would build."""
    yield interpreter_check()
    yield cores_check()
    yield from memory_checks()
    yield cache_check(cache)
    for tool in _TOOLS:
        yield tool_check(*tool)
    for target in GPU_TARGETS:
        yield compiler_check(target)
    yield from extra_checks()


def interpreter_check() -> Check:
    """Return whether the compiled interpreter is here and current, and the leaves this CPU has."""
    name = INTERPRETER
    try:
        found = load()
    except TargetError as error:
        return failed(name, sentence(error))
    return passed(name, f"leaves {', '.join(found.leaves)}; a run takes the first")


def cores_check(root: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> Check:
    """Return how many cores this process may use: its affinity mask, and its groups' quota."""
    allowed, here = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{allowed} of {count_text(here, 'core')} allowed"
    quota = cpu_quota(root, membership)
    if quota is not None and quota < allowed:
        threads = max(1, int(quota))
        detail += f"; the control group gives the time of {quota:g}: run --threads {threads}"
    return passed("cores", detail)


def cpu_quota(root: Path, membership: Path) -> float | None:
    """Return the cores whose time the control groups give: the least of its own and those above.

    None without a quota. Source: the kernel's cgroup-v2 page, cpu.max.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            group = root / name.strip("/")
            inside = (each for each in (group, *group.parents) if each.is_relative_to(root))
            found += [quota for each in inside if (quota := _quota(each)) is not None]
    return min(found, default=None)


def _quota(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def memory_checks() -> Iterator[Check]:
    """Yield what each limit leaves. FAIL where not even the commands' own libraries fit."""
    for room in sorted(rooms()):
        detail = f"{bytes_text(room.n_bytes)} left under {room.limit}"
        yield (passed if room.is_start_possible else failed)("memory", detail)


def cache_check(cache: Path) -> Check:
    """Return what the cache's disk has free. A cache that cannot be written is no failure yet: a
    run at TP 1 needs little of it, and `--cache` names another.
    """
    place = existing(cache)
    stat = os.statvfs(place)
    free = f"{bytes_text(stat.f_bavail * stat.f_frsize)} free for {printable(str(cache))}"
    if os.access(place, os.W_OK | os.X_OK) and place.is_dir():
        return passed("cache", free)
    return not_run("cache", f"{free}, which may not be written: run --cache FOLDER")


def existing(path: Path) -> Path:
    """Return the path, or the nearest above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def tool_check(program: str, what_for: str, package: str) -> Check:
    """Return whether a program is on PATH."""
    found = shutil.which(program)
    if found:
        return passed(program, f"{printable(found)}, for {what_for}")
    return not_run(program, f"not on PATH; for {what_for}: apt-get install {package}")


def compiler_check(target: str) -> Check:
    """Return whether the interpreter of a GPU target can be compiled here."""
    found = find_compiler(target)
    name = f"compiler for {target}"
    if found is None:
        return not_run(name, f"none: {needs(target)}")
    return passed(name, found.__name__)


# -- optional packages ---------------------------------------------------------------------------


def extra_checks() -> Iterator[Check]:
    """Yield each of the package's extras, as its own metadata lists them."""
    for extra, names in extras().items():
        missing = [name for name in names if _version(name) is None]
        name = f"extra {extra}"
        if missing:
            yield not_run(name, f"no {', '.join(missing)}: {install_extra(extra)}")
        else:
            yield passed(name, ", ".join(f"{each} {_version(each)}" for each in names))


def extras() -> Mapping[str, list[str]]:
    """Return the packages of each extra; nothing where k3tool runs without being installed."""
    try:
        required = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in required:
        extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", line)
        package = re.match(r"[A-Za-z0-9._-]+", line)
        if extra and package and extra[1] not in _OWN_EXTRAS:
            found[extra[1]].append(package[0])
    return dict(sorted(found.items()))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sentence(error: K3Error) -> str:
    """Return a refusal as a check's detail."""
    hint = f": {error.hint}" if error.hint else ""
    return f"{error.object}: got {error.got}, need {error.need}{hint}"

"""Find the compiled interpreter and refuse one that is stale: built from other sources or tables.

It compiles nothing; `build.py` does, at install.
"""

import errno
import functools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from k3tool.errors import TargetError
from k3tool.isa.table import isa_hash
from k3tool.runtime.build import REBUILD, executable_path, source_hash
from k3tool.targets import get_target

# What a process that cannot be started lacks where it is neither memory nor its file, and the
# limit that says so.
_LIMITS = {
    errno.EMFILE: ("more open files", "ulimit -n"),
    errno.ENFILE: ("more open files of the system", "fs.file-max"),
    errno.EFBIG: ("longer files", "ulimit -f"),
    errno.EAGAIN: ("more processes", "ulimit -u, the container's"),
}
LEAVES = ("auto", "scalar", "avx2", "avx512", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An executable that has been asked who it is."""

    path: Path
    isa_hash: str
    source_hash: str
    leaves: tuple[str, ...]


# The hint where the interpreter of another build was named.
_BUILDS = "`make build` writes one to kernels_cpu/build/k3-cpu"


def load(path: Path | None = None, *, any_source: bool = False) -> Interpreter:
    """Return the interpreter after comparing its hashes with this package's sources and op table.

    `any_source` accepts other sources: negative controls run variants on purpose.
    Raises: TargetError if it is absent, does not run or is stale, with both values.
    """
    hint = REBUILD if path is None else _BUILDS
    path = (path or executable_path()).absolute()  # a bare name would be looked for on PATH
    if not path.is_file():
        raise TargetError(str(path), got="no such file", need="an interpreter", hint=hint)
    found = _identity(path, path.stat().st_mtime_ns)
    if found.isa_hash != isa_hash():
        _refuse_stale(path, "isa_hash", found.isa_hash, isa_hash())
    if not any_source and found.source_hash != source_hash():
        _refuse_stale(path, "source_hash", found.source_hash, source_hash())
    return found


def check_leaves(interpreter: Interpreter, leaves: str) -> None:
    """Refuse a leaf set this CPU does not have. Raises: TargetError listing those it has."""
    if leaves != "auto" and leaves not in interpreter.leaves:
        need = " or ".join(interpreter.leaves)
        raise TargetError("--leaves", got=f"{leaves}, not on this CPU", need=need)


def handlers(target: str, path: Path | None = None) -> dict[str, set[int]]:
    """Return the opcodes an interpreter of a target has bodies for, by phase.

    Raises: UsageError for an unknown target; TargetError for a stale or absent interpreter.
    """
    if get_target(target).family != "cpu":
        raise TargetError(f"interpreter of {target}", got="none in this build", need="target cpu")
    interpreter = load(path, any_source=path is not None)
    out = {}
    for line in _ask(interpreter.path, "--handlers").splitlines():
        phase, *opcodes = line.split()
        out[phase] = {int(opcode) for opcode in opcodes}
    return out


def cannot_start(what: str, error: OSError) -> TargetError | None:
    """Return the refusal for a limit that a process was not started under, None for another cause.

    The interpreter may be as it should: to build it again would not help.
    """
    if error.errno not in _LIMITS:
        return None
    need, limit = _LIMITS[error.errno]
    got = (error.strerror or str(error)).lower()
    return TargetError(what, got=got, need=need, hint=f"raise the limit ({limit})")


@functools.lru_cache(maxsize=8)
def _identity(path: Path, modified_ns: int) -> Interpreter:
    said = json.loads(_ask(path, "--identity"))
    return Interpreter(path, said["isa_hash"], said["source_hash"], tuple(said["leaves"]))


def _ask(path: Path, question: str) -> str:
    try:
        done = subprocess.run([str(path), question], capture_output=True, text=True, check=True)
    except OSError as error:
        if limit := cannot_start(path.name, error):
            raise limit from None
        why = (error.strerror or str(error)).lower()
    except subprocess.CalledProcessError as error:
        why = f"exit code {error.returncode}"
    else:
        return done.stdout
    hint = REBUILD if path == executable_path() else _BUILDS
    raise TargetError(str(path), got=f"no answer ({why})", need="k3-cpu", hint=hint)


def _refuse_stale(path: Path, field: str, got: str, need: str) -> None:
    raise TargetError(
        f"{path}: {field}", got=f"{got[:12]}..", need=f"{need[:12]}.. of the sources", hint=REBUILD
    )

"""Compile the CPU interpreter `k3-cpu`: called at install, by `make build`, and by tests.

Only the standard library and the op table are used, because pip runs this before anything is
installed. It does not decide whether a built interpreter may be used; `interpreter.py` does.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from k3tool.errors import TargetError
from k3tool.isa.table import SPECS

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("kernels_common", "kernels_cpu")
BUILD_FOLDER = "build"  # inside kernels_cpu, of the source tree or of an installed copy
EXECUTABLE = "k3-cpu"

# -ffp-contract=off is part of the arithmetic contract: gcc contracts a * b + c by default.
_COMMON = (
    "-std=gnu11", "-ffp-contract=off", "-fno-fast-math", "-fno-trapping-math", "-fno-math-errno",
    "-Wall", "-Wextra", "-Werror", "-pthread", "-g1",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mbmi2")
_AVX512 = (
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", *_AVX2,
)  # fmt: skip
# (object, source, flags); the bodies are compiled once a leaf set.
_UNITS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("scalar", "ops_body.c", ("-DK3_LEAVES_SCALAR", "-O2", "-fno-tree-vectorize")),
    ("avx2", "ops_body.c", ("-DK3_LEAVES_AVX2", "-O3", *_AVX2)),
    ("avx512", "ops_body.c", ("-DK3_LEAVES_AVX512", "-O3", *_AVX512)),
    ("interp", "interp.c", ("-O2",)),
    ("memory", "memory.c", ("-O2",)),
    ("image", "image.c", ("-O2",)),
    ("main", "main.c", ("-O2",)),
)


def source_files(root: Path = ROOT) -> list[Path]:
    """Return every C source and header the interpreter is made of, sorted by path."""
    return sorted(
        path
        for folder in SOURCE_FOLDERS
        for path in (root / folder).rglob("*.[ch]")
        if BUILD_FOLDER not in path.relative_to(root).parts
    )


def source_hash(root: Path = ROOT) -> str:
    """Return the SHA-256 of the sources and of how they are compiled; checked at load."""
    digest = hashlib.sha256(repr((_COMMON, _UNITS)).encode())
    for path in source_files(root):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def executable_path(root: Path = ROOT) -> Path:
    """Return where the interpreter is, built or not."""
    return root / "kernels_cpu" / BUILD_FOLDER / EXECUTABLE


def build(
    output: Path | None = None, *, root: Path = ROOT, defines: Sequence[str] = (), jobs: int = 2
) -> Path:
    """Compile the interpreter to `output` (default: executable_path) and return its path.

    `defines` makes a variant for a negative control; its source hash is changed with it, so that a
    loader never takes it for the real one.
    Raises: TargetError if there is no C compiler or it refuses a source.
    """
    compiler = _compiler()
    output = output or executable_path(root)
    # Before compiling: a source edited meanwhile makes the result stale, never wrongly fresh.
    stamp = " ".join([source_hash(root), *defines])
    with contextlib.ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            name = stack.enter_context(tempfile.TemporaryDirectory(dir=output.parent))
        except OSError as error:
            raise TargetError(str(output), got=error.strerror, need="a writable folder") from None
        folder = Path(name)
        _write_op_list(folder)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            made_with = ["-DK3_SOURCE_HASH=" + json.dumps(stamp), *(f"-D{d}" for d in defines)]
            commands = [[compiler, *_arguments(root, folder, u), *made_with] for u in _UNITS]
            list(pool.map(_run, commands))
        objects = [str(folder / f"{unit[0]}.o") for unit in _UNITS]
        made = folder / EXECUTABLE
        _run([compiler, "-pthread", "-o", str(made), *objects, "-lm"])
        os.replace(made, output)
    return output


def _compiler() -> str:
    for name in (os.environ.get("CC"), "gcc", "cc"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise TargetError(
        "C compiler", got="no gcc or cc on PATH", need="gcc", hint="apt-get install gcc libc6-dev"
    )


def _write_op_list(folder: Path) -> None:
    """Include the body of every op that the CPU serves: a missing file is a compile error."""
    names = [spec.name.lower() for _, spec in sorted(SPECS.items()) if "cpu" in spec.targets]
    lines = [f'#include "ops/{name}.h"' for name in names]
    (folder / "k3_ops.h").write_text("\n".join(lines) + "\n")


def _arguments(root: Path, folder: Path, unit: tuple[str, str, tuple[str, ...]]) -> list[str]:
    name, source, flags = unit
    return [
        *_COMMON, *flags,
        f"-I{folder}", f"-I{root / 'kernels_cpu'}", f"-I{root / 'kernels_common'}",
        "-c", str(root / "kernels_cpu" / source), "-o", str(folder / f"{name}.o"),
    ]  # fmt: skip


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
    raise TargetError(
        "k3-cpu", got=errors[0], need="sources that compile", hint="see the compiler: make build"
    )


def main() -> int:
    """Build in place; print where, or the one-line reason why not."""
    try:
        print(build(jobs=os.cpu_count() or 1))
    except TargetError as error:
        print(error.text("build"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

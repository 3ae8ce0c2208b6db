"""Compile the CPU interpreter `k3-cpu` and the scan library: at install, by `make build`, by tests.

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
from typing import NamedTuple

from k3tool.errors import TargetError
from k3tool.isa.table import SPECS

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("kernels_common", "kernels_cpu")
BUILD_FOLDER = "build"  # inside kernels_cpu, of the source tree or of an installed copy
EXECUTABLE = "k3-cpu"
SCAN_FOLDER = "scan"  # inside kernels_cpu: sources of the library, which the interpreter lacks
SCAN_LIBRARY = "k3-scan.so"

# -ffp-contract=off is part of the arithmetic contract: gcc contracts a * b + c by default.
_COMMON = (
    "-std=gnu11", "-ffp-contract=off", "-fno-fast-math", "-fno-trapping-math", "-fno-math-errno",
    "-Wall", "-Wextra", "-Werror", "-pthread", "-g1",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mbmi2")
_AVX512 = (
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", *_AVX2,
)  # fmt: skip
_BF16 = "-mavx512bf16"
_LOOPS = ("-O3", "-DK3_LEAVES_SCALAR")  # only for the definitions: no leaf is called there
REBUILD = "make build (or install the package again)"  # the hint where what is built is stale


class Unit(NamedTuple):
    """One object file; the op bodies are compiled once a leaf set."""

    name: str
    source: str
    flags: tuple[str, ...]


_UNITS = (
    Unit("scalar", "ops_body.c", ("-DK3_LEAVES_SCALAR", "-O2", "-fno-tree-vectorize")),
    Unit("avx2", "ops_body.c", ("-DK3_LEAVES_AVX2", "-O3", *_AVX2)),
    Unit("avx512", "ops_body.c", ("-DK3_LEAVES_AVX512", "-O3", *_AVX512)),
    Unit("avx512_bf16", "ops_body.c", ("-DK3_LEAVES_AVX512_BF16", "-O3", *_AVX512, _BF16)),
    Unit("loops", "measure_loops.c", (*_LOOPS, "-DK3_MEASURE_NAME=k3_measure_plain")),
    Unit("loops-avx2", "measure_loops.c", (*_LOOPS, "-DK3_MEASURE_NAME=k3_measure_avx2", *_AVX2)),
    Unit("loops-avx512", "measure_loops.c",
         (*_LOOPS, "-DK3_MEASURE_NAME=k3_measure_avx512", "-mprefer-vector-width=512", *_AVX512)),
    Unit("measure", "measure.c", ("-O2", "-DK3_LEAVES_SCALAR")),
    Unit("measure_io", "measure_io.c", ("-O2",)),
    Unit("cpu", "cpu.c", ("-O2",)),
    Unit("interp", "interp.c", ("-O2",)),
    Unit("team", "team.c", ("-O2",)),
    Unit("waiting", "waiting.c", ("-O2",)),
    Unit("observe", "observe.c", ("-O3",)),
    Unit("memory", "memory.c", ("-O2",)),
    Unit("copy", "copy.c", ("-O2",)),
    Unit("io", "io.c", ("-O2",)),
    Unit("devices", "devices.c", ("-O2",)),
    Unit("residency", "residency.c", ("-O2",)),
    Unit("trace", "trace.c", ("-O2",)),
    Unit("hashes", "hashes.c", ("-O2",)),
    Unit("image", "image.c", ("-O2",)),
    Unit("steps", "steps.c", ("-O2",)),
    Unit("main", "main.c", ("-O2",)),
)  # fmt: skip
_SCAN_UNITS = (
    Unit("scan-plain", "scan/scan_loops.c", ("-fPIC", "-O3", "-DK3_SCAN_NAME=plain")),
    Unit("scan-avx2", "scan/scan_loops.c", ("-fPIC", "-O3", "-DK3_SCAN_NAME=avx2", *_AVX2)),
    Unit("scan-avx512", "scan/scan_loops.c",
         ("-fPIC", "-O3", "-DK3_SCAN_NAME=avx512", "-mprefer-vector-width=512", *_AVX512)),
    Unit("scan", "scan/scan.c", ("-fPIC", "-O2")),
)  # fmt: skip


def source_files(root: Path = ROOT) -> list[Path]:
    """Return every C source and header the interpreter is made of, sorted by path."""
    return sorted(
        path
        for folder in SOURCE_FOLDERS
        for path in (root / folder).rglob("*.[ch]")
        if not {BUILD_FOLDER, SCAN_FOLDER} & set(path.relative_to(root).parts)
    )


def source_hash(root: Path = ROOT) -> str:
    """Return the SHA-256 of the sources and of how they are compiled; checked at load."""
    return _hash(root, _UNITS, source_files(root))


def scan_source_hash(root: Path = ROOT) -> str:
    """Return the same of the scan library."""
    return _hash(root, _SCAN_UNITS, sorted((root / "kernels_cpu" / SCAN_FOLDER).glob("*.[ch]")))


def _hash(root: Path, units: Sequence[Unit], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((_COMMON, units)).encode())
    for path in files:
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def executable_path(root: Path = ROOT) -> Path:
    """Return where the interpreter is, built or not."""
    return root / "kernels_cpu" / BUILD_FOLDER / EXECUTABLE


def scan_library_path(root: Path = ROOT) -> Path:
    """Return where the scan library is, built or not."""
    return root / "kernels_cpu" / BUILD_FOLDER / SCAN_LIBRARY


def build(
    output: Path | None = None,
    *,
    root: Path = ROOT,
    defines: Sequence[str] = (),
    flags: Sequence[str] = (),
    only: Sequence[str] = (),
    keep: bool = True,
) -> Path:
    """Compile the interpreter to `output` (default: executable_path) and return its path.

    `defines` and `flags` make a variant (a negative control, a sanitizer) of the units named by
    `only` (default: all); they enter the source hash, so that a loader never takes a variant for
    the real one. `keep` leaves objects in the build folder for the next variant.
    Raises: TargetError if there is no C compiler or it refuses a source.
    """
    compiler = _compiler()
    output = output or executable_path(root)
    # Before compiling: a source edited meanwhile makes the result stale, never wrongly fresh.
    sources = source_hash(root)
    with contextlib.ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=output.parent)))
            kept = executable_path(root).parent / "objects" if keep else folder
            kept.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TargetError(str(output), got=error.strerror, need="a writable folder") from None
        _write_op_list(folder)
        changes = [*(f"-D{name}" for name in defines), *flags]
        jobs, objects = [], []
        for unit in _UNITS:
            extra = changes if not only or unit.name in only else []
            if unit.name == "main":
                stamp = " ".join([sources, *changes, *only])
                extra = [*extra, "-DK3_SOURCE_HASH=" + json.dumps(stamp)]
            key = hashlib.sha256(repr((sources, unit, extra)).encode()).hexdigest()[:16]
            objects.append(kept / f"{unit.name}-{key}.o")
            arguments = [compiler, *_arguments(root, folder, unit), *extra]
            jobs.append((arguments, folder / f"{unit.name}.o", objects[-1]))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_compile, jobs))
        made = folder / EXECUTABLE
        _run([compiler, "-pthread", *flags, "-o", str(made), *map(str, objects), "-lm"])
        os.replace(made, output)
    if keep and not changes:
        _forget_others(kept, objects)
    return output


def build_scan(output: Path | None = None, *, root: Path = ROOT) -> Path:
    """Compile the scan library to `output` (default: scan_library_path) and return its path.

    Raises: TargetError if there is no C compiler or it refuses a source.
    """
    compiler, output = _compiler(), output or scan_library_path(root)
    define = "-DK3_SOURCE_HASH=" + json.dumps(scan_source_hash(root))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as name:
            folder = Path(name)
            objects = [folder / f"{unit.name}.o" for unit in _SCAN_UNITS]
            for unit, made in zip(_SCAN_UNITS, objects, strict=True):
                _run([compiler, *_arguments(root, folder, unit), define, "-o", str(made)])
            library = folder / SCAN_LIBRARY
            _run([compiler, "-shared", "-o", str(library), *map(str, objects)])
            os.replace(library, output)
    except OSError as error:
        raise TargetError(str(output), got=error.strerror, need="a writable folder") from None
    return output


def _forget_others(kept: Path, objects: Sequence[Path]) -> None:
    for path in set(kept.glob("*.o")) - set(objects):
        path.unlink(missing_ok=True)


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


def _arguments(root: Path, folder: Path, unit: Unit) -> list[str]:
    return [
        *_COMMON, *unit.flags,
        f"-I{folder}", f"-I{root / 'kernels_cpu'}", f"-I{root / 'kernels_common'}",
        "-c", str(root / "kernels_cpu" / unit.source),
    ]  # fmt: skip


def _compile(job: tuple[list[str], Path, Path]) -> None:
    """Compile to a temporary name and rename: another build may run at the same time."""
    arguments, temporary, made = job
    if not made.exists():
        _run([*arguments, "-o", str(temporary)])
        os.replace(temporary, made)


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
        print(build())
        print(build_scan())
    except TargetError as error:
        print(error.text("build"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

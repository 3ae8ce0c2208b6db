"""The object of a program's interpreter: compiled where it is missing, and kept in the cache.

A kept object is named by all that made it, so an edited source or another flag is another file.
Its hash stands before it: a bit that has changed on disk would be an instruction that has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from k3tool.atomic import atomic_path
from k3tool.canonical import canonical_json
from k3tool.errors import TargetError, UnsoundError
from k3tool.runtime import gpu_source
from k3tool.runtime.compile_gpu import judge
from k3tool.runtime.gpu_compilers import CUDA_FLAGS, HIP_FLAGS, HIP_LOOP_FLAGS, find_compiler, needs
from k3tool.runtime.gpu_object import check_build, read_identity
from k3tool.targets import get_target

_HASH_BYTES = 32  # of SHA-256


def object_of(target: str, phases: Sequence[str], ops: Sequence[str], folder: Path) -> bytes:
    """Return the object of an interpreter for `phases` with the bodies of `ops`.

    Raises: TargetError where no compiler is here, or its object is not what it was asked for;
    K3Error with what it said; UnsoundError where the object spills or holds forbidden arithmetic.
    """
    source = gpu_source.interpreter(target, phases, ops)
    flags = CUDA_FLAGS if get_target(target).family == "cuda" else HIP_FLAGS + HIP_LOOP_FLAGS
    key = hashlib.sha256(canonical_json([target, source.digest, flags]).encode()).hexdigest()
    path = folder / f"gpu-{key[:24]}.object"
    if path.exists():
        kept = path.read_bytes()
        code = kept[_HASH_BYTES:]
        if hashlib.sha256(code).digest() == kept[:_HASH_BYTES]:  # a damaged one is compiled again
            return code
    compiler = find_compiler(target)
    if compiler is None:
        need = needs(target)
        raise TargetError(f"compiler for {target}", got="none", need=need)
    made = compiler(source, target)
    check_build(read_identity(made.object_bytes, target), target, phases, ops)
    wrong = judge(made)
    if wrong:
        raise UnsoundError(f"{target}: {made.compiler}", got=wrong[0], need="a sound object")
    with atomic_path(path) as temporary:
        temporary.write_bytes(hashlib.sha256(made.object_bytes).digest() + made.object_bytes)
    return made.object_bytes

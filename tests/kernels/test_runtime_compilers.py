"""The interpreters as run-time compilers see them: one text, no header, names declared beforehand.

hipRTC is stood in for (hiprtc_surface.h); NVRTC is itself, where it is installed. What AMD's driver
makes of the text is NOT RUN.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from k3tool.isa.table import ALL_PHASES
from k3tool.runtime import compile_gpu, gpu_compilers, gpu_source
from k3tool.runtime.gpu_object import check_build, read_identity
from tests.kernels.test_compile_gpu import compiler_for

SURFACE = Path(__file__).with_name("hiprtc_surface.h")
HIP = "hip:gfx942"
# Atomics, DPP, LDS, teams and collectives: what a dialect is asked for.
OPS = ("GEMV_BF16", "ALL_REDUCE", "MLA_PAGES")


def as_hiprtc(text: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Compile with clang as hipRTC does: no header is anywhere, its own names come first."""
    compiler_for(HIP)
    (folder / "x.hip").write_text(text)
    command = [
        "clang-22", "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpulib",
        "-nogpuinc", "-nostdinc", "-nostdinc++", "--offload-arch=gfx942", "-O3", "-std=c++17",
        "-Werror", "-include", str(SURFACE), *gpu_compilers.HIP_LOOP_FLAGS,
        *gpu_compilers.HIP_FLAGS, *more, str(folder / "x.hip"), "-o", str(folder / "x.hsaco"),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def ordinary():
    """Return what clang makes of the same text without the surface."""
    return compiler_for(HIP)(gpu_source.interpreter(HIP, ("decode",), OPS), HIP)


@pytest.mark.parametrize("surface", [(), ("-DHIP_NO_STD",)], ids=["ROCm 6", "ROCm 7"])
def test_what_hiprtc_sees_is_what_clang_compiles(tmp_path, ordinary, surface):
    source = gpu_source.interpreter(HIP, ("decode",), OPS)
    done = as_hiprtc(source.text, tmp_path, *surface)
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "x.hsaco").read_bytes()
    check_build(read_identity(made, "an object"), HIP, ("decode",), OPS)
    assert gpu_compilers.function_sizes(made) == gpu_compilers.function_sizes(ordinary.object_bytes)


@pytest.mark.parametrize("phase", ALL_PHASES)
def test_every_body_passes_its_front_end(tmp_path, phase):
    ops = gpu_source.op_names("hip", phase)
    text = gpu_source.interpreter(HIP, (phase,), ops).text
    done = as_hiprtc(text, tmp_path, "-fsyntax-only")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("#define uint64_t k3_uint64", "", "typedef redefinition with different types"),
        ("#define K3_DIALECT_H", "#include <stdint.h>", "'stdint.h' file not found"),
        ("#undef __launch_bounds__", "", "'__launch_bounds__' macro redefined"),
        ("__builtin_sqrtf(a)", "sqrtf(a)", "undeclared identifier 'sqrtf'"),
    ],
    ids=["its types", "a header", "its launch bounds", "a library function"],
)
def test_control_what_hiprtc_refuses(tmp_path, old, new, message):
    text = gpu_source.interpreter(HIP, ("decode",), ("ADD",)).text
    assert text.count(old) == 1
    done = as_hiprtc(text.replace(old, new), tmp_path, "-fsyntax-only")
    assert done.returncode != 0
    assert message in done.stderr


def test_nvrtc_compiles_the_same_text():
    target = "cuda:sm_100a"
    if gpu_compilers.nvrtc_library() is None:
        pytest.skip("NOT RUN: NVRTC (needs PyPI package nvidia-cuda-nvrtc)")
    source = gpu_source.interpreter(target, ("decode",), OPS)
    compiled = gpu_compilers.nvrtc(source, target)
    assert compile_gpu.judge(compiled) == ()
    check_build(read_identity(compiled.object_bytes, "an object"), target, ("decode",), OPS)

"""The compilers that turn a GPU source into text, object and numbers: nvcc, NVRTC, clang.

Knows flags and how each compiler reports; does not know which findings are fatal.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from k3tool.errors import K3Error, TargetError
from k3tool.runtime import gpu_text
from k3tool.runtime.gpu_source import Source
from k3tool.targets import BUILDS, get_target

# Numerics, rule 1, to the letter. A compiler's own defaults contract a * b + c.
CUDA_FLAGS = ("-fmad=false", "-ftz=true", "-prec-div=true", "-prec-sqrt=true")
HIP_FLAGS = (
    "-ffp-contract=off", "-fgpu-flush-denormals-to-zero",
    "-fhip-fp32-correctly-rounded-divide-sqrt",
)  # fmt: skip
# One loop holds every op: what a pass moves out of it lives through all of them, and spills.
HIP_LOOP_FLAGS = ("-mllvm", "-disable-machine-licm")
OPAQUE = "-DK3_OPAQUE_FMA"
TARGETS = tuple(dict.fromkeys(target for target, _ in BUILDS))
_CLANG = "clang-22"


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the compiler says of one kernel.

    `spills` goes to memory: bytes on CUDA, registers on HIP. `scalar_spills` are HIP's scalar
    registers kept in lanes of vector registers, which touches no memory.
    """

    name: str
    registers: int
    spills: int
    scalar_spills: int
    stack_bytes: int
    shared_bytes: int
    code_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """One source compiled for one target; `findings` are sentences of `gpu_text`."""

    target: str
    compiler: str
    kernels: tuple[Kernel, ...]
    findings: tuple[str, ...]
    object_bytes: bytes
    text: str


Compiler = Callable[[Source, str], Compiled]


def find_compiler(target: str) -> Compiler | None:
    """Return what compiles `target` here, or None. Raises TargetError for a target nobody knows."""
    if target not in TARGETS:
        raise TargetError("--target", got=target, need=" or ".join(TARGETS))
    if get_target(target).family == "hip":
        return clang if shutil.which(_CLANG) and shutil.which("ld.lld-22") else None
    if shutil.which("nvcc") and shutil.which("ptxas"):
        return nvcc
    return nvrtc if nvrtc_library() else None


def needs(target: str) -> str:
    """Return what to install so that `target` can be compiled."""
    if get_target(target).family == "hip":
        return "apt package clang-22 lld-22"
    return "nvcc, or PyPI package nvidia-cuda-nvrtc"


# ---- CUDA ---------------------------------------------------------------------------------------


def nvcc(source: Source, target: str, flags: tuple[str, ...] = CUDA_FLAGS) -> Compiled:
    """Compile with nvcc: PTX twice (once with the explicit fma hidden), then ptxas."""
    arch = target.partition(":")[2]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "x.cu").write_text(source.text)
        command = ["nvcc", f"-arch={arch}", "-std=c++17", *flags, "-ptx", str(base / "x.cu"), "-o"]
        opaque_command = [*command, str(base / "opaque.ptx"), OPAQUE]
        _call_both([*command, str(base / "x.ptx")], opaque_command, source, target)
        ptxas = ["ptxas", f"-arch={arch}", "-v", str(base / "x.ptx"), "-o", str(base / "x.cubin")]
        log = _call(ptxas, source, target)
        ptx, opaque = ((base / name).read_text() for name in ("x.ptx", "opaque.ptx"))
        cubin = (base / "x.cubin").read_bytes()
    version = _version(["nvcc", "--version"], r"V([\d.]+)")
    return _cuda(target, f"nvcc {version}", ptx, opaque, cubin, log)


def nvrtc_library() -> Path | None:
    """Return NVRTC's library: an installed wheel's on sys.path, else the CUDA toolkit's."""
    for entry in [*map(Path, sys.path), Path("/usr/local/cuda/lib64")]:
        for pattern in ("nvidia/*/lib/libnvrtc.so.*", "libnvrtc.so.*"):
            found = sorted(entry.glob(pattern))
            if found:
                return found[-1]
    return None


def nvrtc(source: Source, target: str, flags: tuple[str, ...] = CUDA_FLAGS) -> Compiled:
    """Compile with NVRTC, in this process. Raises: TargetError without it, or with its log."""
    arch = target.partition(":")[2]
    path = nvrtc_library()
    if path is None:
        raise TargetError(target, got="no NVRTC library", need=needs(target))
    library = _Nvrtc(path)
    options = [f"-{flag}" for flag in flags] + ["--std=c++17"]
    real, ptxas = f"--gpu-architecture={arch}", "--ptxas-options=-v"
    virtual = real.replace("sm_", "compute_")
    ptx, cubin, log = library.compile(source, target, [*options, real, ptxas])
    opaque, _, _ = library.compile(source, target, [*options, virtual, OPAQUE])
    return _cuda(target, f"NVRTC {library.version}", ptx, opaque, cubin, log)


class _Nvrtc:
    """The few calls of libnvrtc that are needed, through ctypes."""

    def __init__(self, path: Path) -> None:
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)  # found by name, not beside the library
        self.lib = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: Source, target: str, options: list[str]) -> tuple[str, bytes, str]:
        """Return (PTX, cubin, log); the cubin is empty for a virtual architecture."""
        program = ctypes.c_void_p()
        text, name = source.text.encode(), source.name.encode()
        made = self.lib.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
        if made:
            raise K3Error(target, got=f"NVRTC error {made}", need="a program")
        try:
            array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            failed = self.lib.nvrtcCompileProgram(program, len(options), array)
            log = self._get(program, "ProgramLog").decode(errors="replace").rstrip("\0")
            if failed:
                raise _compile_error(source, target, log)
            ptx = self._get(program, "PTX").decode().rstrip("\0")
            return ptx, self._get(program, "CUBIN"), log
        finally:
            self.lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.lib, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


_PTXAS_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


def _cuda(target: str, compiler: str, ptx: str, opaque: str, cubin: bytes, log: str) -> Compiled:
    sizes = function_sizes(cubin)
    kernels = []
    for name, stack, stores, loads, registers, rest in _PTXAS_ENTRY.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        kernels.append(
            Kernel(
                name=name,
                registers=int(registers),
                spills=int(stores) + int(loads),
                scalar_spills=0,
                stack_bytes=int(stack),
                shared_bytes=int(shared.group(1)) if shared else 0,
                code_bytes=sizes[name],
            )
        )
    findings = gpu_text.ptx_findings(ptx) + gpu_text.ptx_contractions(opaque)
    return _compiled(target, compiler, kernels, findings, cubin, ptx)


# ---- HIP ----------------------------------------------------------------------------------------


def clang(source: Source, target: str, flags: tuple[str, ...] = HIP_FLAGS) -> Compiled:
    """Compile with clang and lld, without ROCm: assembly, code object, and IR for the fma check."""
    arch = target.partition(":")[2]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "x.hip").write_text(source.text)
        command = [
            _CLANG, "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpulib",
            "-nogpuinc", f"--offload-arch={arch}", "-O3", "-std=c++17", "-Wall",
            "-Wno-unused-function", *HIP_LOOP_FLAGS, *flags, str(base / "x.hip"), "-o",
        ]  # fmt: skip
        _call_both(
            [*command, str(base / "x.hsaco"), "-save-temps=obj"],
            [*command, str(base / "x.ll"), "-S", "-emit-llvm", OPAQUE],
            source, target,
        )  # fmt: skip
        (saved,) = base.glob("*.s")
        assembly, ir = saved.read_text(), (base / "x.ll").read_text()
        code = (base / "x.hsaco").read_bytes()
    version = _version([_CLANG, "--version"], r"version ([\d.]+)")
    findings = gpu_text.gcn_findings(assembly) + gpu_text.ir_findings(ir)
    kernels = _hip_kernels(assembly, function_sizes(code))
    return _compiled(target, f"clang {version}", kernels, findings, code, assembly)


def _hip_kernels(assembly: str, sizes: dict[str, int]) -> list[Kernel]:
    """Read the kernels' metadata, which the assembly carries as YAML."""
    _, _, metadata = assembly.partition("amdhsa.kernels:")
    # What a called function saves is in no kernel's count; any kernel may call it.
    called = len(re.findall(r"scratch_store_\w+ .*Spill$", assembly, re.MULTILINE))
    kernels = []
    for entry in metadata.split("- .agpr_count:")[1:]:
        field = dict(re.findall(r"^    \.(\w+): +(\S+)", entry, re.MULTILINE))
        kernels.append(
            Kernel(
                name=field["name"],
                registers=int(field["vgpr_count"]),
                spills=int(field["vgpr_spill_count"]) + called,
                scalar_spills=int(field["sgpr_spill_count"]),
                stack_bytes=int(field["private_segment_fixed_size"]),
                shared_bytes=int(field["group_segment_fixed_size"]),
                code_bytes=sizes[field["name"]],
            )
        )
    return kernels


# ---- shared -------------------------------------------------------------------------------------


def _compiled(
    target: str, compiler: str, kernels: list[Kernel], findings: list[str], code: bytes, text: str
) -> Compiled:
    if not kernels:
        raise K3Error(target, got="no kernel in the compiler's report", need="at least one")
    ordered = tuple(sorted(kernels, key=lambda kernel: kernel.name))
    return Compiled(target, compiler, ordered, tuple(findings), code, text)


def _call(command: list[str], source: Source, target: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    if done.returncode != 0:
        raise _compile_error(source, target, log)
    if "warning:" in log or "warning #" in log:
        raise _compile_error(source, target, log)
    return log


def _call_both(first: list[str], second: list[str], source: Source, target: str) -> None:
    """Call twice at once: with every op in one loop a compilation takes most of a minute."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(_call, command, source, target) for command in (first, second)]
        for call in calls:
            call.result()


def _compile_error(source: Source, target: str, log: str) -> K3Error:
    """Keep the lines that say what and where; compilers also print whole expanded macros."""
    lines = [
        line.strip() for line in log.splitlines() if re.search(r"\b(error|warning|fatal)\b", line)
    ]
    shown = "; ".join(line[:200] for line in lines[:4]) or log.strip()[:400]
    more = f" (and {len(lines) - 4} more)" if len(lines) > 4 else ""
    return K3Error(f"{target} {source.name}", got=shown + more, need="no error and no warning")


def _version(command: list[str], pattern: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    match = re.search(pattern, done.stdout)
    return match.group(1) if match else "?"


def function_sizes(elf: bytes) -> dict[str, int]:
    """Return name -> bytes of every function symbol of a 64-bit little-endian ELF file.

    Raises: K3Error for another file. Source: the ELF specification, symbol table (SHT_SYMTAB).
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise K3Error("object", got=elf[:6].hex(), need="a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_bytes) for i in range(count)
    ]
    sizes = {}
    for _, kind, _, _, offset, size, link, _, _, each in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for at in range(offset, offset + size, each):
            name, info, _, _, _, length = struct.unpack_from("<IBBHQQ", elf, at)
            if info & 15 == 2:  # STT_FUNC
                start = names + name
                sizes[elf[start : elf.index(b"\0", start)].decode()] = length
    return sizes

"""What the words of the protocol are as instructions of both vendors, and that each is there.

tests/protocol/test_source.py holds the interpreter's text to the explored programs, word by word;
here each word of a vendor's dialect, compiled alone, is the instructions that the memory models ask
for: PTX ISA, "Memory Consistency Model"; LLVM, "User Guide for AMDGPU Backend", "Memory Model
GFX942". A compiler that is absent is NOT RUN.
"""

from __future__ import annotations

import re

import pytest

from k3tool.runtime import gpu_source
from tests.kernels.conftest import ROOT
from tests.kernels.test_compile_gpu import compiler_for

TARGETS = ("cuda:sm_90a", "hip:gfx942", "hip:gfx950")
DEVICE, SYSTEM = "K3_DEVICE_SCOPE", "K3_SYSTEM_SCOPE"
WORDS = {
    "retire": "K3_RETIRE(out);", "sync": "K3_SYNC(out);", "pause": "k3_pause();",
    "poll_device": f"*out = k3_poll(p, {DEVICE});", "poll_system": f"*out = k3_poll(p, {SYSTEM});",
    "look_device": f"*out = k3_look(p, {DEVICE});", "look_system": f"*out = k3_look(p, {SYSTEM});",
    "acquire_device": f"k3_acquire({DEVICE});", "acquire_system": f"k3_acquire({SYSTEM});",
    "add_release": "k3_add_release(p, n);", "release_system": "k3_release_system();",
    "add_system": "k3_add_system(p, n);", "take": "*out = k3_take(p);",
    "count_out": "*out = k3_count_out(p);",
    "swap_zero_device": f"*out = k3_swap_zero(p, n, {DEVICE});",
    "swap_zero_system": f"*out = k3_swap_zero(p, n, {SYSTEM});",
    "clock": "*out = k3_clock();", "add64": "k3_add64((uint64_t *)p, n);",
}  # fmt: skip
HIP_WORDS = {
    "domain": "*out = k3_domain();", "domain_count": "*out = k3_domain_count(p);",
    "domain_open": "k3_domain_open(p);", "domain_is_open": "*out = k3_domain_is_open(p);",
    "domain_acquire": "k3_domain_acquire();",
}  # fmt: skip
BARRIER = ("bar.sync",)
CUDA = {
    "retire": BARRIER, "sync": BARRIER, "pause": (),
    "poll_device": ("ld.acquire.gpu.global.u32",), "poll_system": ("ld.acquire.sys.global.u32",),
    "look_device": ("ld.relaxed.gpu.global.u32",), "look_system": ("ld.relaxed.sys.global.u32",),
    "acquire_device": (), "acquire_system": (),  # the polls do
    "add_release": ("red.release.gpu.global.add.u32",), "release_system": ("fence.acq_rel.sys",),
    "add_system": ("red.relaxed.sys.global.add.u32",),
    "take": ("atom.relaxed.gpu.global.add.u32",), "count_out": ("atom.acq_rel.gpu.global.add.u32",),
    "swap_zero_device": ("atom.acq_rel.gpu.global.cas.b32",),
    "swap_zero_system": ("atom.acq_rel.sys.global.cas.b32",),
    "clock": ("mov.u64 %globaltimer",), "add64": ("atom.global.add.u64",),
}  # fmt: skip
# sc0 sc1: system. sc1: device. A read-modify-write has sc0 where it returns, and sc1 where its
# scope is the system.
WAIT = "s_waitcnt vmcnt(0)"
BACK, BACK_SYSTEM = ("buffer_wbl2 sc1", WAIT), ("buffer_wbl2 sc0 sc1", WAIT)
DROP, DROP_SYSTEM = ("buffer_inv sc1", WAIT), ("buffer_inv sc0 sc1", WAIT)
HIP = {
    "retire": (WAIT, "s_barrier"), "sync": ("s_barrier",), "pause": ("s_sleep 8",),
    "poll_device": ("global_load_dword sc1", WAIT),
    "poll_system": ("global_load_dword sc0 sc1", WAIT),
    "look_device": ("global_load_dword sc1", WAIT),
    "look_system": ("global_load_dword sc0 sc1", WAIT),
    "acquire_device": DROP, "acquire_system": DROP_SYSTEM,
    "add_release": (*BACK, "global_atomic_add"), "release_system": BACK_SYSTEM,
    "add_system": ("global_atomic_add sc1",), "take": ("global_atomic_add sc0", WAIT),
    "count_out": (*BACK, "global_atomic_add sc0", WAIT, *DROP),
    "swap_zero_device": (*BACK, "global_atomic_cmpswap sc0", WAIT, *DROP),
    "swap_zero_system": (*BACK_SYSTEM, "global_atomic_cmpswap sc0 sc1", WAIT, *DROP_SYSTEM),
    "clock": ("s_memrealtime",), "add64": ("global_atomic_add_x2",),
    "domain": ("s_getreg_b32 hwreg(HW_REG_XCC_ID, 0, 4)",),
    "domain_count": ("global_atomic_add sc0", WAIT), "domain_open": ("global_store_dword sc1",),
    "domain_is_open": ("global_load_dword sc1", WAIT),
    "domain_acquire": ("buffer_inv sc0", WAIT),
}  # fmt: skip
# One change each to a dialect's text, and the words that it makes others.
CUDA_MISTAKES = {
    "ld.relaxed.gpu": ("ld.volatile", "look_device"),
    "ld.acquire.gpu": ("ld.relaxed.gpu", "poll_device"),
    "ld.acquire.sys": ("ld.acquire.gpu", "poll_system"),
    "red.release.gpu": ("red.relaxed.gpu", "add_release"),
    "fence.acq_rel.sys": ("fence.acq_rel.gpu", "release_system"),
    "red.relaxed.sys": ("red.relaxed.gpu", "add_system"),
    "atom.acq_rel.gpu.global.add": ("atom.relaxed.gpu.global.add", "count_out"),
    "atom.acq_rel.sys": ("atom.acq_rel.gpu", "swap_zero_system"),
    "#define K3_SYNC(c) ((void)(c), __syncthreads())": ("#define K3_SYNC(c) ((void)(c))", "retire"),
}
HIP_MISTAKES = {
    "K3_FN void k3_drain(void) { __builtin_amdgcn_s_waitcnt(0x0f70); }": (
        "K3_FN void k3_drain(void) {}", "retire add_release acquire_device domain_acquire"),
    '    if (scope == K3_SYSTEM_SCOPE) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");\n    else': (
        "   ", "release_system"),
    '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent")': (
        '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")', "acquire_device count_out"),
    'asm volatile("buffer_inv sc0" ::: "memory");': ("", "domain_acquire"),
    "s_getreg(20 | (3 << 11))": ("s_getreg(20 | (2 << 11))", "domain"),
    "__hip_atomic_store(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)": (
        "(*p = 1u)", "domain_open"),
    "n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM": (
        "n, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT", "add_system"),
}  # fmt: skip
_PTX = re.compile(r"^\s*((?:ld|st|atom|red|fence|membar|bar)[.\w]*|mov\.u64)\s*([^;]*);", re.M)
_SCALAR = "barrier|sleep|memrealtime|getreg_b32|waitcnt"
_GCN = re.compile(rf"^\s+((?:buffer|global|flat)_\w+|s_(?:{_SCALAR})\b)([^\n;]*)", re.M)


def expected(target: str) -> dict[str, tuple[str, ...]]:
    return CUDA if target.startswith("cuda") else HIP


def words_of(target: str, edits: dict[str, str] | None = None) -> dict[str, tuple[str, ...]]:
    """Compile every word of a target's dialect, and return its instructions."""
    vendor = target.partition(":")[0]
    arguments = "(uint32_t *p, uint32_t n, uint64_t *out)"
    kernels = "".join(
        f'extern "C" __global__ void t_{name}{arguments} {{ {text} }}\n'
        for name, text in (WORDS | (HIP_WORDS if vendor == "hip" else {})).items()
    )
    source = gpu_source.expand(f'#include "k3.h"\n{kernels}', "words", vendor)
    text = source.text
    for old, new in (edits or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    compiled = compiler_for(target)(gpu_source.Source("words", text), target).text
    read = ptx_words if vendor == "cuda" else gcn_words
    found = {}
    for name in expected(target):
        begin = re.search(rf"\bt_{name}(?:\(|:)", compiled)
        assert begin is not None, name
        rest = compiled[begin.end() :]
        found[name] = read(rest[: re.search(r"^\s*(?:ret;|s_endpgm)", rest, re.M).start()])
    return found


def ptx_words(text: str) -> tuple[str, ...]:
    """Return what touches memory or clocks, but for parameters and the plain store of a result."""
    found = []
    for name, operands in _PTX.findall(text):
        if name == "mov.u64":
            found += ["mov.u64 %globaltimer"] if "%globaltimer" in operands else []
        elif not name.startswith(("ld.param", "st.global.u", "st.global.b")):
            found.append(name)
    return tuple(found)


def gcn_words(text: str) -> tuple[str, ...]:
    """Return the same, and waits for memory's answers; registers are left out."""
    found = []
    for name, operands in _GCN.findall(text):
        kept = " ".join(word for word in operands.split() if word in {"sc0", "sc1", "nt"})
        if name == "s_waitcnt":
            found += [WAIT] if "vmcnt(0)" in operands else []
        elif name == "s_getreg_b32":
            found.append(f"{name} {operands.partition(',')[2].strip()}")
        elif name == "s_sleep":
            found.append(f"{name} {operands.strip()}")
        elif kept or name not in {"global_store_dword", "global_store_dwordx2"}:
            found.append(f"{name} {kept}".strip())
    return tuple(found)


@pytest.mark.parametrize("target", TARGETS)
def test_each_word_is_the_instructions_that_the_memory_model_asks_for(target: str) -> None:
    assert words_of(target) == expected(target)


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_every_word_of_the_protocol_is_here(vendor: str) -> None:
    text = (ROOT / f"kernels_{vendor}" / "dialect.h").read_text()
    _, _, protocol = text.partition("/* ---- for kernels_common/simt_interp.h")
    named = set(re.findall(r"^K3_FN \w+ k3_(\w+)\(", protocol, re.M))
    named -= {"drain", "block_retire", "release", "block_add"}  # of others; of shared memory
    assert named <= {word.removesuffix("_device") for word in expected(f"{vendor}:")}


def changed_by(target: str, mistakes: dict[str, tuple[str, str]]) -> set[str]:
    """Return the words that are not what they should be."""
    got = words_of(target, {old: new for old, (new, _) in mistakes.items()})
    return {name for name, words in got.items() if words != expected(target)[name]}


def test_control_weaker_words_of_cuda_are_found() -> None:
    """All at once, which is one word each, and the barrier two."""
    wanted = {word for _, word in CUDA_MISTAKES.values()} | {"sync"}
    assert changed_by(TARGETS[0], CUDA_MISTAKES) == wanted


@pytest.mark.parametrize("mistake", HIP_MISTAKES)
def test_control_a_weaker_word_of_hip_is_found(mistake: str) -> None:
    wanted = set(HIP_MISTAKES[mistake][1].split())
    assert wanted <= changed_by(TARGETS[1], {mistake: HIP_MISTAKES[mistake]})

"""Every op body through every GPU compiler, and the text rules against sources that break them.

A compiler that is absent is NOT RUN. No GPU runs here; see test_simt_leaves.py and
test_simt_ops.py for what the bodies compute.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.compile import compile_plan
from k3tool.errors import K3Error, TargetError
from k3tool.isa.emit import emit
from k3tool.isa.table import ALL_PHASES, SPECS, Op
from k3tool.model.config import K3Config
from k3tool.runtime import compile_gpu, gpu_compilers, gpu_object, gpu_source
from k3tool.runtime.gpu_compilers import CUDA_FLAGS, HIP_FLAGS
from k3tool.runtime.gpu_object import check_object, read_identity
from k3tool.targets import BUILDS, get_build
from k3tool.targets import TARGETS as TARGET_TABLE

SMALL = {"cuda": "cuda:sm_90a", "hip": "hip:gfx950"}
LAUNCH = 'extern "C" __global__ void __launch_bounds__(K3_BLOCK_LANES) '


def compiler_for(target):
    found = gpu_compilers.find_compiler(target)
    if found is None:
        pytest.skip(f"NOT RUN: {target} (needs {gpu_compilers.needs(target)})")
    return found


def program(target):
    """Return a small model's streams for a target."""
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    plan = compile_plan(config, tp=1, target=target, workgroups=8, chunk=4, batch=1, ctx=256)
    return emit(plan, target, "plan.h5")


def compile_small(vendor, body, flags=None, compiler=None):
    """Compile one kernel ``k(const float *x, const float *y, float *z)`` with `body`."""
    target = SMALL[vendor]
    compiler = compiler or compiler_for(target)
    text = f'#include "k3.h"\n#include "k3_math.h"\n{LAUNCH}'
    text += (
        f"k(const float *x, const float *y, float *z) {{ const uint32_t i = K3_LANE; {body} }}\n"
    )
    source = gpu_source.expand(text, "small", vendor)
    return compiler(source, target) if flags is None else compiler(source, target, flags)


# ---- the product ----


@pytest.fixture(scope="module")
def outcomes():
    """Return ``of(target)``, compiling once the build of each target that holds most.

    `make compile-gpu` compiles the others, which is minutes more.
    """
    made = {}

    def of(target):
        compiler_for(target)
        if target not in made:
            made[target] = [
                compile_gpu._compile(target, phases, ops, BUILDS[target, phases[0]][0])
                for phases, ops in gpu_source.builds(compile_gpu.all_ops(target)).items()
            ]
        return made[target]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("target", SMALL.values())
def test_every_interpreter_compiles(outcomes, target):
    kind = target.partition(":")[0]
    found = outcomes(target)
    for phase in ALL_PHASES:
        sources = [outcome.source for outcome in found if phase in outcome.phases]
        assert sources == [BUILDS[target, phase][0].source]
    for outcome in found:
        assert outcome.status == "PASS", outcome.detail
        assert outcome.ops == tuple(
            spec.name
            for _, spec in sorted(SPECS.items())
            if kind in spec.targets and set(outcome.phases) <= set(spec.phases)
        )
        kernels = {kernel.name: kernel for kernel in outcome.compiled.kernels}
        assert set(kernels) == {"k3_interp", "k3_canary", "k3_barrier"}
        assert kernels["k3_interp"].spills == 0
        assert kernels["k3_interp"].code_bytes > 50_000  # dozens of bodies, not an emptied kernel
        assert 40_000 < kernels["k3_interp"].shared_bytes < 48 << 10  # a tile, the block's state
        json.loads(compile_gpu._as_json(outcome))


@pytest.mark.slow
@pytest.mark.parametrize("target", SMALL.values())
def test_the_text_is_really_read(outcomes, target):
    """The clean verdict is of a text in which the rules' subjects occur."""
    subjects = {
        "cuda": [
            "fma.rn.ftz.f32",
            "div.rn.ftz.f32",
            "sqrt.rn.ftz.f32",
            "shfl.sync",
            "ld.acquire.gpu",
            "ld.acquire.sys",
            "red.release.gpu",
            "fence.acq_rel.sys",
            "red.relaxed.sys",
        ],
        "hip": [
            "v_pk_fma_f32",
            "v_div_fixup_f32",
            "v_rsq_f32",
            "v_cmp_class_f32",
            "row_ror:8",
            "buffer_wbl2 sc1",
            "buffer_wbl2 sc0 sc1",
            "buffer_inv sc1",
            "buffer_inv sc0 sc1",
            "buffer_inv sc0\n",
            "HW_REG_XCC_ID, 0, 4",
            "s_waitcnt vmcnt(0)",
        ],
    }
    text = outcomes(target)[0].compiled.text
    for subject in subjects[target.partition(":")[0]]:
        assert subject in text, subject


def test_phases_of_equal_ops_share_a_build_and_others_do_not():
    shared = gpu_source.builds({"decode": ("ADD",), "prefill": ("ADD",)})
    assert shared == {("decode", "prefill"): ("ADD",)}
    apart = gpu_source.builds({"decode": ("ADD",), "prefill": ("MUL",)})
    assert apart == {("decode",): ("ADD",), ("prefill",): ("MUL",)}


def test_only_the_given_ops_are_in_the_source():
    text = gpu_source.interpreter("hip:gfx950", ("decode",), ("ADD",)).text
    assert "X(ADD, add)" in text
    assert "k3_op_add(" in text
    assert "k3_op_mla_heads(" not in text


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_only_the_given_ops_are_in_the_object(vendor):
    target = SMALL[vendor]
    compiler_for(target)
    (outcome,) = compile_gpu.compile_target(target, {"decode": ("ADD", "MUL")})
    assert outcome.status == "PASS", outcome.detail
    found = read_identity(outcome.compiled.object_bytes, "an object")
    assert (found.ops, found.phases) == ({int(Op.ADD), int(Op.MUL)}, ("decode",))
    kernels = {kernel.name: kernel for kernel in outcome.compiled.kernels}
    assert kernels["k3_interp"].code_bytes < 60_000  # all ops: ten times that
    with pytest.raises(TargetError, match=r"opcodes: got no [A-Z]"):
        check_object(found, program(target), "decode")


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_control_an_object_that_says_otherwise_is_a_failure(monkeypatch, vendor):
    """The compiler's own output, but another argument layout expected: no PASS."""
    target = SMALL[vendor]
    compiler_for(target)
    changed = np.dtype([("insts", "<u8")])
    monkeypatch.setattr(gpu_object, "LAUNCH_DTYPE", changed)
    (outcome,) = compile_gpu.compile_target(target, {"decode": ("ADD",)})
    assert (outcome.status, outcome.exit_code) == ("FAIL", 1)
    assert "kernel argument: got entries at 8, need its end at 8" in outcome.detail[0]


def test_pages_in_shared_memory_are_for_programs_that_attend_by_pages():
    for target, phase in BUILDS:
        ordinary, *others = (
            get_build(target, phase, ("ADD", *ops)) for ops in ((), ("MLA_PAGES",), ("MLA_ATTEND",))
        )
        (flash,) = set(others)
        assert (ordinary.ops, flash.ops) == ((), ("MLA_PAGES", "MLA_ATTEND"))
        assert (ordinary.lanes, ordinary.kernel) == (flash.lanes, flash.kernel)
        assert "#define K3_FLASH" not in gpu_source.interpreter(target, (phase,), ("ADD",)).text
        text = gpu_source.interpreter(target, (phase,), ("MLA_PAGES",)).text
        assert text.index("#define K3_FLASH") < text.index("#ifdef K3_FLASH")


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_an_object_for_pages_says_so(vendor):
    target = SMALL[vendor]
    compiler_for(target)
    (outcome,) = compile_gpu.compile_target(target, {"decode": ("MLA_PAGES",)})
    assert (outcome.status, outcome.detail) == ("PASS", ())
    found = read_identity(outcome.compiled.object_bytes, "an object")
    assert found.capability & gpu_object.FLASH
    ordinary = get_build(target, "decode")
    with pytest.raises(TargetError, match="capability: got pages in shared memory, need "):
        gpu_object.check_build(found, target, ("decode",), ("MLA_PAGES",), ordinary)


def test_every_target_has_a_build_for_every_phase():
    named = {name for name, target in TARGET_TABLE.items() if target.family != "cpu"}
    assert {(name, phase) for name in named for phase in ALL_PHASES} == set(BUILDS)
    with pytest.raises(TargetError, match="cpu for decode"):
        get_build("cpu", "decode")


# ---- a body that is missing, a compiler that is absent ----


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_a_missing_body_is_named(monkeypatch, vendor):
    compiler_for(SMALL[vendor])
    whole = gpu_source.op_includes

    def without_add(names):
        return whole(names).replace('#include "ops/add.h"\n', "")

    monkeypatch.setattr(gpu_source, "op_includes", without_add)
    outcome = compile_gpu.compile_target(SMALL[vendor], {"decode": ("ADD", "MUL")})[0]
    assert (outcome.status, outcome.exit_code) == ("FAIL", 1)
    assert "k3_op_add" in outcome.detail[0]
    assert "\n" not in outcome.detail[0]


def test_an_absent_compiler_is_not_run(monkeypatch, capsys):
    monkeypatch.setattr(gpu_compilers.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpu_compilers, "nvrtc_library", lambda: None)
    assert compile_gpu.main([]) == 5
    assert compile_gpu.main(["--allow-missing"]) == 5  # nothing was compiled
    lines = capsys.readouterr().out.splitlines()
    need = "(needs apt package clang-22 lld-22)"
    assert f"NOT RUN: hip:gfx950 decode=prefill of kernels_hip/interp.hip {need}" in lines
    assert all(line.startswith("NOT RUN: ") for line in lines)


def test_gravest_exit_code():
    def outcome(code, compiled=None):
        return compile_gpu.Outcome("t", ("decode",), "x.cu", "", code, (), (), "", compiled)

    done = outcome(0, compiled=object())
    assert compile_gpu.exit_code([done], False) == 0
    assert compile_gpu.exit_code([done, outcome(5)], False) == 5
    assert compile_gpu.exit_code([done, outcome(5)], True) == 0
    assert compile_gpu.exit_code([done, outcome(5), outcome(1)], True) == 1
    assert compile_gpu.exit_code([outcome(1), outcome(4)], False) == 4


def test_unknown_target_is_refused():
    with pytest.raises(TargetError, match="cuda:sm_90a or cuda:sm_100a or hip"):
        gpu_compilers.find_compiler("cuda:sm_10")


def test_includes_are_found_or_named():
    with pytest.raises(TargetError, match=r"nowhere\.h"):
        gpu_source.expand('#include "nowhere.h"\n', "x", "cuda")
    with pytest.raises(TargetError, match=r"<math\.h>"):
        gpu_source.expand("#include <math.h>\n", "x", "hip")
    once = gpu_source.expand('#include "leaves.h"\n#include "k3_math.h"\n', "x", "cuda").text
    assert once.count("#define K3_MATH_H") == 1
    assert "#include" not in "\n".join(s for s in once.splitlines() if not s.startswith((" ", "/")))


def test_an_edited_header_changes_the_digest(tmp_path):
    header = tmp_path / "h.h"
    digests = []
    for text in ("int a;\n", "int b;\n"):
        header.write_text(text)
        digests.append(gpu_source.expand(f'#include "{header}"\n', "x", "cuda").digest)
    assert digests[0] != digests[1]


# ---- controls: each forbidden thing is caught, and clean code is not ----

CLEAN = "z[i] = k3_fma(x[i], y[i], z[i]) + k3_sqrt(x[i]) / k3_exp(y[i]) * x[i];"


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_control_clean_code_passes(vendor):
    compiled = compile_small(vendor, CLEAN)
    assert compile_gpu.judge(compiled) == ()
    assert [kernel.name for kernel in compiled.kernels] == ["k"]


def cuda_flags(**changed):
    """CUDA_FLAGS with some values replaced, as in ``fmad="true"``."""
    flags = dict(flag[1:].split("=") for flag in CUDA_FLAGS)
    flags |= {name.replace("_", "-"): value for name, value in changed.items()}
    return tuple(f"-{name}={value}" for name, value in flags.items())


def without(flag):
    return tuple(f for f in HIP_FLAGS if f != flag)


CUDA_MISTAKES = {
    "contraction": ("z[i] = x[i] * y[i] + z[i];", cuda_flags(fmad="true"), "fma"),
    "subnormals live": (CLEAN, cuda_flags(ftz="false"), "does not flush"),
    "fast division": (CLEAN, cuda_flags(prec_div="false"), "approximate"),
    "fast square root": ("z[i] = sqrtf(x[i]);", cuda_flags(prec_sqrt="false"), "approximate"),
    "fast exp": ("z[i] = __expf(x[i]);", None, "approximate"),
    "fast reciprocal": ("z[i] = __frcp_rn(x[i]) + __fdividef(x[i], y[i]);", None, "approximate"),
    "rsqrt": ("z[i] = rsqrtf(x[i]);", None, "approximate"),
    "library tanh": ("z[i] = tanhf(x[i]);", None, "approximate"),
    "binary64": ("z[i] = (float)(x[i] * 0.1);", None, "not binary32"),
}
HIP_MISTAKES = {
    "contraction": (
        "z[i] = x[i] * y[i] + z[i];",
        (*without("-ffp-contract=off"), "-ffp-contract=fast"),
        "fast-math flag",
    ),
    "subnormals live": (CLEAN, without("-fgpu-flush-denormals-to-zero"), "does not flush"),
    "fast division": (
        CLEAN,
        (*without(HIP_FLAGS[2]), "-fno-hip-fp32-correctly-rounded-divide-sqrt"),
        "need not be correctly rounded",
    ),
    "fast math": (CLEAN, (*HIP_FLAGS, "-ffast-math"), "fast-math flag"),
    "fast exp": ("z[i] = __builtin_amdgcn_exp2f(x[i]);", None, "approximate"),
    "fast reciprocal": ("z[i] = __builtin_amdgcn_rcpf(x[i]);", None, "reciprocal outside"),
    "rsqrt": ("z[i] = __builtin_amdgcn_rsqf(x[i]);", None, "approximate"),
    "binary64": ("z[i] = (float)(x[i] * 0.1);", None, "not binary32"),
    "a write-back that nothing waits for": (
        'asm volatile("buffer_wbl2 sc1" ::: "memory"); z[i] = x[i];',
        None,
        "buffer_wbl2 sc1, then global_",
    ),
    "an invalidation that one way does not wait for": (
        'asm volatile("buffer_inv sc1" ::: "memory"); if (x[0] > 0.0f) k3_drain(); z[i] = x[i];',
        None,
        "buffer_inv sc1, then global_",
    ),
    "hidden fma": ("z[i] = __builtin_fmaf(x[i], y[i], z[i]);", None, "does not write"),
}


@pytest.mark.parametrize("mistake", CUDA_MISTAKES)
def test_control_cuda_mistakes_are_caught(mistake):
    body, flags, message = CUDA_MISTAKES[mistake]
    assert message in " ".join(compile_small("cuda", body, flags).findings)


@pytest.mark.parametrize("mistake", HIP_MISTAKES)
def test_control_hip_mistakes_are_caught(mistake):
    body, flags, message = HIP_MISTAKES[mistake]
    assert message in " ".join(compile_small("hip", body, flags).findings)


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_control_a_spill_is_caught(monkeypatch, vendor):
    """A hundred values alive across a barrier in a kernel that may use few registers."""
    few = {
        "cuda": "__launch_bounds__(1024, 2) ",
        "hip": "__launch_bounds__(512) __attribute__((amdgpu_num_vgpr(24))) ",
    }
    monkeypatch.setitem(globals(), "LAUNCH", 'extern "C" __global__ void ' + few[vendor])
    body = (
        "float v[100]; K3_UNROLL for (int j = 0; j < 100; j++) v[j] = x[i + 512 * j];"
        "K3_SYNC(z); K3_UNROLL for (int j = 0; j < 100; j++) z[i * 100 + j] = v[99 - j];"
    )
    problems = compile_gpu.judge(compile_small(vendor, body))
    assert len(problems) == 1
    assert "spilled, need 0" in problems[0]


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_control_a_warning_is_an_error(vendor):
    with pytest.raises(K3Error, match="warning"):
        compile_small(vendor, "float unused; z[i] = i < 0u ? x[i] : y[i]; if (i = 3u) z[i] = 0.0f;")


def test_nvrtc_agrees_with_nvcc():
    if gpu_compilers.nvrtc_library() is None:
        pytest.skip("NOT RUN: NVRTC (needs PyPI package nvidia-cuda-nvrtc)")
    compiled = compile_small("cuda", CLEAN, compiler=gpu_compilers.nvrtc)
    assert compile_gpu.judge(compiled) == ()
    body, flags, message = CUDA_MISTAKES["contraction"]
    wrong = compile_small("cuda", body, flags, gpu_compilers.nvrtc)
    assert message in " ".join(wrong.findings)

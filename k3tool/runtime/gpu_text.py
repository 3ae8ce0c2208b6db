"""Read compiled GPU text for arithmetic that the contract forbids (numerics, rules 1 and 7).

The model would not notice a wrong compiler flag: results stay plausible. So the text is the test.
It is read too for what orders memory and cannot be seen to be missing: waits for caches.
Each function returns findings, one sentence each, and none when the text is clean. It does not know
which ops were compiled, and it cannot see what a GPU does with a clean instruction.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

# ---- PTX ----------------------------------------------------------------------------------------

_PTX_LINE = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:[.:][a-z0-9_:]+)*)\s+[^;]*;")
_PTX_ROUNDED = {"add", "sub", "mul", "div", "rcp", "sqrt", "fma"}
_PTX_COMPARED = {"setp", "set", "slct", "min", "max"}
_PTX_INEXACT = {"ex2", "lg2", "sin", "cos", "tanh", "rsqrt", "mad"}
_PTX_MOVES = {"mov", "ld", "st", "ldu", "selp", "shfl", "call", "ret", "bra"}


def ptx_findings(text: str) -> list[str]:
    """Return what is approximate, unflushed, contractible or not binary32 in PTX text."""
    return _unique(
        f"PTX line {number}: {name}: {reason}"
        for number, name in _ptx_instructions(text)
        if (reason := _ptx_reason(name.split(".")))
    )


def ptx_contractions(text: str) -> list[str]:
    """Return every fma in PTX compiled with the explicit ones hidden (K3_OPAQUE_FMA)."""
    return _unique(
        f"PTX line {number}: {name}: an fma that the source does not write"
        for number, name in _ptx_instructions(text)
        if name.split(".")[0] in {"fma", "mad"} and _is_float(name.split("."))
    )


def _ptx_instructions(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        match = _PTX_LINE.match(line)
        if match:
            yield number, match.group(1)


def _is_float(parts: list[str]) -> bool:
    return bool({"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"} & set(parts))


def _ptx_reason(parts: list[str]) -> str:
    base = parts[0]
    if "approx" in parts or "full" in parts:
        return "approximate"
    if base in _PTX_MOVES or not _is_float(parts):
        return ""
    if base in _PTX_INEXACT:
        return "approximate or contractible"
    if "f32" not in parts or ({"f64", "f16", "bf16"} & set(parts)):
        return "not binary32"
    if base in _PTX_ROUNDED and "rn" not in parts:
        return "no rounding modifier, so ptxas may contract it"
    if base in _PTX_ROUNDED | _PTX_COMPARED and "ftz" not in parts:
        return "does not flush subnormals"
    return ""


# ---- GCN ----------------------------------------------------------------------------------------

_GCN_LINE = re.compile(r"^\s+((?:v|s)_[a-z0-9_]+)")
_GCN_SUFFIX = re.compile(r"_(?:e32|e64|dpp|sdwa|e64_dpp)$")
# v_mad and v_mac round twice on paper and flush on their own; the others are approximate.
_GCN_FORBIDDEN = re.compile(
    r"v_(?:exp|log|sin|cos|exp_legacy|log_legacy|mad|mac|madak|madmk|mad_legacy)_f32"
    r"|v_(?:pk_)?(?:add|sub|subrev|mul|fma|fmac|mad|min|max|div_\w+|rcp|rsq|sqrt)_(?:f16|bf16|f64)"
    r"|v_(?:dot\w*|mfma\w*|smfmac\w*)"
)
# The correctly rounded division: its chain runs with subnormals on, between two mode switches.
_DIVISION_CHAIN = ["v_fma", "v_fmac", "v_mul", "v_fma", "v_fmac", "v_fma"]
_MODE_SWITCH = re.compile(r"s_setreg_imm32_b32 hwreg\(HW_REG_MODE, 4, 2\), (\d)")
_CACHE = re.compile(r"\s+buffer_(?:wbl2|inv)\b")
_CACHE_WAIT = re.compile(r"\s+s_waitcnt\b.*vmcnt\(0\)")
_BEHIND = re.compile(r"\s+(?:buffer|global|flat|scratch|ds|s_barrier|s_endpgm|s_setpc|s_swappc)")
_BRANCH = re.compile(r"\s+s_(c?)branch\w*\s+(\S+)")
_LABEL = re.compile(r"([.\w$]+):")
_KERNEL_MODE = re.compile(r"\.amdhsa_float_(denorm|round)_mode_32 (\d)")


def gcn_findings(text: str) -> list[str]:
    """Return what is approximate, unflushed or not binary32 in GCN assembly.

    v_rcp_f32 is allowed as the start of the division sequence and v_rsq_f32 or v_sqrt_f32 as that
    of the square root; each sequence ends in exactly one v_div_fixup_f32 or v_cmp_class_f32, so
    counts tell. v_rcp_iflag_f32 belongs to integer division, which corrects it exactly.
    """
    found = [
        f"GCN line {number}: {name}: approximate, contracted or not binary32"
        for number, name in _gcn_instructions(text)
        if _GCN_FORBIDDEN.fullmatch(name)
    ]
    count = Counter(name for _, name in _gcn_instructions(text))
    steps = {n: count[n] for n in ("v_rcp_f32", "v_div_fmas_f32", "v_div_fixup_f32")}
    if len(set(steps.values())) > 1:
        found.append(f"GCN: a reciprocal outside a division: {steps}")
    roots = count["v_rsq_f32"] + count["v_sqrt_f32"]
    if roots > count["v_cmp_class_f32"]:
        found.append(f"GCN: {roots} square roots, {count['v_cmp_class_f32']} finished")
    return _unique(found + _mode_findings(text) + _cache_findings(text))


def _gcn_instructions(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        match = _GCN_LINE.match(line)
        if match:
            yield number, _GCN_SUFFIX.sub("", match.group(1))


def _mode_findings(text: str) -> list[str]:
    """Kernels start with flushing and round-to-nearest; only a division's chain runs without."""
    found: list[str] = []
    chain: list[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        kernel = _KERNEL_MODE.search(line)
        if kernel and kernel.group(2) != "0":
            found.append(f"GCN line {number}: kernel starts with {kernel.group(0).strip()}")
        switch = _MODE_SWITCH.search(line)
        if switch and switch.group(1) == "3":
            chain = []
        elif switch:
            if chain != _DIVISION_CHAIN:
                found.append(f"GCN line {number}: not a division between mode switches: {chain}")
            chain = None
        elif chain is not None:
            chain += re.findall(r"\b(v_(?:pk_)?(?:fma|fmac|mul|add|sub)\w*?)_f32", line)
    if chain is not None:
        found.append("GCN: subnormals stay on after a division")
    return found


def _cache_findings(text: str) -> list[str]:
    """A write-back or an invalidation is under way until it is waited for.

    What comes behind it overtakes it: a counter its data. Clang before 23 leaves the wait out.
    """
    lines = [line.partition(";")[0] for line in text.splitlines()]
    labels = {match.group(1): at for at, line in enumerate(lines) if (match := _LABEL.match(line))}
    return [
        f"GCN line {at + 1}: {line.strip()}, then {behind}: nothing waits for it"
        for at, line in enumerate(lines)
        if _CACHE.match(line) and (behind := _overtakes(lines, labels, at + 1))
    ]


def _overtakes(lines: list[str], labels: dict[str, int], start: int) -> str:
    """Return what some way from a line on comes to before a wait for all of memory's answers."""
    ways, seen = [start], set[int]()
    while ways:
        at = ways.pop()
        if at in seen or at >= len(lines) or _CACHE_WAIT.match(lines[at]):
            continue
        seen.add(at)
        if _BEHIND.match(lines[at]) and not _CACHE.match(lines[at]):
            return lines[at].split()[0]
        branch = _BRANCH.match(lines[at])
        if branch and branch.group(2) in labels:
            ways.append(labels[branch.group(2)])
        if branch is None or branch.group(1):
            ways.append(at + 1)
    return ""


# ---- LLVM IR ------------------------------------------------------------------------------------

_IR_FLAG = re.compile(
    r"\b(?:fadd|fsub|fmul|fdiv|frem|fneg|fcmp|call|select|phi)\s+(?:fast|contract|reassoc|arcp|afn)\b"
)
_IR_FUSED = re.compile(r"@llvm\.(?:fma|fmuladd)\.|amdgcn\.fmad")
_IR_APPROXIMATE = re.compile(
    r"@llvm\.(?:exp|exp2|exp10|log|log2|log10|pow|sin|cos|tan)\.|@llvm\.amdgcn\.(?:rcp|rsq|sqrt|exp2|log|sin|cos|fdot|sdot|mfma)"
)
_IR_TYPE = re.compile(r"\b(?:fadd|fsub|fmul|fdiv|frem)\s+(?:<\d+ x )?(?:double|half|bfloat)\b")
_IR_FLUSH = '"denormal-fp-math-f32"="preserve-sign,preserve-sign"'


def ir_findings(text: str) -> list[str]:
    """Return what IR, compiled with the explicit fma hidden, asks its backend to do inexactly."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("attributes") and '"target-cpu"' in line and _IR_FLUSH not in line:
            found.append(f"IR line {number}: a function that does not flush subnormals")
        if line.startswith(("attributes", "declare")):
            continue
        reason = _ir_reason(line)
        if reason:
            found.append(f"IR line {number}: {line.strip()[:90]}: {reason}")
    return _unique(found)


def _ir_reason(line: str) -> str:
    if _IR_FUSED.search(line):
        return "an fma that the source does not write"
    if _IR_FLAG.search(line):
        return "fast-math flag"
    if "!fpmath" in line:
        return "division or square root that need not be correctly rounded"
    if _IR_APPROXIMATE.search(line):
        return "approximate"
    return "not binary32" if _IR_TYPE.search(line) else ""


def _unique(findings: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(findings))

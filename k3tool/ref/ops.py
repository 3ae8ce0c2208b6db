"""REFERENCE: the float64 meaning of every op of the table, total over it.

A function takes the row's operands (all but "out") by position and, by keyword, those of the row's
parameters that mean something (a block count or page length only fixes an order of summation), the
record's ``unit_cols`` and the ``step``. It returns the result (a tuple of them where the row has
several), or (result, new state) where the row has both an "out" and a "state" (a tuple of states
where it has several). Operands of a run of any length come as ``*``.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from k3tool.isa.op_spec import OpSpec
from k3tool.isa.table import READS_STATE, SPECS, Op
from k3tool.ref import dense, kda, mla, moe

Reference = Callable[..., Any]

REFERENCE: dict[Op, Reference] = {
    Op.NOP: dense.nop,
    Op.PART: dense.part,
    Op.DEQUANT_MXFP4: moe.dequant_mxfp4,
    Op.MOE_UP: moe.moe_up_mxfp4,
    Op.MOE_DOWN: moe.moe_down_mxfp4,
    Op.MOE_DOWN_EACH: moe.moe_down_each,
    Op.MOE_COMBINE: moe.moe_combine,
    Op.GEMV_REDUCED: dense.gemv_bf16,
    Op.ARGMAX_ALL: dense.argmax_all,
    Op.EMBED_BF16: dense.embed_bf16,
    Op.EMBED_PUSH: dense.embed_push,
    Op.GEMV_BF16: dense.gemv_bf16,
    Op.GEMV_BF16_BLOCKS: dense.gemv_bf16_blocks,
    Op.NORM_GEMV_BF16: dense.norm_gemv_bf16,
    Op.GLU_BF16: dense.glu_bf16,
    Op.MIX_LINEARS_3: dense.mix_linears,
    Op.MIX_LINEARS_4: dense.mix_linears_headed,
    Op.MIX_LINEARS_6: dense.mix_linears,
    Op.SITU_GEMV_BLOCKS: dense.situ_gemv_blocks,
    Op.RMSNORM: dense.rmsnorm,
    Op.ATTN_RES: dense.attn_res,
    Op.ATTN_RES_NORM: dense.attn_res_norm,
    Op.BLOCK_PUSH: dense.block_push,
    Op.ADD: dense.add,
    Op.MUL: dense.mul,
    Op.SIGMOID: dense.sigmoid,
    Op.SILU: dense.silu,
    Op.SOFTCAP: dense.softcap,
    Op.SITU: dense.situ,
    Op.L2NORM: dense.l2norm,
    Op.SCALE: dense.scale,
    Op.HEAD_RMSNORM: dense.head_rmsnorm,
    Op.ATTN_PART: dense.attn_part,
    Op.ATTN_PARTS_8: dense.attn_parts_8,
    Op.SHORT_CONV: kda.short_conv,
    Op.CONV_SILU: kda.conv_silu,
    Op.KDA_DECAY: kda.kda_decay,
    Op.KDA_STEP: kda.kda_step,
    Op.KDA_CORE: kda.kda_core,
    Op.KDA_GATED_NORM: kda.kda_gated_norm,
    Op.KDA_HEADS: kda.kda_heads,
    Op.MLA_QLAT: mla.mla_qlat,
    Op.MLA_CACHE: mla.mla_cache,
    Op.MLA_ATTEND: mla.mla_attend,
    Op.MLA_UV: mla.mla_uv,
    Op.MLA_OUT_GATE: mla.mla_out_gate,
    Op.MLA_UV_GATE: mla.mla_uv_gate,
    Op.MLA_HEADS: mla.mla_heads,
    Op.MLA_QUERY: mla.mla_query,
    Op.MLA_PAGES: mla.mla_pages,
    Op.MLA_MERGE: mla.mla_merge,
    Op.ROUTER_TOPK: moe.router_topk,
    Op.MOE_UP_MXFP4: moe.moe_up_mxfp4,
    Op.MOE_GLU_MXFP4: moe.moe_glu_mxfp4,
    Op.MOE_DOWN_MXFP4: moe.moe_down_mxfp4,
    Op.MOE_GLU_TOPK: moe.moe_glu_topk,
    Op.MOE_DOWN_TOPK: moe.moe_down_topk,
    Op.ARGMAX: dense.argmax,
    Op.ARGMAX_FOLD: dense.argmax_fold,
    Op.ALL_REDUCE: dense.all_reduce,
    Op.ALL_REDUCE_ADD: dense.all_reduce_add,
    Op.ALL_GATHER: dense.all_gather,
    Op.REDUCE_GATHER: dense.reduce_gather,
    Op.REDUCE_GATHER_ADD: dense.reduce_gather_add,
}

# Beyond the row's own parameters a meaning may ask for these.
_CONTEXT = frozenset({"unit_cols", "step"})
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def operand_names(spec: OpSpec) -> tuple[str, ...]:
    """Return the names of what a meaning takes by position: every operand but "out"."""
    return tuple(operand.name for operand in spec.operands if operand.role != "out")


def written_states(spec: OpSpec) -> tuple[str, ...]:
    """Return the names of the state operands that the op writes."""
    if spec.op in READS_STATE:
        return ()
    return tuple(operand.name for operand in spec.operands if operand.role == "state")


def returns_state(spec: OpSpec) -> bool:
    """Return whether the meaning gives (result, new state) instead of one value."""
    has_out = any(operand.role == "out" for operand in spec.operands)
    return has_out and bool(written_states(spec))


def split_result(spec: OpSpec, result: Any) -> tuple[Any, dict[str, Any]]:
    """Return what a meaning gave as (result, new states by operand)."""
    names = written_states(spec)
    if not names:
        return result, {}
    value, states = result if returns_state(spec) else (result, result)
    return value, dict(zip(names, states if len(names) > 1 else (states,), strict=True))


@cache
def keyword_names(reference: Reference) -> tuple[str, ...]:
    """Return what a meaning takes by keyword."""
    parameters = tuple(inspect.signature(reference).parameters.values())
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def check(references: Mapping[Op, Reference]) -> None:
    """Assert that there is a meaning for every row and that it reads as the row does."""
    due = {op for op, spec in SPECS.items() if not spec.is_load}  # moving weights has no value
    assert set(references) == due, "every op that makes a value has one meaning"
    for op, reference in references.items():
        spec = SPECS[op]
        parameters = tuple(inspect.signature(reference).parameters.values())
        by_position = tuple(p.name for p in parameters if p.kind in _BY_POSITION)
        names = operand_names(spec)
        if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
            names = names[: len(by_position)]
        assert by_position == names, f"{spec.name}: {by_position}"
        known = {param.name for param in spec.params} | _CONTEXT | set(spec.flags)
        unknown = set(keyword_names(reference)) - known
        assert not unknown, f"{spec.name} has no parameter {sorted(unknown)}"


check(REFERENCE)

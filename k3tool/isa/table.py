"""THE table of ops: names, numbers, operands, parameters, slicing, placement, formula.

Everything that knows an op is derived from this table or checked against it: the e-graph's
constructors, the wire codec, the device record, the generated C header, the interpreters' dispatch,
the disassembler, the coverage gate and the manual. What a row may say is in ``op_spec``. Numerics are
elsewhere (``k3tool.ref`` has the meaning of each op, ``kernels_common/ops`` its bits).

Numbers are written here and never reused, because programs are stored in files for later: the
tempting ``enum.auto()`` would renumber every stored program when a row is inserted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import get_args

from k3tool.isa import scratch
from k3tool.isa.op_spec import (
    FLAG_SHIFT,
    N_HANDLES,
    N_PARAMS,
    RECORD_WORDS,
    WORD_PARAMS,
    WORD_UNIT_COLS,
    WORD_UNITS,
    WORD_WIDTH,
    Operand,
    OpSpec,
    Param,
    ParamKind,
    Placement,
    Role,
    Unit,
)

ISA_VERSION = 1
PAGE_TOKENS = 256  # the length of a softmax page: fixed in numerics version 1
LOAD_BLOCK_BYTES = 1 << 20  # what one read of a LOAD asks the device for
MOST_IO_QUEUES = 64  # of either kind: threads that sleep in a device
IO_PAGE_BYTES = 4096  # reads that bypass the page cache start and end on it, in file and memory
CANDIDATE_WORDS = 4  # argmax candidate: best f32, index u32, second best f32, 0


class Op(IntEnum):
    """Opcodes. Append only."""

    NOP = 0
    # weights on their way into memory, by I/O workers
    LOAD = 1
    EXPERT_FETCH = 2
    # names that only the graph has: `targets=()` in their rows; no plan and no stream may hold one
    PART = 4
    DEQUANT_MXFP4 = 5
    MOE_UP = 6
    MOE_DOWN = 7
    ARGMAX_ALL = 8
    MOE_DOWN_EACH = 9
    MOE_COMBINE = 10
    GEMV_REDUCED = 11
    # dense products
    EMBED_BF16 = 16
    GEMV_BF16 = 17
    GEMV_BF16_BLOCKS = 18
    NORM_GEMV_BF16 = 19
    GLU_BF16 = 20
    MIX_LINEARS_3 = 21
    MIX_LINEARS_4 = 22
    MIX_LINEARS_6 = 23
    SITU_GEMV_BLOCKS = 24
    EMBED_PUSH = 25
    # norms, residual mixing, elementwise
    RMSNORM = 32
    ATTN_RES = 33
    ATTN_RES_NORM = 34
    BLOCK_PUSH = 35
    ADD = 36
    MUL = 37
    SIGMOID = 38
    SILU = 39
    SOFTCAP = 40
    SITU = 41
    L2NORM = 42
    SCALE = 43
    HEAD_RMSNORM = 44
    ATTN_PART = 45
    ATTN_PARTS_8 = 46
    # Kimi delta attention
    SHORT_CONV = 48
    CONV_SILU = 49
    KDA_DECAY = 50
    KDA_STEP = 51
    KDA_CORE = 52
    KDA_GATED_NORM = 53
    KDA_HEADS = 54
    # multi-head latent attention
    MLA_QLAT = 56
    MLA_CACHE = 57
    MLA_ATTEND = 58
    MLA_UV = 59
    MLA_OUT_GATE = 60
    MLA_UV_GATE = 61
    MLA_HEADS = 62
    # mixture of experts
    ROUTER_TOPK = 64
    MOE_UP_MXFP4 = 65
    MOE_GLU_MXFP4 = 66
    MOE_DOWN_MXFP4 = 67
    MOE_GLU_TOPK = 68
    MOE_DOWN_TOPK = 69
    # the choice of a token
    ARGMAX = 72
    ARGMAX_FOLD = 73
    # collectives
    ALL_REDUCE = 80
    ALL_REDUCE_ADD = 81
    ALL_GATHER = 82
    REDUCE_GATHER = 83
    REDUCE_GATHER_ADD = 84
    # latent attention of a long context, divided by pages
    MLA_QUERY = 88
    MLA_PAGES = 89
    MLA_MERGE = 90


# Ops that read of a weight the rows of the step's token ids, and no others.
ROW_LOOKUPS = frozenset({Op.EMBED_BF16, Op.EMBED_PUSH})

# Numbers that later steps have a name for: an interpreter traps on them, a table may not use them.
RESERVED: dict[int, str] = {3: "ROUND_BF16"}
RETIRED: dict[int, str] = {}

_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}
_KINDS: dict[str, ParamKind] = {kind: kind for kind in get_args(ParamKind)}

ALL_PHASES = ("decode", "prefill")
ALL_TARGETS = ("cpu", "cuda", "hip")


def _operands(text: str) -> tuple[Operand, ...]:
    """Parse ``x weight:w +weight:v out:y``: a bare word is an activation read, ``+`` goes on a run."""
    rows: list[Operand] = []
    slot = run = -1
    for word in text.split():
        slot, run = (slot, run + 1) if word.startswith("+") else (slot + 1, 0)
        role, _, name = word.lstrip("+").rpartition(":")
        rows.append(Operand(name, _ROLES[role or "in"], slot, run))
    return tuple(rows)


def _run(text: str, n: int) -> str:
    """Return operands numbered from 0 as one run: ``weight:w`` as ``weight:w0 +weight:w1 ...``."""
    return " +".join(" +".join(f"{word}{i}" for word in text.split()) for i in range(n))


def _params(text: str) -> tuple[tuple[Param, ...], tuple[str, ...]]:
    """Parse ``K:u32:elements eps:f32:1 round:flag:1`` into parameter words and flags."""
    rows, flags = [], []
    for word in text.split():
        name, kind, unit = word.split(":")
        if kind == "flag":
            flags.append(name)
        else:
            rows.append(Param(name, _KINDS[kind], unit))
    return tuple(rows), tuple(flags)


def _row(
    op: Op,
    operands: str,
    params: str,
    unit: Unit,
    grain: int,
    placement: Placement,
    scratch: Callable[[Mapping[str, int], int], int],
    doc: str,
    targets: tuple[str, ...] = ALL_TARGETS,
    whole: str = "",
    again: str = "",
    inner_waits: int = 0,
) -> OpSpec:
    reads = {name: int(times or 1) for name, _, times in (w.partition("*") for w in whole.split())}
    words, flags = _params(params)
    return OpSpec(
        op,
        _operands(operands),
        words,
        unit,
        grain,
        placement,
        doc,
        scratch,
        flags,
        phases=ALL_PHASES,
        targets=targets,
        whole=reads,
        again=tuple(again.split()),
        inner_waits=inner_waits,
    )


def _mix_linears_row(op: Op, n: int, rows: str, flags: str = "round:flag:1") -> OpSpec:
    """A group of n linears of one normed mix."""
    return _row(
        op,
        f"prefix part weight:res_norm weight:res_proj weight:norm {_run('weight:w', n)} {_run('out:y', n)}",
        f"K:u32:elements eps:f32:1 norm_eps:f32:1 {rows} {flags}",
        "row",
        8,
        "weight",
        scratch.mix_linears,
        "y_i[t,r] = rule3(w_i[r], rmsnorm(mix of prefix and the block part (numerics, AttnRes); norm, norm_eps))",
        whole="prefix*3 part res_norm res_proj norm",
    )


# fmt: off
_ROWS: tuple[OpSpec, ...] = (
    #    op                    operands                                             params                                          unit      grain placement     scratch     formula
    _row(Op.NOP,               "out:y",                                             "",                                             "step",    1, "replicated", scratch.none,      "nothing"),
    _row(Op.LOAD,              "load:w",                                            "",                                             "block",   1, "weight",     scratch.none,      "w's bytes, from its file to its place in the ring of weights", targets=("cpu",)),
    _row(Op.EXPERT_FETCH,      "scores weight:bias load:w1 load:w3 load:w2",        "top_k:u32:experts n_experts:u32:experts",      "block",   1, "weight",     scratch.fetch,     "the experts of router_topk(scores), from their files to slots of the expert cache", targets=("cpu",)),
    _row(Op.PART,              "group out:y",                                       "index:u32:1",                                  "step",    1, "follow",     scratch.none,      "value index of a group: a name in the graph, no instruction", targets=()),
    _row(Op.DEQUANT_MXFP4,     "weight:w out:y",                                    "",                                             "step",    1, "weight",     scratch.none,      "y = every expert's matrix in numbers: scale of the block times element; a name in the graph, no instruction", targets=()),
    _row(Op.MOE_UP,            "z route weight:w out:y",                            "top_k:u32:experts round:flag:1",               "row",     8, "weight",     scratch.none,      "y[t,s,r] = w[expert s][r] . z[t], of matrices in numbers; a name in the graph, no instruction", targets=()),
    _row(Op.MOE_DOWN,          "x route weight:w2 out:y",                           "top_k:u32:experts x_bf16:flag:1",              "row",     8, "partial",    scratch.none,      "y[t,r] = sum over experts of w_e * (w2[e][r] . x[t,s]), of matrices in numbers; a name in the graph, no instruction", targets=()),
    _row(Op.MOE_DOWN_EACH,     "x route weight:w2 out:y",                           "top_k:u32:experts x_bf16:flag:1",              "row",     8, "reduced",    scratch.none,      "y[t,s,r] = w2[expert s][r] . x[t,s] over all columns, of matrices in numbers; a name in the graph, no instruction", targets=()),
    _row(Op.MOE_COMBINE,       "y route out:out",                                   "top_k:u32:experts round:flag:1",               "row",     8, "replicated", scratch.none,      "out[t,r] = sum over experts of w_e * y[t,s,r]; a name in the graph, no instruction", targets=()),
    _row(Op.GEMV_REDUCED,      "x weight:w out:y",                                  "x_bf16:flag:1 round:flag:1",                   "row",     8, "reduced",    scratch.none,      "y[t,r] = w[r] . x[t] over all columns; a name in the graph, no instruction", targets=()),
    _row(Op.ARGMAX_ALL,        "logits out:y",                                      "",                                             "step",    1, "replicated", scratch.none,      "y[t] = (best, lowest index, second best) of the whole vocabulary; a name in the graph, no instruction", targets=()),
    _row(Op.EMBED_BF16,        "weight:table out:y",                                "vocab:u32:rows",                               "column", 16, "replicated", scratch.none,      "y[t] = table[token_id[t]]: a move"),
    _row(Op.GEMV_BF16,         "x weight:w out:y",                                  "K:u32:elements head_only:u32:flag round:flag:1", "row",     8, "weight",     scratch.gemv,      "y[t,r] = rule3(w[r], x[t]); head_only: tokens from head_from on", whole="x"),
    _row(Op.GEMV_BF16_BLOCKS,  "x weight:w out:y",                                  "K:u32:elements n_blocks:u32:blocks x_bf16:flag:1", "row",     8, "partial",    scratch.gemv,      "y[t,r] = tree(rule3 of each of this rank's n_blocks blocks of row r)", whole="x"),
    _row(Op.NORM_GEMV_BF16,    "x weight:norm weight:w out:y",                      "K:u32:elements eps:f32:1 head_only:u32:flag norm_round:flag:1 round:flag:1", "row",     8, "weight",     scratch.norm_gemv, "y[t,r] = rule3(w[r], rmsnorm(x[t]; norm, eps))", whole="x*2 norm"),
    _row(Op.GLU_BF16,          "x weight:gate weight:up out:y",                     "K:u32:elements beta:f32:1 linear_beta:f32:1 round:flag:1", "row",     8, "weight",     scratch.glu,       "y[t,r] = situ(rule3(gate[r], x[t]), rule3(up[r], x[t]))", whole="x"),
    _mix_linears_row(Op.MIX_LINEARS_3, 3, "rows01:u32:rows rows2:u32:rows"),
    _mix_linears_row(Op.MIX_LINEARS_4, 4, "rows01:u32:rows rows23:u32:rows", "round:flag:1 head_round:flag:1"),
    _mix_linears_row(Op.MIX_LINEARS_6, 6, "rows01:u32:rows rows23:u32:rows rows45:u32:rows"),
    _row(Op.SITU_GEMV_BLOCKS,  "gate up weight:w out:y",                            "K:u32:elements n_blocks:u32:blocks beta:f32:1 linear_beta:f32:1 round:flag:1", "row", 8, "partial", scratch.situ_gemv, "y = gemv_blocks(situ(gate, up); w)", whole="gate up"),
    _row(Op.EMBED_PUSH,        "weight:table inout:blocks",                         "vocab:u32:rows index:u32:blocks",              "column", 16, "replicated", scratch.none,      "blocks[index] = table[token_id[t]]: a move"),
    _row(Op.RMSNORM,           "x weight:norm out:y",                               "eps:f32:1 round:flag:1",                       "token",   1, "follow",     scratch.none,      "y = (x * (1 / sqrt(ss / width + eps))) * norm", whole="norm"),
    _row(Op.ATTN_RES,          "prefix blocks weight:res_norm weight:res_proj out:y", "n_blocks:u32:blocks eps:f32:1 round:flag:1", "token",   1, "follow",     scratch.attn_res,  "y = softmax-weighted mix of n_blocks finished blocks and the prefix (numerics, AttnRes)", whole="res_norm res_proj"),
    _row(Op.ATTN_RES_NORM,     "prefix blocks weight:res_norm weight:res_proj weight:norm out:y", "n_blocks:u32:blocks eps:f32:1 norm_eps:f32:1 round:flag:1", "token", 1, "follow", scratch.attn_res, "y = rmsnorm(attn_res(prefix, blocks); norm, norm_eps)", whole="res_norm res_proj norm"),
    _row(Op.BLOCK_PUSH,        "prefix inout:blocks",                               "index:u32:blocks",                             "column", 16, "follow",     scratch.none,      "blocks[index] = prefix: a move"),
    _row(Op.ADD,               "a b out:y",                                         "round:flag:1",                                 "column", 16, "follow",     scratch.none,      "y = a + b"),
    _row(Op.MUL,               "a b out:y",                                         "round:flag:1",                                 "column", 16, "follow",     scratch.none,      "y = a * b"),
    _row(Op.SIGMOID,           "x out:y",                                           "round:flag:1",                                 "column", 16, "follow",     scratch.none,      "y = 1 / (1 + exp(-x))"),
    _row(Op.SILU,              "x out:y",                                           "round:flag:1",                                 "column", 16, "follow",     scratch.none,      "y = x * sigmoid(x)"),
    _row(Op.SOFTCAP,           "x out:y",                                           "beta:f32:1",                                   "column", 16, "follow",     scratch.none,      "y = beta * tanh(x / beta)"),
    _row(Op.SITU,              "gate up out:y",                                     "beta:f32:1 linear_beta:f32:1 round:flag:1",    "column", 16, "follow",     scratch.none,      "y = (softcap(gate; beta) * sigmoid(gate)) * softcap(up; linear_beta)"),
    _row(Op.L2NORM,            "x out:y",                                           "eps:f32:1",                                    "head",    1, "follow",     scratch.head,      "y = x * (1 / sqrt(sum x^2 + eps)) per head of unit_cols"),
    _row(Op.SCALE,             "x out:y",                                           "factor:f32:1",                                 "column", 16, "follow",     scratch.none,      "y = x * factor"),
    _row(Op.HEAD_RMSNORM,      "x weight:norm out:y",                               "eps:f32:1",                                    "head",    1, "follow",     scratch.head,      "y = (x * (1 / sqrt(ss / unit_cols + eps))) * norm per head", whole="norm"),
    _row(Op.ATTN_PART,         "blocks weight:res_norm weight:res_proj out:y",      "n_blocks:u32:blocks eps:f32:1",                "token",   1, "follow",     scratch.part,      "y = [o_B | m_B | s_B | 0 ...]: the finished blocks' part of attn_res (numerics, AttnRes)", whole="res_norm res_proj"),
    _row(Op.ATTN_PARTS_8,      f"blocks {_run('weight:res_norm weight:res_proj', 8)} {_run('out:y', 8)}", "n_blocks:u32:blocks eps:f32:1", "member", 1, "follow", scratch.parts,  "y_i = attn_part(blocks; res_norm_i, res_proj_i)", whole="blocks"),
    _row(Op.SHORT_CONV,        "x weight:conv state:taps out:y",                    "",                                             "channel", 16, "follow",    scratch.none,      "y[t] = w0 x[t-3], then fma w1 x[t-2], w2 x[t-1], w3 x[t]; taps keep the last three x per slot"),
    _row(Op.CONV_SILU,         "x weight:conv state:taps out:y",                    "round:flag:1",                                 "channel", 16, "follow",    scratch.none,      "y = silu(short_conv(x))"),
    _row(Op.KDA_DECAY,         "f weight:a_log weight:dt_bias out:y",               "lower_bound:f32:1",                            "head",    1, "follow",     scratch.none,      "y = exp(lower_bound * sigmoid(exp(a_log[h]) * (f + dt_bias)))"),
    _row(Op.KDA_STEP,          "q k v decay beta state:s out:y",                    "round:flag:1",                                 "head",    1, "follow",     scratch.head,      "S = decay_i S; u = v - k.S; S = fma(k, beta u, S); y = q.S, in time order"),
    _row(Op.KDA_CORE,          "q k v f b weight:a_log weight:dt_bias state:s out:y", "l2_eps:f32:1 q_scale:f32:1 lower_bound:f32:1 round:flag:1", "head",  1, "follow",     scratch.head,      "kda_step(scale(l2norm(q)), l2norm(k), v, kda_decay(f), sigmoid(b))"),
    _row(Op.KDA_GATED_NORM,    "o weight:norm gate out:y",                          "eps:f32:1 round:flag:1",                       "head",    1, "follow",     scratch.head,      "y = head_rmsnorm(o; norm, eps) * sigmoid(gate)", whole="norm"),
    _row(Op.KDA_HEADS,         "q +k +v +f +b +gate weight:conv_q +weight:conv_k +weight:conv_v +weight:f_b +weight:a_log +weight:dt_bias +weight:o_norm state:taps_q +state:taps_k +state:taps_v +state:s out:y", "l2_eps:f32:1 q_scale:f32:1 lower_bound:f32:1 eps:f32:1 rank:u32:elements round:flag:1", "head", 1, "follow", scratch.kda_heads, "kda_gated_norm(kda_core(conv_silu(q), conv_silu(k), conv_silu(v), gemv(f; f_b), b), gate)", whole="f o_norm", again="f_b"),
    _row(Op.MLA_QLAT,          "q weight:kv_b out:y",                               "nope:u32:elements rope:u32:elements latent:u32:elements v:u32:elements round:flag:1", "head", 1, "follow", scratch.qlat, "y[h] = [rule3 over nope of W_UK[h]^T q_nope | q_rope]", again="kv_b"),
    _row(Op.MLA_CACHE,         "x weight:norm state:cache",                         "latent:u32:elements rope:u32:elements eps:f32:1 round:flag:1", "token", 1, "replicated", scratch.none,     "cache[slot, position] = [rmsnorm(latent; norm, eps) | shared key]", whole="norm"),
    _row(Op.MLA_ATTEND,        "q state:cache out:y",                               "latent:u32:elements rope:u32:elements scale:f32:1 page_tokens:u32:tokens pages:u32:pages round:flag:1", "head", 1, "follow", scratch.attend, "y[h] = softmax(q.cache * scale) over positions <= own, by pages, times latent", whole="cache"),
    _row(Op.MLA_UV,            "ctx weight:kv_b out:y",                             "nope:u32:elements v:u32:elements latent:u32:elements round:flag:1", "row", 8, "follow",  scratch.uv,         "y[t,h*v+i] = rule3(W_UV[h][i], ctx[t,h])"),
    _row(Op.MLA_OUT_GATE,      "o gate out:y",                                      "round:flag:1",                                 "column", 16, "follow",     scratch.none,      "y = o * sigmoid(gate)"),
    _row(Op.MLA_UV_GATE,       "ctx weight:kv_b gate out:y",                        "nope:u32:elements v:u32:elements latent:u32:elements round:flag:1", "row", 8, "follow",  scratch.uv,         "y = mla_uv(ctx) * sigmoid(gate)"),
    _row(Op.MLA_HEADS,         "q weight:kv_b state:cache gate out:y",              "nope:u32:elements rope:u32:elements latent:u32:elements v:u32:elements scale:f32:1 page_tokens:u32:tokens round:flag:1", "head", 1, "follow", scratch.mla_heads, "mla_uv_gate(mla_attend(mla_qlat(q), cache), gate)", whole="cache", again="kv_b"),
    _row(Op.MLA_QUERY,         "x weight:norm weight:w weight:kv_b out:y",          "K:u32:elements eps:f32:1 nope:u32:elements rope:u32:elements latent:u32:elements v:u32:elements norm_round:flag:1 round:flag:1", "head", 1, "weight", scratch.query, "mla_qlat(norm_gemv(x; norm, w, eps))", whole="x*2 norm"),
    _row(Op.MLA_PAGES,         "q state:cache out:y",                               "latent:u32:elements rope:u32:elements scale:f32:1 page_tokens:u32:tokens pages:u32:pages", "page", 1, "follow", scratch.pages, "y[page][h] = [sum of e l | max | sum of e | 0 ...] over a page of mla_attend, e = exp(q.cache * scale - max)", whole="q"),
    _row(Op.MLA_MERGE,         "parts weight:kv_b gate out:y",                      "nope:u32:elements v:u32:elements latent:u32:elements page_tokens:u32:tokens pages:u32:pages round:flag:1", "head", 1, "follow", scratch.merge, "mla_uv_gate(parts of a softmax merged page by page, gate)", again="kv_b"),
    _row(Op.ROUTER_TOPK,       "logits weight:bias out:y",                          "n_experts:u32:experts top_k:u32:experts scale:f32:1", "token", 1, "replicated", scratch.router, "top_k of sigmoid + bias, ids ascending; w = s / (sum s + 1e-20) * scale", whole="bias"),
    _row(Op.MOE_UP_MXFP4,      "z route weight:w out:y",                            "K:u32:elements top_k:u32:experts round:flag:1", "row",     8, "weight",     scratch.moe_up,    "y[t,s,r] = rule3(w[expert s][r], z[t])", whole="z route"),
    _row(Op.MOE_GLU_MXFP4,     "z route weight:w1 weight:w3 out:y",                 "K:u32:elements top_k:u32:experts beta:f32:1 linear_beta:f32:1 round:flag:1", "row", 8, "weight", scratch.moe_glu, "y[t,s,r] = situ(rule3(w1[expert s][r], z[t]), rule3(w3[expert s][r], z[t]))", whole="z route"),
    _row(Op.MOE_DOWN_MXFP4,    "x route weight:w2 out:y",                           "K:u32:elements top_k:u32:experts n_blocks:u32:blocks x_bf16:flag:1", "row", 8, "partial", scratch.moe_down,   "y[t,r] = tree over blocks of sum over experts ascending of w_e * rule3(block of w2[e][r], x[t,s])", whole="x route"),
    _row(Op.MOE_GLU_TOPK,      "z scores weight:bias weight:w1 weight:w3 out:y",    "K:u32:elements top_k:u32:experts beta:f32:1 linear_beta:f32:1 n_experts:u32:experts round:flag:1", "row", 8, "weight", scratch.glu_topk, "y = moe_glu(z, router_topk(scores))", whole="z scores bias"),
    _row(Op.MOE_DOWN_TOPK,     "x scores weight:bias weight:w2 out:y",              "K:u32:elements top_k:u32:experts n_blocks:u32:blocks scale:f32:1 n_experts:u32:experts x_bf16:flag:1", "row", 8, "partial", scratch.down_topk, "y = moe_down(x, router_topk(scores))", whole="x scores bias"),
    _row(Op.ARGMAX,            "logits out:y",                                      "vocab_base:u32_per_rank:rows vocab:u32:rows",  "step",    1, "partial",    scratch.none,      "y[t] = (best, lowest index, second best) of this rank's logits"),
    _row(Op.ARGMAX_FOLD,       "peer:x out:y",                                      "",                                             "step",    1, "replicated", scratch.none,      "y[t] = (best, lowest index, second best) over all ranks"),
    _row(Op.ALL_REDUCE,        "peer:x out:y",                                      "round:flag:1",                                 "column", 16, "replicated", scratch.none,      "y = tree of the ranks' x"),
    _row(Op.ALL_REDUCE_ADD,    "residual peer:x out:y",                             "round:flag:1",                                 "column", 16, "replicated", scratch.none,      "y = residual + all_reduce(x)"),
    _row(Op.ALL_GATHER,        "peer:x out:y",                                      "shard_cols:u32:columns",                       "column", 16, "replicated", scratch.none,      "y = the ranks' x side by side"),
    _row(Op.REDUCE_GATHER,     "peer:up peer:x out:y",                              "shard_cols:u32:columns round:flag:1",          "column", 16, "replicated", scratch.none,      "y = all_gather(up) + all_reduce(x)"),
    _row(Op.REDUCE_GATHER_ADD, "residual peer:up peer:x out:y",                     "shard_cols:u32:columns round:flag:1",          "column", 16, "replicated", scratch.none,      "y = residual + (all_gather(up) + all_reduce(x))"),
)
# fmt: on

# Ops that only read a state: another op has written it.
READS_STATE = frozenset({Op.MLA_ATTEND, Op.MLA_HEADS, Op.MLA_PAGES})

SPECS: dict[Op, OpSpec] = {row.op: row for row in _ROWS}


def check() -> None:
    """Assert that the table is total, in range and unambiguous. Runs at import."""
    assert set(SPECS) == set(Op), "every op has exactly one row"
    assert len(_ROWS) == len(SPECS), "no op has two rows"
    taken = set(RESERVED) | set(RETIRED)
    for spec in _ROWS:
        assert int(spec.op) not in taken, f"{spec.name} uses a reserved or retired number"
        assert int(spec.op) < 1 << 16
        assert spec.n_slots <= N_HANDLES, spec.name
        assert len(spec.params) <= N_PARAMS, spec.name
        assert FLAG_SHIFT + len(spec.flags) <= 16, spec.name
        names = [o.name for o in spec.operands] + [p.name for p in spec.params] + [*spec.flags]
        assert len(set(names)) == len(names), f"{spec.name} names something twice"
        assert spec.output.name, spec.name
        assert set(spec.phases) <= set(ALL_PHASES), spec.name
        assert set(spec.targets) <= set(ALL_TARGETS), spec.name
        assert {*spec.whole, *spec.again} <= {o.name for o in spec.operands}, spec.name
        assert all(times > 0 for times in spec.whole.values()), spec.name
        assert spec.inner_waits >= 0, spec.name


def isa_hash() -> str:
    """Return the SHA-256 of everything that gives a stored program its meaning.

    Docs, scratch, grain and what slices cost are left out: they change no record. Stamped into plans and streams,
    compiled into every interpreter, compared at load.
    """
    lines = [
        f"{ISA_VERSION} {RECORD_WORDS} {N_HANDLES} {WORD_UNITS} {WORD_WIDTH} {WORD_UNIT_COLS} {WORD_PARAMS} {PAGE_TOKENS} {FLAG_SHIFT}"
    ]
    for op in sorted(SPECS):
        spec = SPECS[op]
        operands = " ".join(f"{'+' if o.run else ''}{o.role}:{o.name}" for o in spec.operands)
        params = " ".join(
            [*(f"{p.kind}:{p.name}" for p in spec.params), *(f"flag:{f}" for f in spec.flags)]
        )
        lines.append(f"{int(op)} {spec.name} {spec.unit} | {operands} | {params}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


check()

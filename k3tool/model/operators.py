"""What an op does to shapes and placements: the part of its meaning that a compiler needs.

The op table says what an op's operands and parameters are; this file adds how their sizes hang
together, one row per op, and solves a row for the sizes of one node. The same row is solved twice,
with the logical sizes when the graph is built and with one rank's sizes when packets are made, so a
weight that is split differently from the activation it meets is refused at compile time.

It holds no numerics and knows no model.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

from k3tool.errors import K3Error
from k3tool.isa.op_spec import Operand, OpSpec, Param
from k3tool.isa.table import PAGE_TOKENS, SPECS, Op
from k3tool.model.expressions import evaluate, letters_of

Placement = Literal["replicated", "sharded", "partial"]
BLOCKS = 8  # numerics rule 5: a row-parallel axis is summed in eight blocks

PART_EXTRA = 16  # words behind the block part's o_B: m_B, s_B, and zeros up to a cache line
_HEADS = "H*head_dim"
_MIX = f"prefix:K part:K+{PART_EXTRA} res_norm:K res_proj:1,K norm:K"

# Sizes per operand, then the result's ("|" between several); "," separates axes, of a result too
# where it is a weight in numbers, which is not solved. Capitals are solved for: H heads, D head
# size, C channels, R rows, K the summed axis, W a width, V vocabulary, E experts, S columns of one
# rank's shard. Small names are the node's attributes; tp is the number of ranks (1 when logical).
# State operands are in place and are not sized here.
SIZES: dict[Op, str] = {
    Op.NOP: "-> W",
    Op.LOAD: "-> W",  # not solved: no value of the graph; compiler.residency sizes both
    Op.EXPERT_FETCH: "scores:E bias:E -> W",
    Op.PART: "group:W -> W",  # not solved: the group's row says how wide its values are
    Op.DEQUANT_MXFP4: "w:E,R,K -> E,R,K",
    Op.MOE_UP: "z:K route:2*top_k w:E,R,K -> top_k*R",
    Op.MOE_DOWN: "x:top_k*K route:2*top_k w2:E,R,K -> R",
    Op.MOE_DOWN_EACH: "x:top_k*tp*S route:2*top_k w2:E,R,tp*S -> top_k*R",
    Op.MOE_COMBINE: "y:top_k*R route:2*top_k -> R",
    Op.GEMV_REDUCED: "x:tp*S w:R,tp*S -> R",
    Op.ARGMAX_ALL: "logits:V -> 4",
    Op.EMBED_BF16: "table:V,W -> W",
    Op.EMBED_PUSH: "table:V,W blocks:W -> W",
    Op.GEMV_BF16: "x:K w:R,K -> R",
    Op.GEMV_BF16_BLOCKS: "x:K w:R,K -> R",
    Op.NORM_GEMV_BF16: "x:K norm:K w:R,K -> R",
    Op.GLU_BF16: "x:K gate:R,K up:R,K -> R",
    Op.MIX_LINEARS_3: f"{_MIX} w0:R0,K w1:R1,K w2:R2,K -> R0|R1|R2",
    Op.MIX_LINEARS_4: f"{_MIX} w0:R0,K w1:R1,K w2:R2,K w3:R3,K -> R0|R1|R2|R3",
    Op.MIX_LINEARS_6: f"{_MIX} w0:R0,K w1:R1,K w2:R2,K w3:R3,K w4:R4,K w5:R5,K"
    " -> R0|R1|R2|R3|R4|R5",
    Op.SITU_GEMV_BLOCKS: "gate:K up:K w:R,K -> R",
    Op.RMSNORM: "x:W norm:W -> W",
    Op.ATTN_RES: "prefix:W blocks:W res_norm:W res_proj:1,W -> W",
    Op.ATTN_RES_NORM: "prefix:W blocks:W res_norm:W res_proj:1,W norm:W -> W",
    Op.ATTN_PART: f"blocks:W res_norm:W res_proj:1,W -> W+{PART_EXTRA}",
    Op.ATTN_PARTS_8: "blocks:W "
    + " ".join(f"res_norm{i}:W res_proj{i}:1,W" for i in range(8))
    + " -> "
    + "|".join([f"W+{PART_EXTRA}"] * 8),
    Op.BLOCK_PUSH: "prefix:W blocks:W -> W",
    Op.ADD: "a:W b:W -> W",
    Op.MUL: "a:W b:W -> W",
    Op.SIGMOID: "x:W -> W",
    Op.SILU: "x:W -> W",
    Op.SOFTCAP: "x:W -> W",
    Op.SITU: "gate:W up:W -> W",
    Op.L2NORM: "x:H*head_dim -> H*head_dim",
    Op.SCALE: "x:W -> W",
    Op.HEAD_RMSNORM: "x:H*D norm:D -> H*D",
    Op.SHORT_CONV: "x:C conv:C,1,4 -> C",
    Op.CONV_SILU: "x:C conv:C,1,4 -> C",
    Op.KDA_DECAY: f"f:{_HEADS} a_log:H dt_bias:{_HEADS} -> {_HEADS}",
    Op.KDA_STEP: f"q:{_HEADS} k:{_HEADS} v:{_HEADS} decay:{_HEADS} beta:H -> {_HEADS}",
    Op.KDA_CORE: f"q:{_HEADS} k:{_HEADS} v:{_HEADS} f:{_HEADS} b:H a_log:H"
    f" dt_bias:{_HEADS} -> {_HEADS}",
    Op.KDA_GATED_NORM: "o:H*D norm:D gate:H*D -> H*D",
    Op.KDA_HEADS: f"q:{_HEADS} k:{_HEADS} v:{_HEADS} f:rank b:H gate:{_HEADS}"
    f" conv_q:{_HEADS},1,4 conv_k:{_HEADS},1,4 conv_v:{_HEADS},1,4"
    f" f_b:{_HEADS},rank a_log:H dt_bias:{_HEADS} o_norm:head_dim ->"
    f" {_HEADS}",
    Op.MLA_QLAT: "q:H*(nope+rope) kv_b:H*(nope+v),latent -> H*(latent+rope)",
    Op.MLA_CACHE: "x:latent+rope norm:latent -> latent+rope",
    Op.MLA_ATTEND: "q:H*(latent+rope) -> H*latent",
    Op.MLA_UV: "ctx:H*latent kv_b:H*(nope+v),latent -> H*v",
    Op.MLA_OUT_GATE: "o:W gate:W -> W",
    Op.MLA_UV_GATE: "ctx:H*latent kv_b:H*(nope+v),latent gate:H*v -> H*v",
    Op.MLA_HEADS: "q:H*(nope+rope) kv_b:H*(nope+v),latent gate:H*v -> H*v",
    Op.MLA_QUERY: "x:K norm:K w:H*(nope+rope),K kv_b:H*(nope+v),latent -> H*(latent+rope)",
    Op.MLA_PAGES: f"q:H*(latent+rope) -> pages*H*(latent+{PART_EXTRA})",
    Op.MLA_MERGE: f"parts:pages*H*(latent+{PART_EXTRA}) kv_b:H*(nope+v),latent gate:H*v -> H*v",
    Op.ROUTER_TOPK: "logits:E bias:E -> 2*top_k",
    Op.MOE_UP_MXFP4: "z:K route:2*top_k w:E,R,K -> top_k*R",
    Op.MOE_GLU_MXFP4: "z:K route:2*top_k w1:E,R,K w3:E,R,K -> top_k*R",
    Op.MOE_DOWN_MXFP4: "x:top_k*K route:2*top_k w2:E,R,K -> R",
    Op.MOE_GLU_TOPK: "z:K scores:E bias:E w1:E,R,K w3:E,R,K -> top_k*R",
    Op.MOE_DOWN_TOPK: "x:top_k*K scores:E bias:E w2:E,R,K -> R",
    Op.ARGMAX: "logits:V -> 4",
    Op.ARGMAX_FOLD: "x:4 -> 4",
    Op.ALL_REDUCE: "x:W -> W",
    Op.ALL_REDUCE_ADD: "residual:W x:W -> W",
    Op.ALL_GATHER: "x:S -> tp*S",
    Op.REDUCE_GATHER: "up:S x:tp*S -> tp*S",
    Op.REDUCE_GATHER_ADD: "residual:tp*S up:S x:tp*S -> tp*S",
}

# Parameters of the table that follow from the sizes: an expression of letters.
_SIZE_PARAMS = {
    "K": "K", "shard_cols": "S", "n_experts": "E", "vocab": "V", "vocab_base": "V", "rank": "rank",
    "rows01": "R0+65536*R1", "rows23": "R2+65536*R3", "rows45": "R4+65536*R5", "rows2": "R2",
}  # fmt: skip
MAX_MEMBER_ROWS = 65535  # of a group of linears: two row counts share a parameter word
# Attributes of graph nodes that are no parameter: what a head is. Widths do not say it (two heads
# of 64 look like one of 128), and a rule that joins norms and states per head has to know.
_EXTRA_ATTRS: dict[Op, tuple[str, ...]] = dict.fromkeys(
    (Op.L2NORM, Op.KDA_DECAY, Op.KDA_STEP, Op.KDA_CORE, Op.KDA_HEADS), ("head_dim",)
)
# Operands that live elsewhere than the rule says: a sharded op's replicated inputs and the reverse.
_PLACES: dict[tuple[Op, str], Placement] = {
    (Op.KDA_HEADS, "f"): "replicated",
    (Op.SITU_GEMV_BLOCKS, "up"): "sharded",
}
# Collectives read a peer operand either whole from the rank that owns it or as a term of a sum.
_GATHERED = {(Op.ALL_GATHER, "x"), (Op.REDUCE_GATHER, "up"), (Op.REDUCE_GATHER_ADD, "up")}


def f32_bits(value: float) -> int:
    """Return the bits of a binary64 value rounded once to binary32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def is_derived(spec: OpSpec, param: Param) -> bool:
    """Return whether a parameter follows from sizes and ranks, not from the model's maths."""
    if param.name == "n_blocks":
        return spec.placement == "partial"  # AttnRes has a parameter of that name that is its own
    return param.name in _SIZE_PARAMS or param.name == "page_tokens"


@cache
def attr_names(op: Op) -> tuple[str, ...]:
    """Return a node's attributes: parameters that are not derived, flags, and what a head is."""
    spec = SPECS[op]
    own = tuple(param.name for param in spec.params if not is_derived(spec, param))
    return own + spec.flags + _EXTRA_ATTRS.get(op, ())


def flags_of(op: Op, attrs: Mapping[str, int]) -> int:
    """Return the bits of an op's own flags in word 0 of its record."""
    return sum(SPECS[op].flag(name) for name in SPECS[op].flags if attrs[name])


def record_attrs(spec: OpSpec, row: Any) -> dict[str, int]:
    """Return a node's attributes from a record; a head's size is its columns a unit."""
    words = dict(zip((p.name for p in spec.params), row["params"].tolist(), strict=False))
    words |= spec.flag_values(int(row["flags"]))
    return {name: words.get(name, int(row["unit_cols"])) for name in attr_names(spec.op)}


@cache
def input_operands(op: Op) -> tuple[Operand, ...]:
    """Return the operands that are a node's inputs, in table order: all but the result."""
    return tuple(o for o in SPECS[op].operands if o.role not in ("out", "load"))


# -- sizes -------------------------------------------------------------------------------------

_Equations = tuple[tuple[str, tuple[str, ...]], ...]


@cache
def _row(op: Op) -> tuple[_Equations, str]:
    """Return (operand, axis expressions) pairs and the result's expression of one row of SIZES."""
    left, right = SIZES[op].split("->")
    pairs = [word.split(":") for word in left.split()]
    return tuple((name, tuple(axes.split(","))) for name, axes in pairs), right.strip()


def _value(expression: str, sizes: Mapping[str, int]) -> int:
    return int(evaluate(expression, sizes))


def solve_sizes(
    op: Op, name: str, shapes: Mapping[str, tuple[int, ...]], attrs: Mapping[str, int], tp: int
) -> tuple[int, dict[str, int]]:
    """Return the width of a node's result and every letter's size.

    `shapes` maps operand names to (width,) for activations and to the shape for weights.
    Raises: K3Error naming node and operand where sizes contradict each other.
    """
    equations, _ = _row(op)
    pending = []
    for operand, axes in equations:
        shape = shapes[operand]
        if len(shape) != len(axes):
            need = f"[{','.join(axes)}]"
            raise K3Error(f"{name}: {op.name} {operand}", got=f"shape {list(shape)}", need=need)
        pending += [(operand, axis, size) for axis, size in zip(axes, shape, strict=True)]
    sizes = dict(attrs) | {"tp": tp}
    while pending:
        later = [entry for entry in pending if not _settle(op, name, entry, sizes)]
        assert len(later) < len(pending), f"{op.name}: SIZES does not determine {later}"
        pending = later
    unsaid = {x for part in _row(op)[1].split("|") for x in letters_of(part)} - set(sizes)
    if unsaid:  # a packet of a file may be of any op: NOP has no operand that says how wide it is
        need = f"an operand that says {' and '.join(sorted(unsaid))}"
        raise K3Error(f"{name}: {op.name}", got="of no size", need=need)
    return sum(result_widths(op, sizes)), sizes


def result_widths(op: Op, sizes: Mapping[str, int]) -> list[int]:
    """Return the width of each of an op's results, from the letters' sizes."""
    return [_value(part, sizes) for part in _row(op)[1].split("|")]


def _settle(op: Op, name: str, entry: tuple[str, str, int], sizes: dict[str, int]) -> bool:
    """Check an equation or solve it for its one unknown; return False if it has two."""
    operand, expression, size = entry
    unknown = [letter for letter in letters_of(expression) if letter not in sizes]
    if len(unknown) > 1:
        return False
    if unknown:
        at0, at1 = (_value(expression, sizes | {unknown[0]: x}) for x in (0, 1))
        sizes[unknown[0]] = (size - at0) // (at1 - at0)
    if _value(expression, sizes) != size:
        known = ", ".join(f"{k}={sizes[k]}" for k in letters_of(expression))
        raise K3Error(f"{name}: {op.name} {operand}", got=size, need=f"{expression} with {known}")
    return True


def params_of(op: Op, attrs: Mapping[str, int], sizes: Mapping[str, int], tp: int) -> list[int]:
    """Return the parameter words of a packet, in table order, for one rank."""
    spec, words = SPECS[op], []
    wide = [size for letter, size in sizes.items() if letter[0] == "R" and letter[1:].isdigit()]
    assert max(wide, default=0) <= MAX_MEMBER_ROWS, f"{op.name}: {wide} rows"
    for param in spec.params:
        if not is_derived(spec, param):
            words.append(attrs[param.name])
        elif param.name == "page_tokens":
            words.append(PAGE_TOKENS)
        elif param.name == "n_blocks":
            words.append(BLOCKS // tp)
        else:
            words.append(_value(_SIZE_PARAMS[param.name], sizes))
    return words


def units_of(op: Op, width: int, sizes: Mapping[str, int], max_tokens: int) -> tuple[int, int]:
    """Return (n_units, unit_cols) of a packet: what slices divide, and a unit's columns."""
    match SPECS[op].unit:
        case "token":
            return max_tokens, 0
        case "step":
            return 1, 0
        case "head":
            return sizes["H"], width // sizes["H"]
        case "page":
            return sizes["pages"], width // sizes["pages"]
        case "member":
            members = len(SPECS[op].outputs)
            return members, width // members
        case "row" if "R" in sizes:
            return sizes["R"], 1  # an expert's rows: the result has top_k runs of them
        case _:
            return width, 1


# -- placement ---------------------------------------------------------------------------------


def place(
    op: Op,
    name: str,
    placements: Sequence[tuple[Operand, Placement]],
    splits: Mapping[str, str],
) -> Placement:
    """Return where a node's result lives, from its activations' places and its weights' splits.

    `placements` covers the activations in operand order, `splits` the weights' rules by operand.
    Raises: K3Error naming node and operand when an input lives where the op cannot use it: a sum
    over shards must be reduced before anything that is not linear reads it.
    """
    spec = SPECS[op]
    first: Placement | None = None
    for operand, placement in placements:
        need = _needed(spec, operand, first)
        fits = placement == need if need else placement != "partial"
        if not fits:
            raise K3Error(
                f"{name}: {op.name} {operand.name}",
                got=placement,
                need=need or "replicated or sharded",
            )
        first = first or placement
    match spec.placement:
        case "replicated":
            _need_split(name, spec, splits, ("replicate",))
            return "replicated"
        case "partial":
            _need_split(name, spec, splits, ("cols",))
            return "partial"
        case "reduced":
            _need_split(name, spec, splits, ("cols",))
            return "replicated"
        case "weight":
            _need_split(name, spec, splits, ("rows", "replicate"))
            return "sharded" if "rows" in splits.values() else "replicated"
        case "follow":
            assert first is not None, f"{op.name} follows no input"
            return first


def _needed(spec: OpSpec, operand: Operand, first: Placement | None) -> Placement | None:
    if operand.role == "peer":
        return "sharded" if (spec.op, operand.name) in _GATHERED else "partial"
    if (spec.op, operand.name) in _PLACES:
        return _PLACES[spec.op, operand.name]
    if spec.placement in ("partial", "reduced"):
        return "sharded" if first is None else "replicated"
    if spec.placement in ("replicated", "weight") or spec.unit == "token":
        return "replicated"
    if first is None:  # an elementwise op works on a shard or on the whole, not on a term of a sum
        return None
    return first


def _need_split(
    name: str, spec: OpSpec, splits: Mapping[str, str], allowed: tuple[str, ...]
) -> None:
    for operand, split in splits.items():
        # A norm inside a fused linear op is as long as its replicated input; a router's bias goes
        # with its scores, which every rank has.
        if operand == "bias" and split == "replicate":
            continue
        if split not in allowed:
            raise K3Error(
                f"{name}: {spec.name} {operand}", got=f"split by {split}", need=" or ".join(allowed)
            )


def _check() -> None:
    assert set(SIZES) == set(Op), "every op has a row of sizes"
    for op in Op:
        named = {operand for operand, _ in _row(op)[0]}
        roles = {o.name: o.role for o in input_operands(op)}
        sized = {n for n, role in roles.items() if role != "state"}
        assert named == sized, f"{op.name}: sizes name {named}, the op table {sized}"


_check()

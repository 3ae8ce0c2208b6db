"""Wrong wirings of the operator graph: each edit is one mistake (see rewrite.Edit)."""

from k3tool.isa.table import Op
from k3tool.model.nodes import Leaf, Node
from k3tool.model.operators import f32_bits
from tests.oracle.rewrite import Copy, attribute


def eps(suffix: str, value: float):
    return attribute(Op.RMSNORM, suffix, lambda _: {"eps": f32_bits(value)})


def is_kda_output(copy: Copy, node: Node) -> bool:
    return copy.old.nodes[node.inputs[0]].op is Op.HEAD_RMSNORM


def is_gated(node: Node, name: str) -> bool:
    return node.op is Op.MUL and name.endswith(".self_attn.gated")


# -- Kimi delta attention ------------------------------------------------------------------------


def q_scaled_before_norm(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    if node.op is not Op.SCALE:
        return None
    unit = copy.new.nodes[inputs[0]]
    attrs = {key: int(value) for key, value in unit.attrs}
    scaled = copy.add(Op.SCALE, [unit.inputs[0]], factor=int(node.attrs[0][1]))
    return copy.add(Op.L2NORM, [scaled], **attrs)


def silu_on_kda_gate(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    if not (is_gated(node, name) and is_kda_output(copy, node)):
        return None
    raw = copy.new.nodes[inputs[1]].inputs[0]
    return copy.add(Op.MUL, [inputs[0], copy.add(Op.SILU, [raw])])


def gate_before_norm(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    if not (is_gated(node, name) and is_kda_output(copy, node)):
        return None
    norm = copy.new.nodes[inputs[0]]
    gated = copy.add(Op.MUL, [norm.inputs[0], inputs[1]])
    return copy.add(Op.HEAD_RMSNORM, [gated, norm.inputs[1]], eps=int(norm.attrs[0][1]))


def kda_gate_missing(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    return inputs[0] if is_gated(node, name) and is_kda_output(copy, node) else None


def silu_inside_low_rank_gate(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    if not (node.op is Op.GEMV_BF16 and name.endswith(".self_attn.f")):
        return None
    return copy.add(Op.GEMV_BF16, [copy.add(Op.SILU, [inputs[0]]), inputs[1]], head_only=0)


# -- multi-head latent attention -----------------------------------------------------------------


def mla_gate_missing(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    return inputs[0] if is_gated(node, name) and not is_kda_output(copy, node) else None


def silu_on_mla_gate(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    if not is_gated(node, name) or is_kda_output(copy, node):
        return None
    raw = copy.new.nodes[inputs[1]].inputs[0]
    return copy.add(Op.MUL, [inputs[0], copy.add(Op.SILU, [raw])])


# -- feed-forward --------------------------------------------------------------------------------


def capped_gate_in_sigmoid(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    if not (node.op is Op.MUL and name.endswith(".act.gated")):
        return None
    return copy.add(Op.MUL, [inputs[0], copy.add(Op.SIGMOID, [inputs[0]])])


def betas_swapped(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    if node.op is not Op.SOFTCAP:
        return None
    value = 25.0 if name.endswith(".cap") else 4.0
    return copy.new.add(Op.SOFTCAP, name, inputs, beta=f32_bits(value))


# -- attention residuals -------------------------------------------------------------------------


def prefix_never_restarts(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    """Keep adding to the prefix where a layer opens a block."""
    reads_prefix = node.op is Op.ATTN_RES and name.endswith(".mlp_mix")
    reads_prefix = reads_prefix or (node.op is Op.ADD and name.endswith(".out"))
    if not reads_prefix or not copy.old.names[node.inputs[0]].endswith(".self_attn.out"):
        return None
    layer = copy.old.names[node.inputs[0]].removesuffix(".self_attn.out")
    pushed = copy.old_inputs(f"{layer}.blocks")[0]
    whole = copy.add(Op.ADD, [pushed, inputs[0]])
    return copy.new.add(node.op, name, [whole, *inputs[1:]], **{k: int(v) for k, v in node.attrs})


def block_opened_after_attention(
    copy: Copy, node: Node, name: str, inputs: list[int]
) -> int | None:
    """Push the prefix with this layer's attention output in it; the new prefix starts as it is."""
    if not (node.op is Op.GEMV_REDUCED and name.endswith(".self_attn.out")):
        return None
    layer = name.removesuffix(".self_attn.out")
    if f"{layer}.blocks" not in copy.old.names:
        return None
    out = copy.plain(node, name, inputs)
    push = copy.old.names.index(f"{layer}.blocks")
    prefix, blocks = copy.old_inputs(f"{layer}.blocks")
    index = int(copy.old.nodes[push].attrs[0][1])
    copy.map[push] = copy.add(Op.BLOCK_PUSH, [copy.add(Op.ADD, [prefix, out]), blocks], index=index)
    return out


def block_pushed_before_mixing(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    """Let the attention-side mix see the block that this layer opens: the prefix counts twice."""
    if not (node.op is Op.ATTN_RES and name.endswith(".attn_mix")):
        return None
    layer = name.removesuffix(".attn_mix")
    if f"{layer}.blocks" not in copy.old.names:
        return None
    attrs = {key: int(value) for key, value in node.attrs}
    count = attrs["n_blocks"]
    blocks = copy.add(Op.BLOCK_PUSH, inputs[:2], index=count)
    return copy.add(
        Op.ATTN_RES, [inputs[0], blocks, *inputs[2:]], **(attrs | {"n_blocks": count + 1})
    )


def mix_pushed_as_block(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    """Push the mixed input of a layer instead of the raw one."""
    if node.op is not Op.BLOCK_PUSH:
        return None
    mix = f"{name.removesuffix('.blocks')}.attn_mix"
    if mix not in copy.old.names:
        return None  # layer 0 has no mix
    index = int(node.attrs[0][1])
    return copy.add(Op.BLOCK_PUSH, [copy.named(mix), inputs[1]], index=index)


def plain_residual(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    """Let every sub-layer read the prefix alone."""
    return inputs[0] if node.op is Op.ATTN_RES else None


def output_mix_after_norm(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    if name == "output_mix":
        return inputs[0]
    if name != "output_norm":
        return None
    mix = copy.old.nodes[copy.old.names.index("output_mix")]
    attrs = {key: int(value) for key, value in mix.attrs}
    normed = copy.plain(node, name, inputs)
    return copy.add(Op.ATTN_RES, [normed, *copy.old_inputs("output_mix")[1:]], **attrs)


def newest_block_unseen(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    """Mix one block less at the output."""
    if name != "output_mix":
        return None
    attrs = {key: int(value) for key, value in node.attrs}
    return copy.new.add(Op.ATTN_RES, name, inputs, **(attrs | {"n_blocks": attrs["n_blocks"] - 1}))


def mixes_share_one_query(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
    """Use a layer's attention-side mixing vectors on its MLP side too."""
    if node.op is Leaf.WEIGHT and ".mlp_res_" in name:
        return copy.new.leaf(Leaf.WEIGHT, name.replace(".mlp_res_", ".self_attention_res_"))
    return None

"""Graphs on which a rule fires, and their look-alikes, on which it must not."""

from collections.abc import Callable

from k3tool.isa.table import Op
from tests.unit.compiler.kit import BETA, DIM, EPS, OTHER_EPS, TOP_K, Kit


def norm_linear(kit: Kit) -> int:
    return kit.linear(kit.norm(kit.x()), "q")


def mix_norm(kit: Kit) -> int:
    weights = kit.w("res_norm"), kit.w("res_proj")
    mix = kit.add(Op.ATTN_RES, kit.x(), kit.blocks(), *weights, n_blocks=1, eps=EPS)
    return kit.norm(mix, OTHER_EPS)


def norm_mix(kit: Kit) -> int:
    weights = kit.w("res_norm"), kit.w("res_proj")
    x = kit.norm(kit.x())
    return kit.add(Op.ATTN_RES, x, kit.blocks(), *weights, n_blocks=1, eps=EPS)


def situ(kit: Kit) -> int:
    x = kit.x()
    return kit.situ(kit.linear(x, "q"), kit.linear(x, "k"))


def situ_of_other_sigmoid(kit: Kit) -> int:
    x = kit.x()
    gate, up = kit.linear(x, "q"), kit.linear(x, "k")
    return kit.situ(gate, up, sigmoid_of=up)


def situ_gating_the_capped(kit: Kit) -> int:
    gate = kit.linear(kit.x(), "q")
    capped = kit.add(Op.SOFTCAP, gate, beta=BETA)
    return kit.situ(gate, capped, sigmoid_of=capped)


def glu_of_two_inputs(kit: Kit) -> int:
    x = kit.x()
    return kit.situ(kit.linear(x, "q"), kit.linear(kit.norm(x), "k"))


def glu_on_the_head_only(kit: Kit) -> int:
    x = kit.x()
    return kit.situ(kit.linear(x, "q", head_only=1), kit.linear(x, "k", head_only=1))


def _experts(kit: Kit, z1: int, z3: int, route1: int, route3: int) -> int:
    w1 = kit.add(Op.MOE_UP_MXFP4, z1, route1, kit.w("w1"), top_k=TOP_K)
    w3 = kit.add(Op.MOE_UP_MXFP4, z3, route3, kit.w("w3"), top_k=TOP_K)
    return kit.situ(w1, w3)


def experts(kit: Kit) -> int:
    x = kit.x()
    return _experts(kit, x, x, kit.route(x), kit.route(x))


def experts_of_two_inputs(kit: Kit) -> int:
    x = kit.x()
    return _experts(kit, x, kit.norm(x), kit.route(x), kit.route(x))


def experts_of_two_routes(kit: Kit) -> int:
    x = kit.x()
    return _experts(kit, x, x, kit.route(x), kit.route(kit.norm(x)))


def conv_silu(kit: Kit) -> int:
    x = kit.linear(kit.x(), "q")
    conv = kit.add(Op.SHORT_CONV, x, kit.w("conv"), kit.state("taps", 3, 64))
    return kit.add(Op.SILU, conv)


def conv_sigmoid(kit: Kit) -> int:
    x = kit.linear(kit.x(), "q")
    conv = kit.add(Op.SHORT_CONV, x, kit.w("conv"), kit.state("taps", 3, 64))
    return kit.add(Op.SIGMOID, conv)


def kda(kit: Kit) -> int:
    return kit.kda_step(kit.x())


def kda_two_eps(kit: Kit) -> int:
    return kit.kda_step(kit.x(), k_eps=OTHER_EPS)


def kda_two_head_sizes(kit: Kit) -> int:
    return kit.kda_step(kit.x(), k_dim=2 * DIM)


def kda_heads_of_twice_the_state(kit: Kit) -> int:
    # H * D is the same, so sizes alone let this through: q and k normed over two heads at once.
    return kit.kda_step(kit.x(), q_dim=2 * DIM, k_dim=2 * DIM)


def kda_gate(kit: Kit) -> int:
    x = kit.x()
    o = kit.add(Op.HEAD_RMSNORM, kit.linear(x, "q"), kit.w("o_norm"), eps=EPS)
    return kit.add(Op.MUL, o, kit.add(Op.SIGMOID, kit.linear(x, "k")))


def kda_gate_before_norm(kit: Kit) -> int:
    x = kit.x()
    o = kit.add(Op.MUL, kit.linear(x, "q"), kit.add(Op.SIGMOID, kit.linear(x, "k")))
    return kit.add(Op.HEAD_RMSNORM, o, kit.w("o_norm"), eps=EPS)


def kda_norm_of_the_gate(kit: Kit) -> int:
    x = kit.x()
    gate = kit.add(Op.HEAD_RMSNORM, kit.linear(x, "q"), kit.w("o_norm"), eps=EPS)
    return kit.add(Op.MUL, kit.linear(x, "k"), kit.add(Op.SIGMOID, gate))


def mla_gate(kit: Kit) -> int:
    x = kit.x()
    o = kit.value_projection(x)
    return kit.add(Op.MUL, o, kit.add(Op.SIGMOID, kit.linear(x, "mg")))


def mla_gate_without_sigmoid(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MUL, kit.value_projection(x), kit.linear(x, "mg"))


def bare_gate(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MUL, kit.linear(x, "q"), kit.add(Op.SIGMOID, kit.linear(x, "k")))


def add_reduced(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.ADD, x, kit.reduced(kit.linear(x, "q")))


def add_plain(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.ADD, x, kit.norm(x))


def _gathered(kit: Kit, x: int) -> int:
    return kit.add(Op.ALL_GATHER, kit.linear(x, "up"))


def gather_reduced(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.ADD, _gathered(kit, x), kit.reduced(kit.linear(x, "q")))


def gather_gathered(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.ADD, _gathered(kit, x), _gathered(kit, kit.norm(x)))


def residual_gather_reduced(kit: Kit) -> int:
    return kit.add(Op.ADD, kit.x(), gather_reduced(kit))


def residual_after_the_sum(kit: Kit) -> int:
    # (gathered + reduced) + residual rounds like residual + (...), but the rule names operands.
    return kit.add(Op.ADD, gather_reduced(kit), kit.x())


def up_in_numbers(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_UP, x, kit.route(x), kit.experts("w1"), top_k=TOP_K)


def up_as_stored(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_UP_MXFP4, x, kit.route(x), kit.w("w1"), top_k=TOP_K)


def _e(kit: Kit, x: int) -> int:
    return kit.add(Op.SILU, kit.add(Op.MOE_UP_MXFP4, x, kit.route(x), kit.w("w1"), top_k=TOP_K))


def down_in_numbers(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_DOWN, _e(kit, x), kit.route(x), kit.experts("w2"), top_k=TOP_K)


def down_as_stored(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_DOWN_MXFP4, _e(kit, x), kit.route(x), kit.w("w2"), top_k=TOP_K)


def _each(kit: Kit, x: int, **attrs: int) -> int:
    inputs = _e(kit, x), kit.route(x), kit.experts("w2")
    return kit.add(Op.MOE_DOWN_EACH, *inputs, top_k=TOP_K, **attrs)


def combined(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_COMBINE, _each(kit, x), kit.route(x), top_k=TOP_K)


def combined_by_another_route(kit: Kit) -> int:
    # The outputs of one choice of experts under the weights of another.
    x = kit.x()
    return kit.add(Op.MOE_COMBINE, _each(kit, x), kit.route(kit.norm(x)), top_k=TOP_K)


def combined_down(kit: Kit) -> int:
    return kit.add(Op.ALL_REDUCE, down_in_numbers(kit))


def row_parallel(kit: Kit) -> int:
    return kit.row_parallel(kit.linear(kit.x(), "q"))


def column_parallel(kit: Kit) -> int:
    # Every rank has whole rows: there is nothing to add up.
    return kit.linear(kit.x(), "q")


def gathered_rows(kit: Kit) -> int:
    return _gathered(kit, kit.x())


def token(kit: Kit) -> int:
    logits = kit.linear(kit.x(), "head", head_only=1)
    return kit.add(Op.ARGMAX_ALL, kit.add(Op.ALL_GATHER, logits))


def token_folded(kit: Kit) -> int:
    best = kit.add(Op.ARGMAX, kit.linear(kit.x(), "head", head_only=1))
    return kit.add(Op.ARGMAX_FOLD, best)


def token_of_a_whole(kit: Kit) -> int:
    # Logits that every rank has whole are not the ranks' shares side by side.
    return kit.add(Op.ARGMAX_ALL, kit.linear(kit.x(), "same"))


def first_block(kit: Kit) -> int:
    return kit.add(Op.BLOCK_PUSH, kit.x(), kit.blocks(), index=0)


def later_block(kit: Kit) -> int:
    return kit.add(Op.BLOCK_PUSH, kit.norm(kit.x()), kit.blocks(), index=1)


CASES: list[tuple[str, Callable[[Kit], int], tuple[Callable[[Kit], int], ...]]] = [
    ("dequant-up-fuse", up_in_numbers, (up_as_stored, down_in_numbers)),
    ("dequant-down-fuse", down_in_numbers, (down_as_stored, up_in_numbers)),
    ("expert-combine-fuse", combined, (combined_by_another_route, combined_down)),
    ("down-reduce-fuse", row_parallel, (column_parallel, gathered_rows, combined)),
    ("argmax-fold-fuse", token, (token_folded, token_of_a_whole)),
    ("embed-block-fuse", first_block, (later_block,)),
    ("norm-linear-fuse", norm_linear, (lambda k: k.linear(k.x(), "q"),)),
    ("attnres-norm-fuse", mix_norm, (norm_mix,)),
    ("situ-fuse", situ, (situ_of_other_sigmoid, situ_gating_the_capped, bare_gate)),
    ("glu-situ-fuse", situ, (glu_of_two_inputs, glu_on_the_head_only, experts)),
    ("moe-situ-fuse", experts, (experts_of_two_inputs, experts_of_two_routes, situ)),
    ("conv-silu-fuse", conv_silu, (conv_sigmoid,)),
    ("kda-core-fuse", kda, (kda_two_eps, kda_two_head_sizes, kda_heads_of_twice_the_state)),
    ("kda-gated-norm-fuse", kda_gate, (kda_gate_before_norm, kda_norm_of_the_gate, mla_gate)),
    ("mla-out-gate-fuse", mla_gate, (kda_gate, situ, bare_gate, mla_gate_without_sigmoid)),
    ("mla-uv-gate-fuse", mla_gate, (kda_gate, mla_gate_without_sigmoid)),
    ("reduce-residual-fuse", add_reduced, (add_plain, gather_gathered)),
    ("reduce-gather-fuse", gather_reduced, (gather_gathered, add_reduced)),
    ("gather-residual-fuse", residual_gather_reduced, (gather_reduced, residual_after_the_sum)),
]


# Rules over what the rules above make: their cases are whole layers (test_chain_rules).

"""Prices by hand: hand-offs, what slices read whole or again, and what few slices share.

Kills: bytes of all ranks for one rank's, a hand-off inside a packet that is free, an idle
workgroup's time counted as work, a stack of blocks priced as one.
"""

from dataclasses import replace

import pytest

from k3tool.compiler.egraph import Form, saturate
from k3tool.compiler.prices import FEW_TOKENS, FREE, Costs, Price, Prices
from k3tool.isa.table import SPECS, Op
from k3tool.model.nodes import Graph
from k3tool.targets import get_target
from tests.unit.compiler.kit import EPS, HIDDEN, Kit

# A byte takes a picosecond by one workgroup, an eighth by all: numbers to be read as bytes.
COSTS = Costs(handoff_ps=10_000, unit_bytes_per_s=10**12, bytes_per_s=8 * 10**12, workgroups=8)
F32, BF16, ISSUE = 4, 2, 1_000


def priced(graph: Graph, tokens: int = 1, tp: int = 1) -> Price:
    """Return the price of a graph's output as it was built."""
    prices = Prices(graph, saturate(graph, ()), COSTS, tokens, tp)
    node = graph.nodes[graph.outputs[0]]
    price = prices.of(Form(node.op, node.inputs, tuple(value for _, value in node.attrs)))
    assert price is not None
    return price


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_product_reads_its_input_in_every_slice(tokens: int) -> None:
    kit = Kit()
    graph = kit.finish(kit.linear(kit.x(), "q"))
    # 64 rows are eight tiles, one for each workgroup: all of them are busy that long.
    x = tokens * HIDDEN * F32
    assert priced(graph, tokens) == Price(10_000 + x, ISSUE + x)


def test_a_product_of_few_rows_keeps_few_workgroups_busy() -> None:
    kit = Kit()
    graph = kit.finish(kit.linear(kit.x(), "b"))
    x = HIDDEN * F32
    assert priced(graph) == Price(10_000 + x, ISSUE + x // 8), "four rows are one tile"


def test_a_prologue_reads_its_input_twice_and_the_norm() -> None:
    kit = Kit()
    attrs = {"eps": EPS, "head_only": 0}
    graph = kit.finish(kit.add(Op.NORM_GEMV_BF16, kit.x(), kit.w("norm"), kit.w("q"), **attrs))
    own = 3 * (2 * HIDDEN * F32) + HIDDEN * BF16
    assert priced(graph, 3) == Price(10_000 + own, ISSUE + own)


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_a_norm_of_its_own_is_shared_by_as_many_slices_as_tokens(tokens: int) -> None:
    kit = Kit()
    graph = kit.finish(kit.norm(kit.x()))
    norm, moved = HIDDEN * BF16, 2 * HIDDEN * F32  # a token's row, read and written
    narrow = moved - tokens * moved // 8  # eight slices take no longer than all workgroups
    own = norm + narrow
    assert priced(graph, tokens) == Price(10_000 + own, ISSUE + own * tokens // 8)


def test_a_mix_reads_as_many_blocks_as_it_mixes() -> None:
    delays = []
    for blocks in (1, 3):
        kit = Kit()
        weights = kit.w("res_norm"), kit.w("res_proj")
        mix = kit.add(Op.ATTN_RES, kit.x(), kit.blocks(), *weights, n_blocks=blocks, eps=EPS)
        delays.append(priced(kit.finish(mix)).delay)
    more = 2 * HIDDEN * F32
    assert delays[1] - delays[0] == pytest.approx(more * 7 / 8, abs=1)


def test_a_wait_inside_a_packet_costs_a_hand_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    graph = kit.finish(kit.linear(kit.x(), "q"))
    before = priced(graph)
    row = replace(SPECS[Op.GEMV_BF16], inner_waits=2)
    monkeypatch.setitem(SPECS, Op.GEMV_BF16, row)
    assert priced(graph) == before._replace(delay=before.delay + 20_000)


def test_a_shard_is_priced_by_its_part() -> None:
    kit = Kit(tp=2)
    q = kit.linear(kit.x(), "q")
    graph = kit.finish(kit.add(Op.GEMV_BF16_BLOCKS, q, kit.w("down")))
    width = graph.nodes[q].width
    assert priced(graph, tp=2).delay == 10_000 + width // 2 * F32


def test_some_ops_are_for_few_tokens_and_leaves_are_free() -> None:
    kit = Kit()
    gate, up = kit.linear(kit.x(), "q"), kit.linear(kit.x(), "k")
    attrs = {"beta": EPS, "linear_beta": EPS}
    graph = kit.finish(kit.add(Op.SITU_GEMV_BLOCKS, gate, up, kit.w("down"), **attrs))
    saturated = saturate(graph, ())
    node = graph.nodes[graph.outputs[0]]
    form = Form(node.op, node.inputs, tuple(value for _, value in node.attrs))
    few, many = (Prices(graph, saturated, COSTS, FEW_TOKENS + n, 1) for n in (0, 1))
    assert few.of(form) is not None
    assert many.of(form) is None
    (leaf, *_) = saturated.forms[saturated.class_of[node.inputs[-1]]]
    assert many.of(leaf) == FREE


def test_a_targets_costs_are_its_own() -> None:
    target = get_target("hip:gfx950")
    costs = Costs.of(target, 256)
    assert costs == Costs(3_460_000, 10**11, 8 * 10**12, 256)
    assert Costs.of(replace(target, handoff_us=1.0), 8).handoff_ps == 1_000_000
    assert Costs.of(get_target("cpu"), 8).bytes_per_s == 8 * 10**11

"""Whole layers are accepted whatever their order, and never where one tensor of them is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint.header_table import ANY_LAYER, TensorTable
from k3tool.checkpoint.layer_match import LayerMatcher, ModuleTotal
from k3tool.checkpoint.reader import Checkpoint
from k3tool.model.config import K3Config

FILE = "model-00003-of-000011.safetensors"  # layer 2


@pytest.fixture
def layer(oracle: Callable[[str], Path]) -> tuple[K3Config, TensorTable]:
    with Checkpoint.open(oracle("tiny_tp8")) as checkpoint:
        header = checkpoint.header(FILE)
        assert header.layer == 2
        return checkpoint.config, header.table


def change(table: TensorTable, **columns: object) -> TensorTable:
    kept = {name: getattr(table, name) for name in ("names", "kinds", "kind_of", "starts")}
    return TensorTable(**{**kept, "n_bytes": table.n_bytes, **columns})


def test_totals_do_not_depend_on_the_order(layer: tuple[K3Config, TensorTable]) -> None:
    config, table = layer
    found = LayerMatcher(config, None).match(2, table)
    assert found is not None
    assert sum(total.n_tensors for total in found) == len(table.names)
    assert sum(total.n_bytes for total in found) == table.n_bytes
    assert ModuleTotal("experts", 72, found[-1].n_bytes) in found
    back = change(table, names=table.names[::-1], kind_of=table.kind_of[::-1])
    assert LayerMatcher(config, None).match(2, back) == found


def test_a_layer_of_another_kind_is_not_this_one(layer: tuple[K3Config, TensorTable]) -> None:
    config, table = layer
    matcher = LayerMatcher(config, None)
    same = {config.is_mla(2), config.is_moe(2)}
    for number in config.layers:
        alike = (config.is_mla(number), config.is_moe(number)) == (False, True)
        assert (matcher.match(number, table) is not None) == alike, number
    assert same == {False, True}
    assert LayerMatcher(config, 2).match(2, table) is None  # a rank's layer is narrower


@pytest.mark.parametrize("which", [0, 17, -1])
def test_one_wrong_tensor_is_enough(layer: tuple[K3Config, TensorTable], which: int) -> None:
    config, table = layer
    renamed, kinds, kind_of = list(table.names), list(table.kinds), list(table.kind_of)
    renamed[which] = f"language_model.model.layers.{ANY_LAYER}.other"
    dtype, shape = kinds[kind_of[which]]
    kind_of[which] = len(kinds)
    mutants = [
        change(table, names=renamed),
        change(table, names=table.names[:-1], kind_of=table.kind_of[:-1]),
        change(table, kinds=[*kinds, ("F16", shape)], kind_of=kind_of),
        change(table, kinds=[*kinds, (dtype, (*shape, 1))], kind_of=kind_of),
    ]
    matcher = LayerMatcher(config, None)
    assert [matcher.match(2, mutant) for mutant in mutants] == [None] * 4
    assert matcher.match(2, table) is not None

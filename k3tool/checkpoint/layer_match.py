"""Decide for a whole layer at once whether a file's header is what the layer has to be.

All layers of one kind (KDA or MLA, dense or MoE) have the same names, dtypes and shapes after the
layer's number, and files of equal layers share one table, so the comparison is made once for each
pair of kind and table. It says yes or nothing: what is wrong coverage finds tensor by tensor.
"""

from typing import NamedTuple

from k3tool.checkpoint.header_table import ANY_LAYER, TensorTable
from k3tool.model.config import K3Config
from k3tool.model.weights import (
    TensorSpec,
    dtype_fault,
    layer_tensors,
    n_bytes,
    rank_spec,
    shape_fault,
)


class ModuleTotal(NamedTuple):
    """Sound tensors of one module of a layer, and their bytes as stored."""

    module: str
    n_tensors: int
    n_bytes: int


class LayerMatcher:
    """Compares tables with the layers of one model, or of one rank of it."""

    def __init__(self, config: K3Config, tp: int | None) -> None:
        """Take what the layers have to be."""
        self._config = config
        self._tp = tp
        self._specs: dict[tuple[bool, bool], dict[str, TensorSpec]] = {}
        self._known: dict[tuple[int, tuple[bool, bool]], list[ModuleTotal] | None] = {}
        self._tables: list[TensorTable] = []  # keeps the ids in `_known` alive

    def match(self, layer: int, table: TensorTable) -> list[ModuleTotal] | None:
        """Return the totals of a layer that a table holds wholly and alone, else None."""
        kind = (self._config.is_mla(layer), self._config.is_moe(layer))
        key = (id(table), kind)
        if key not in self._known:
            self._known[key] = _totals(self._layer_specs(layer, kind), table)
            self._tables.append(table)
        return self._known[key]

    def _layer_specs(self, layer: int, kind: tuple[bool, bool]) -> dict[str, TensorSpec]:
        """Return a kind's specs by the name that a shared table has for them."""
        if kind not in self._specs:
            number, any_layer = f"layers.{layer}.", f"layers.{ANY_LAYER}."
            self._specs[kind] = {
                spec.name.replace(number, any_layer, 1): spec
                if self._tp is None
                else rank_spec(spec, self._tp)
                for spec in layer_tensors(self._config, layer)
            }
        return self._specs[kind]


def _totals(specs: dict[str, TensorSpec], table: TensorTable) -> list[ModuleTotal] | None:
    if len(specs) != len(table.names):
        return None
    counts: dict[str, list[int]] = {spec.row.module: [0, 0] for spec in specs.values()}
    for name, kind in zip(table.names, table.kind_of, strict=True):
        spec = specs.get(name)
        dtype, shape = table.kinds[kind]
        if spec is None or dtype_fault(spec, dtype) or shape_fault(spec, shape):
            return None
        count = counts[spec.row.module]
        count[0] += 1
        count[1] += n_bytes(shape, dtype)
    return [ModuleTotal(module, *count) for module, count in counts.items()]

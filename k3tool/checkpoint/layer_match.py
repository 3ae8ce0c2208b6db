"""Decide for a whole layer at once whether a file's header is what the layer has to be.

All layers of one kind (KDA or MLA, dense or MoE) have the same names, dtypes and shapes after the
layer's number, and files of equal layers share one layout, so the comparison is made once for each
pair of kind and layout. It says yes or nothing: what is wrong coverage finds tensor by tensor.
"""

from collections import Counter
from typing import NamedTuple

from k3tool.checkpoint.header_table import ANY_LAYER, TensorTable
from k3tool.model.config import K3Config
from k3tool.model.weight_slices import dtype_fault, n_bytes, rank_spec, shape_fault
from k3tool.model.weights import TensorSpec, layer_tensors


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
        self._rows: dict[tuple[bool, bool], _LayerRows] = {}
        self._known: dict[tuple[object, tuple[bool, bool]], list[ModuleTotal] | None] = {}

    def match(self, layer: int, table: TensorTable) -> list[ModuleTotal] | None:
        """Return the totals of a layer that a table holds wholly and alone, else None."""
        kind = (self._config.is_mla(layer), self._config.is_moe(layer))
        key = (table.layout, kind)
        if key not in self._known:
            self._known[key] = _totals(self._layer_rows(layer, kind), table)
        return self._known[key]

    def _layer_rows(self, layer: int, kind: tuple[bool, bool]) -> "_LayerRows":
        """Return what a kind's layers hold, by the names that a shared table has for it."""
        if kind not in self._rows:
            number, any_layer = f"layers.{layer}.", f"layers.{ANY_LAYER}."
            rows: dict[str, int] = {}
            row_of: dict[str, int] = {}
            specs: list[TensorSpec] = []
            for spec in layer_tensors(self._config, layer):
                row = rows.setdefault(spec.row.pattern, len(rows))
                if row == len(specs):
                    specs.append(spec if self._tp is None else rank_spec(spec, self._tp))
                row_of[spec.name.replace(number, any_layer, 1)] = row
            self._rows[kind] = _LayerRows(row_of, specs)
        return self._rows[kind]


class _LayerRows(NamedTuple):
    """Each name's row of the weight table, and one spec a row: all experts of a row are alike."""

    row_of: dict[str, int]
    specs: list[TensorSpec]


def _totals(layer: _LayerRows, table: TensorTable) -> list[ModuleTotal] | None:
    if len(layer.row_of) != len(table.names):
        return None
    # Few pairs of a row and a stored kind stand for thousands of tensors.
    pairs = Counter(zip(map(layer.row_of.get, table.names), table.kind_of, strict=True))
    counts: dict[str, list[int]] = {spec.row.module: [0, 0] for spec in layer.specs}
    for (row, kind), n_tensors in pairs.items():
        if row is None:
            return None
        spec, (dtype, shape) = layer.specs[row], table.kinds[kind]
        if dtype_fault(spec, dtype) or shape_fault(spec, shape):
            return None
        count = counts[spec.row.module]
        count[0] += n_tensors
        count[1] += n_tensors * n_bytes(shape, dtype)
    return [ModuleTotal(module, *count) for module, count in counts.items()]

"""The handle table while it grows: weights and states first, then each phase's buffers."""

import math
from collections.abc import Sequence

from k3tool.compiler.plan import Tensor
from k3tool.model.nodes import Graph, StateLeaf

F32_BYTES = 4


class Handles:
    """Tensors in handle order, and the handle of each name."""

    def __init__(
        self,
        graphs: Sequence[Graph],
        tp: int,
        slots: int,
        pages: int,
        runs: Sequence[tuple[str, ...]] = (),
    ) -> None:
        """Enter the weights that the phases' graphs read, in table order, then states by name.

        `runs` are leaves that an op reads through one slot: they stand together, at the first
        one's place.
        """
        self.tensors: list[Tensor] = []
        self.index: dict[str, int] = {}
        claimed = {leaf for graph in graphs for leaf in graph.claimed_weights()}
        weights = graphs[0].weights
        for leaf in _in_runs([leaf for leaf in weights if leaf in claimed], runs):
            weight = weights[leaf]
            role = "experts" if weight.dtype == "mxfp4" else "weight"
            shapes = weight.shape, weight.local_shape
            n_bytes = weight_bytes(weight.dtype, weight.local_shape)
            row = Tensor(weight.leaf, role, weight.dtype, *shapes, n_bytes, leaf=weight.leaf)
            self.add(row._replace(source=weight.source, split=weight.split))
        states = {name: state for graph in graphs for name, state in graph.states.items()}
        for name in _in_runs(sorted(states), runs):
            self.add(state_tensor(states[name], tp, slots, pages))

    def add(self, tensor: Tensor) -> int:
        """Return the handle of a new tensor."""
        assert tensor.name not in self.index, tensor.name
        self.index[tensor.name] = len(self.tensors)
        self.tensors.append(tensor)
        return self.index[tensor.name]


def _in_runs(names: Sequence[str], runs: Sequence[tuple[str, ...]]) -> list[str]:
    run_of = {name: run for run in runs for name in run}
    return list(dict.fromkeys(n for name in names for n in run_of.get(name, (name,))))


def state_tensor(state: StateLeaf, tp: int, slots: int, pages: int) -> Tensor:
    """Return the row of a state for so many sequences and pages of all of them."""
    part = [
        size // tp if axis == state.sharded_axis else size for axis, size in enumerate(state.shape)
    ]
    rows = slots if state.rows == "slots" else pages
    n_bytes = rows * math.prod(part) * F32_BYTES
    return Tensor(state.name, "state", "f32", (rows, *state.shape), (rows, *part), n_bytes)


def weight_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the stored bytes of one rank's part; MXFP4: packed values plus a scale per 32."""
    elements = math.prod(shape)
    sizes = {"bf16": elements * 2, "f32": elements * 4, "mxfp4": elements // 2 + elements // 32}
    return sizes[dtype]

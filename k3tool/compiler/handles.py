"""The handle table while it grows: weights and states first, then each phase's buffers."""

import math
from collections.abc import Sequence

from k3tool.compiler.plan import Tensor
from k3tool.model.nodes import Graph

F32_BYTES = 4


class Handles:
    """Tensors in handle order, and the handle of each name."""

    def __init__(self, graph: Graph, tp: int, slots: int, pages: int) -> None:
        """Enter the weights that the graph reads, in table order, then its states by name."""
        self.tensors: list[Tensor] = []
        self.index: dict[str, int] = {}
        claimed = graph.claimed_weights()
        for weight in graph.weights.values():
            if weight.leaf in claimed:
                role = "experts" if weight.dtype == "mxfp4" else "weight"
                shapes = weight.shape, weight.local_shape
                n_bytes = weight_bytes(weight.dtype, weight.local_shape)
                row = Tensor(weight.leaf, role, weight.dtype, *shapes, n_bytes, leaf=weight.leaf)
                self.add(row._replace(source=weight.source, split=weight.split))
        for name in sorted(graph.states):
            state = graph.states[name]
            part = [
                size // tp if axis == state.sharded_axis else size
                for axis, size in enumerate(state.shape)
            ]
            rows = slots if state.rows == "slots" else pages
            n_bytes = rows * math.prod(part) * F32_BYTES
            self.add(Tensor(name, "state", "f32", (rows, *state.shape), (rows, *part), n_bytes))

    def add(self, tensor: Tensor) -> int:
        """Return the handle of a new tensor."""
        assert tensor.name not in self.index, tensor.name
        self.index[tensor.name] = len(self.tensors)
        self.tensors.append(tensor)
        return self.index[tensor.name]


def weight_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the stored bytes of one rank's part; MXFP4: packed values plus a scale per 32."""
    elements = math.prod(shape)
    sizes = {"bf16": elements * 2, "f32": elements * 4, "mxfp4": elements // 2 + elements // 32}
    return sizes[dtype]

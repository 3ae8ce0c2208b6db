"""Copy an operator graph while changing some of its nodes: how a mutant gets its one mistake."""

from collections.abc import Callable, Sequence

from k3tool.isa.table import Op
from k3tool.model.nodes import Graph, Leaf, Node


class Copy:
    """A graph being copied. An edit sees each node of ``old`` with its inputs in ``new``."""

    def __init__(self, old: Graph) -> None:
        self.old = old
        self.new = Graph(old.weights, n_blocks=old.n_blocks)
        self.map: dict[int, int] = {}  # node of old -> node of new

    def add(self, op: Op, inputs: Sequence[int], **attrs: int) -> int:
        return self.new.add(op, f"edit{len(self.new.nodes)}", inputs, **attrs)

    def named(self, name: str) -> int:
        """Return the new node of an old name."""
        return self.map[self.old.names.index(name)]

    def old_inputs(self, name: str) -> tuple[int, ...]:
        """Return, in the new graph, the inputs of an old node."""
        return tuple(self.map[index] for index in self.old.nodes[self.old.names.index(name)].inputs)

    def plain(self, node: Node, name: str, inputs: Sequence[int]) -> int:
        """Copy one node as it is."""
        if isinstance(node.op, Leaf):
            if node.op is Leaf.STATE:
                return self.new.state(self.old.states[name])
            return self.new.leaf(node.op, name, node.width)
        return self.new.add(node.op, name, inputs, **{k: int(v) for k, v in node.attrs})


# An edit returns the new node that stands for the old one, or None to copy it.
Edit = Callable[[Copy, Node, str, list[int]], int | None]


def rewrite(graph: Graph, edit: Edit) -> Graph:
    """Copy a graph through an edit. Raises: AssertionError if the edit changed nothing."""
    copy, touched = Copy(graph), False
    for index, node in enumerate(graph.nodes):
        name, inputs = graph.names[index], [copy.map[i] for i in node.inputs]
        made = edit(copy, node, name, inputs)
        touched = touched or made is not None
        copy.map[index] = copy.plain(node, name, inputs) if made is None else made
    assert touched, "the edit met no node that it changes"
    copy.new.outputs = [copy.map[index] for index in graph.outputs]
    return copy.new


def skip(op: Op, suffix: str = "") -> Edit:
    """Return an edit that leaves out an op: its consumers read its first operand."""

    def edit(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
        return inputs[0] if node.op is op and name.endswith(suffix) else None

    return edit


def attribute(op: Op, suffix: str, change: Callable[[dict[str, int]], dict[str, int]]) -> Edit:
    """Return an edit of an op's attributes."""

    def edit(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
        if node.op is not op or not name.endswith(suffix):
            return None
        attrs = {key: int(value) for key, value in node.attrs}
        return copy.new.add(op, name, inputs, **(attrs | change(attrs)))

    return edit


def other_leaf(swap: dict[str, str]) -> Edit:
    """Return an edit that reads another weight of the same shape, by the end of its name."""

    def edit(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
        for end, other in swap.items():
            if node.op is Leaf.WEIGHT and name.endswith(end):
                return copy.new.leaf(Leaf.WEIGHT, name.removesuffix(end) + other)
        return None

    return edit

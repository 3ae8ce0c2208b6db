"""The packets of a graph as a graph of their own: order, producers, ancestors.

One op node is one packet. Order is by level (longest way from the inputs), so that a workgroup's
queue, which is in packet order, seldom waits in front of work that is ready; correctness rests on
waits alone. A packet's producers are the fewest whose completion implies that of all it reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3tool.compiler.memory import packet_set
from k3tool.model.nodes import Graph, Leaf


@dataclass(frozen=True, slots=True)
class Dag:
    """Packets as a graph: node of each packet, its producers, all its ancestors as a set."""

    nodes: tuple[int, ...]
    producers: tuple[tuple[int, ...], ...]  # transitively reduced
    ancestors: tuple[int, ...]
    depth: tuple[int, ...]  # packets on the longest chain that ends here


def packet_dag(graph: Graph) -> Dag:
    """Return the packets that the graph's outputs need, in level order, with their producers."""
    needed = _reachable(graph)
    inputs = {
        node: sorted({i for i in graph.nodes[node].inputs if i in needed}) for node in needed
    }
    level, height = _levels(needed, inputs)
    order = sorted(needed, key=lambda node: (level[node], -height[node], node))
    position = {node: packet for packet, node in enumerate(order)}
    ancestors: list[int] = []
    producers: list[tuple[int, ...]] = []
    for node in order:
        direct = sorted(position[i] for i in inputs[node])
        above = [ancestors[packet] for packet in direct]
        covered = 0
        for bits in above:
            covered |= bits
        producers.append(tuple(packet for packet in direct if not covered >> packet & 1))
        ancestors.append(covered | packet_set(direct))
    depth = tuple(level[node] for node in order)
    return Dag(tuple(order), tuple(producers), tuple(ancestors), depth)


def _reachable(graph: Graph) -> list[int]:
    """Return the op nodes that the outputs depend on, in topological order."""
    seen: set[int] = set()
    stack = list(graph.outputs)
    while stack:
        node = stack.pop()
        if node not in seen and not isinstance(graph.nodes[node].op, Leaf):
            seen.add(node)
            stack.extend(graph.nodes[node].inputs)
    return sorted(seen)


def _levels(
    needed: Sequence[int], inputs: Mapping[int, Sequence[int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return each node's longest way from the inputs and to the outputs, in nodes."""
    level: dict[int, int] = {}
    height = dict.fromkeys(needed, 1)
    for node in needed:
        level[node] = 1 + max((level[i] for i in inputs[node]), default=0)
    for node in reversed(needed):
        for i in inputs[node]:
            height[i] = max(height[i], height[node] + 1)
    return level, height

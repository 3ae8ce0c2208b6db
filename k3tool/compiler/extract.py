"""The graph of the forms that were chosen, rebuilt node by node, with what it rests on.

`prices` says what a form costs and `choose` which forms are taken; here the result becomes a graph
again, so that sizes and places are checked as when it was built, and every fused value is traced to
the rule applications that made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from k3tool.compiler.choose import choose, original
from k3tool.compiler.egraph import Form, Made, Saturated
from k3tool.compiler.plan import Fired
from k3tool.compiler.prices import Costs, Prices
from k3tool.isa.table import Op
from k3tool.model.nodes import Graph, Leaf
from k3tool.model.operators import attr_names
from k3tool.targets import TARGETS

# What a graph is priced by where nobody says: the target that the chain is shortened for.
DEFAULT_COSTS = Costs.of(TARGETS["hip:gfx950"], TARGETS["hip:gfx950"].workgroups)


@dataclass(frozen=True, slots=True)
class Extracted:
    """The chosen graph; `made_by[node]` are the rows of `fired` that a node rests on."""

    graph: Graph
    made_by: dict[int, tuple[int, ...]]
    fired: tuple[Fired, ...]


def extract(
    graph: Graph,
    saturated: Saturated,
    tokens: int = 1,
    tp: int = 1,
    costs: Costs = DEFAULT_COSTS,
) -> Extracted:
    """Return the cheapest graph found, rebuilt node by node (so sizes and places are checked).

    `tokens` is the most that a step of the program has: what slices repeat costs that often.
    """
    choice = choose(graph, saturated, Prices(graph, saturated, costs, tokens, tp))
    provenance = _Provenance(graph, saturated)
    names = _value_names(graph, saturated)
    chosen = Graph(graph.weights, n_blocks=graph.n_blocks, pages=graph.pages)
    new: dict[int, int] = {}
    made_by: dict[int, tuple[int, ...]] = {}
    for cls in choice.in_order():
        form = choice.form[cls]
        new[cls] = _rebuild(chosen, graph, cls, names[cls], form, [new[i] for i in form.inputs])
        used = provenance.use(cls, form)
        if used:
            made_by[new[cls]] = tuple(sorted(used))
    chosen.outputs = [new[saturated.class_of[node]] for node in graph.outputs]
    return Extracted(chosen, made_by, provenance.fired(names))


def _value_names(graph: Graph, saturated: Saturated) -> dict[int, str]:
    """Return a name for each class: its node's, or for a new value one after what it is part of."""
    names = dict(enumerate(graph.names))
    for application in saturated.applications:
        for cls, form in application.inner:
            root = names[application.made[0].cls]
            assert isinstance(form.op, Op)
            names.setdefault(cls, inner_name(root, form.op))
    doubled = len(names) - len(set(names.values()))
    assert not doubled, f"{doubled} values share a name"
    return names


def inner_name(root: str, op: Op) -> str:
    """Return the name of a new value inside the right side that rewrote `root`."""
    return f"{root}.{op.name.lower()}"


def _rebuild(
    chosen: Graph, graph: Graph, cls: int, name: str, form: Form, inputs: Sequence[int]
) -> int:
    match form.op:
        case Leaf.STATE:
            return chosen.state(graph.states[str(form.attrs[0])])
        case Leaf.WEIGHT | Leaf.BLOCKS:
            return chosen.leaf(form.op, str(form.attrs[0]), graph.nodes[cls].width)
        case _:
            names = attr_names(form.op)
            attrs = {name: int(x) for name, x in zip(names, form.attrs, strict=True)}
            return chosen.add(form.op, name, inputs, **attrs)


@dataclass(slots=True)
class _Provenance:
    """Traces forms to the rule applications that made them."""

    graph: Graph
    saturated: Saturated
    made_by: dict[Made, int] = field(init=False)
    original: set[Made] = field(init=False)
    used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.made_by = {}
        for number, application in enumerate(self.saturated.applications):
            for made in (*application.made, *application.inner):
                self.made_by.setdefault(made, number)
        self.original = {
            Made(cls, original(self.graph, self.saturated, node))
            for node, cls in enumerate(self.saturated.class_of)
        }

    def use(self, cls: int, form: Form) -> set[int]:
        """Return the applications between the built graph and a chosen form; mark them used."""
        made = Made(cls, form)
        if made in self.original:
            return set()
        number = self.made_by[made]
        found = {number}
        for part_cls, part in self.saturated.applications[number].matched:
            found |= self.use(part_cls, part)
        self.used |= found
        return found

    def fired(self, names: Mapping[int, str]) -> tuple[Fired, ...]:
        """Return every application in order, and whether the chosen graph rests on it."""
        rows = []
        for number, application in enumerate(self.saturated.applications):
            used = number in self.used
            values = [f"{k}={names[v]}" for k, v in application.values.items()]
            numbers = [f"{k}={v}" for k, v in application.numbers.items()]
            roots = " ".join(names[made.cls] for made in application.made)
            rows.append(Fired(application.rule.name, roots, " ".join(values + numbers), used))
        return tuple(rows)

"""Choosing: one form per value of a saturated e-graph, so that the whole graph costs least.

The cost of a graph counts each chosen value once, however many readers it has. A choice is
therefore judged by what it adds and frees in the graph as it stands (the values only it kept
alive), as logic synthesis does, not by a tree cost: for a tree, a norm fused into each of its six
readers is free; in the graph it is five norms too many. Descent starts from the graph as it was
built, takes classes in topological order and repeats until nothing gets cheaper; each step lowers
the cost, so it ends, and it depends on nothing but the graph and the rules.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from k3tool.compiler.egraph import Application, Form, Saturated
from k3tool.compiler.plan import Fired
from k3tool.isa.table import Op
from k3tool.model.nodes import Graph, Leaf
from k3tool.model.operators import attr_names

# Unit: a tenth of a packet, for a packet is a hand-off and hand-offs are what the chain is made of.
PACKET_COST = 10
# Every slice of the linear op repeats the norm of the whole row: worth it for one reader, which
# saves a packet, and not when other readers keep the norm's packet alive.
_COSTS: dict[Op, int] = {Op.NORM_GEMV_BF16: 13}


def cost_of(form: Form) -> int:
    """Return the cost of one value made this way."""
    return 0 if isinstance(form.op, Leaf) else _COSTS.get(form.op, PACKET_COST)


@dataclass(frozen=True, slots=True)
class Extracted:
    """The chosen graph; `rules[node]` are the rules that made a node, space-separated."""

    graph: Graph
    rules: dict[int, str]
    fired: tuple[Fired, ...]


def extract(graph: Graph, saturated: Saturated) -> Extracted:
    """Return the cheapest graph found, rebuilt node by node (so sizes and places are checked)."""
    descent = _Descent(graph, saturated)
    descent.run()
    provenance = _Provenance(graph, saturated)
    chosen = Graph(graph.weights, n_blocks=graph.n_blocks)
    new: dict[int, int] = {}
    rules: dict[int, str] = {}
    for cls in sorted(descent.live()):
        form = descent.choice[cls]
        new[cls] = _rebuild(chosen, graph, cls, form, [new[i] for i in form.inputs])
        names = provenance.use(cls, form)
        if names:
            rules[new[cls]] = " ".join(sorted(names))
    chosen.outputs = [new[saturated.class_of[node]] for node in graph.outputs]
    return Extracted(chosen, rules, provenance.fired())


def _rebuild(chosen: Graph, graph: Graph, cls: int, form: Form, inputs: Sequence[int]) -> int:
    match form.op:
        case Leaf.STATE:
            return chosen.state(graph.states[str(form.attrs[0])])
        case Leaf.WEIGHT | Leaf.BLOCKS:
            return chosen.leaf(form.op, str(form.attrs[0]), graph.nodes[cls].width)
        case _:
            names = attr_names(form.op)
            attrs = {name: int(x) for name, x in zip(names, form.attrs, strict=True)}
            return chosen.add(form.op, graph.names[cls], inputs, **attrs)


def _original(graph: Graph, saturated: Saturated, node: int) -> Form:
    found = graph.nodes[node]
    inputs = tuple(saturated.class_of[i] for i in found.inputs)
    return Form(found.op, inputs, tuple(value for _, value in found.attrs))


class _Descent:
    """The current choice, with the number of readers of every class."""

    def __init__(self, graph: Graph, saturated: Saturated) -> None:
        self.forms = {cls: _acyclic(cls, forms) for cls, forms in saturated.forms.items()}
        self.choice = {cls: _original(graph, saturated, cls) for cls in self.forms}
        self.readers = dict.fromkeys(self.forms, 0)
        for node in graph.outputs:
            self.readers[saturated.class_of[node]] += 1
        for cls in sorted(self.forms, reverse=True):
            if self.readers[cls]:
                for i in self.choice[cls].inputs:
                    self.readers[i] += 1

    def live(self) -> Iterable[int]:
        """Return the classes that the outputs need."""
        return (cls for cls, readers in self.readers.items() if readers)

    def run(self) -> None:
        improved = True
        while improved:
            improved = False
            for cls, forms in self.forms.items():
                if self.readers[cls] and len(forms) > 1:
                    improved |= self._improve(cls, forms)

    def _improve(self, cls: int, forms: Sequence[Form]) -> bool:
        current = self.choice[cls]
        best, best_delta = current, 0
        for form in forms:
            delta = self._switch(current, form)
            self._switch(form, current)
            if delta < best_delta:
                best, best_delta = form, delta
        self._switch(current, best)
        self.choice[cls] = best
        return best_delta < 0

    def _switch(self, old: Form, new: Form) -> int:
        """Move a class's reads from one form's inputs to another's; return what the graph gains."""
        gained = sum(self._take(i) for i in new.inputs)
        freed = sum(self._release(i) for i in old.inputs)
        return cost_of(new) - cost_of(old) + gained - freed

    def _take(self, cls: int) -> int:
        self.readers[cls] += 1
        if self.readers[cls] > 1:
            return 0
        form = self.choice[cls]
        return cost_of(form) + sum(self._take(i) for i in form.inputs)

    def _release(self, cls: int) -> int:
        self.readers[cls] -= 1
        if self.readers[cls] > 0:
            return 0
        form = self.choice[cls]
        return cost_of(form) + sum(self._release(i) for i in form.inputs)


def _acyclic(cls: int, forms: Sequence[Form]) -> list[Form]:
    """Return the forms that read only smaller classes: any mixture of those is free of cycles.

    The form that the builder wrote is among them, since graph ids are in topological order.
    """
    return [form for form in forms if all(i < cls for i in form.inputs)]


@dataclass(slots=True)
class _Provenance:
    """Traces forms to the rule applications that made them."""

    graph: Graph
    saturated: Saturated
    made_by: dict[tuple[int, Form], Application] = field(init=False)
    original: set[tuple[int, Form]] = field(init=False)
    used: set[tuple[int, Form]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.made_by = {}
        for application in self.saturated.applications:
            self.made_by.setdefault((application.root, application.made), application)
        self.original = {
            (cls, _original(self.graph, self.saturated, node))
            for node, cls in enumerate(self.saturated.class_of)
        }

    def use(self, cls: int, form: Form) -> set[str]:
        """Return the rules on the way from the built graph to a chosen form; mark them used."""
        if (cls, form) in self.original:
            return set()
        application = self.made_by[cls, form]
        self.used.add((cls, form))
        names = {application.rule.name}
        for part_cls, part in application.matched:
            names |= self.use(part_cls, part)
        return names

    def fired(self) -> tuple[Fired, ...]:
        """Return every application in order, and whether the chosen graph rests on it."""
        rows = []
        for application in self.saturated.applications:
            key = (application.root, application.made)
            used = key in self.used and self.made_by[key] is application
            values = [f"{k}={self.graph.names[v]}" for k, v in application.values.items()]
            numbers = [f"{k}={v}" for k, v in application.numbers.items()]
            root = self.graph.names[application.root]
            rows.append(Fired(application.rule.name, root, " ".join(values + numbers), used))
        return tuple(rows)

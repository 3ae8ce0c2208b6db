"""Choosing: one form per value of a saturated e-graph, so that the whole graph costs least.

The cost of a graph counts each chosen value once, however many readers it has. A choice is
therefore judged by what it adds and frees in the graph as it stands (the values only it kept
alive), as logic synthesis does, not by a tree cost: for a tree, a norm fused into each of its six
readers is free; in the graph it is five norms too many. Descent starts from the graph as it was
built, takes classes in topological order and repeats until nothing gets cheaper; each step lowers
the cost, so it ends, and it depends on nothing but the graph and the rules. A rule that rewrites
several values is one move: the first of six linears to join a group gains nothing, the sixth all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor

from k3tool.compiler.egraph import Form, Made, Saturated
from k3tool.compiler.plan import Fired
from k3tool.isa.table import Op
from k3tool.model.nodes import Graph, Leaf
from k3tool.model.operators import attr_names

# Unit: a tenth of a packet, for a packet is a hand-off and hand-offs are what the chain is made of.
PACKET_COST = 10
# Every slice of the linear op repeats the norm of the whole row: worth it for one reader, which
# saves a packet, and not when other readers keep the norm's packet alive.
_COSTS: dict[Op, int] = {Op.PART: 0, Op.NORM_GEMV_BF16: 13}
# Of a step of few tokens, where a hand-off costs more than what slices repeat or what a slice that
# does a whole head could share out further. A block part is an eighth of a packet off the chain. A
# gated linear costs its siblings' company: they cannot share a packet with what is half a product.
FEW_TOKENS = 4
_FEW_COSTS: dict[Op, int] = {
    Op.ATTN_PART: 2,
    Op.MIX_LINEARS_3: PACKET_COST,
    Op.MIX_LINEARS_4: PACKET_COST,
    Op.MIX_LINEARS_6: PACKET_COST,
    Op.KDA_HEADS: PACKET_COST,
    Op.MLA_HEADS: PACKET_COST,
    Op.SITU_GEMV_BLOCKS: PACKET_COST,
    Op.MOE_GLU_TOPK: PACKET_COST - 1,  # off the chain even while the down keeps the router's packet
    Op.MOE_DOWN_TOPK: PACKET_COST,
}
_GATED_LINEAR_COST = 25
# Of more tokens: every slice would repeat the work of all of them, from scratch that nobody has.
_REPEATED_COST = 1000 * PACKET_COST


def cost_of(form: Form, tokens: int = 1) -> int:
    """Return the cost of one value made this way, in a program of so many tokens a step."""
    if isinstance(form.op, Leaf):
        return 0
    if form.op in _FEW_COSTS:
        return _FEW_COSTS[form.op] if tokens <= FEW_TOKENS else _REPEATED_COST
    if form.op is Op.GLU_BF16 and tokens <= FEW_TOKENS:
        return _GATED_LINEAR_COST
    return _COSTS.get(form.op, PACKET_COST)


@dataclass(frozen=True, slots=True)
class Extracted:
    """The chosen graph; `made_by[node]` are the rows of `fired` that a node rests on."""

    graph: Graph
    made_by: dict[int, tuple[int, ...]]
    fired: tuple[Fired, ...]


def extract(graph: Graph, saturated: Saturated, tokens: int = 1) -> Extracted:
    """Return the cheapest graph found, rebuilt node by node (so sizes and places are checked).

    `tokens` is the most that a step of the program has: what slices repeat costs that often.
    """
    descent = _Descent(graph, saturated, tokens)
    descent.run()
    provenance = _Provenance(graph, saturated)
    names = _value_names(graph, saturated)
    chosen = Graph(graph.weights, n_blocks=graph.n_blocks)
    new: dict[int, int] = {}
    made_by: dict[int, tuple[int, ...]] = {}
    for cls in descent.in_order():
        form = descent.choice[cls]
        new[cls] = _rebuild(
            chosen, graph, cls, names[cls], form, [new[i] for i in form.inputs]
        )
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


def _original(graph: Graph, saturated: Saturated, node: int) -> Form:
    found = graph.nodes[node]
    inputs = tuple(saturated.class_of[i] for i in found.inputs)
    return Form(found.op, inputs, tuple(value for _, value in found.attrs))


class _Descent:
    """The current choice, with the number of readers of every class."""

    def __init__(self, graph: Graph, saturated: Saturated, tokens: int) -> None:
        self.cost = {
            form: cost_of(form, tokens) for forms in saturated.forms.values() for form in forms
        }
        ranks = _ranks(graph, saturated)
        self.forms = {
            cls: [form for form in forms if all(ranks[i] < ranks[cls] for i in form.inputs)]
            for cls, forms in saturated.forms.items()
        }
        built = len(graph.nodes)
        self.choice = {
            cls: _original(graph, saturated, cls) if cls < built else forms[0]
            for cls, forms in self.forms.items()
        }
        self.moves = [
            application.made
            for application in saturated.applications
            if len(application.made) > 1
            and all(form in self.forms[cls] for cls, form in application.made)
        ]
        self.readers = dict.fromkeys(self.forms, 0)
        for node in graph.outputs:
            self.readers[saturated.class_of[node]] += 1
        for cls in sorted((c for c in self.forms if c < built), reverse=True):
            if self.readers[cls]:
                for i in self.choice[cls].inputs:
                    self.readers[i] += 1

    def in_order(self) -> list[int]:
        """Return the classes that the outputs need, inputs first, else by number."""
        done: dict[int, None] = {}
        for cls in sorted(cls for cls, readers in self.readers.items() if readers):
            stack = [cls]
            while stack:
                top = stack[-1]
                missing = [i for i in self.choice[top].inputs if i not in done]
                stack.extend(reversed(missing))
                if not missing:
                    done[stack.pop()] = None
        return list(done)

    def run(self) -> None:
        improved = True
        while improved:
            improved = False
            for cls, forms in self.forms.items():
                if self.readers[cls] and len(forms) > 1:
                    improved |= self._improve(cls, forms)
            for move in self.moves:
                if all(self.readers[cls] for cls, _ in move):
                    improved |= self._improve_together(move)

    def _improve_together(self, move: Sequence[Made]) -> bool:
        """Rewrite several values at once if that makes the graph cheaper."""
        before = [(cls, self.choice[cls]) for cls, _ in move]
        delta = sum(self._choose(cls, form) for cls, form in move)
        if delta < 0:
            return True
        for cls, form in reversed(before):
            self._choose(cls, form)
        return False

    def _choose(self, cls: int, form: Form) -> int:
        delta = self._switch(self.choice[cls], form)
        self.choice[cls] = form
        return delta

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
        return self.cost[new] - self.cost[old] + gained - freed

    def _take(self, cls: int) -> int:
        self.readers[cls] += 1
        if self.readers[cls] > 1:
            return 0
        form = self.choice[cls]
        return self.cost[form] + sum(self._take(i) for i in form.inputs)

    def _release(self, cls: int) -> int:
        self.readers[cls] -= 1
        if self.readers[cls] > 0:
            return 0
        form = self.choice[cls]
        return self.cost[form] + sum(self._release(i) for i in form.inputs)


def _ranks(graph: Graph, saturated: Saturated) -> dict[int, float]:
    """Return numbers such that forms that only read smaller ones can be mixed without a cycle.

    A built value's is its longest way from the leaves, so the form that the builder wrote is among
    them. A new value's lies between its inputs' and the next whole number: below the values that
    become parts of it. Node ids would not do: a group reads weights that were named after its
    first member.
    """
    ranks: dict[int, float] = {}
    for cls in sorted(saturated.forms):
        if cls < len(graph.nodes):
            inputs = _original(graph, saturated, cls).inputs
            ranks[cls] = 1 + max((ranks[i] for i in inputs), default=-1)
        else:
            below = min(
                max(ranks[i] for i in form.inputs)
                for form in saturated.forms[cls]
                if all(i in ranks for i in form.inputs)
            )
            ranks[cls] = (below + floor(below) + 1) / 2
    return ranks


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
            Made(cls, _original(self.graph, self.saturated, node))
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

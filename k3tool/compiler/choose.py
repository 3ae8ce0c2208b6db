"""Choosing one form per value of a saturated e-graph: a short chain, then little work.

What is made small is the chain plus the work, in ps: when the last output arrives, and what all
packets keep busy. Two steps:

1. The shortest chain is solved exactly, as in depth-optimal technology mapping: a value's arrival
   is the least, over its forms, of what the form costs on a chain plus the latest arrival among its
   inputs. Sharing does not matter to it, so one pass in topological order is enough. Only groups
   (several values that one packet makes) do not fit: a group of which some member is better made
   otherwise is taken apart, and the chain is the shortest without it.
2. From there the sum is lowered greedily, until no change and no rule helps: a local optimum.
   Work counts each chosen value once, however many readers it has, so a change is judged by what it
   adds and frees in the graph as it stands, not by a tree cost; and by how much later than its
   readers need it a value would come. A rule that rewrites several values is one change: the first
   of six linears to join a group gains nothing, the sixth all.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from math import floor

from k3tool.compiler.egraph import Form, Made, Saturated
from k3tool.compiler.prices import Price, Prices
from k3tool.errors import K3Error
from k3tool.isa.table import SPECS, Op
from k3tool.model.nodes import Graph, Leaf


def choose(graph: Graph, saturated: Saturated, prices: Prices) -> "Choice":
    """Return the forms of the shortest chain with little work. Nothing depends on the process."""
    choice = Choice(graph, saturated, prices)
    choice.take_apart()
    choice.save_work()
    return choice


def original(graph: Graph, saturated: Saturated, node: int) -> Form:
    """Return the form that the builder wrote for a node."""
    found = graph.nodes[node]
    inputs = tuple(saturated.class_of[i] for i in found.inputs)
    return Form(found.op, inputs, tuple(value for _, value in found.attrs))


class Choice:
    """One form per class, with what follows from it: readers, arrivals, and what is required."""

    def __init__(self, graph: Graph, saturated: Saturated, prices: Prices) -> None:
        """Price every form that can be made, and take the shortest chain."""
        ranks = _ranks(graph, saturated)
        self.price: dict[Form, Price] = {}
        self.forms: dict[int, list[Form]] = {}
        for cls in sorted(saturated.forms, key=lambda cls: (ranks[cls], cls)):
            for form in saturated.forms[cls]:
                made = all(i in self.forms and ranks[i] < ranks[cls] for i in form.inputs)
                price = prices.of(form) if made else None
                if price is not None:
                    self.price[form] = price
                    self.forms.setdefault(cls, []).append(form)
        self.order = list(self.forms)  # inputs first
        self.outputs = [saturated.class_of[node] for node in graph.outputs]
        _require_forms(graph, saturated, self.forms)
        self.moves = [
            application.made
            for application in saturated.applications
            if len(application.made) > 1
            and all(form in self.forms[cls] for cls, form in application.made)
        ]
        self.required: dict[int, int] = {}
        self.arrival: dict[int, int] = {}
        self.form: dict[int, Form] = {}
        self._pick(self.order)
        self.readers: dict[int, int] = {}
        self._count_readers()

    @property
    def chain_ps(self) -> int:
        """Return when the last output arrives."""
        return max(self.arrival[cls] for cls in self.outputs)

    @property
    def work_ps(self) -> int:
        """Return what all chosen values keep busy."""
        return sum(self.price[self.form[cls]].busy for cls in self.in_order())

    def in_order(self) -> list[int]:
        """Return the classes that the outputs need, inputs first, else by number."""
        done: dict[int, None] = {}
        for cls in sorted(cls for cls, readers in self.readers.items() if readers):
            stack = [cls]
            while stack:
                top = stack[-1]
                missing = [i for i in self.form[top].inputs if i not in done]
                stack.extend(reversed(missing))
                if not missing:
                    done[stack.pop()] = None
        return list(done)

    # -- the chain ---------------------------------------------------------------------------------

    def _at(self, form: Form) -> int:
        latest = max((self.arrival[i] for i in form.inputs), default=0)
        return self.price[form].delay + latest

    def _pick(self, order: Iterable[int]) -> None:
        """Choose for each class the form that arrives first, of several the one of least work."""
        for cls in order:
            best = min(self.forms[cls], key=lambda form: (self._at(form), self.price[form].busy))
            self.form[cls], self.arrival[cls] = best, self._at(best)

    def _count_readers(self) -> None:
        self.readers = dict.fromkeys(self.forms, 0)
        for cls in self.outputs:
            self.readers[cls] += 1
        for cls in reversed(self.order):
            if self.readers[cls]:
                for i in self.form[cls].inputs:
                    self.readers[i] += 1

    def take_apart(self) -> None:
        """Forbid groups of which not all values are chosen or read, until none is left."""
        while broken := self._broken_groups():
            for cls, forms in self.forms.items():
                kept = [f for f in forms if f.op is not Op.PART or f.inputs[0] not in broken]
                assert kept, f"class {cls} can only be part of a group"
                self.forms[cls] = kept
            self.moves = [
                move for move in self.moves if all(form in self.forms[cls] for cls, form in move)
            ]
            self._pick(self.order)
            self._count_readers()

    def _broken_groups(self) -> set[int]:
        members: dict[int, set[int]] = defaultdict(set)
        for cls, form in self.form.items():
            if self.readers[cls] and form.op is Op.PART:
                members[form.inputs[0]].add(int(form.attrs[0]))
        return {
            group for group, found in members.items() if len(found) < _n_values(self.form[group])
        }

    # -- the rest ----------------------------------------------------------------------------------

    def save_work(self) -> None:
        """Change forms while that saves more work than it lengthens the chain."""
        improved = True
        while improved:
            improved = False
            self._settle()
            for cls in self.order:
                if self.readers[cls] and len(self.forms[cls]) > 1:
                    improved |= self._improve(cls)
            for move in self.moves:
                if all(self.readers[cls] for cls, _ in move):
                    improved |= self._improve_together(move)

    def _settle(self) -> None:
        """Derive arrivals from the forms chosen, and how late each value may arrive."""
        for cls in self.order:
            self.arrival[cls] = self._at(self.form[cls])
        chain = self.chain_ps
        self.required = dict.fromkeys(self.order, chain)
        for cls in reversed(self.order):
            if self.readers[cls]:
                left = self.required[cls] - self.price[self.form[cls]].delay
                for i in self.form[cls].inputs:
                    self.required[i] = min(self.required[i], left)

    def _delay(self, cls: int, form: Form) -> int:
        """Return how much longer the chain may get if a value is made this way."""
        return max(0, self._at(form) - max(self.arrival[cls], self.required[cls]))

    def _improve(self, cls: int) -> bool:
        current = self.form[cls]
        best, best_delta = current, 0
        for form in self.forms[cls]:
            if form.op is Op.PART:
                continue
            delta = self._delay(cls, form) + self._switch(current, form)
            self._switch(form, current)
            if delta < best_delta:
                best, best_delta = form, delta
        return best_delta < 0 and self._keep([Made(cls, best)])

    def _improve_together(self, move: Sequence[Made]) -> bool:
        """Rewrite several values at once if that makes the graph cheaper."""
        before = [Made(cls, self.form[cls]) for cls, _ in move]
        delta = max(self._delay(cls, form) for cls, form in move)
        delta += sum(self._set(cls, form) for cls, form in move)
        for cls, form in reversed(before):
            self._set(cls, form)
        return delta < 0 and self._keep(move)

    def _keep(self, move: Sequence[Made]) -> bool:
        """Make a change that lowers the sum; take it back where it would break a group."""
        before = [Made(cls, self.form[cls]) for cls, _ in move]
        for cls, form in move:
            self._set(cls, form)
        broken = self._broken_groups()
        if broken:
            for cls, form in reversed(before):
                self._set(cls, form)
        self._settle()
        return not broken

    def _set(self, cls: int, form: Form) -> int:
        delta = self._switch(self.form[cls], form)
        self.form[cls] = form
        return delta

    def _switch(self, old: Form, new: Form) -> int:
        """Move a class's reads from one form's inputs to another's; return what the work gains."""
        gained = sum(self._take(i) for i in new.inputs)
        freed = sum(self._release(i) for i in old.inputs)
        return self.price[new].busy - self.price[old].busy + gained - freed

    def _take(self, cls: int) -> int:
        self.readers[cls] += 1
        if self.readers[cls] > 1:
            return 0
        form = self.form[cls]
        return self.price[form].busy + sum(self._take(i) for i in form.inputs)

    def _release(self, cls: int) -> int:
        self.readers[cls] -= 1
        if self.readers[cls] > 0:
            return 0
        form = self.form[cls]
        return self.price[form].busy + sum(self._release(i) for i in form.inputs)


def _is_instruction(op: Op | Leaf) -> bool:
    return isinstance(op, Leaf) or op is Op.PART or SPECS[op].is_emitted


def _require_forms(graph: Graph, saturated: Saturated, forms: Container[int]) -> None:
    """Refuse a graph of which an output cannot be made, naming the first value that is in the way.

    Raises: K3Error.
    """
    for cls in (saturated.class_of[node] for node in graph.outputs):
        if cls in forms:
            continue
        named = cls
        while made := [f for f in saturated.forms[cls] if _is_instruction(f.op)]:
            cls = next(i for i in made[0].inputs if i not in forms)
            named = cls if cls < len(graph.names) else named  # or a new value inside the last one
        op = saturated.forms[cls][0].op
        assert isinstance(op, Op), op
        raise K3Error(f"e-graph: {graph.names[named]}", got=f"{op.name}, which is no instruction",
                      need="a rule that makes one of it")  # fmt: skip


def _n_values(form: Form) -> int:
    """Return how many values the packet of a group makes; a form that is no op's has one."""
    return len(SPECS[form.op].outputs) if isinstance(form.op, Op) else 1


def _ranks(graph: Graph, saturated: Saturated) -> dict[int, float]:
    """Return numbers such that forms that only read smaller ones can be mixed without a cycle.

    A built value's is its longest way from the leaves, so the form that the builder wrote is among
    them. A new value's lies between its inputs', of all its forms, and the next whole number: below
    the values that become parts of it. Node ids would not do: a group reads weights that were named
    after its first member.
    """
    ranks: dict[int, float] = {}
    for cls in sorted(saturated.forms):
        if cls < len(graph.nodes):
            inputs = original(graph, saturated, cls).inputs
            ranks[cls] = 1 + max((ranks[i] for i in inputs), default=-1)
        else:
            below = max(
                max(ranks[i] for i in form.inputs)
                for form in saturated.forms[cls]
                if all(i in ranks for i in form.inputs)
            )
            ranks[cls] = (below + floor(below) + 1) / 2
    return ranks

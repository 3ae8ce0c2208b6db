"""Whether a program computes the model: its fused ops, unfolded, are the graph of the config.

Records are followed in order, each result replacing its tensor's value. A fused op is unfolded by
reading the rule that makes it from right to left, down to primitive ops. What comes out has to be,
node for node, the graph that the config implies: same weights, same constants, same inputs. Nothing
of the scheduler or the e-graph is consulted, so a swapped weight of equal shape, another norm's eps
or an op on the wrong buffer shows at its instruction.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3tool.compiler.dag import PACKINGS
from k3tool.compiler.handles import state_tensor
from k3tool.compiler.order import Ordering
from k3tool.compiler.patterns import Term
from k3tool.compiler.plan import NUMERICS_VERSION, Tensor
from k3tool.compiler.record_checks import handles_of, results_of
from k3tool.compiler.rules import RULES
from k3tool.errors import K3Error, shown
from k3tool.isa.columns import spec_of
from k3tool.isa.disasm import param_text
from k3tool.isa.op_spec import OpSpec
from k3tool.isa.table import PAGE_TOKENS, Op
from k3tool.model.config import K3Config
from k3tool.model.graph import MODES, build_graph, weight_table
from k3tool.model.nodes import Graph, Leaf, StateLeaf
from k3tool.model.operators import attr_names, input_operands, record_attrs

# By the op of a right side: what it was made from, and the right side itself.
_MADE_BY: dict[Op | Leaf, list[tuple[Term, Term]]] = {}
for _rule in RULES:
    for _equation in _rule.equations:
        _MADE_BY.setdefault(_equation.right.op, []).append((_equation.left, _equation.right))
_FUSED = {term.op for made in _MADE_BY.values() for _, right in made for term in right.subterms()}


def model_of(params: Mapping[str, Any]) -> K3Config | None:
    """Return the config that a plan or stream says it was compiled from, None if it says none.

    Raises: K3Error where the recorded config is none this build accepts.
    """
    if "config" not in params:
        return None
    return K3Config.from_dict(params["config"], "the recorded config", params.get("eps"))


def mode_of(params: Mapping[str, Any]) -> str:
    """Return the arithmetic mode that a plan or stream says it was compiled for.

    Raises: K3Error where it says none that this build knows.
    """
    recorded = params.get("numerics")
    numerics = recorded if isinstance(recorded, Mapping) else {}
    found = numerics.get("mode")
    if found not in MODES:
        raise K3Error("the recorded numerics", got=found, need=" or ".join(MODES))
    if numerics.get("version") != NUMERICS_VERSION:
        got = f"version {shown(numerics.get('version'))}"
        raise K3Error("the recorded numerics", got=got, need=f"version {NUMERICS_VERSION}")
    return str(found)


def pages_of(params: Mapping[str, Any]) -> int:
    """Return the pages of latent cache that a sequence of a plan or stream may fill.

    Raises: K3Error where the recorded context is no number of positions.
    """
    ctx = params.get("ctx")
    if not isinstance(ctx, int) or ctx < 1:
        raise K3Error("the recorded ctx", got=ctx, need="positions")
    return -(-ctx // PAGE_TOKENS)


def check_meaning(
    c: Ordering, config: K3Config, tp: int, mode: str, pages: int
) -> tuple[str, list[str]]:
    """Compare one phase's records with the graph of the model, rounding points included."""
    reader = _Reader(c.tensors, build_graph(config, tp, mode, pages))
    partial: dict[int, list[int]] = {}  # node that is a part -> the rows that made it and its parts
    maker: dict[int, int] = {}  # value of the model -> the row that made it
    for index, row in enumerate(c.rows):
        made, fault = reader.step(row)
        if fault is not None:
            # What was made for it alone may be what is wrong, and could not be judged before.
            parts = [c.name(p) for p in reader.parts_read(row, partial)]
            made_for = f", with parts made by {' and '.join(parts)}" if parts else ""
            return "", [f"{c.name(index)}: {fault}{made_for}"]
        if reader.parts:
            rows = sorted({*reader.parts_read(row, partial), index})
            partial |= dict.fromkeys(reader.parts, rows)
        for value in made:
            other = maker.setdefault(value, index)
            if other != index:  # a weight taken twice shows here, before anything reads the value
                twice = f"makes {reader.graph.names[value]}, which {c.name(other)} makes"
                return "", [f"{c.name(index)}: {twice}"]
    return f"{len(c.rows)} packets are the model's {reader.n_model} values", reader.missing(
        c.phase_name
    )


def unknown_leaves(tensors: Sequence[Tensor], config: K3Config, tp: int) -> Iterator[str]:
    """Yield rows that say to be a weight the model has not; its graph cannot be followed then."""
    weights = weight_table(config, tp)
    for handle, tensor in enumerate(tensors):
        if tensor.is_weight and tensor.leaf not in weights:
            yield f"tensor {handle} ({tensor.name}): the model has no weight {tensor.leaf!r}"


def weight_faults(tensors: Sequence[Tensor], config: K3Config, tp: int) -> Iterator[str]:
    """Yield rows of the handle table that are not the weights the config implies."""
    weights = weight_table(config, tp)
    for handle, tensor in enumerate(tensors):
        leaf = weights.get(tensor.leaf) if tensor.is_weight else None
        if leaf is None:
            continue  # no weight, or an unknown one, which is told before
        got = (tensor.dtype, tensor.logical, tensor.local, tensor.split, tensor.source)
        need = (leaf.dtype, leaf.shape, leaf.local_shape, leaf.split, leaf.source)
        words = ("dtype", "shape", "part", "split", "source")
        for word, a, b in zip(words, got, need, strict=True):
            if a != b:
                yield f"tensor {handle} ({tensor.name}): {word} {a}, the model has {b}"


def state_faults(
    tensors: Sequence[Tensor], states: Mapping[str, StateLeaf], tp: int, batch: int, pages: int
) -> Iterator[str]:
    """Yield rows of the handle table that are not the model's states, in any column.

    `pages` are one sequence's. Op bodies take strides from what they solve, not from these rows: a
    state with smaller inner sizes would be read and written past its end.
    """
    for handle, tensor in enumerate(tensors):
        state = states.get(tensor.name)
        if state is None and tensor.role == "state":
            yield f"tensor {handle} ({tensor.name}): the model has no such state"
        if state is None:
            continue
        need = state_tensor(state, tp, batch, batch * pages)
        for word, a, b in zip(Tensor._fields, tensor, need, strict=True):
            if a != b:
                yield f"tensor {handle} ({tensor.name}): {word} {a}, the model's state has {b}"


@dataclass(slots=True)
class _Reader:
    """Follows records in the model's own graph, to which it adds the program's fused ops.

    A value is a node; nodes below `n_model` are the model's. `value` is what each tensor holds.
    """

    tensors: Sequence[Tensor]
    graph: Graph
    n_model: int = field(init=False)
    value: dict[int, int] = field(default_factory=dict)
    unfolded: dict[int, int | None] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)  # of the last record's results
    last: int | None = None

    def __post_init__(self) -> None:
        self.n_model = len(self.graph.nodes)

    def step(self, row: Any) -> tuple[list[int], str | None]:
        """Follow one record; return the model's values it makes, and what is wrong with it."""
        spec = spec_of(int(row["op"]))
        assert spec is not None, row["op"]
        if spec.is_load:
            return [], None  # it makes no value; what it must bring is a matter of bytes (C, D)
        handles = handles_of(spec, row["handles"].tolist())
        inputs: dict[str, int] = {}
        for operand in input_operands(spec.op):
            found = self._read(handles[operand.name], operand.name, operand.role)
            if isinstance(found, str):
                return [], found
            inputs[operand.name] = found
        try:
            made = self._results(spec, inputs, record_attrs(spec, row))
            meanings = [self._unfold(node) for node in made]
        except K3Error as error:
            return [], f"{error.object.removeprefix('?: ')} is {error.got}, need {error.need}"
        for operand, node in zip(results_of(spec), made, strict=True):
            self.value[handles[operand.name]] = node
        self.last = meanings[-1]
        # None: a part of something that only has a meaning with what a later packet does to it.
        pairs = list(zip(made, meanings, strict=True))
        self.parts = [node for node, meaning in pairs if meaning is None]
        whole = [meaning for meaning in meanings if meaning is not None]
        # What some rule makes whole and none does here is no part of anything either.
        stray = any(
            all(self.graph.nodes[form].op in _MADE_BY for form in self._forms(node))
            for node in self.parts
        )
        if stray or any(meaning >= self.n_model for meaning in whole):
            return [], f"is no value of the model: {self._describe(spec, handles, row)}"
        return whole, None

    def _results(
        self, spec: OpSpec, inputs: Mapping[str, int], attrs: Mapping[str, int]
    ) -> list[int]:
        """Return the values a record makes: one, or the parts of a group."""
        n_results = len(results_of(spec))
        if spec.op in PACKINGS:
            single = PACKINGS[spec.op]
            names = [operand.name for operand in input_operands(single)]
            made = []
            for i in range(n_results):
                own = [inputs[f"{n}{i}"] if f"{n}{i}" in inputs else inputs[n] for n in names]
                made.append(self.graph.add(single, "?", own, **attrs))
            return made
        node = self.graph.add(spec.op, "?", list(inputs.values()), **attrs)
        if n_results <= 1:
            return [node]
        return [self.graph.add(Op.PART, "?", [node], index=i) for i in range(n_results)]

    def parts_read(self, row: Any, partial: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the rows that made what a record reads and that has no meaning of its own."""
        spec = spec_of(int(row["op"]))
        assert spec is not None, row["op"]
        read = [self.value.get(h, -1) for h in spec.handles(row["handles"].tolist())]
        return sorted({made for node in read for made in partial.get(node, ())})

    def missing(self, phase: str) -> list[str]:
        """Return what is wrong with the whole, every packet having been followed."""
        if self.last == self.graph.outputs[0]:
            return list(self._results_faults(phase))
        got = "part of a value" if self.last is None else self.graph.names[self.last]
        return [f"the last packet makes {got}, need the model's token"]

    def _results_faults(self, phase: str) -> Iterator[str]:
        """Yield what a runtime would take for the step's token or logits, and is not.

        It finds both by role. A rank's logits are what the token's choice gathers.
        """
        token = self.graph.outputs[0]
        gathered = self.graph.nodes[token].inputs[0]
        logits = self.graph.nodes[gathered].inputs[0]
        for role, value in (("output", token), ("logits", logits)):
            made = [h for h, node in self.value.items() if self._unfold(node) == value]
            need = [h for h in made if self.tensors[h].phase == phase]
            got = [
                h for h, t in enumerate(self.tensors) if t.role == role and t.phase in (phase, "")
            ]
            if len(got) != 1 or got[0] not in need:
                names = [" and ".join(self.tensors[h].name for h in found) for found in (got, need)]
                got_name, need_name = (name or "no tensor" for name in names)
                yield f"role {role}: {got_name}, the model's is {need_name}"

    def _read(self, handle: int, operand: str, role: str) -> int | str:
        if handle >= len(self.tensors):
            return f"{operand} has handle {handle} of {len(self.tensors)}"
        if handle in self.value:
            return self.value[handle]
        tensor = self.tensors[handle]
        if tensor.is_weight != (role == "weight"):
            return f"{operand} ({role}) is {tensor.name} ({tensor.role})"
        if role == "weight":
            return self.graph.leaf(Leaf.WEIGHT, tensor.leaf)
        if role == "state":
            if tensor.name not in self.graph.states:
                return f"{operand}: the model has no state {tensor.name}"
            return self.graph.leaf(Leaf.STATE, tensor.name)
        if operand == "blocks":
            return self.graph.leaf(Leaf.BLOCKS, "blocks", tensor.local[-1])
        return f"{operand}: nothing has written {tensor.name}"

    def _unfold(self, node: int) -> int | None:
        """Return a value in primitive ops, None for what only has a meaning inside another."""
        found = self.graph.nodes[node]
        if node < self.n_model or isinstance(found.op, Leaf):
            return node
        if node not in self.unfolded:
            self.unfolded[node] = self._unfold_new(node)
        return self.unfolded[node]

    def _unfold_new(self, node: int) -> int | None:
        found = self.graph.nodes[node]
        reached: int | None = None
        for left, right in _MADE_BY.get(found.op, ()):
            values: dict[str, int] = {}
            numbers: dict[str, int] = {}
            if self._match(right, node, values, numbers):
                reached = self._unfold(self._build(left, values, numbers))
                if reached is not None and reached < self.n_model:
                    return reached
        if reached is not None or found.op in _FUSED:
            return reached
        whole = [self._whole(i) for i in found.inputs]
        assert isinstance(found.op, Op)
        return self.graph.add(found.op, "?", whole, **{k: int(v) for k, v in found.attrs})

    def _forms(self, node: int) -> Iterator[int]:
        """Yield a value as it is, then as what rules make it from, step by step."""
        yield node
        for left, right in _MADE_BY.get(self.graph.nodes[node].op, ()):
            values: dict[str, int] = {}
            numbers: dict[str, int] = {}
            if self._match(right, node, values, numbers):
                yield from self._forms(self._build(left, values, numbers))

    def _bind(self, term: Term, node: int, values: dict[str, int], numbers: dict[str, int]) -> bool:
        """Match as `_match` does; leave no binding behind where it does not."""
        tried, counted = dict(values), dict(numbers)
        if not self._match(term, node, tried, counted):
            return False
        values |= tried
        numbers |= counted
        return True

    def _match(
        self, term: Term, node: int, values: dict[str, int], numbers: dict[str, int]
    ) -> bool:
        """Match a rule's right side with a value of the program, binding its variables."""
        found = self.graph.nodes[node]
        if found.op is not term.op:
            return False
        for pattern, (_, attr) in zip(term.attrs, found.attrs, strict=True):
            bound = numbers.setdefault(pattern, int(attr)) if isinstance(pattern, str) else pattern
            if bound != int(attr):
                return False
        for item, i in zip(term.inputs, found.inputs, strict=True):
            if isinstance(item, Term):
                if not any(self._bind(item, form, values, numbers) for form in self._forms(i)):
                    return False
            elif values.setdefault(item, i) != i:
                return False
        return True

    def _build(self, term: Term, values: Mapping[str, int], numbers: dict[str, int]) -> int:
        """Return what a rule's left side is under a match of its right one, not unfolded yet."""
        if term.name in values:  # `o@(...)`: the right side holds the whole inner term
            return values[term.name]
        inputs = [
            self._build(item, values, numbers) if isinstance(item, Term) else values[item]
            for item in term.inputs
        ]
        if any(isinstance(attr, str) and attr not in numbers for attr in term.attrs):
            self._bind_from_model(term, [self._whole(i) for i in inputs], numbers)
        attrs = {
            name: numbers[attr] if isinstance(attr, str) else attr
            for name, attr in zip(attr_names(term.op), term.attrs, strict=True)
        }
        return self.graph.add(term.op, "?", inputs, **attrs)

    def _bind_from_model(self, term: Term, inputs: Sequence[int], numbers: dict[str, int]) -> None:
        """Bind a number that only the left side has (a head's size) as the model has it there.

        Raises: K3Error where the model does nothing of the kind with these inputs.
        """
        for node in self.graph.nodes[: self.n_model]:
            if node.op is term.op and list(node.inputs) == inputs:
                found = [int(value) for _, value in node.attrs]
                for pattern, value in zip(term.attrs, found, strict=True):
                    if isinstance(pattern, str):
                        numbers.setdefault(pattern, value)
                return
        names = ", ".join(self.graph.names[i] for i in inputs)
        raise K3Error(f"{term.op.name} of {names}", got="absent from the model", need="a value")

    def _whole(self, node: int) -> int:
        found = self._unfold(node)
        if found is None:
            raise K3Error(str(self.graph.nodes[node].op), got="a part of a value", need="a whole")
        return found

    def _describe(self, spec: OpSpec, handles: Mapping[str, int], row: Any) -> str:
        words = [
            f"{operand.name}={self.tensors[handles[operand.name]].name}"
            for operand in spec.operands
            if operand.role != "out"
        ]
        kinds = {param.name: param for param in spec.params}
        words += [
            f"{name}={param_text(kinds[name], value) if name in kinds else value}"
            for name, value in record_attrs(spec, row).items()
        ]
        return " ".join([spec.name, *words])

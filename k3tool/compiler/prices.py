"""What a packet costs on a target, in picoseconds: the hand-off, and what its slices repeat.

The unit is a picosecond of a step, which is a token's where it has one. Decode is bound by its
chain's depth, so a packet on the chain costs a hand-off. What fusing can make worse is what slices
do more than once: a prologue that each of them repeats (it reads the whole input of a norm, where a
packet of its own would read it once), and work of heads or tokens, which fewer slices share than
there are workgroups. Both are bytes that one workgroup moves, at what it can move alone. Weights
and activations that are divided evenly cost the same however the graph is cut, and are not priced;
nor are states that an op updates, which every form reads alike, nor arithmetic. A latent cache is
read: by every slice of heads from end to end, by slices of pages once.

Which operands a slice reads whole, and how often, is in the op table, beside the op.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from k3tool.compiler.egraph import Form, Saturated
from k3tool.compiler.handles import F32_BYTES, weight_bytes
from k3tool.compiler.plan import n_slices
from k3tool.isa.op_spec import Operand
from k3tool.isa.table import PAGE_TOKENS, READS_STATE, ROW_LOOKUPS, SPECS, Op
from k3tool.model.nodes import Graph, Leaf, WeightLeaf
from k3tool.model.operators import attr_names, input_operands, result_widths, solve_sizes, units_of
from k3tool.targets import Target

PS = 10**12
# A packet off the chain still has its polls and arrivals: this part of a hand-off.
ISSUE_PART = 10
# Ops of which a packing makes several one packet (see `dag`).
_PACKED = {Op.ATTN_PART: 8}
# Bodies that go token by token, or whose scratch holds a whole row of every token: for steps of few
# tokens whatever they cost, as no workgroup's own memory has room for more.
FEW_TOKENS = 4
_FEW_ONLY = (
    Op.MIX_LINEARS_3,
    Op.MIX_LINEARS_4,
    Op.MIX_LINEARS_6,
    Op.SITU_GEMV_BLOCKS,
    Op.KDA_HEADS,
    Op.MLA_HEADS,
    Op.MLA_QUERY,
    Op.MLA_PAGES,
    Op.MLA_MERGE,
    Op.MOE_GLU_TOPK,
    Op.MOE_DOWN_TOPK,
)


class Price(NamedTuple):
    """What one value costs in ps: on a chain that it is on, and of all workgroups' time."""

    delay: int
    busy: int


FREE = Price(0, 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a target's hand-off and bytes cost. Units: ps, bytes a second, workgroups."""

    handoff_ps: int
    unit_bytes_per_s: int  # that one workgroup reads from memory or a cache
    bytes_per_s: int  # of all workgroups together from memory
    workgroups: int

    @classmethod
    def of(cls, target: Target, workgroups: int) -> "Costs":
        """Return what a program laid out for so many workgroups costs on a target."""
        unit = int(target.unit_bytes_per_s)
        peak = int(target.peak_bytes_per_s) or workgroups * unit
        return cls(int(target.handoff_us * 1e6), unit, peak, workgroups)


@dataclass(slots=True)
class Prices:
    """The price of every form, for one graph, TP degree, number of tokens, and target."""

    graph: Graph
    saturated: Saturated
    costs: Costs
    tokens: int
    tp: int
    _widths: dict[int, int] = field(default_factory=dict)

    def of(self, form: Form) -> Price | None:
        """Return a form's price; None where no instruction or no scratch is for it."""
        if isinstance(form.op, Leaf) or form.op is Op.PART:
            return FREE
        if not SPECS[form.op].is_emitted:
            return None
        if form.op in _FEW_ONLY and self.tokens > FEW_TOKENS:
            return None
        own = self._repeated_ps(form) + self._narrow_ps(form)
        issue = self.costs.handoff_ps // ISSUE_PART // _PACKED.get(form.op, 1)
        waits = (1 + SPECS[form.op].inner_waits) * self.costs.handoff_ps
        return Price(waits + own, issue + own * self._slices(form) // self.costs.workgroups)

    def _repeated_ps(self, form: Form) -> int:
        """Return the time that a slice takes for what every slice reads."""
        assert isinstance(form.op, Op), form
        spec, moved = SPECS[form.op], 0
        for operand, value in zip(input_operands(form.op), form.inputs, strict=True):
            if operand.role == "state" and form.op not in READS_STATE:
                continue
            size = self._bytes(form, operand, value)
            moved += spec.whole.get(operand.name, 0) * size
            if operand.name in spec.again:
                moved += (self.tokens - 1) * size // self._slices(form)
        return moved * PS // self.costs.unit_bytes_per_s

    def _narrow_ps(self, form: Form) -> int:
        """Return what a slice takes for its share beyond what it would with all workgroups.

        Rows are left out: a fused product has the slices of its parts, so this would only say that
        two packets beside each other are faster than one.
        """
        assert isinstance(form.op, Op), form
        spec = SPECS[form.op]
        if spec.unit == "row":
            return 0
        width, _ = self._sizes(form)
        shared = self.tokens * width * F32_BYTES + sum(
            self._bytes(form, operand, value)
            for operand, value in zip(input_operands(form.op), form.inputs, strict=True)
            if (operand.role not in ("state", "inout") or form.op in READS_STATE)
            and operand.name not in spec.whole
        )
        alone = shared * PS // (self._slices(form) * self.costs.unit_bytes_per_s)
        return max(0, alone - shared * PS // self.costs.bytes_per_s)

    def _bytes(self, form: Form, operand: Operand, value: int) -> int:
        """Return what a step of all tokens reads of an operand on one rank."""
        weight = self._weight(value)
        if operand.role == "state":  # that is read, READS_STATE: a latent cache
            row = dict(_attrs(form))["latent"] + dict(_attrs(form))["rope"]
            return self.tokens * self.graph.pages * PAGE_TOKENS * row * F32_BYTES
        if weight is None:
            count = dict(_attrs(form)).get("n_blocks", 1) if operand.name == "blocks" else 1
            return self.tokens * count * self.width(value) * F32_BYTES
        size = weight_bytes(weight.dtype, weight.local_shape)
        rows = weight.local_shape[0]
        if form.op in ROW_LOOKUPS:
            return size * min(rows, self.tokens) // rows
        if weight.dtype == "mxfp4":
            return size * min(rows, self.tokens * dict(_attrs(form))["top_k"]) // rows
        return size

    def _weight(self, value: int) -> WeightLeaf | None:
        if value < len(self.graph.nodes) and self.graph.nodes[value].op is Leaf.WEIGHT:
            return self.graph.weight_of(value)
        return None

    def width(self, cls: int) -> int:
        """Return the elements a token has of a value on one rank."""
        if cls not in self._widths:
            if cls < len(self.graph.nodes):
                node = self.graph.nodes[cls]
                self._widths[cls] = node.width // (self.tp if node.placement == "sharded" else 1)
            else:
                forms = self.saturated.forms[cls]
                # A form that no rank computes would count the elements of all of them.
                made = (f for f in forms if isinstance(f.op, Op) and SPECS[f.op].is_emitted)
                self._widths[cls] = self._sizes(next(made))[0]
        return self._widths[cls]

    def _slices(self, form: Form) -> int:
        assert isinstance(form.op, Op), form
        width, sizes = self._sizes(form)
        units, _ = units_of(form.op, width, sizes, self.tokens)
        return n_slices(units, SPECS[form.op].grain, self.costs.workgroups)

    def _sizes(self, form: Form) -> tuple[int, Mapping[str, int]]:
        assert isinstance(form.op, Op), form
        shapes: dict[str, tuple[int, ...]] = {}
        for operand, value in zip(input_operands(form.op), form.inputs, strict=True):
            weight = self._weight(value)
            if weight is not None:
                shapes[operand.name] = weight.local_shape
            elif operand.role != "state":
                shapes[operand.name] = (self.width(value),)
        _, sizes = solve_sizes(form.op, form.op.name, shapes, dict(_attrs(form)), self.tp)
        return sum(result_widths(form.op, sizes)), sizes


def _attrs(form: Form) -> Sequence[tuple[str, int]]:
    assert isinstance(form.op, Op), form
    return [(n, int(x)) for n, x in zip(attr_names(form.op), form.attrs, strict=True)]

"""Weights that do not stay in memory: where they lie while they do, and packets that bring them.

A compiled plan knows nothing of memory budgets. Here some of its weights are given places in a ring
that is walked once and again in the order of first use, LOAD packets are put in as early as the
readers of what they overwrite allow, and an EXPERT_FETCH behind each router's scores. What the
first turn of the ring holds is loaded at the end of a step for the next one, so that reading goes
on across steps; before the first step the runtime loads it (`held_at_start`). The compute packets
and their waits stay as they are. How much memory is spent on what is decided in
``k3tool.runtime.budget``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from k3tool.compiler.experts import EXPERT_OPERANDS, Choice, expert_rows, slot_bytes
from k3tool.compiler.order import EXPERT_MATRICES, Order
from k3tool.compiler.plan import EXPERT_ROLES, Phase, Plan, Records, Tensor
from k3tool.compiler.ring import (
    Place,
    loads_of,
    ring_places,
    row_tables,
    spec_of_row,
    uses_of,
)
from k3tool.isa.access import paged_bytes
from k3tool.isa.columns import GATE, PACKET_DTYPE, WAIT_DTYPE, empty_packets
from k3tool.isa.op_spec import OpSpec
from k3tool.isa.table import LOAD_BLOCK_BYTES, SPECS, Op


@dataclass(frozen=True, slots=True)
class Residency:
    """What a memory budget decides about one rank's weights. Part of a plan's identity.

    `streamed` are the tensors that come through the ring, by name; every other weight stays.
    `slots` hold experts, one each. `load_queues` and `fetch_queues` are I/O workers.
    """

    streamed: tuple[str, ...]
    ring_bytes: int
    slots: int
    load_queues: int
    fetch_queues: int

    def params(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return it as a plan's parameter; what is streamed is in the handle table.

        The ring ends where its last weight does.
        """
        found = asdict(self) | {"ring_bytes": ring_end(tensors), "slot_bytes": slot_bytes(tensors)}
        del found["streamed"]
        return found


def streamable(plan: Plan) -> tuple[str, ...]:
    """Return the weights that may come through the ring, in order of first use.

    Not tables of rows, and not what a fetch reads, which stands beside the packets of the graph.
    """
    stay = row_tables(plan)
    for phase in plan.phases.values():
        stay |= {group.choice.bias for group in _expert_groups(plan, phase)}
    uses = uses_of(plan, next(iter(plan.phases.values())))
    found = [h for h, t in enumerate(plan.tensors) if t.role == "weight" and h not in stay]
    return tuple(plan.tensors[h].name for h in sorted(found, key=lambda h: (uses[h].first, h)))


# -- the plan ----------------------------------------------------------------------------------


def with_residency(plan: Plan, residency: Residency) -> Plan:
    """Return the plan with the packets that bring its weights, for one memory budget.

    Wrong if: a ring that `ring_places` refuses is asked for (AssertionError).
    """
    places = ring_places(plan, residency.streamed, residency.ring_bytes)
    assert places is not None, "a ring too small for the plan"
    groups = {name: _expert_groups(plan, phase) for name, phase in plan.phases.items()}
    tensors = list(plan.tensors)
    for place in places:
        tensors[place.handle] = tensors[place.handle]._replace(role="ring", offset=place.offset)
    for group in (group for found in groups.values() for group in found):
        for matrix, handle in enumerate(group.matrices):
            old = plan.tensors[handle]
            made = old._replace(role="slots", offset=matrix)
            assert tensors[handle] in (old, made), f"{old.name}: another matrix in another phase"
            tensors[handle] = made
    phases = {
        name: _Builder(plan, phase, places, groups[name], residency).build()
        for name, phase in plan.phases.items()
    }
    params = {**plan.params, "residency": residency.params(tensors)}
    return Plan(tuple(tensors), phases, params, plan.fired, plan.inputs)


class _Group(NamedTuple):
    """The packets that use one router's choice, and what a fetch has to know."""

    choice: Choice
    matrices: tuple[int, ...]  # expert tensors in order of first use: a slot's layout
    packets: tuple[int, ...]


def _expert_groups(plan: Plan, phase: Phase) -> list[_Group]:
    found: dict[int, dict[str, Any]] = {}
    for row in expert_rows(phase.packets, plan.tensors):
        assert row.choice is not None, row
        group = found.setdefault(row.choice.scores, {"matrices": [], "packets": []})
        group["choice"] = row.choice
        group["matrices"] += [h for h in row.matrices if h not in group["matrices"]]
        group["packets"].append(row.at)
    for group in found.values():
        assert len(group["matrices"]) == EXPERT_MATRICES, group
    return [_Group(g["choice"], tuple(g["matrices"]), tuple(g["packets"])) for g in found.values()]


class _New(NamedTuple):
    """A packet to put in: its columns, the packets it waits for, those that wait for it."""

    after: int
    row: Records
    waits_for: tuple[int, ...]  # original packets
    needed_by: tuple[int, ...]  # original packets


@dataclass(slots=True)
class _Builder:
    """Puts new packets into one phase and renumbers its counters."""

    plan: Plan
    phase: Phase
    places: Sequence[Place]
    groups: Sequence[_Group]
    residency: Residency

    def build(self) -> Phase:
        order = Order(self.plan, self.phase)
        news = [*self._loads(order), *self._fetches(order)]
        news_at: dict[int, list[int]] = {}
        for number, new in enumerate(news):
            news_at.setdefault(new.after, []).append(number)
        sequence: list[tuple[bool, int]] = [(True, n) for n in news_at.get(-1, [])]
        for index in range(len(self.phase.packets)):
            sequence.append((False, index))
            sequence += [(True, n) for n in news_at.get(index, [])]
        position = {key: at for at, key in enumerate(sequence)}
        return self._join(sequence, position, news)

    # -- what is put in ----------------------------------------------------------------------------

    def _loads(self, order: Order) -> list[_New]:
        uses = uses_of(self.plan, self.phase)
        loads = loads_of(self.places, uses)
        assert loads is not None
        news: list[_New] = []
        for load in loads:
            handle = load.place.handle
            readers = {p for other in load.overwrites for p in uses[other].packets}
            needed = uses[handle].packets if load.place.turn > 0 else ()
            row = empty_packets(1)
            row["op"], row["handles"][0, 0] = int(Op.LOAD), handle
            row["n_units"] = -(-load.place.n_bytes // LOAD_BLOCK_BYTES)
            row["n_slices"] = np.minimum(row["n_units"], self.residency.load_queues)
            waits = _latest(readers, order)
            news.append(_New(load.after, row, waits, _earliest(needed, order)))
        return news

    def _fetches(self, order: Order) -> list[_New]:
        makers: dict[int, int] = {}
        for index, row in enumerate(self.phase.packets):
            spec = spec_of_row(row)
            handles = spec.handles(row["handles"].tolist())
            makers |= {
                h: index for o, h in zip(spec.operands, handles, strict=True) if o.role == "out"
            }
        news = []
        for before, group in pairwise([None, *self.groups]):
            assert group is not None
            choice = group.choice
            waits = {makers[choice.scores], *(before.packets if before else ())}
            row = empty_packets(1)
            row["op"] = int(Op.EXPERT_FETCH)
            row["handles"][0, :5] = choice.scores, choice.bias, *group.matrices
            row["params"][0, :2] = choice.top_k, choice.n_experts
            row["n_units"] = row["n_slices"] = self.residency.fetch_queues
            needed = _earliest(group.packets, order)
            news.append(_New(max(waits), row, _latest(waits, order), needed))
        return news

    # -- joining -----------------------------------------------------------------------------------

    def _join(
        self,
        sequence: Sequence[tuple[bool, int]],
        position: Mapping[tuple[bool, int], int],
        news: Sequence[_New],
    ) -> Phase:
        old = self.phase.packets
        packets = np.zeros(len(sequence), PACKET_DTYPE)
        waits: list[tuple[int, int]] = []
        needs: dict[int, list[int]] = {}
        for number, new in enumerate(news):
            for index in new.needed_by:
                needs.setdefault(index, []).append(number)
        made_by: list[tuple[int, ...]] = []

        def counter(counted: int) -> int:
            return counted if counted & GATE else position[False, counted]

        for at, (is_new, number) in enumerate(sequence):
            row = news[number].row[0] if is_new else old[number]
            packets[at] = row
            packets["wait_ofs"][at] = len(waits)
            if is_new:
                packets["width"][at] = packets["grain"][at] = 1
                packets["counter"][at] = at
                packets["threshold"][at] = row["n_slices"]
                waits += [
                    (counter(int(old["counter"][p])), int(old["threshold"][p]))
                    for p in news[number].waits_for
                ]
                made_by.append(())
            else:
                packets["counter"][at] = counter(int(row["counter"]))
                waits += [(counter(c), t) for c, t in self.phase.waits_of(number).tolist()]
                waits += [
                    (position[True, n], int(news[n].row["n_slices"][0]))
                    for n in needs.get(number, [])
                ]
                made_by.append(self.phase.made_by[number])
            packets["n_waits"][at] = len(waits) - int(packets["wait_ofs"][at])
        columns = np.array(waits, dtype=WAIT_DTYPE)
        path = longest_path(packets, columns)
        return replace(
            self.phase, packets=packets, waits=columns, made_by=tuple(made_by), packet_path=path,
            critical_path=path,
        )  # fmt: skip


def longest_path(packets: Records, waits: Records) -> int:
    """Return the packets on the longest chain of waits."""
    makers: dict[int, list[int]] = {}
    depth: list[int] = []
    for index, row in enumerate(packets):
        own = waits["counter"][row["wait_ofs"] : row["wait_ofs"] + row["n_waits"]].tolist()
        depth.append(1 + max((depth[p] for c in own for p in makers.get(c, [])), default=0))
        makers.setdefault(int(row["counter"]), []).append(index)
    return max(depth)


def _latest(packets: set[int], order: Order) -> tuple[int, ...]:
    """Return those of some packets whose completion implies that of the others."""
    return tuple(
        sorted(p for p in packets if not any(order.before[q] >> p & 1 for q in packets if q != p))
    )


def _earliest(packets: Sequence[int], order: Order) -> tuple[int, ...]:
    """Return those of some packets that none of the others comes before."""
    return tuple(p for p in packets if not any(order.before[p] >> q & 1 for q in packets if q != p))


# -- checks ------------------------------------------------------------------------------------


def load_faults(
    row: Any, spec: OpSpec, handles: Mapping[str, int], tensors: Sequence[Tensor]
) -> Iterator[str]:
    """Yield what is wrong with the words of a LOAD or an EXPERT_FETCH, given the handle table."""
    for name, need in (("width", 1), ("unit_cols", 0)):
        if int(row[name]) != need:
            yield f"{name} {int(row[name])}, need {need}"
    if spec.op is Op.LOAD:
        tensor = tensors[handles["w"]]
        need = -(-paged_bytes(tensor.n_bytes) // LOAD_BLOCK_BYTES)
        if int(row["n_units"]) != need:
            yield f"{int(row['n_units'])} blocks, {tensor.name} has {need}"
        return
    words = dict(zip((p.name for p in SPECS[Op.EXPERT_FETCH].params), row["params"].tolist(),
                     strict=False))  # fmt: skip
    matrices = [tensors[handles[name]] for name in EXPERT_OPERANDS]
    counts = {tensors[handles["scores"]].local[-1], tensors[handles["bias"]].local[-1]}
    counts |= {tensor.local[0] for tensor in matrices}
    if counts != {words["n_experts"]}:
        yield f"n_experts {words['n_experts']}, its tensors have {sorted(counts)}"
    if not 0 < words["top_k"] <= words["n_experts"]:
        yield f"top_k {words['top_k']} of {words['n_experts']} experts"
    places = [tensor.offset for tensor in matrices]
    if places != list(range(EXPERT_MATRICES)):
        yield f"its matrices lie at {places} of a slot, need {list(range(EXPERT_MATRICES))}"


def ring_end(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the ring that some weight lies in."""
    return max((t.offset + paged_bytes(t.n_bytes) for t in tensors if t.role == "ring"), default=0)


def budget_faults(
    params: Mapping[str, Any],
    tensors: Sequence[Tensor],
    phases: Mapping[str, tuple[int, Records]],
) -> Iterator[str]:
    """Yield parameters of a memory budget that are not what tensors and fetches make them.

    `phases` holds each phase's most tokens and its rows. The slots are free between those that the
    largest step cannot do without and those that hold every expert.
    """
    found = params.get("residency")
    moved = [t.name for t in tensors if t.role in ("ring", "slots")]
    if found is None:
        if moved:
            yield f"no residency, and {moved[0]} does not stay in memory"
        return
    for name, need in (("ring_bytes", ring_end(tensors)), ("slot_bytes", slot_bytes(tensors))):
        if found[name] != need:
            yield f"residency {name} {found[name]}, its tensors give {need}"
    names = [p.name for p in SPECS[Op.EXPERT_FETCH].params]
    most = sum(t.local[0] for t in tensors if t.role in EXPERT_ROLES) // EXPERT_MATRICES
    least = 0
    for max_tokens, rows in phases.values():
        for row in rows[rows["op"] == Op.EXPERT_FETCH]:
            words = dict(zip(names, row["params"].tolist(), strict=False))
            least = max(least, min(words["n_experts"], max_tokens * words["top_k"]))
            if int(row["n_units"]) != found["fetch_queues"]:
                got = f"a fetch of {int(row['n_units'])} parts"
                yield f"residency fetch_queues {found['fetch_queues']}, and {got}"
    if not least <= found["slots"] <= most:
        yield f"residency slots {found['slots']}, its experts need {least} to {most}"

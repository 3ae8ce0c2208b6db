"""What a plan must prove before anything runs it, checked on the bytes of its file.

Letters are those of the architecture page. Orders and accesses are derived here from packets, slices
and the handle table, never taken from the scheduler that made them. Steps of one rank follow each
other: a rank starts a step when it has finished the one before.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k3tool.artifact import open_artifact
from k3tool.compiler.plan import PLAN_SCHEMA, Phase, Plan, load_plan
from k3tool.errors import ArtifactError
from k3tool.isa import table, wire
from k3tool.isa.access import Access, accesses
from k3tool.isa.columns import GATE, PACKET_REARM, Columns, spec_of
from k3tool.isa.queues import slice_bounds
from k3tool.verdict import Check, failed, not_run, passed

NOT_YET = {
    "A rewrites": "rules have no machine-checked theorems in this build",
    "F stream": "C and D are not yet derived from emitted instructions alone",
    "G ranks": "ranks' programs are not yet compared with each other",
}


def verify_plan(path: str | Path) -> list[Check]:
    """Check a plan file.

    Raises: ArtifactError when the file itself is damaged, stale or no plan (its digest fails).
    """
    checks = check_wire(path)
    readable = all(check.status == "PASS" for check in checks)
    rest = check_plan(load_plan(path)) if readable else _unreadable()
    return sorted([*checks, *rest], key=lambda check: check.name)


def _unreadable() -> list[Check]:
    names = ("A rewrites", "B slices", "C memory", "D thresholds", "D acyclic", "D ordered",
             "D steps", "F stream", "G ranks")  # fmt: skip
    return [not_run(name, "the wire form does not decode") for name in names]


def check_plan(plan: Plan) -> list[Check]:
    """Run every check but E on a plan in memory."""
    checks = [not_run(name, reason) for name, reason in NOT_YET.items()]
    contexts = [_Context(plan, phase) for phase in plan.phases.values()]
    for context in contexts:
        for name, check in _PHASE_CHECKS.items():
            label = f"{name} {context.phase.name}"
            checks.append(_outcome(label, check(context)))
    if contexts:
        checks.append(_outcome("D steps", _check_steps(contexts)))
    return checks


def _outcome(name: str, result: tuple[str, list[str]]) -> Check:
    claim, faults = result
    if not faults:
        return passed(name, claim)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return failed(name, faults[0] + more)


# -- E: bytes ------------------------------------------------------------------------------------


def check_wire(path: str | Path) -> list[Check]:
    """E: every phase's stored bytes decode, and encode to the same bytes again."""
    with open_artifact(path, "plan", PLAN_SCHEMA, isa_hash=table.isa_hash()) as file:
        names = [name for name in file.names() if name.endswith("/wire")]
        stored = {name.split("/")[1]: file.read(name).tobytes() for name in names}
    if not stored:
        raise ArtifactError(str(path), got="no phase", need="at least one")
    return [_check_phase_wire(phase, data) for phase, data in stored.items()]


def _check_phase_wire(phase: str, data: bytes) -> Check:
    name = f"E wire {phase}"
    try:
        packets, waits = wire.decode(data, phase)
    except ArtifactError as error:
        return failed(name, f"{error.object}: got {error.got}, need {error.need}")
    again = wire.encode(packets, waits)
    if again != data:
        at = next(i for i, (a, b) in enumerate(zip(again, data, strict=False)) if a != b)
        return failed(name, f"byte {at} encodes differently")
    return passed(name, f"{len(data)} bytes, {len(packets)} packets: decoded and encoded again")


# -- order ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Context:
    """One phase with what its waits imply.

    Bit a of before[b]: packet a of a rank is over before packet b of the same rank starts. Bit a of
    before_everywhere[b]: packet a is over on all ranks. Only a wait with the exact threshold counts.
    """

    plan: Plan
    phase: Phase
    producers: dict[int, list[int]] = field(init=False)
    before: list[int] = field(init=False)
    before_everywhere: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.producers = {}
        for index, counter in enumerate(self.phase.packets["counter"].tolist()):
            self.producers.setdefault(counter, []).append(index)
        self.before, self.before_everywhere = [], []
        for index in range(len(self.phase.packets)):
            self._order(index)

    def total(self, counter: int) -> int:
        """Return the arrivals at a counter when all its producers are done, 0 if it has none."""
        ranks = self.plan.tp if counter & GATE else 1
        slices = self.phase.packets["n_slices"]
        return ranks * sum(int(slices[p]) for p in self.producers.get(counter, ()))

    def _order(self, index: int) -> None:
        here = everywhere = 0
        for counter, threshold in self.phase.waits_of(index).tolist():
            if threshold != self.total(counter):
                continue
            for producer in self.producers[counter]:
                if producer >= index:
                    continue
                done = self.before[producer] | 1 << producer
                here |= done
                everywhere |= self.before_everywhere[producer]
                if counter & GATE:
                    everywhere |= done
        self.before.append(here)
        self.before_everywhere.append(everywhere)

    def name(self, index: int) -> str:
        """Return how messages call a packet."""
        spec = spec_of(int(self.phase.packets["op"][index]))
        return f"packet {index} ({spec.name if spec else '?'})"


def _counter_name(counter: int) -> str:
    return f"gate {counter & ~GATE}" if counter & GATE else f"counter {counter}"


def _check_thresholds(c: _Context) -> tuple[str, list[str]]:
    """D: thresholds, the packets' own and those waited for, are the number of producing slices."""
    faults, packets = [], c.phase.packets
    for index, packet in enumerate(packets):
        counter, threshold = int(packet["counter"]), int(packet["threshold"])
        if threshold != c.total(counter):
            got = f"{_counter_name(counter)} has threshold {threshold}"
            faults.append(f"{c.name(index)}: {got}, its producers arrive {c.total(counter)} times")
        for waited, needed in c.phase.waits_of(index).tolist():
            if needed != c.total(waited):
                got = f"waits for {needed} at {_counter_name(waited)}"
                faults.append(f"{c.name(index)}: {got}, where {c.total(waited)} arrive")
    gates = sorted(counter & ~GATE for counter in c.producers if counter & GATE)
    if gates != list(range(c.phase.n_gates)):
        faults.append(f"gates {gates} signalled, {c.phase.n_gates} declared")
    faults += _rearm_faults(c)
    return f"{len(packets)} counters, {len(c.phase.waits)} waits", faults


def _rearm_faults(c: _Context) -> list[str]:
    """Return what is wrong with clearing the counters' other bank.

    It happens before the arrival at a gate that ends the step on every rank; anywhere else a fast
    rank's arrivals of the next step would be cleared away.
    """
    flagged = np.flatnonzero(c.phase.packets["flags"] & PACKET_REARM).tolist()
    if len(flagged) != 1:
        return [f"packets {flagged} clear the other bank, exactly one has to"]
    counter = int(c.phase.packets["counter"][flagged[0]])
    if not counter & GATE or counter not in set(c.phase.waits["counter"].tolist()):
        return [
            f"{c.name(flagged[0])} clears the other bank but signals no gate that is waited for"
        ]
    return []


def _check_acyclic(c: _Context) -> tuple[str, list[str]]:
    """D: every wait is on an earlier packet, and every queue is in packet order, so none can lock.

    Queues hold packets in increasing order by construction of the placement (all slices of a packet
    share its waits), so the packet order is the one global order.
    """
    faults = []
    for index in range(len(c.phase.packets)):
        for counter, _ in c.phase.waits_of(index).tolist():
            for producer in c.producers.get(counter, ()):
                if producer >= index:
                    faults.append(
                        f"{c.name(index)} waits for {c.name(producer)}, which is not earlier"
                    )
            if counter not in c.producers:
                faults.append(
                    f"{c.name(index)} waits for {_counter_name(counter)}: nobody signals it"
                )
    return f"{len(c.phase.packets)} packets, every wait on an earlier one", faults


# -- bytes in memory -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Segment:
    """A run of bytes that every access covers whole or not at all: its last writer, readers since."""

    writer: int | None = None
    handle: int = -1
    readers: list[tuple[int, bool]] = field(default_factory=list)


def _segments(found: Sequence[Sequence[Access]]) -> dict[str, tuple[list[int], list[_Segment]]]:
    bounds: dict[str, set[int]] = {}
    for packet in found:
        for access in packet:
            bounds.setdefault(access.space, set()).update((access.byte0, access.byte1))
    return {
        space: (sorted(edges), [_Segment() for _ in range(len(edges) - 1)])
        for space, edges in bounds.items()
    }


def _accesses(c: _Context) -> tuple[list[list[Access]], list[str]]:
    """Return every packet's accesses, and faults where a record does not fit its tensors."""
    found: list[list[Access]] = []
    faults = []
    for index, packet in enumerate(c.phase.packets):
        try:
            found.append(list(accesses(packet, c.plan.tensors)))
        except ValueError as error:
            found.append([])
            faults.append(f"{c.name(index)}: {error}")
    return found, faults


def _touched(
    c: _Context, found: Sequence[Sequence[Access]]
) -> Iterator[tuple[int, Access, _Segment]]:
    """Yield (packet, access, segment) in packet order, noting each access after it was yielded."""
    spaces = _segments(found)
    for index, packet in enumerate(found):
        for access in packet:
            edges, segments = spaces[access.space]
            low, high = bisect_left(edges, access.byte0), bisect_left(edges, access.byte1)
            for segment in segments[low:high]:
                yield index, access, segment
                if access.is_write:
                    segment.writer, segment.handle = index, access.handle
                    segment.readers = []
                else:
                    segment.readers.append((index, access.every_rank))


def _check_ordered(c: _Context) -> tuple[str, list[str]]:
    """D: each pair of accesses to the same bytes, one of them a write, is ordered by counters."""
    found, faults = _accesses(c)
    pairs, seen = 0, set()

    def fault(kind: str, index: int, other: int, access: Access, across: bool) -> None:
        key = (kind, index, other, access.handle)
        if key not in seen:
            seen.add(key)
            tensor = c.plan.tensors[access.handle].name
            where = " on every rank" if across else ""
            faults.append(
                f"{c.name(index)}: {kind} of {tensor} not ordered after {c.name(other)}{where}"
            )

    for index, access, segment in _touched(c, found):
        verb = "write" if access.is_write else "read"
        if segment.writer is not None and segment.writer != index:
            order = c.before_everywhere if access.every_rank else c.before
            pairs += 1
            if not order[index] >> segment.writer & 1:
                fault(f"{verb} after write", index, segment.writer, access, access.every_rank)
        if access.is_write:
            for reader, across in segment.readers:
                order = c.before_everywhere if across else c.before
                pairs += 1
                if reader != index and not order[index] >> reader & 1:
                    fault("write after read", index, reader, access, across)
    return f"{pairs} pairs of accesses to the same bytes", faults


def _check_memory(c: _Context) -> tuple[str, list[str]]:
    """C: what is read under a handle was last written under it, whole: no live buffers overlap."""
    found, faults = _accesses(c)
    limits = {"arena": c.phase.arena_bytes, "peer": c.phase.peer_bytes}
    reads = 0
    for index, access, segment in _touched(c, found):
        tensor = c.plan.tensors[access.handle]
        if access.space not in limits:
            continue
        if access.byte1 > limits[access.space]:
            got = f"{tensor.name} ends at byte {access.byte1} of {limits[access.space]}"
            faults.append(f"{c.name(index)}: {got} in the {access.space}")
        if tensor.phase != c.phase.name:
            faults.append(f"{c.name(index)}: {tensor.name} belongs to phase {tensor.phase}")
        if access.is_write:
            continue
        reads += 1
        if segment.writer is None:
            faults.append(f"{c.name(index)} reads {tensor.name}, which nothing has written")
        elif segment.handle != access.handle:
            other = c.plan.tensors[segment.handle].name
            text = f"{c.name(index)} reads {tensor.name}, whose bytes {other} overwrote"
            faults.append(f"{text} in {c.name(segment.writer)}")
    return f"{reads} reads of the arena and the peer segment", list(dict.fromkeys(faults))


def _check_steps(contexts: Sequence[_Context]) -> tuple[str, list[str]]:
    """D: a peer buffer is not written in a step before every rank has read it in the step before.

    "Arrived" is not "has read". A reader is safe if something later in its own step waits for it on
    all ranks; else whoever writes those bytes next has to be behind a gate of its own step.
    """
    readers, writers = [], []
    for c in contexts:
        waited_for = 0
        for done in c.before_everywhere:
            waited_for |= done
        for index, packet in enumerate(_accesses(c)[0]):
            for access in packet:
                if access.every_rank and not waited_for >> index & 1:
                    readers.append((c, index, access))
                if access.is_write and access.space == "peer" and not c.before_everywhere[index]:
                    writers.append((c, index, access))
    faults = [
        f"{w.phase.name} {w.name(j)} may write {w.plan.tensors[b.handle].name} while another rank's "
        f"{r.phase.name} {r.name(i)} still reads it"
        for r, i, a in readers
        for w, j, b in writers
        if a.byte0 < b.byte1 and b.byte0 < a.byte1
    ]
    return f"{len(readers)} last readers, {len(writers)} first writers of peer buffers", faults


# -- B: slices -----------------------------------------------------------------------------------


def _check_slices(c: _Context) -> tuple[str, list[str]]:
    """B: every element of every result is written by exactly one slice."""
    packets, faults = c.phase.packets, []
    slices = slice_bounds(packets)
    ends = np.flatnonzero(np.diff(slices.packet, append=len(packets)))
    starts = np.concatenate([[0], ends[:-1] + 1])
    joined = slices.unit0[1:] == slices.unit1[:-1]
    joined[ends[:-1]] = True
    broken: Columns = np.zeros(len(packets), bool)
    broken[slices.packet[1:][~joined]] = True
    broken[slices.packet[slices.unit0 >= slices.unit1]] = True
    broken |= slices.unit0[starts] != 0
    broken |= slices.unit1[ends] != packets["n_units"]
    for index in range(len(packets)):
        if broken[index]:
            faults.append(f"{c.name(index)}: slices do not partition its units")
        fault = _row_fault(c, index)
        if fault is not None:
            faults.append(f"{c.name(index)}: {fault}")
    return f"{len(slices.packet)} slices of {len(packets)} packets", faults


def _row_fault(c: _Context, index: int) -> str | None:
    """Return how units fail to cover a token's row, None if they cover it once."""
    packet = c.phase.packets[index]
    spec = spec_of(int(packet["op"]))
    assert spec is not None
    n_units, width, unit_cols = (int(packet[name]) for name in ("n_units", "width", "unit_cols"))
    whole = {"token": c.phase.max_tokens, "step": 1}.get(spec.unit)
    if whole is not None and (n_units, unit_cols) != (whole, 0):
        return f"{n_units} units of {unit_cols} columns, need {whole} whole rows"
    if whole is None:
        copies, rest = divmod(width, max(1, n_units * unit_cols))
        routed = any(operand.name == "route" for operand in spec.operands)
        if rest or copies < 1 or (copies > 1 and not routed):
            return f"{n_units} units of {unit_cols} columns do not cover a row of {width} once"
    if spec.output.role != "out":
        return None
    tensor = c.plan.tensors[int(packet["handles"][spec.slot(spec.output.name)])]
    elements = int(np.prod(tensor.local))
    if elements != c.phase.max_tokens * width:
        return f"{tensor.name} has {elements} elements, need {c.phase.max_tokens} rows of {width}"
    return None


_PHASE_CHECKS: Mapping[str, Callable[[_Context], tuple[str, list[str]]]] = {
    "B slices": _check_slices,
    "C memory": _check_memory,
    "D thresholds": _check_thresholds,
    "D acyclic": _check_acyclic,
    "D ordered": _check_ordered,
}

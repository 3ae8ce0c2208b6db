"""Single faults of what holds a step together: its end, waits too many, tiles, stated chains."""

from dataclasses import replace

import numpy as np

from k3tool.compiler.plan import Plan
from k3tool.isa.columns import GATE, PACKET_REARM
from k3tool.isa.stream import Isa
from k3tool.isa.table import SPECS, Op
from tests.faults.mutations import (
    Broken,
    Mutation,
    entries_of,
    first,
    packets_of,
    rows_of,
    set_packet,
    table_of,
    waiting,
    with_packets,
    with_queues,
    with_size,
    with_stream,
)

PLAN_ENDS: list[Mutation] = []
STREAM_ENDS: list[Mutation] = []
on_plan, on_stream = table_of(PLAN_ENDS), table_of(STREAM_ENDS)


# -- of a plan -------------------------------------------------------------------------------------


def moved_rearm(plan: Plan, to: int) -> Plan:
    packets = packets_of(plan).copy()
    packets["flags"] &= np.uint16(0xFFFF ^ PACKET_REARM)
    packets["flags"][to] |= np.uint16(PACKET_REARM)
    return with_packets(plan, packets)


@on_plan("the other bank is cleared at the step's first gate", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["counter"] & GATE)
    return Broken(moved_rearm(plan, at), at)


@on_plan("the other bank is cleared at the last gate but one", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = int(np.flatnonzero(packets_of(plan)["counter"] & GATE)[-2])
    return Broken(moved_rearm(plan, at), at)


@on_plan("more gates than a list can hold", "D thresholds decode")
def _(plan: Plan) -> Broken:
    return Broken(with_size(plan, "n_gates", 1 << 40), None)


def with_wait(plan: Plan, index: int, counter: int, threshold: int) -> Plan:
    """Give a packet one wait more; its list moves to the end."""
    phase = plan.phases["decode"]
    own = phase.waits_of(index)
    more = np.append(own, np.array([(counter, threshold)], own.dtype))
    packets = phase.packets.copy()
    packets["wait_ofs"][index], packets["n_waits"][index] = len(phase.waits), len(more)
    return with_packets(plan, packets, np.append(phase.waits, more))


@on_plan("a wait that the others imply", "D ordered decode")
def _(plan: Plan) -> Broken:
    packets = packets_of(plan)
    at = first(packets, waiting, 9)
    source = int(packets["wait_ofs"][first(packets, waiting, 2)])
    counter, threshold = plan.phases["decode"].waits[source].tolist()
    return Broken(with_wait(plan, at, counter, threshold), at)


@on_plan("the same wait twice", "D ordered decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 6)
    own = plan.phases["decode"].waits_of(at)[0].tolist()
    return Broken(with_wait(plan, at, *own), at)


@on_plan("a later wait in place of the one needed", "D ordered decode")
def _(plan: Plan) -> Broken:
    """It implies the one needed, so nothing races: the chain is longer than it has to be."""
    phase = plan.phases["decode"]
    for at in range(len(phase.packets)):
        own = phase.waits_of(at)
        if len(own) != 1 or own["counter"][0] & GATE:
            continue
        needed = int(own["counter"][0])
        later = [
            i for i in range(needed + 1, at)
            if not phase.packets["counter"][i] & GATE
            and needed in phase.waits_of(i)["counter"].tolist()
        ]  # fmt: skip
        if later:
            waits = phase.waits.copy()
            threshold = int(phase.packets["threshold"][later[0]])
            waits[int(phase.packets["wait_ofs"][at])] = (later[0], threshold)
            return Broken(with_packets(plan, phase.packets, waits), at)
    raise AssertionError("no packet beside another")


@on_plan("tiles of a row more", "B slices decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: row["grain"] > 1 and row["n_slices"] == 1)
    return Broken(set_packet(plan, at, grain=int(packets_of(plan)["grain"][at]) + 1), at)


@on_plan("a slice less than there are workers", "B slices decode")
def _(plan: Plan) -> Broken:
    packets, waits = packets_of(plan).copy(), plan.phases["decode"].waits.copy()
    at = first(packets, lambda row, _: row["n_slices"] > 2 and not row["counter"] & GATE)
    packets["n_slices"][at] -= 1
    packets["threshold"][at] -= 1
    waits["threshold"][waits["counter"] == at] -= np.uint32(1)
    return Broken(with_packets(plan, packets, waits), at)


@on_plan("a chain of a packet less is stated", "D ordered decode")
def _(plan: Plan) -> Broken:
    return Broken(with_size(plan, "packet_path", -1), None)


@on_plan("a chain of a hand-off more is stated", "D ordered decode")
def _(plan: Plan) -> Broken:
    return Broken(with_size(plan, "critical_path", 1), None)


# -- of a stream -----------------------------------------------------------------------------------


def with_rearm_at(isa: Isa, nth_gate: int) -> Broken:
    stream = isa.streams["decode"]
    at = int(np.flatnonzero(stream.queues.signals & GATE)[nth_gate])
    records = [r.copy() for r in stream.instructions]
    for words in records:
        words[:, 0] &= np.uint32(0xFFFFFFFF ^ PACKET_REARM << 16)
        words[at, 0] |= np.uint32(PACKET_REARM << 16)
    entries = entries_of(isa).copy()
    entries["flags"] = records[0][entries["inst"], 0] >> 16
    queues = replace(stream.queues, entries=entries)
    return Broken(with_stream(isa, instructions=tuple(records), queues=queues), at)


@on_stream("the other bank is cleared at the step's first gate", "F thresholds decode")
def _(isa: Isa) -> Broken:
    return with_rearm_at(isa, 0)


@on_stream("the other bank is cleared at the last gate but one", "F thresholds decode")
def _(isa: Isa) -> Broken:
    return with_rearm_at(isa, -2)


@on_stream("an instruction waits for one thing more", "F ordered decode")
def _(isa: Isa) -> Broken:
    """Its list runs on into the next one's, whose producer is over by then."""
    queues = isa.streams["decode"].queues
    entries, waits, signals = queues.entries.copy(), queues.waits, queues.signals
    for at in range(1, len(signals)):
        own = entries["inst"] == at
        end = int((entries["wait_ofs"] + entries["n_waits"])[own][0])
        producer = int(np.flatnonzero(signals == waits["counter"][min(end, len(waits) - 1)])[0])
        if entries["n_waits"][own][0] and end < len(waits) and producer < at:
            entries["n_waits"][own] += 1
            return Broken(with_queues(isa, entries=entries), at)
    raise AssertionError("no list runs on")


@on_stream("a wait in no entry's list", "F thresholds decode")
def _(isa: Isa) -> Broken:
    waits = isa.streams["decode"].queues.waits
    return Broken(with_queues(isa, waits=np.append(waits, waits[-1:])), None)


@on_stream("a counter more than there are instructions", "F thresholds decode")
def _(isa: Isa) -> Broken:
    counts = isa.streams["decode"].queues.local_counts
    return Broken(with_queues(isa, local_counts=np.append(counts, counts[:1] * 0)), None)


@on_stream("a gate more than signals name", "F thresholds decode")
def _(isa: Isa) -> Broken:
    counts = isa.streams["decode"].queues.gate_counts
    return Broken(with_queues(isa, gate_counts=np.append(counts, counts[:1] * 0)), None)


@on_stream("a cut inside a tile", "F records decode")
def _(isa: Isa) -> Broken:
    """Every unit is in one entry still; two of a tile's rows are another worker's."""
    entries, rows = entries_of(isa).copy(), rows_of(isa)
    found = [i for i, row in enumerate(rows) if SPECS[Op(int(row["op"]))].grain == 8]
    for at in found:
        own = np.flatnonzero(entries["inst"] == at)
        if len(own) > 1:
            order = own[np.argsort(entries["slice"][own])]
            entries["unit1"][order[0]] += 2
            entries["unit0"][order[1]] += 2
            return Broken(with_queues(isa, entries=entries), at)
    raise AssertionError("no instruction of rows in several slices")

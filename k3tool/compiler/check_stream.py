"""Check F: an emitted stream proves itself again, from its 64-byte instructions and entries alone.

Letters B, C and D of a plan's checks are repeated on what an interpreter reads: reads and writes
come from records and the handle table, the order from wait and signal lists of entries. That all
ranks' programs are one program is check G (``check_ranks``).
"""

from collections.abc import Iterator

import numpy as np

from k3tool.compiler.hazards import check_memory, check_ordered, check_steps
from k3tool.compiler.needless import needless_waits, rearm_faults
from k3tool.compiler.order import counter_name
from k3tool.compiler.record_checks import (
    cut_faults,
    record_faults,
    state_faults,
    tensor_faults,
    tile_units,
)
from k3tool.errors import ArtifactError
from k3tool.isa.columns import GATE
from k3tool.isa.queues import Queues, slice_bounds
from k3tool.isa.stream import Isa, check_isa
from k3tool.isa.stream_order import StreamOrder
from k3tool.isa.windows import window_faults
from k3tool.verdict import Check, not_run, outcome

STREAM_CHECKS = ("F tables", "F records", "F thresholds", "F acyclic", "F memory", "F ordered",
                 "F steps", "F windows")  # fmt: skip


def check_stream(isa: Isa, where: str) -> tuple[list[Check], list[StreamOrder]]:
    """Run check F. Return its outcomes and the orders of all phases, none if tables are broken."""
    tables = outcome("F tables", _tables(isa, where))
    if tables.status != "PASS":
        return [tables, *(not_run(name, "tables are broken") for name in STREAM_CHECKS[1:])], []
    orders = [StreamOrder(isa, stream) for stream in isa.streams.values()]
    checks = [tables]
    for c in orders:
        results = {
            "F records": _records(c),
            "F thresholds": _thresholds(c),
            "F acyclic": _acyclic(c),
            "F memory": check_memory(c),
            "F ordered": _ordered(c),
            "F windows": window_faults(c.stream, isa.target),
        }
        checks += [outcome(f"{name} {c.phase_name}", result) for name, result in results.items()]
    return [*checks, outcome("F steps", check_steps(orders))], orders


def _tables(isa: Isa, where: str) -> tuple[str, list[str]]:
    """F: everything is in range, queues are in order, each unit is in one entry."""
    if not isa.streams or any(len(s.queues.signals) == 0 for s in isa.streams.values()):
        return "", ["nothing to check: no instruction in a phase"]
    try:
        check_isa(isa, where)
    except ArtifactError as error:
        at = error.object.removeprefix(f"{where}: ")
        return "", [f"{at}: got {error.got}, need {error.need}"]
    n_entries = sum(len(stream.queues.entries) for stream in isa.streams.values())
    return f"{n_entries} entries in range, queues in order, units in one entry each", []


def _records(c: StreamOrder) -> tuple[str, list[str]]:
    """F: words are what the tensors' sizes make them, tensors the bytes of their shapes."""
    faults = [*tensor_faults(c.tensors), *state_faults(c.tensors, c.isa.params)]
    faults += record_faults(c, c.stream.max_tokens, c.isa.tp, rank_of_params=0)
    faults += _cut_faults(c)
    return f"{len(c.rows)} records, {len(c.tensors)} tensors", faults


def _thresholds(c: StreamOrder) -> tuple[str, list[str]]:
    """F: every wait is for exactly what arrives, and the audit's counts are the arrivals."""
    faults, n_waits = [], 0
    for index in range(len(c.rows)):
        for waits in c.waits_of(index):
            n_waits += len(waits)
            faults += [
                f"{c.name(index)}: waits for {threshold} at {counter_name(counter)}, "
                f"where {c.arrivals.get(counter, 0)} arrive"
                for counter, threshold in waits
                if threshold != c.arrivals.get(counter, 0)
            ]
    faults += [*_list_faults(c.stream.queues), *_audit_faults(c), *_flag_faults(c)]
    signals = {i: {s for own in c.signals_of(i) for s in own} for i in range(len(c.rows))}
    faults += rearm_faults(c, _wait_lists(c), signals)
    return f"{len(c.arrivals)} counters, {n_waits} waits, as counted from entries", faults


def _audit_faults(c: StreamOrder) -> Iterator[str]:
    queues = c.stream.queues
    for bit, counts in ((0, queues.local_counts), (GATE, queues.gate_counts)):
        for number, need in enumerate(counts.tolist()):
            got = c.arrivals.get(number | bit, 0)
            if got != need:
                who = c.producers.get(number | bit, [])
                at = c.name(who[0]) if who else "no instruction"
                yield f"{at}: {counter_name(number | bit)} gets {got}, the audit expects {need}"


def _list_faults(queues: Queues) -> Iterator[str]:
    """Every wait is some entry's, and there is a count for each counter and each gate, no more."""
    entries, edges = queues.entries, np.zeros(len(queues.waits) + 1, np.int64)
    first = entries["wait_ofs"].astype(np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, first + entries["n_waits"], -1)
    for wait in np.flatnonzero(np.cumsum(edges)[:-1] == 0).tolist():
        yield f"wait {wait} is in no entry's list"
    gates = queues.signals[(queues.signals & GATE) != 0] & ~np.uint32(GATE)
    need = {"local_counts": len(queues.signals), "gate_counts": int(max(gates, default=-1)) + 1}
    for name, n in need.items():
        if len(getattr(queues, name)) != n:
            yield f"{name} of {len(getattr(queues, name))} counters, signals name {n}"


def _flag_faults(c: StreamOrder) -> Iterator[str]:
    """Entries carry their record's flags."""
    entries = c.stream.queues.entries
    wrong = entries["flags"] != c.rows["flags"][entries["inst"]]
    if wrong.any():
        bad = int(entries["inst"][np.argmax(wrong)])
        yield f"{c.name(bad)}: an entry's flags are not the record's"


def _wait_lists(c: StreamOrder) -> dict[int, list[list[int]]]:
    return {i: [[w for w, _ in own] for own in c.waits_of(i)] for i in range(len(c.rows))}


def _ordered(c: StreamOrder) -> tuple[str, list[str]]:
    """F: accesses to the same bytes are ordered, and every wait orders some."""
    what, faults = check_ordered(c)
    return what, [*faults, *needless_waits(c, _wait_lists(c))]


def _cut_faults(c: StreamOrder) -> Iterator[str]:
    """Entries are whole tiles of their instruction, as many as there are workers for them."""
    entries = c.stream.queues.entries
    rows = c.rows.copy()
    rows["n_slices"] = np.bincount(entries["inst"], minlength=len(rows))
    for index, row in enumerate(rows):
        rows["grain"][index] = tile_units(row)
        for fault in cut_faults(rows[index], c.isa.crew):
            yield f"{c.name(index)}: {fault}"
    cuts = slice_bounds(rows)
    order = np.lexsort((entries["slice"], entries["inst"]))
    for name, need in (("unit0", cuts.unit0), ("unit1", cuts.unit1)):
        wrong = entries[name][order] != need
        if wrong.any():
            bad = int(np.argmax(wrong))
            got = f"{name} {entries[name][order][bad]} of slice {cuts.number[bad]}"
            yield f"{c.name(int(cuts.packet[bad]))}: {got}, its tiles give {need[bad]}"


def _acyclic(c: StreamOrder) -> tuple[str, list[str]]:
    """F: every wait is on instructions that come earlier in every queue, so none can lock."""
    faults = []
    for index in range(len(c.rows)):
        for waits in c.waits_of(index):
            for counter, _ in waits:
                producers = c.producers.get(counter)
                if producers is None:
                    faults.append(
                        f"{c.name(index)} waits for {counter_name(counter)}: nobody signals it"
                    )
                    continue
                faults += [
                    f"{c.name(index)} waits for {c.name(p)}, which is not earlier"
                    for p in producers
                    if p >= index
                ]
    return f"{len(c.rows)} instructions, every wait on an earlier one", faults

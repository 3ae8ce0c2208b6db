"""From packets to workgroup queues: slices, their placement, stream entries, counts.

Array arithmetic throughout: a K3 phase at 256 workgroups has more than half a million entries. It
derives everything from packet columns and knows no file format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from k3tool.errors import ArtifactError
from k3tool.isa.columns import ENTRY_DTYPE, GATE, Columns, spec_of
from k3tool.isa.table import Op


@dataclass(frozen=True, slots=True)
class Slices:
    """All slices in packet order: parallel columns, one row a slice. Units are half-open."""

    packet: Columns
    number: Columns
    unit0: Columns
    unit1: Columns


@dataclass(frozen=True, slots=True)
class Queues:
    """One phase's stream, the same on every rank: who executes which slice, after what.

    `entries` are ordered by workgroup, then packet; workgroup w owns queue_ofs[w] .. [w + 1].
    `local_counts` and `gate_counts` are the arrivals at each counter when a step is over.
    """

    entries: Columns
    queue_ofs: Columns
    waits: Columns
    signals: Columns
    local_counts: Columns
    gate_counts: Columns


def slice_bounds(packets: Columns) -> Slices:
    """Cut every packet's units into its n_slices slices of whole tiles of `grain` units."""
    n_slices = packets["n_slices"].astype(np.int64)
    packet = np.repeat(np.arange(len(packets), dtype=np.int64), n_slices)
    number = np.arange(len(packet), dtype=np.int64) - (np.cumsum(n_slices) - n_slices)[packet]
    n_units, grain = (packets[name].astype(np.int64)[packet] for name in ("n_units", "grain"))
    tiles, total = -(-n_units // grain), n_slices[packet]
    unit0 = np.minimum(tiles * number // total * grain, n_units)
    unit1 = np.minimum(tiles * (number + 1) // total * grain, n_units)
    return Slices(packet, number, unit0, unit1)


class Crew(NamedTuple):
    """How many queues there are: of compute, then of workers that LOAD, then that EXPERT_FETCH.

    I/O has queues of its own because a read blocks its worker, and two kinds because a fetch is
    wanted at once while a LOAD is mostly ahead of its time.
    """

    compute: int
    load: int = 0
    fetch: int = 0

    def first(self, kind: int) -> int:
        """Return the first queue of a kind: 0 compute, 1 load, 2 fetch."""
        return sum(self[:kind])


def crew_of(params: Mapping[str, Any]) -> Crew:
    """Return the queues of a plan's parameters."""
    residency = params.get("residency")
    io = (residency["load_queues"], residency["fetch_queues"]) if residency else (0, 0)
    return Crew(int(params["workgroups"]), *map(int, io))


def kinds_of(ops: Columns) -> Columns:
    """Return which kind of queue each op goes to, an index of `Crew`."""
    return np.where(ops == Op.LOAD, 1, np.where(ops == Op.EXPERT_FETCH, 2, 0))


def place(slices: Slices, packets: Columns, crew: Crew) -> Columns:
    """Return the workgroup of every slice.

    Each packet starts where the one before it of its kind ended, so that packets with fewer slices
    than workgroups do not all land on the first ones.
    """
    placed: Columns = np.zeros(len(slices.packet), np.int64)
    kinds = kinds_of(packets["op"])
    for kind, size in enumerate(crew):
        n_slices = np.where(kinds == kind, packets["n_slices"].astype(np.int64), 0)
        start = np.cumsum(n_slices) - n_slices
        own = kinds[slices.packet] == kind
        numbers = slices.number[own] + start[slices.packet[own]]
        placed[own] = crew.first(kind) + numbers % max(1, size)
    return placed


def build(packets: Columns, waits: Columns, crew: Crew, n_ranks: int) -> Queues:
    """Return the queues of one phase.

    Raises: ArtifactError when a packet has more slices than there are workgroups of its kind: a
    workgroup would then execute two slices of one packet.
    """
    most = np.array(crew)[kinds_of(packets["op"])]
    if (packets["n_slices"] > most).any():
        bad = int(np.argmax(packets["n_slices"] > most))
        got, need = int(packets["n_slices"][bad]), f"at most {most[bad]} workgroups"
        raise ArtifactError(f"packet {bad}: n_slices", got=got, need=need)
    n_workgroups = sum(crew)
    slices = slice_bounds(packets)
    workgroup = place(slices, packets, crew)
    order = np.argsort(workgroup, kind="stable")  # stable: packet order stays inside a queue
    owner = slices.packet[order]
    entries = np.zeros(len(order), ENTRY_DTYPE)
    entries["inst"] = owner
    entries["unit0"], entries["unit1"] = slices.unit0[order], slices.unit1[order]
    entries["wait_ofs"], entries["n_waits"] = packets["wait_ofs"][owner], packets["n_waits"][owner]
    entries["signal_ofs"], entries["n_signals"] = owner, 1
    entries["slice"], entries["flags"] = slices.number[order], packets["flags"][owner]
    per_workgroup = np.bincount(workgroup, minlength=n_workgroups)
    queue_ofs = np.concatenate([[0], np.cumsum(per_workgroup)]).astype("<u4")
    signals = packets["counter"].astype("<u4")
    local_counts, gate_counts = final_counts(entries, signals, len(packets), n_ranks)
    return Queues(entries, queue_ofs, waits, signals, local_counts, gate_counts)


def final_counts(
    entries: Columns, signals: Columns, n_counters: int, n_ranks: int
) -> tuple[Columns, Columns]:
    """Return the arrivals at every local counter and at every gate at the end of a step.

    They are counted from the entries, not copied from thresholds: this is what the audit compares.
    """
    assert (entries["n_signals"] == 1).all(), "one counter a packet"
    arrived = signals[entries["signal_ofs"]].astype(np.int64)
    is_gate = (arrived & GATE) != 0
    local = np.bincount(arrived[~is_gate], minlength=n_counters)
    gates = np.bincount(arrived[is_gate] & ~GATE) * n_ranks
    return local.astype("<u4"), gates.astype("<u4")


def scratch_floats(packets: Columns, max_tokens: int) -> int:
    """Return the scratch that a workgroup needs: the most that any instruction asks for."""
    most = 0
    for packet in packets:
        spec = spec_of(int(packet["op"]))
        assert spec is not None, packet["op"]
        words = zip(spec.params, packet["params"], strict=False)
        named = {param.name: int(word) for param, word in words}
        named |= {name: int(packet[name]) for name in ("n_units", "width", "unit_cols")}
        most = max(most, spec.scratch(named, max_tokens))
    return most

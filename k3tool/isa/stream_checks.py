"""What a stream's tables must satisfy before an interpreter indexes them without looking.

Everything in range, every queue in instruction order, every wait on an earlier instruction, every
unit of every instruction in exactly one slice. Whether waits suffice for the bytes in memory, and
whether thresholds are right, is not asked here (``k3tool.compiler.checks``).
"""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from k3tool.errors import ArtifactError
from k3tool.isa import device, op_spec, table
from k3tool.isa.columns import GATE, Columns, spec_of
from k3tool.isa.queues import Crew, Queues, kinds_of


def refuse(what: str, got: object, need: object) -> NoReturn:
    """Raise the ArtifactError of a stream that is not as emission writes it."""
    raise ArtifactError(what, got=got, need=need, hint="emit the stream again with this build")


def check_tables(
    instructions: Sequence[Columns],
    queues: Queues,
    *,
    n_tensors: int,
    n_ranks: int,
    crew: Crew,
    at: str,
) -> None:
    """Check one phase: `instructions[rank]` is (P, 16) u4; `at` names it in messages.

    Raises: ArtifactError naming the instruction, entry or queue.
    """
    if len(instructions) != n_ranks:
        refuse(f"{at}: ranks", len(instructions), n_ranks)
    n_instructions = len(queues.signals)
    for rank, records in enumerate(instructions):
        if len(records) != n_instructions:
            refuse(f"{at}: rank {rank}: instructions", len(records), n_instructions)
        _check_records(records, n_tensors, f"{at}: rank {rank}")
    if len(queues.queue_ofs) != sum(crew) + 1:
        refuse(f"{at}: workgroups", len(queues.queue_ofs) - 1, sum(crew))
    n_units = instructions[0][:, op_spec.WORD_UNITS].astype(np.int64)
    _check_queues(queues, at)
    _check_entries(queues, n_units, at)
    _check_kinds(queues, instructions[0][:, 0] & 0xFFFF, crew, at)
    _check_queue_order(queues, at)
    _check_wait_order(queues, at)
    _check_partition(queues, n_units, at)


def _check_records(records: Columns, n_tensors: int, at: str) -> None:
    packets = device.unpack(records)
    for op in np.unique(packets["op"]):
        rows = np.flatnonzero(packets["op"] == op)
        spec = spec_of(int(op))
        if spec is None:
            name = table.RESERVED.get(int(op), "unknown")
            refuse(f"{at}: instruction {rows[0]}: opcode", f"{op} ({name})", "an op of the table")
        handles = packets["handles"][rows]
        slots, runs = [o.slot for o in spec.operands], [o.run for o in spec.operands]
        used = handles[:, slots].astype(np.int64) + runs
        good = (used < n_tensors).all(axis=1)
        good &= (handles[:, spec.n_slots :] == op_spec.NO_HANDLE).all(axis=1)
        if not good.all():
            bad = int(rows[np.argmin(good)])
            got = packets["handles"][bad].tolist()
            need = f"{spec.n_slots} handles below {n_tensors}, then {op_spec.NO_HANDLE}"
            refuse(f"{at}: instruction {bad}: {spec.name}: handles", got, need)
        spare = (packets["params"][rows][:, len(spec.params) :] != 0).any(axis=1)
        if spare.any():
            bad = int(rows[np.argmax(spare)])
            got = packets["params"][bad].tolist()
            refuse(f"{at}: instruction {bad}: {spec.name}: params", got, "0 beyond the op's own")


def _check_queues(queues: Queues, at: str) -> None:
    offsets = queues.queue_ofs.astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != len(queues.entries) or (np.diff(offsets) < 0).any():
        refuse(f"{at}: queue_ofs", "bounds out of order", f"0 to {len(queues.entries)}, rising")
    limits = {0: len(queues.local_counts), GATE: len(queues.gate_counts)}
    for name, counters in (("wait", queues.waits["counter"]), ("signal", queues.signals)):
        for bit, limit in limits.items():
            mine = (counters & GATE) == bit
            good = ~mine | ((counters & ~np.uint32(GATE)) < limit)
            if not good.all():
                bad = int(np.argmin(good))
                refuse(f"{at}: {name} {bad}: counter", int(counters[bad]), f"below {limit}")


def _check_entries(queues: Queues, n_units: Columns, at: str) -> None:
    entries, n_instructions = queues.entries, len(queues.signals)
    inst = entries["inst"].astype(np.int64)
    # Clip before the look-up: an index out of range is reported by the rule for it.
    own_units = n_units[np.minimum(inst, n_instructions - 1)] if n_instructions else inst
    rules = (
        ("inst", inst < n_instructions, f"below {n_instructions}"),
        (
            "units",
            (entries["unit0"] < entries["unit1"]) & (entries["unit1"] <= own_units),
            "a non-empty range of the instruction's units",
        ),
        (
            "waits",
            entries["wait_ofs"].astype(np.int64) + entries["n_waits"] <= len(queues.waits),
            f"a range of {len(queues.waits)}",
        ),
        (
            "signals",
            entries["signal_ofs"].astype(np.int64) + entries["n_signals"] <= len(queues.signals),
            f"a range of {len(queues.signals)}",
        ),
        ("reserved", entries["reserved"] == 0, "0"),
    )
    for name, good, need in rules:
        if not good.all():
            bad = int(np.argmin(good))
            refuse(f"{at}: entry {bad}: {name}", entries[bad].tolist(), need)


def _check_kinds(queues: Queues, ops: Columns, crew: Crew, at: str) -> None:
    """Each queue holds entries of its kind: only I/O workers read, and they do nothing else."""
    inst = queues.entries["inst"]
    need = kinds_of(ops[inst])
    ofs = queues.queue_ofs.astype(np.int64)
    got = np.repeat(np.repeat(np.arange(len(crew)), crew), ofs[1:] - ofs[:-1])
    if (got != need).any():
        bad = int(np.argmax(got != need))
        names = [name.upper() for name in Crew._fields]
        what = f"{at}: instruction {inst[bad]}: entry {bad}: queue"
        refuse(what, f"one of {names[got[bad]]}", f"one of {names[need[bad]]}")


def _check_queue_order(queues: Queues, at: str) -> None:
    """Each queue holds instructions in rising order, so no interleaving of queues can lock."""
    rising = np.diff(queues.entries["inst"].astype(np.int64)) > 0
    first = queues.queue_ofs[1:-1].astype(np.int64)
    rising[first[(first > 0) & (first < len(queues.entries))] - 1] = True  # a new queue starts
    if not rising.all():
        bad = int(np.argmin(rising)) + 1
        got = f"instruction {queues.entries['inst'][bad]} after {queues.entries['inst'][bad - 1]}"
        refuse(f"{at}: entry {bad}: queue order", got, "rising instructions in a queue")


def _check_wait_order(queues: Queues, at: str) -> None:
    """Every wait is on counters that only earlier instructions arrive at, and some do."""
    entries = queues.entries
    per_entry = entries["n_waits"].astype(np.int64)
    owner = np.repeat(np.arange(len(entries)), per_entry)
    nth = np.arange(len(owner)) - (np.cumsum(per_entry) - per_entry)[owner]
    waited = queues.waits["counter"][entries["wait_ofs"].astype(np.int64)[owner] + nth]
    last = {GATE: np.full(len(queues.gate_counts), -1), 0: np.full(len(queues.local_counts), -1)}
    for index, counter in enumerate(queues.signals.tolist()):
        last[counter & GATE][counter & ~GATE] = index
    number = (waited & ~np.uint32(GATE)).astype(np.int64)
    producer = np.full(len(owner), -1)
    for bit, table_of in last.items():
        mine = (waited & np.uint32(GATE)) == bit
        producer[mine] = table_of[number[mine]]
    good = (producer >= 0) & (producer < entries["inst"][owner])
    if not good.all():
        bad = int(np.argmin(good))
        got = f"instruction {producer[bad]}" if producer[bad] >= 0 else "nobody"
        inst = int(entries["inst"][owner[bad]])
        refuse(f"{at}: instruction {inst}: waits for", got, "an earlier instruction")


def _check_partition(queues: Queues, n_units: Columns, at: str) -> None:
    """Every unit of every instruction lies in exactly one entry; slices are numbered in order."""
    order = np.lexsort((queues.entries["unit0"], queues.entries["inst"]))
    entries = queues.entries[order]
    inst, unit0, unit1 = (entries[name].astype(np.int64) for name in ("inst", "unit0", "unit1"))
    starts = np.diff(inst, prepend=-1) != 0
    previous = np.where(starts, 0, np.concatenate([[0], unit1[:-1]]))
    last = np.append(starts[1:], True)
    wrong = (unit0 != previous) | (last & (unit1 != n_units[inst]))
    missing = np.setdiff1d(np.arange(len(n_units)), inst)
    if wrong.any() or len(missing):
        bad = int(inst[np.argmax(wrong)]) if wrong.any() else int(missing[0])
        refuse(f"{at}: instruction {bad}: slices", "units left out or twice", "each unit once")
    number = np.arange(len(inst)) - np.flatnonzero(starts)[np.cumsum(starts) - 1]
    misnumbered = entries["slice"] != number
    if misnumbered.any():
        bad = int(inst[np.argmax(misnumbered)])
        refuse(f"{at}: instruction {bad}: slices", "numbers out of order", "0, 1, ...")

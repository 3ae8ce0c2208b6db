"""What a plan must prove before anything runs it, checked on the bytes of its file.

Letters are those of the architecture page. Orders and accesses are derived from packets, slices
and the handle table, never taken from the scheduler that made them. Steps of one rank follow each
other: a rank starts a step when it has finished the one before.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from k3tool.artifact import open_artifact
from k3tool.compiler.hazards import check_memory, check_ordered, check_steps
from k3tool.compiler.order import Order, counter_name
from k3tool.compiler.plan import PLAN_SCHEMA, Plan, load_plan
from k3tool.errors import ArtifactError
from k3tool.isa import table, wire
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
    empty = [name for name, phase in plan.phases.items() if len(phase.packets) == 0]
    if empty or not plan.phases:
        return [
            *checks,
            failed("B slices", f"nothing to check: no packet in {empty or 'any phase'}"),
        ]
    contexts = [Order(plan, phase) for phase in plan.phases.values()]
    for context in contexts:
        for name, check in _PHASE_CHECKS.items():
            label = f"{name} {context.phase.name}"
            checks.append(_outcome(label, check(context)))
    return [*checks, _outcome("D steps", check_steps(contexts))]


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


# -- D: counters ---------------------------------------------------------------------------------


def _check_thresholds(c: Order) -> tuple[str, list[str]]:
    """D: thresholds, the packets' own and those waited for, are the number of producing slices."""
    faults, packets = [], c.phase.packets
    for index, packet in enumerate(packets):
        counter, threshold = int(packet["counter"]), int(packet["threshold"])
        if threshold != c.total(counter):
            got = f"{counter_name(counter)} has threshold {threshold}"
            faults.append(f"{c.name(index)}: {got}, its producers arrive {c.total(counter)} times")
        for waited, needed in c.phase.waits_of(index).tolist():
            if needed != c.total(waited):
                got = f"waits for {needed} at {counter_name(waited)}"
                faults.append(f"{c.name(index)}: {got}, where {c.total(waited)} arrive")
    gates = sorted(counter & ~GATE for counter in c.producers if counter & GATE)
    if gates != list(range(c.phase.n_gates)):
        faults.append(f"gates {gates} signalled, {c.phase.n_gates} declared")
    faults += _rearm_faults(c)
    return f"{len(packets)} counters, {len(c.phase.waits)} waits", faults


def _rearm_faults(c: Order) -> list[str]:
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


def _check_acyclic(c: Order) -> tuple[str, list[str]]:
    """D: every wait is on an earlier packet, and every queue is in packet order, so none can lock.

    Queues hold packets in increasing order by construction of the placement (all slices of a packet
    share its waits), so the packet order is the one global order.
    """
    faults = []
    for index in range(len(c.phase.packets)):
        for counter, _ in c.phase.waits_of(index).tolist():
            faults += [
                f"{c.name(index)} waits for {c.name(producer)}, which is not earlier"
                for producer in c.producers.get(counter, ())
                if producer >= index
            ]
            if counter not in c.producers:
                faults.append(
                    f"{c.name(index)} waits for {counter_name(counter)}: nobody signals it"
                )
    return f"{len(c.phase.packets)} packets, every wait on an earlier one", faults


# -- B: slices -----------------------------------------------------------------------------------


def _check_slices(c: Order) -> tuple[str, list[str]]:
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


def _row_fault(c: Order, index: int) -> str | None:
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


_PHASE_CHECKS: Mapping[str, Callable[[Order], tuple[str, list[str]]]] = {
    "B slices": _check_slices,
    "C memory": check_memory,
    "D thresholds": _check_thresholds,
    "D acyclic": _check_acyclic,
    "D ordered": check_ordered,
}

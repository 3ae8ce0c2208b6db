"""What a plan must prove before anything runs it, checked on the bytes of its file.

Letters are those of the architecture page. Orders and accesses are derived from packets, slices
and the handle table, never taken from the scheduler that made them. Steps of one rank follow each
other: a rank starts a step when it has finished the one before.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from k3tool.artifact import open_artifact
from k3tool.compiler.check_ranks import RANK_CHECKS, check_ranks
from k3tool.compiler.check_stream import STREAM_CHECKS, check_stream
from k3tool.compiler.hazards import check_memory, check_ordered, check_steps
from k3tool.compiler.meaning import (
    check_meaning,
    mode_of,
    model_of,
    pages_of,
    unknown_leaves,
    weight_faults,
)
from k3tool.compiler.meaning import state_faults as model_state_faults
from k3tool.compiler.needless import needless_waits, rearm_faults
from k3tool.compiler.order import Order, Ordering, counter_name, longest_paths
from k3tool.compiler.param_checks import check_plan_params, check_stream_params, readable
from k3tool.compiler.plan import PLAN_SCHEMA, Plan, load_plan
from k3tool.compiler.record_checks import cut_faults, record_faults, state_faults, tensor_faults
from k3tool.compiler.theorems import prove_fired
from k3tool.errors import ArtifactError, K3Error, UnsoundError
from k3tool.isa import table, wire
from k3tool.isa.columns import GATE, Columns
from k3tool.isa.emit import emit
from k3tool.isa.queues import crew_of, slice_bounds
from k3tool.isa.stream import Isa, read_isa
from k3tool.model.graph import build_graph
from k3tool.verdict import Check, failed, not_run, outcome, passed, summary


def verify_program(plan_path: str | Path, isa_path: str | Path | None = None) -> list[Check]:
    """Check a plan file and the stream emitted from it: letters A to G.

    Without a stream file F and G are made on the stream that this build emits from the plan.
    Raises: ArtifactError when a file is damaged, stale or another kind (its digest fails), or the
    stream was not emitted from this plan.
    """
    checks = verify_plan(plan_path)
    if any(c.name.startswith("E") and c.status != "PASS" for c in checks):
        return checks + _no_stream("the plan's wire form does not decode")
    plan = load_plan(plan_path)
    if isa_path is not None:
        isa = read_isa(isa_path)
        _require_descent(plan, isa, str(isa_path))
        return checks + check_program(isa, str(isa_path))
    try:
        isa = emit(plan, str(plan.params["target"]))
    except K3Error as error:
        return [*checks, failed("F tables", f"no stream can be emitted: {error}")]
    return checks + check_program(isa, "emitted")


def verify_stream(isa_path: str | Path) -> list[Check]:
    """Check a stream without its plan: F and G. Raises: ArtifactError as `verify_program`."""
    return check_program(read_isa(isa_path), str(isa_path))


def check_program(isa: Isa, where: str) -> list[Check]:
    """Run checks F and G on a program in memory; `where` names it in messages."""
    if lack := readable(isa.params):
        rest = [c for c in _no_stream("parameters cannot be read") if c.name != "F params"]
        return sorted([failed("F params", lack), *rest], key=lambda check: check.name)
    checks, orders = check_stream(isa, where)
    if orders:
        checks.append(check_stream_params(isa))
        checks += _meaning("F", isa.params, orders, isa.tp)
    else:
        checks += [not_run(name, "the stream's tables are broken") for name in _NO_MEANING]
    return sorted([*checks, *check_ranks(isa, orders)], key=lambda check: check.name)


def is_proved(checks: Sequence[Check]) -> bool:
    """Return whether every check ran and passed."""
    return bool(checks) and not _shortcomings(checks)


def _shortcomings(checks: Sequence[Check]) -> list[Check]:
    failing = [c for c in checks if c.status == "FAIL"]
    return failing + [c for c in checks if c.status == "NOT RUN"]


_NEXT_STEP = "k3tool verify plan lists them; k3tool compile-plan and emit-isa write files anew"


def require_proved(checks: Sequence[Check], what: str, hint: str = _NEXT_STEP) -> None:
    """Refuse a program unless every check ran and passed: not run is not passed.

    `hint` is the next step. Raises: UnsoundError with the first check that did not.
    """
    short = _shortcomings(checks)
    if short or not checks:
        first = short[0] if short else not_run("every check", "nothing to check")
        others = ", ".join(check.name for check in short[1:] if check.status == "FAIL")
        got = f"{first.status} {first.name}: {first.detail}" + (f"; and {others}" if others else "")
        need = f"every check to pass ({summary(checks)})"
        raise UnsoundError(what, got=got, need=need, hint=hint)


_NO_MEANING = ("F params", "F meaning", "F states")


def _no_stream(reason: str) -> list[Check]:
    return [not_run(name, reason) for name in (*STREAM_CHECKS, *_NO_MEANING, *RANK_CHECKS)]


def _require_descent(plan: Plan, isa: Isa, where: str) -> None:
    digests = [ref.content_sha256 for ref in isa.inputs if ref.role == "plan"]
    if digests != [plan.digest]:
        got = f"emitted from plan {digests[0][:16]}.." if digests else "emitted from no plan"
        need = f"a stream of plan {plan.digest[:16]}.."
        raise ArtifactError(where, got=got, need=need, hint="emit the stream again from this plan")


def verify_plan(path: str | Path) -> list[Check]:
    """Check a plan file: letters A to E.

    Raises: ArtifactError when the file itself is damaged, stale or no plan (its digest fails).
    """
    checks = check_wire(path)
    readable = all(check.status == "PASS" for check in checks)
    rest = check_plan(load_plan(path)) if readable else _unreadable()
    return sorted([*checks, *rest], key=lambda check: check.name)


def _unreadable(reason: str = "the wire form does not decode") -> list[Check]:
    names = ("A params", "A rewrites", "A meaning", "A weights", "A states", "B opcodes",
             "B records", "B slices", "C memory", "C tensors", "D thresholds", "D acyclic",
             "D ordered", "D steps")  # fmt: skip
    return [not_run(name, reason) for name in names]


def check_plan(plan: Plan) -> list[Check]:
    """Run every check of A to D on a plan in memory."""
    checks = check_plan_params(plan)
    if readable(plan.params) or checks[1].status == "FAIL":
        have = {check.name for check in checks}
        rest = _unreadable("parameters or opcodes cannot be read")
        return [*checks, *(check for check in rest if check.name not in have)]
    checks.append(outcome("A rewrites", prove_fired(plan)))
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
            checks.append(outcome(label, check(context)))
    tensors = [*tensor_faults(plan.tensors), *state_faults(plan.tensors, plan.params)]
    checks.append(outcome("C tensors", (f"{len(plan.tensors)} tensors", tensors)))
    checks.append(outcome("D steps", check_steps(contexts)))
    return checks + _meaning("A", plan.params, contexts, plan.tp)


# -- A: meaning ----------------------------------------------------------------------------------


def _meaning(
    letter: str, params: Mapping[str, object], contexts: Sequence[Ordering], tp: int
) -> list[Check]:
    """A, and F again on a stream: what is executed is the graph of the config it was made from."""
    names = (f"{letter} meaning", f"{letter} weights", f"{letter} states")
    try:
        config = model_of(params)
        if config is not None:
            config.check_tp(tp)
        mode, pages = ("", 0) if config is None else (mode_of(params), pages_of(params))
    except K3Error as error:
        return [failed(name, f"no model: {error}") for name in names]
    if config is None:
        return [not_run(name, "no config is recorded to compare with") for name in names]
    tensors = contexts[0].tensors
    if unknown := list(unknown_leaves(tensors, config, tp)):
        return [failed(name, unknown[0]) for name in names]
    weights = list(weight_faults(tensors, config, tp))
    n_weights = sum(tensor.is_weight for tensor in tensors)
    model = build_graph(config, tp, mode, pages)
    states = list(model_state_faults(tensors, model.states, tp, int(str(params["batch"])), pages))
    checks = [
        outcome(names[1], (f"{n_weights} weights are the config's", weights)),
        outcome(names[2], (f"{len(model.states)} states are the model's", states)),
    ]
    return checks + [
        outcome(f"{names[0]} {c.phase_name}", check_meaning(c, config, tp, mode, pages))
        for c in contexts
    ]


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
    gates = {counter & ~GATE for counter in c.producers if counter & GATE}
    if len(gates) != c.phase.n_gates or max(gates, default=-1) >= c.phase.n_gates:
        faults.append(f"gates {sorted(gates)} signalled, {c.phase.n_gates} declared")
    signals = {index: {counter} for index, counter in enumerate(packets["counter"].tolist())}
    faults += rearm_faults(c, _wait_lists(c), signals)
    return f"{len(packets)} counters, {len(c.phase.waits)} waits", faults


def _wait_lists(c: Order) -> dict[int, list[list[int]]]:
    return {i: [c.phase.waits_of(i)["counter"].tolist()] for i in range(len(c.phase.packets))}


def _check_ordered(c: Order) -> tuple[str, list[str]]:
    """D: accesses to the same bytes are ordered, and every wait orders some."""
    what, faults = check_ordered(c)
    faults = [*faults, *needless_waits(c, _wait_lists(c))]
    stated, need = (c.phase.packet_path, c.phase.critical_path), longest_paths(c)
    if stated != need:
        faults.append(f"a longest chain of {stated} packets and hand-offs, its waits give {need}")
    return what, faults


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
    packets = c.phase.packets
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
    faults = [
        f"{c.name(index)}: slices do not partition its units"
        for index in np.flatnonzero(broken).tolist()
    ]
    crew = crew_of(c.plan.params)
    for index, row in enumerate(packets):
        faults += [f"{c.name(index)}: {fault}" for fault in cut_faults(row, crew)]
    return f"{len(slices.packet)} slices of {len(packets)} packets", faults


def _check_records(c: Order) -> tuple[str, list[str]]:
    """B: a packet's units cover each result row once, as its tensors' sizes make them."""
    faults = list(record_faults(c, c.phase.max_tokens, c.plan.tp, rank_of_params=1))
    return f"{len(c.phase.packets)} records", faults


_PHASE_CHECKS: Mapping[str, Callable[[Order], tuple[str, list[str]]]] = {
    "B records": _check_records,
    "B slices": _check_slices,
    "C memory": check_memory,
    "D thresholds": _check_thresholds,
    "D acyclic": _check_acyclic,
    "D ordered": _check_ordered,
}

"""Coverage of a program: every weight read, every opcode handled, every handler reachable.

It reads tables and records only: what an interpreter can do is told to it, and no weight is opened.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from k3tool.compiler.dag import PACKINGS
from k3tool.compiler.rules import RULES
from k3tool.isa import device
from k3tool.isa.columns import Columns, spec_of
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.table import RESERVED, SPECS, Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.targets import get_target
from k3tool.verdict import Check, failed, not_run, passed


def producible_ops(config: K3Config) -> set[int]:
    """Return the ops that can reach a stream: of the model's graph, by rules, by packing of those,
    by a memory budget.

    NOP belongs: it is there for protocol tests, and no graph has to make it.
    """
    ops = {node.op for node in build_graph(config).nodes if isinstance(node.op, Op)}
    ops |= {op for rule in RULES for op in rule.made_ops()}
    ops |= {packed for packed, op in PACKINGS.items() if op in ops}
    ops |= {Op.NOP, *(op for op, spec in SPECS.items() if spec.is_load)}
    return {int(op) for op in ops if SPECS[op].is_emitted}


def check_weights(isa: Isa, leaves: set[str] | None) -> list[Check]:
    """Check that each phase reads all weights: of the handle table, and of the model.

    `leaves` are the model's; None where no model was given, which is NOT RUN and not a pass.
    """
    checks = []
    for stream in isa.streams.values():
        read = read_handles(stream)
        checks.append(_check_table(isa, stream.name, read))
        checks.append(_check_leaves(isa, stream.name, read, leaves))
    return checks


def read_handles(stream: Stream) -> set[int]:
    """Return the handles that some instruction of some rank reads as a weight.

    Instructions that no queue entry executes read nothing.
    """
    executed = np.unique(stream.queues.entries["inst"])
    handles: set[int] = set()
    for records in stream.instructions:
        packets = device.unpack(records[executed])
        for op in np.unique(packets["op"]):
            handles |= _weight_handles(packets[packets["op"] == op], int(op))
    return handles


def _weight_handles(packets: Columns, op: int) -> set[int]:
    spec = spec_of(op)
    assert spec is not None, op  # the loader refused unknown opcodes
    weights = [operand for operand in spec.operands if operand.role == "weight"]
    slots, runs = [operand.slot for operand in weights], [operand.run for operand in weights]
    return set(np.unique(packets["handles"][:, slots].astype(np.int64) + runs).tolist())


def _check_table(isa: Isa, phase: str, read: set[int]) -> Check:
    name = f"weights of the program read, {phase}"
    rows = {h: t for h, t in enumerate(isa.tensors) if t.is_weight}
    if not rows:
        return failed(name, "the handle table has no weight: nothing to check")
    unread = [tensor.name for handle, tensor in rows.items() if handle not in read]
    if unread:
        return failed(name, f"{len(unread)} of {len(rows)} read by no instruction: {_few(unread)}")
    return passed(name, f"{len(rows)} of {len(rows)}")


def _check_leaves(isa: Isa, phase: str, read: set[int], leaves: set[str] | None) -> Check:
    name = f"weights of the model read, {phase}"
    if leaves is None:
        return not_run(name, "no --weights given, so the model's tensors are not known")
    if not leaves:
        return failed(name, "the model has no weight: nothing to check")
    claimed = {isa.tensors[handle].leaf for handle in read}
    if missing := sorted(leaves - claimed):
        text = f"{len(missing)} of {len(leaves)} read by no instruction of any rank"
        return failed(name, f"{text}: {_few(missing)}")
    if beyond := sorted(claimed - leaves):
        return failed(name, f"reads what the model does not have: {_few(beyond)}")
    return passed(name, f"{len(leaves)} of {len(leaves)} leaves")


def check_handlers(isa: Isa, handlers: Mapping[str, set[int]], producible: set[int]) -> list[Check]:
    """Check an interpreter's handlers, by phase, against streams, op table and compiler."""
    family = get_target(isa.target).family
    checks = []
    for stream in isa.streams.values():
        phase = stream.name
        have = handlers.get(phase, set())
        checks += [
            _check_opcodes(stream, have),
            _check_complete(phase, family, have),
            _check_reachable(phase, have, producible),
        ]
    return checks


def _check_opcodes(stream: Stream, have: set[int]) -> Check:
    name = f"opcodes handled, {stream.name}"
    ops = np.concatenate([records[:, 0] & 0xFFFF for records in stream.instructions])
    used = set(ops.tolist())
    if not used:
        return failed(name, "the stream has no instruction: nothing to check")
    if missing := sorted(used - have):
        first = int(np.argmax(np.isin(ops, missing))) % len(stream.queues.signals)
        return failed(name, f"no handler for {_names(missing)} (instruction {first} on)")
    return passed(name, f"{len(used)} opcodes in {len(stream.queues.signals)} instructions")


def _check_complete(phase: str, family: str, have: set[int]) -> Check:
    """The interpreter has a body for each op that the table says it serves, and none else."""
    name = f"handlers complete, {phase}"
    due = {int(op) for op, spec in SPECS.items() if family in spec.targets and phase in spec.phases}
    if missing := sorted(due - have):
        return failed(name, f"the table lists {_names(missing)}, which has no handler")
    if beyond := sorted(have - due):
        return failed(name, f"a handler for {_names(beyond)}, which the table does not list")
    return passed(name, f"covered {len(due)}/{len(due)} {family} {phase}")


def _check_reachable(phase: str, have: set[int], producible: set[int]) -> Check:
    name = f"handlers reachable, {phase}"
    if not have:
        return failed(name, "the interpreter has no handler: nothing to check")
    if dead := sorted(have - producible):
        return failed(name, f"no graph and no rule can make {_names(dead)}")
    return passed(name, f"{len(have)} handlers, each made by the graph or a rule")


def _names(ops: Iterable[int]) -> str:
    known = {int(op): op.name for op in SPECS} | RESERVED
    return _few([known.get(op, f"opcode {op}") for op in ops])


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown

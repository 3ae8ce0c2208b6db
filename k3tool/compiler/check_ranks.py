"""Check G: the ranks' programs are one program, and what crosses ranks is counted and spent right.

Ranks share entries, waits and signals; their records may differ in per-rank parameters alone. It
reads emitted records and entries, never the plan.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from k3tool.compiler.hazards import check_ordered
from k3tool.compiler.record_checks import handles_of, results_of
from k3tool.isa import op_spec
from k3tool.isa import queues as queue_maths
from k3tool.isa.columns import GATE, Columns, spec_of
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.stream_order import StreamOrder
from k3tool.tables import bytes_text
from k3tool.targets import get_target
from k3tool.verdict import Check, not_run, outcome

RANK_CHECKS = ("G ranks", "G gates", "G slots", "G scratch")


def check_ranks(isa: Isa, orders: Sequence[StreamOrder]) -> list[Check]:
    """Run check G on all ranks' programs together; NOT RUN where check F has no orders."""
    if not orders:
        return [not_run(name, "the stream's tables are broken") for name in RANK_CHECKS]
    checks = []
    for c in orders:
        results = {
            "G ranks": _ranks(c),
            "G gates": _gates(c),
            "G slots": check_ordered(c, spaces=("peer",)),
            "G scratch": _scratch(isa, c.stream, c),
        }
        checks += [outcome(f"{name} {c.phase_name}", result) for name, result in results.items()]
    return checks


# -- ranks ---------------------------------------------------------------------------------------


def _ranks(c: StreamOrder) -> tuple[str, list[str]]:
    """G: rank r's words are rank 0's, but for per-rank parameters, which are r times a stride."""
    records = c.stream.instructions
    mask = _per_rank_words(c)
    faults = []
    strides = (records[1] if len(records) > 1 else records[0]).astype(np.int64)
    for rank, words in enumerate(records):
        other = (words != records[0]) & ~mask
        faults += [
            f"{c.name(index)}: word {word} of rank {rank} is {words[index, word]}, "
            f"rank 0 has {records[0][index, word]}"
            for index, word in np.argwhere(other).tolist()
        ]
        factor = strides * rank if len(records) > 1 else np.zeros_like(strides)
        wrong = (words.astype(np.int64) != factor) & mask
        faults += [
            f"{c.name(index)}: word {word} of rank {rank} is {words[index, word]}, "
            f"need {rank} times {strides[index, word]}"
            for index, word in np.argwhere(wrong).tolist()
        ]
    faults += _stride_faults(c, mask)
    return f"{len(records)} ranks of {len(c.rows)} instructions", faults


def _per_rank_words(c: StreamOrder) -> Columns:
    mask: Columns = np.zeros((len(c.rows), op_spec.RECORD_WORDS), bool)
    for op in np.unique(c.rows["op"]):
        spec = spec_of(int(op))
        assert spec is not None, op
        words = [spec.word(p.name) for p in spec.params if p.kind == "u32_per_rank"]
        mask[np.ix_(c.rows["op"] == op, words)] = True
    return mask


def _stride_faults(c: StreamOrder, mask: Columns) -> Iterator[str]:
    """A rank's share starts where the share before it ends: the stride is the share's size.

    The op table has one such parameter, the first row of a rank's vocabulary, beside the number of
    its rows (`vocab`).
    """
    if len(c.stream.instructions) < 2:
        return
    for index in np.flatnonzero(mask.any(axis=1)).tolist():
        spec = spec_of(int(c.rows["op"][index]))
        assert spec is not None
        words = c.stream.instructions[1][index]
        for param in (p for p in spec.params if p.kind == "u32_per_rank"):
            size = param.name.removesuffix("_base")
            got, need = int(words[spec.word(param.name)]), int(words[spec.word(size)])
            if got != need:
                yield f"{c.name(index)}: ranks are {got} {param.unit} apart, each has {need}"


# -- gates ---------------------------------------------------------------------------------------


def _gates(c: StreamOrder) -> tuple[str, list[str]]:
    """G: each value that crosses ranks has one gate, which counts every rank's every slice.

    A gate's producers write one peer tensor, its readers are collectives that wait for exactly all
    ranks' arrivals; a peer tensor without its gate would be read while other ranks write it.
    """
    entries = np.bincount(c.stream.queues.entries["inst"], minlength=len(c.rows))
    written, faults = _peer_writers(c), []
    gates = sorted(counter for counter in c.arrivals if counter & GATE)
    for gate in gates:
        producers = c.producers[gate]
        need = c.isa.tp * sum(int(entries[p]) for p in producers)
        if c.arrivals[gate] != need:
            faults.append(
                f"{c.name(producers[0])}: {c.arrivals[gate]} arrive at gate {gate & ~GATE}, its "
                f"{c.isa.tp} ranks have {need} entries"
            )
        faults += [
            f"{c.name(p)} signals gate {gate & ~GATE} and writes no peer buffer"
            for p in producers
            if p not in written
        ]
    for index, handle in _peer_reads(c):
        faults += _gate_read_faults(c, index, handle, written)
    return f"{len(gates)} gates of {c.isa.tp} ranks", faults


def _peer_writers(c: StreamOrder) -> dict[int, int]:
    """Return the handle of the peer tensor that each instruction writes."""
    found = {}
    for index, row in enumerate(c.rows):
        spec = spec_of(int(row["op"]))
        assert spec is not None
        handles = handles_of(spec, row["handles"].tolist())
        for operand in results_of(spec):
            if c.tensors[handles[operand.name]].role == "peer":
                found[index] = handles[operand.name]
    return found


def _peer_reads(c: StreamOrder) -> Iterator[tuple[int, int]]:
    for index, row in enumerate(c.rows):
        spec = spec_of(int(row["op"]))
        assert spec is not None
        handles = handles_of(spec, row["handles"].tolist())
        for operand in spec.operands:
            if operand.role == "peer":
                yield index, handles[operand.name]


def _gate_read_faults(
    c: StreamOrder, index: int, handle: int, written: dict[int, int]
) -> Iterator[str]:
    writers = [p for p, h in written.items() if h == handle and p < index]
    if not writers:
        yield f"{c.name(index)} reads {c.tensors[handle].name}, which no earlier one writes"
        return
    if not c.before_everywhere[index] >> writers[-1] & 1:
        yield (
            f"{c.name(index)} reads {c.tensors[handle].name} of all ranks without their gate: "
            f"{c.name(writers[-1])} may still run"
        )


# -- on-chip memory ------------------------------------------------------------------------------


def _scratch(isa: Isa, stream: Stream, c: StreamOrder) -> tuple[str, list[str]]:
    """G: the declared scratch is what the records ask for, and the target has it."""
    need = queue_maths.scratch_floats(c.rows, stream.max_tokens)
    target = get_target(isa.target)
    n_bytes = stream.scratch_floats * 4
    faults = []
    if need != stream.scratch_floats:
        faults.append(f"{stream.scratch_floats} floats declared, records ask for {need}")
    if target.on_chip_bytes is None or n_bytes <= target.on_chip_bytes:
        most = target.on_chip_bytes
        room = "host memory" if most is None else f"{bytes_text(most)} on chip"
        return f"{bytes_text(n_bytes)} a workgroup, of {room}", faults
    total = n_bytes * isa.n_workgroups
    if stream.name == "decode" or total > target.workspace_bytes:
        faults.append(
            f"{n_bytes} bytes a workgroup: beyond {target.on_chip_bytes} on chip, and "
            f"{isa.n_workgroups} workgroups take {total} of {target.workspace_bytes} off chip"
        )
    return (
        f"{bytes_text(n_bytes)} a workgroup, {bytes_text(total)} in device memory: not on chip",
        faults,
    )

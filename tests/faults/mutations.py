"""The table of single faults: what is altered in a plan or a stream, and which check has to say so.

A fault is placed by what a packet is (its op's operands, its waits), not by its number, so that the
table outlives changes of the compiler. `at` is the packet or instruction that the message has to
name, None where the fault belongs to none. The rows are in `plan_mutations`, `stream_mutations`
and, of what both hold, `both_mutations`.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from k3tool.compiler.plan import Plan, Tensor
from k3tool.compiler.record_checks import handles_of
from k3tool.isa.columns import Columns, spec_of
from k3tool.isa.device import unpack
from k3tool.isa.stream import Isa


class Broken(NamedTuple):
    """An altered plan or stream, and the packet that the message names."""

    what: Any
    at: int | None


@dataclass(frozen=True)
class Mutation:
    """One row: a label, the check whose failure is asked for, and how to make the fault."""

    label: str
    check: str
    make: Callable[[Any], Broken]


def table_of(rows: list[Mutation]) -> Callable[[str, str], Callable[[Any], Any]]:
    """Return a decorator that enters a fault into a table: on(label, check)."""

    def on(label: str, check: str) -> Callable[[Any], Any]:
        def add(make: Callable[[Any], Broken]) -> Callable[[Any], Broken]:
            rows.append(Mutation(label, check, make))
            return make

        return add

    return on


# -- tools ---------------------------------------------------------------------------------------


def first(rows: Columns, wanted: Callable[[Any, Any], bool], nth: int = 0) -> int:
    """Return the nth row for which wanted(row, op's table row) holds."""
    found = [i for i, row in enumerate(rows) if wanted(row, spec_of(int(row["op"])))]
    return found[nth]


def has(**roles: str) -> Callable[[Any, Any], bool]:
    """Return a test for ops with an operand or parameter of each name (`eps="param"`)."""

    def test(row: Any, spec: Any) -> bool:
        params = {p.name for p in spec.params}
        operands = {o.name: o.role for o in spec.operands}
        return all(
            name in params if role == "param" else operands.get(name) == role
            for name, role in roles.items()
        )

    return test


def set_tensor(what: Any, name: str, **fields: Any) -> Any:
    rows = [t._replace(**fields) if t.name == name else t for t in what.tensors]
    return replace(what, tensors=tuple(rows))


def with_params(what: Any, **params: Any) -> Any:
    return replace(what, params={**what.params, **params})


def with_size(plan: Plan, name: str, by: int) -> Plan:
    phase = plan.phases["decode"]
    phase = replace(phase, **{name: getattr(phase, name) + by})
    return replace(plan, phases={**plan.phases, "decode": phase})


def single_linears(rows: Columns) -> list[int]:
    """Return plain linears of one weight each: their slots hold no run."""
    linear = has(x="in", w="weight", y="out")
    return [i for i, row in enumerate(rows) if linear(row, spec_of(int(row["op"])))]


def equal_weights(rows: Columns, tensors: tuple[Tensor, ...]) -> tuple[int, int, int]:
    """Return (row, slot, other handle) of a linear whose weight another one of equal shape has."""
    found = single_linears(rows)
    for i in found:
        for j in found:
            spec_i, spec_j = (spec_of(int(rows["op"][k])) for k in (i, j))
            assert spec_i is not None
            assert spec_j is not None
            mine = handles_of(spec_i, rows["handles"][i].tolist())["w"]
            other = handles_of(spec_j, rows["handles"][j].tolist())["w"]
            if mine != other and tensors[mine].local == tensors[other].local:
                return i, spec_i.slot("w"), other
    raise AssertionError("no two weights of equal shape")


def peer_pair(what: Any, rows: Columns) -> tuple[Tensor, Tensor]:
    """Return two peer buffers of equal size that are written one after the other."""
    written: list[Tensor] = []
    for row in rows:
        spec = spec_of(int(row["op"]))
        assert spec is not None
        handles = handles_of(spec, row["handles"].tolist())
        out = what.tensors[handles[spec.output.name]]
        if out.role == "peer":
            written.append(out)
    for a, b in itertools.pairwise(written):
        if a.n_bytes == b.n_bytes and a.offset != b.offset:
            return a, b
    raise AssertionError("no two peer buffers in a row")


def eps_of(row: Any, spec: Any) -> bool:
    return any(p.name.endswith("eps") for p in spec.params)


def eps_name(rows: Columns, index: int) -> str:
    spec = spec_of(int(rows["op"][index]))
    assert spec is not None
    return next(p.name for p in spec.params if p.name.endswith("eps"))


def read_together(what: Any, rows: Columns) -> tuple[int, Tensor, Tensor]:
    """Return the first packet that reads two buffers of the arena, and these."""
    for index, row in enumerate(rows):
        spec = spec_of(int(row["op"]))
        assert spec is not None
        handles = handles_of(spec, row["handles"].tolist())
        tensors = [what.tensors[handles[o.name]] for o in spec.operands if o.role == "in"]
        arena = [t for t in tensors if t.role == "arena"]
        if len({t.offset for t in arena}) > 1:
            return index, arena[0], next(t for t in arena if t.offset != arena[0].offset)
    raise AssertionError("no packet reads two buffers")


def outer_buffers(what: Any) -> tuple[Tensor, Tensor]:
    """Return the buffers that lie first and last in the arena."""
    arena = [t for t in what.tensors if t.role == "arena" and t.phase == "decode"]
    at_zero = next(t for t in arena if t.offset == 0)
    return at_zero, max(arena, key=lambda t: t.offset)


# -- of plans ------------------------------------------------------------------------------------


def packets_of(plan: Plan) -> Columns:
    return plan.phases["decode"].packets


def with_packets(plan: Plan, packets: Columns, waits: Columns | None = None) -> Plan:
    phase = plan.phases["decode"]
    phase = replace(phase, packets=packets, waits=phase.waits if waits is None else waits)
    return replace(plan, phases={**plan.phases, "decode": phase})


def set_packet(plan: Plan, index: int, **fields: int) -> Plan:
    packets = packets_of(plan).copy()
    for name, value in fields.items():
        packets[name][index] = value
    return with_packets(plan, packets)


def set_param(plan: Plan, index: int, name: str, change: Callable[[int], int]) -> Plan:
    packets = packets_of(plan).copy()
    spec = spec_of(int(packets["op"][index]))
    assert spec is not None
    word = [p.name for p in spec.params].index(name)
    packets["params"][index, word] = change(int(packets["params"][index, word]))
    return with_packets(plan, packets)


def set_wait(plan: Plan, index: int, counter: int | None = None, by: int = 0) -> Plan:
    phase = plan.phases["decode"]
    waits = phase.waits.copy()
    at = int(phase.packets["wait_ofs"][index])
    if counter is not None:
        waits["counter"][at] = counter
        waits["threshold"][at] = 1
    waits["threshold"][at] = int(waits["threshold"][at]) + by
    return with_packets(plan, phase.packets, waits)


def waiting(row: Any, spec: Any) -> bool:
    return int(row["n_waits"]) > 0


# -- of streams ----------------------------------------------------------------------------------


def rows_of(isa: Isa) -> Columns:
    return unpack(isa.streams["decode"].instructions[0])


def with_queues(isa: Isa, **columns: Columns) -> Isa:
    stream = isa.streams["decode"]
    return with_stream(isa, queues=replace(stream.queues, **columns))


def with_stream(isa: Isa, **fields: Any) -> Isa:
    stream = replace(isa.streams["decode"], **fields)
    return replace(isa, streams={**isa.streams, "decode": stream})


def entries_of(isa: Isa) -> Columns:
    return isa.streams["decode"].queues.entries


def set_entry(isa: Isa, entry: int, **fields: int) -> Isa:
    entries = entries_of(isa).copy()
    for name, value in fields.items():
        entries[name][entry] = value
    return with_queues(isa, entries=entries)


def set_word(
    isa: Isa, index: int, word: int, value: int, ranks: Iterator[int] | None = None
) -> Isa:
    records = [r.copy() for r in isa.streams["decode"].instructions]
    for rank in range(len(records)) if ranks is None else ranks:
        records[rank][index, word] = value
    return with_stream(isa, instructions=tuple(records))


def sliced(isa: Isa, nth: int = 0) -> tuple[int, int]:
    """Return an entry that is neither its instruction's first nor last, and its instruction."""
    entries = entries_of(isa)
    counts = np.bincount(entries["inst"])
    inner = (entries["slice"] > 0) & (entries["slice"] < counts[entries["inst"]] - 1)
    inner &= entries["n_waits"] > 0
    entry = int(np.flatnonzero(inner)[nth])
    return entry, int(entries["inst"][entry])

"""The table of single faults: what is altered in a plan or a stream, and which check has to say so.

A fault is placed by what a packet is (its op's operands, its waits), not by its number, so that the
table outlives changes of the compiler. `at` is the packet or instruction that the message has to
name, None where the fault belongs to none.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from k3tool.compiler.plan import Plan, Tensor
from k3tool.compiler.record_checks import handles_of
from k3tool.isa import table
from k3tool.isa.columns import GATE, PACKET_DIGEST, PACKET_REARM, Columns, spec_of
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


PLAN: list[Mutation] = []
STREAM: list[Mutation] = []


def _row(rows: list[Mutation], label: str, check: str) -> Callable[[Any], Any]:
    def add(make: Callable[[Any], Broken]) -> Callable[[Any], Broken]:
        rows.append(Mutation(label, check, make))
        return make

    return add


def on_plan(label: str, check: str) -> Callable[[Any], Any]:
    """Enter a fault of a plan."""
    return _row(PLAN, label, check)


def on_stream(label: str, check: str) -> Callable[[Any], Any]:
    """Enter a fault of an emitted stream."""
    return _row(STREAM, label, check)


# -- tools ---------------------------------------------------------------------------------------


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


def waiting(row: Any, spec: Any) -> bool:
    return int(row["n_waits"]) > 0


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


def set_tensor(what: Any, name: str, **fields: Any) -> Any:
    rows = [t._replace(**fields) if t.name == name else t for t in what.tensors]
    return replace(what, tensors=tuple(rows))


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


# -- faults of a plan ----------------------------------------------------------------------------


@on_plan("own threshold one more", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 3)
    return Broken(set_packet(plan, at, threshold=int(packets_of(plan)["threshold"][at]) + 1), at)


@on_plan("own threshold one less", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["n_slices"] > 1, 3)
    return Broken(set_packet(plan, at, threshold=int(packets_of(plan)["threshold"][at]) - 1), at)


@on_plan("a gate counts one rank only", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["counter"] & GATE)
    return Broken(set_packet(plan, at, threshold=int(packets_of(plan)["n_slices"][at])), at)


@on_plan("waits for one more", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 5)
    return Broken(set_wait(plan, at, by=1), at)


@on_plan("waits for one less", "D ordered decode")
def _(plan: Plan) -> Broken:
    packets = packets_of(plan)
    waits = plan.phases["decode"].waits
    needs = waits["threshold"]
    at = first(packets, lambda row, _: row["n_waits"] and needs[row["wait_ofs"]] > 1, 5)
    return Broken(set_wait(plan, at, by=-1), at)


@on_plan("a wait is missing", "D ordered decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["n_waits"] == 1, 4)
    return Broken(set_packet(plan, at, n_waits=0), at)


@on_plan("one of several waits is missing", "D ordered decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["n_waits"] > 1)
    return Broken(set_packet(plan, at, n_waits=int(packets_of(plan)["n_waits"][at]) - 1), at)


@on_plan("waits for a later packet", "D acyclic decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 2)
    own = packets_of(plan)["counter"]
    later = next(int(counter) for counter in own[at + 1 :] if not counter & GATE)
    return Broken(set_wait(plan, at, counter=later), at)


@on_plan("waits for itself", "D acyclic decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["n_waits"] and not row["counter"] & GATE, 2)
    return Broken(set_wait(plan, at, counter=at), at)


@on_plan("waits for a gate nobody signals", "D acyclic decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 2)
    return Broken(set_wait(plan, at, counter=GATE | (len(packets_of(plan)) - 1)), at)


@on_plan("a peer's result under a local counter", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["counter"] & GATE)
    return Broken(set_packet(plan, at, counter=at), at)


@on_plan("nobody clears the other bank", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["flags"] & PACKET_REARM)
    flags = int(packets_of(plan)["flags"][at]) & ~PACKET_REARM
    return Broken(set_packet(plan, at, flags=flags), None)


@on_plan("the ranks agree on nothing", "B records decode")
def _(plan: Plan) -> Broken:
    """Every comparison between ranks would be of no values, and pass."""
    packets = packets_of(plan).copy()
    at = int(np.flatnonzero(packets["flags"] & PACKET_DIGEST)[0])
    packets["flags"] &= np.uint16(0xFFFF ^ PACKET_DIGEST)
    return Broken(with_packets(plan, packets), at)


@on_plan("ranks are to agree on what is one's own", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["op"] == table.Op.KDA_HEADS)
    flags = int(packets_of(plan)["flags"][at]) | PACKET_DIGEST
    return Broken(set_packet(plan, at, flags=flags), at)


@on_plan("two packets clear the other bank", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 3)
    flags = int(packets_of(plan)["flags"][at]) | PACKET_REARM
    return Broken(set_packet(plan, at, flags=flags), None)


def outer_buffers(what: Any) -> tuple[Tensor, Tensor]:
    """Return the buffers that lie first and last in the arena."""
    arena = [t for t in what.tensors if t.role == "arena" and t.phase == "decode"]
    at_zero = next(t for t in arena if t.offset == 0)
    return at_zero, max(arena, key=lambda t: t.offset)


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


@on_plan("buffers overlap", "C memory decode")
def _(plan: Plan) -> Broken:
    at, a, b = read_together(plan, packets_of(plan))
    return Broken(set_tensor(plan, a.name, offset=b.offset), at)


@on_plan("a buffer ends beyond the arena", "C memory decode")
def _(plan: Plan) -> Broken:
    _, high = outer_buffers(plan)
    phase = plan.phases["decode"]
    smaller = replace(phase, arena_bytes=high.offset + high.n_bytes - 4)
    return Broken(replace(plan, phases={**plan.phases, "decode": smaller}), None)


@on_plan("a buffer is of another phase", "C memory decode")
def _(plan: Plan) -> Broken:
    low, _ = outer_buffers(plan)
    return Broken(set_tensor(plan, low.name, phase="prefill"), None)


@on_plan("a tensor's bytes are not its shape's", "C tensors")
def _(plan: Plan) -> Broken:
    low, _ = outer_buffers(plan)
    return Broken(set_tensor(plan, low.name, n_bytes=low.n_bytes + 4), None)


@on_plan("a collective's slot is reused too early", "D ordered decode")
def _(plan: Plan) -> Broken:
    a, b = peer_pair(plan, packets_of(plan))
    return Broken(set_tensor(plan, b.name, offset=a.offset), None)


@on_plan("phases share a peer slot", "D steps")
def _(plan: Plan) -> Broken:
    a, _ = peer_pair(plan, packets_of(plan))
    last = [t for t in plan.tensors if t.role == "peer" and t.phase == "prefill"][-1]
    return Broken(set_tensor(plan, a.name, offset=last.offset), None)


@on_plan("rows are missing", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: s.unit == "row" and row["n_units"] > 16)
    units = int(packets_of(plan)["n_units"][at])
    return Broken(set_packet(plan, at, n_units=units - 8, n_slices=1, threshold=1), at)


@on_plan("a row is too wide", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: s.unit == "token")
    return Broken(set_packet(plan, at, width=int(packets_of(plan)["width"][at]) * 2), at)


@on_plan("columns of a unit are wrong", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: s.unit == "row")
    return Broken(set_packet(plan, at, unit_cols=2), at)


@on_plan("the summed axis is wrong", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), has(K="param"))
    return Broken(set_param(plan, at, "K", lambda k: k // 2), at)


@on_plan("blocks of a partial sum are wrong", "B records decode")
def _(plan: Plan) -> Broken:
    blocks = has(n_blocks="param")
    at = first(packets_of(plan), lambda row, s: s.placement == "partial" and blocks(row, s))
    return Broken(set_param(plan, at, "n_blocks", lambda n: n * 2), at)


@on_plan("a weight of equal shape in place of another", "A meaning decode")
def _(plan: Plan) -> Broken:
    at, slot, other = equal_weights(packets_of(plan), plan.tensors)
    packets = packets_of(plan).copy()
    packets["handles"][at, slot] = other
    return Broken(with_packets(plan, packets), at)


@on_plan("another eps", "A meaning decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), eps_of, 1)
    return Broken(set_param(plan, at, eps_name(packets_of(plan), at), lambda bits: bits + 1), at)


@on_plan("another constant of the router", "A meaning decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: has(bias="weight", scale="param")(row, s))
    return Broken(set_param(plan, at, "scale", lambda bits: bits + 1), at)


@on_plan("the head runs on all tokens", "A meaning decode")
def _(plan: Plan) -> Broken:
    def head(row: Any, spec: Any) -> bool:
        words = dict(zip((p.name for p in spec.params), row["params"].tolist(), strict=False))
        return words.get("head_only") == 1

    at = first(packets_of(plan), head)
    return Broken(set_param(plan, at, "head_only", lambda _: 0), at)


@on_plan("a weight's dtype", "A weights")
def _(plan: Plan) -> Broken:
    tensor = next(t for t in plan.tensors if t.role == "weight" and t.dtype == "bf16")
    return Broken(set_tensor(plan, tensor.name, dtype="f32", n_bytes=tensor.n_bytes * 2), None)


@on_plan("a weight's split", "A weights")
def _(plan: Plan) -> Broken:
    tensor = next(t for t in plan.tensors if t.split == "rows")
    return Broken(set_tensor(plan, tensor.name, split="cols"), None)


@on_plan("two weights' stored names", "A weights")
def _(plan: Plan) -> Broken:
    a, b = [t for t in plan.tensors if t.role == "weight" and t.split == "rows"][:2]
    swapped = set_tensor(plan, a.name, source=b.source)
    return Broken(swapped, None)


@on_plan("the recorded eps of a site", "A meaning decode")
def _(plan: Plan) -> Broken:
    eps = dict(plan.params["eps"], o_norm=0.5)
    return Broken(replace(plan, params={**plan.params, "eps": eps}), None)


@on_plan("another model's config", "A meaning decode")
def _(plan: Plan) -> Broken:
    config = dict(plan.params["config"])
    text = dict(config.get("text_config", config), routed_scaling_factor=3.5)
    config = {**config, "text_config": text} if "text_config" in config else text
    return Broken(replace(plan, params={**plan.params, "config": config}), None)


@on_plan("an operand of a role that it has not", "D ordered decode")
def _(plan: Plan) -> Broken:
    rows = packets_of(plan)
    at = single_linears(rows)[0]
    spec = spec_of(int(rows["op"][at]))
    assert spec is not None
    packets = rows.copy()
    packets["handles"][at, spec.slot("y")] = packets["handles"][at, spec.slot("w")]
    return Broken(with_packets(plan, packets), at)


@on_plan("an input of equal width in place of another", "A meaning decode")
def _(plan: Plan) -> Broken:
    """The residual of a late packet is an early one's: written, live or not, of the right width."""
    rows = packets_of(plan)
    found = [i for i, row in enumerate(rows) if has(residual="in")(row, spec_of(int(row["op"])))]
    early, late = found[0], found[-1]
    spec = spec_of(int(rows["op"][late]))
    assert spec is not None
    packets = rows.copy()
    source = spec_of(int(rows["op"][early]))
    assert source is not None
    other = rows["handles"][early, source.slot("residual")]
    packets["handles"][late, spec.slot("residual")] = other
    return Broken(with_packets(plan, packets), late)


@on_plan("a fused op that no rewrite made", "A rewrites")
def _(plan: Plan) -> Broken:
    phase = plan.phases["decode"]
    at = next(i for i, rows in enumerate(phase.made_by) if rows)
    made_by = (*phase.made_by[:at], (), *phase.made_by[at + 1 :])
    phase = replace(phase, made_by=made_by)
    return Broken(replace(plan, phases={**plan.phases, "decode": phase}), at)


@on_plan("a rewrite by a rule that is none", "A rewrites")
def _(plan: Plan) -> Broken:
    at = next(i for i, row in enumerate(plan.fired) if row.used)
    row = plan.fired[at]._replace(rule="magic-fuse")
    return Broken(replace(plan, fired=(*plan.fired[:at], row, *plan.fired[at + 1 :])), None)


@on_plan("a rewrite that a theorem of another statement allowed", "A rewrites")
def _(plan: Plan) -> Broken:
    theorems = dict.fromkeys(plan.params["theorems"], "0" * 64)
    return Broken(replace(plan, params={**plan.params, "theorems": theorems}), None)


# -- faults of a stream --------------------------------------------------------------------------


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


@on_stream("one entry waits for nothing", "F ordered decode")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa, 3)
    return Broken(set_entry(isa, entry, n_waits=0), at)


@on_stream("one entry has another instruction's waits", "F ordered decode")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa, 3)
    first_waits = next(e for e in entries_of(isa) if e["n_waits"] == 1)
    return Broken(set_entry(isa, entry, wait_ofs=int(first_waits["wait_ofs"]), n_waits=1), at)


def set_threshold(isa: Isa, entry: int, by: int) -> Isa:
    waits = isa.streams["decode"].queues.waits.copy()
    at = int(entries_of(isa)["wait_ofs"][entry])
    waits["threshold"][at] = int(waits["threshold"][at]) + by
    return with_queues(isa, waits=waits)


@on_stream("a wait for one more", "F thresholds decode")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    return Broken(set_threshold(isa, entry, 1), at)


@on_stream("a wait for one less", "F thresholds decode")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    return Broken(set_threshold(isa, entry, -1), at)


@on_stream("a wait for one less, as seen by the order", "F ordered decode")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    return Broken(set_threshold(isa, entry, -1), at)


@on_stream("a wait on a later instruction", "F tables")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    waits = isa.streams["decode"].queues.waits.copy()
    signals = isa.streams["decode"].queues.signals
    later = next(int(s) for s in signals[at + 1 :] if not s & GATE)
    waits["counter"][int(entries_of(isa)["wait_ofs"][entry])] = later
    return Broken(with_queues(isa, waits=waits), at)


@on_stream("an entry before its producer in its queue", "F tables")
def _(isa: Isa) -> Broken:
    entry, _ = sliced(isa, 5)
    entries = entries_of(isa).copy()
    entries[[entry - 1, entry]] = entries[[entry, entry - 1]]
    return Broken(with_queues(isa, entries=entries), int(entries["inst"][entry]))


@on_stream("a gap between slices", "F tables")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    return Broken(set_entry(isa, entry, unit0=int(entries_of(isa)["unit0"][entry]) + 1), at)


@on_stream("slices overlap", "F tables")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    return Broken(set_entry(isa, entry, unit0=int(entries_of(isa)["unit0"][entry]) - 1), at)


@on_stream("an entry is gone", "F tables")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    queues = isa.streams["decode"].queues
    ofs = queues.queue_ofs.copy()
    ofs[ofs > entry] -= 1
    return Broken(with_queues(isa, entries=np.delete(queues.entries, entry), queue_ofs=ofs), at)


@on_stream("an entry is in two queues", "F tables")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    queues = isa.streams["decode"].queues
    row = queues.entries[entry]
    mine = int(np.searchsorted(queues.queue_ofs, entry, "right")) - 1
    bounds = list(itertools.pairwise(queues.queue_ofs.tolist()))
    inst = queues.entries["inst"]
    free, (lo, hi) = next(
        (w, span)
        for w, span in enumerate(bounds)
        if w != mine and row["inst"] not in inst[slice(*span)]
    )  # fmt: skip
    place = lo + int(np.searchsorted(inst[lo:hi], row["inst"]))
    ofs = queues.queue_ofs.copy()
    ofs[free + 1 :] += 1
    entries = np.insert(queues.entries, place, row)
    return Broken(with_queues(isa, entries=entries, queue_ofs=ofs), at)


@on_stream("queue bounds are wrong", "F tables")
def _(isa: Isa) -> Broken:
    ofs = isa.streams["decode"].queues.queue_ofs.copy()
    ofs[1] += 1
    return Broken(with_queues(isa, queue_ofs=ofs), None)


@on_stream("an entry signals another's counter", "F thresholds decode")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    return Broken(set_entry(isa, entry, signal_ofs=at + 1), None)


@on_stream("an entry signals nothing", "F thresholds decode")
def _(isa: Isa) -> Broken:
    entry, _ = sliced(isa)
    return Broken(set_entry(isa, entry, n_signals=0), None)


@on_stream("the audit expects fewer at a counter", "F thresholds decode")
def _(isa: Isa) -> Broken:
    counts = isa.streams["decode"].queues.local_counts.copy()
    at = int(np.flatnonzero(counts)[2])
    counts[at] -= 1
    return Broken(with_queues(isa, local_counts=counts), at)


@on_stream("the audit expects one rank at a gate", "F thresholds decode")
def _(isa: Isa) -> Broken:
    counts = isa.streams["decode"].queues.gate_counts // isa.tp
    at = int(np.flatnonzero(isa.streams["decode"].queues.signals & GATE)[0])
    return Broken(with_queues(isa, gate_counts=counts.astype("<u4")), at)


@on_stream("an entry's flags are not its record's", "F thresholds decode")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    return Broken(set_entry(isa, entry, flags=int(entries_of(isa)["flags"][entry]) ^ 1), at)


@on_stream("records and entries leave the ranks nothing to agree on", "F records decode")
def _(isa: Isa) -> Broken:
    decode = isa.streams["decode"]
    at = int(np.flatnonzero(decode.instructions[0][:, 0] >> 16 & PACKET_DIGEST)[0])
    keep = np.uint32(0xFFFFFFFF ^ PACKET_DIGEST << 16)
    records = tuple(words.copy() for words in decode.instructions)
    for words in records:
        words[:, 0] &= keep
    entries = entries_of(isa).copy()
    entries["flags"] &= np.uint16(0xFFFF ^ PACKET_DIGEST)
    queues = replace(decode.queues, entries=entries)
    broken = replace(decode, instructions=records, queues=queues)
    return Broken(replace(isa, streams={**isa.streams, "decode": broken}), at)


@on_stream("a gate's wait is a local one", "G gates decode")
def _(isa: Isa) -> Broken:
    """A collective waits for its own rank's producer instead of for all ranks'."""
    queues = isa.streams["decode"].queues
    waits, signals = queues.waits.copy(), queues.signals.copy()
    gate = int(np.flatnonzero(waits["counter"] & GATE)[0])
    producer = int(np.flatnonzero(signals == waits["counter"][gate])[0])
    reader = next(
        int(e["inst"]) for e in queues.entries
        if e["wait_ofs"] <= gate < int(e["wait_ofs"]) + int(e["n_waits"])
    )  # fmt: skip
    n_slices = int((queues.entries["inst"] == producer).sum())
    signals[producer] = producer
    waits["counter"][gate], waits["threshold"][gate] = producer, n_slices
    local, gates = queues.local_counts.copy(), queues.gate_counts.copy()
    local[producer], gates[int(queues.signals[producer]) & ~GATE] = n_slices, 0
    counts = {"local_counts": local, "gate_counts": gates}
    return Broken(with_queues(isa, waits=waits, signals=signals, **counts), reader)


@on_stream("two ranks' programs are swapped", "G ranks decode")
def _(isa: Isa) -> Broken:
    records = isa.streams["decode"].instructions
    at = int(np.argwhere(records[0] != records[1])[0][0])
    return Broken(with_stream(isa, instructions=(records[1], records[0], *records[2:])), at)


@on_stream("one rank has another parameter", "G ranks decode")
def _(isa: Isa) -> Broken:
    at = first(rows_of(isa), eps_of)
    records = isa.streams["decode"].instructions
    spec = spec_of(int(rows_of(isa)["op"][at]))
    assert spec is not None
    word = spec.word(eps_name(rows_of(isa), at))
    return Broken(set_word(isa, at, word, int(records[1][at, word]) + 1, iter([1])), at)


@on_stream("all ranks begin their vocabulary at 0", "G ranks decode")
def _(isa: Isa) -> Broken:
    at = first(rows_of(isa), has(vocab_base="param"))
    return Broken(set_word(isa, at, table.SPECS[table.Op.ARGMAX].word("vocab_base"), 0), at)


@on_stream("scratch is declared too small", "G scratch decode")
def _(isa: Isa) -> Broken:
    return Broken(with_stream(isa, scratch_floats=isa.streams["decode"].scratch_floats - 1), None)


@on_stream("scratch does not fit on the chip", "G scratch decode")
def _(isa: Isa) -> Broken:
    return Broken(with_stream(isa, scratch_floats=1 << 20), None)


@on_stream("an opcode that is none", "F tables")
def _(isa: Isa) -> Broken:
    return Broken(set_word(isa, 7, 0, 250), 7)


@on_stream("an opcode that is reserved", "F tables")
def _(isa: Isa) -> Broken:
    return Broken(set_word(isa, 7, 0, 2), 7)


@on_stream("a handle beyond the table", "F tables")
def _(isa: Isa) -> Broken:
    word = int(isa.streams["decode"].instructions[0][5, table.WORD_HANDLES])
    return Broken(set_word(isa, 5, table.WORD_HANDLES, (word & 0xFFFF0000) | 0xFFFE), 5)


@on_stream("a record's rows and its entries' differ", "F tables")
def _(isa: Isa) -> Broken:
    _, at = sliced(isa)
    units = int(rows_of(isa)["n_units"][at])
    return Broken(set_word(isa, at, table.WORD_UNITS, units + 8), at)


@on_stream("a record's width", "F records decode")
def _(isa: Isa) -> Broken:
    _, at = sliced(isa)
    return Broken(set_word(isa, at, table.WORD_WIDTH, int(rows_of(isa)["width"][at]) + 1), at)


@on_stream("a weight of equal shape in place of another", "F meaning decode")
def _(isa: Isa) -> Broken:
    at, slot, other = equal_weights(rows_of(isa), isa.tensors)
    records = [r.copy() for r in isa.streams["decode"].instructions]
    for words in records:
        handles = words[at, table.WORD_HANDLES : table.WORD_UNITS].copy().view("<u2")
        handles[slot] = other
        words[at, table.WORD_HANDLES : table.WORD_UNITS] = handles.view("<u4")
    return Broken(with_stream(isa, instructions=tuple(records)), at)


@on_stream("another eps on all ranks", "F meaning decode")
def _(isa: Isa) -> Broken:
    at = first(rows_of(isa), eps_of, 2)
    spec = spec_of(int(rows_of(isa)["op"][at]))
    assert spec is not None
    word = spec.word(eps_name(rows_of(isa), at))
    value = int(isa.streams["decode"].instructions[0][at, word])
    return Broken(set_word(isa, at, word, value + 1), at)


@on_stream("buffers overlap", "F memory decode")
def _(isa: Isa) -> Broken:
    at, a, b = read_together(isa, rows_of(isa))
    return Broken(set_tensor(isa, a.name, offset=b.offset), at)


@on_stream("the arena is too small", "F memory decode")
def _(isa: Isa) -> Broken:
    return Broken(with_stream(isa, arena_bytes=256), None)


@on_stream("a collective's slot is reused too early", "G slots decode")
def _(isa: Isa) -> Broken:
    a, b = peer_pair(isa, rows_of(isa))
    return Broken(set_tensor(isa, b.name, offset=a.offset), None)


def with_windows(isa: Isa, **columns: Columns) -> Isa:
    windows = isa.streams["decode"].windows
    assert windows is not None
    return with_stream(isa, windows=replace(windows, **columns))


@on_stream("an entry in another domain's window", "F windows decode")
def _(isa: Isa) -> Broken:
    windows = isa.streams["decode"].windows
    assert windows is not None
    order, second = windows.order.copy(), int(windows.window_ofs[1])
    order[[0, second]] = order[[second, 0]]
    return Broken(with_windows(isa, order=order), int(entries_of(isa)["inst"][order[0]]))


@on_stream("a window out of order", "F windows decode")
def _(isa: Isa) -> Broken:
    windows = isa.streams["decode"].windows
    assert windows is not None
    order = windows.order.copy()
    inst = entries_of(isa)["inst"][order]
    at = int(np.flatnonzero(np.diff(inst.astype(np.int64)) > 0)[2])
    order[[at, at + 1]] = order[[at + 1, at]]
    return Broken(with_windows(isa, order=order), int(inst[at]))


@on_stream("a window's bounds", "F windows decode")
def _(isa: Isa) -> Broken:
    windows = isa.streams["decode"].windows
    assert windows is not None
    ofs = windows.window_ofs.copy()
    ofs[3] += 1
    return Broken(with_windows(isa, window_ofs=ofs), None)


@on_stream("a domain's arrivals", "F windows decode")
def _(isa: Isa) -> Broken:
    windows = isa.streams["decode"].windows
    assert windows is not None
    arrivals = windows.arrivals.copy()
    arrivals[9, 1] += 1
    return Broken(with_windows(isa, arrivals=arrivals), 9)

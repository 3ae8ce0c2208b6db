"""Single faults of an emitted stream: entries, lists, records, ranks, memory, windows."""

import itertools
from dataclasses import replace

import numpy as np

from k3tool.isa import op_spec, table
from k3tool.isa.columns import GATE, PACKET_DIGEST, Columns, spec_of
from k3tool.isa.stream import Isa
from tests.faults.mutations import (
    Broken,
    Mutation,
    entries_of,
    eps_name,
    eps_of,
    equal_weights,
    first,
    has,
    outer_buffers,
    peer_pair,
    read_together,
    rows_of,
    set_entry,
    set_tensor,
    set_word,
    sliced,
    table_of,
    with_params,
    with_queues,
    with_stream,
)

STREAM: list[Mutation] = []
on_stream = table_of(STREAM)


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


for _label, _opcode in (("an opcode that is none", 250), ("an opcode that is reserved", 2)):
    on_stream(_label, "F tables")(lambda isa, op=_opcode: Broken(set_word(isa, 7, 0, op), 7))


@on_stream("a handle beyond the table", "F tables")
def _(isa: Isa) -> Broken:
    word = int(isa.streams["decode"].instructions[0][5, op_spec.WORD_HANDLES])
    return Broken(set_word(isa, 5, op_spec.WORD_HANDLES, (word & 0xFFFF0000) | 0xFFFE), 5)


@on_stream("a word that the op has no meaning for", "F tables")
def _(isa: Isa) -> Broken:
    at = first(rows_of(isa), lambda row, spec: len(spec.params) < op_spec.N_PARAMS)
    return Broken(set_word(isa, at, op_spec.RECORD_WORDS - 1, 1), at)


@on_stream("slices' numbers are swapped", "F tables")
def _(isa: Isa) -> Broken:
    entry, at = sliced(isa)
    return Broken(set_entry(isa, entry, slice=int(entries_of(isa)["slice"][entry]) + 1), at)


@on_stream("a buffer begins between alignments", "F records decode")
def _(isa: Isa) -> Broken:
    _, high = outer_buffers(isa)
    return Broken(set_tensor(isa, high.name, offset=high.offset + 4), None)


@on_stream("a record's rows and its entries' differ", "F tables")
def _(isa: Isa) -> Broken:
    _, at = sliced(isa)
    units = int(rows_of(isa)["n_units"][at])
    return Broken(set_word(isa, at, op_spec.WORD_UNITS, units + 8), at)


@on_stream("a record's width", "F records decode")
def _(isa: Isa) -> Broken:
    _, at = sliced(isa)
    return Broken(set_word(isa, at, op_spec.WORD_WIDTH, int(rows_of(isa)["width"][at]) + 1), at)


@on_stream("a weight of equal shape in place of another", "F meaning decode")
def _(isa: Isa) -> Broken:
    at, slot, other = equal_weights(rows_of(isa), isa.tensors)
    records = [r.copy() for r in isa.streams["decode"].instructions]
    for words in records:
        handles = words[at, op_spec.WORD_HANDLES : op_spec.WORD_UNITS].copy().view("<u2")
        handles[slot] = other
        words[at, op_spec.WORD_HANDLES : op_spec.WORD_UNITS] = handles.view("<u4")
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


# -- what it says of itself ------------------------------------------------------------------------


@on_stream("an arena of a byte more", "F memory decode")
def _(isa: Isa) -> Broken:
    return Broken(with_stream(isa, arena_bytes=isa.streams["decode"].arena_bytes + 1), None)


@on_stream("a peer segment of a byte more", "F memory decode")
def _(isa: Isa) -> Broken:
    return Broken(with_stream(isa, peer_bytes=isa.streams["decode"].peer_bytes + 1), None)


@on_stream("a rule that it rests on is not said", "F params")
def _(isa: Isa) -> Broken:
    rules = [name for name in isa.params["rules"] if name != "kda-heads-fuse"]
    theorems = {name: isa.params["theorems"][name] for name in rules}
    return Broken(with_params(isa, rules=rules, theorems=theorems), None)

"""Instructions as a person reads them: one line each, names from the op and handle tables.

A plan's packets and a stream's records print alike; a stream can also be printed queue by queue. It
does not check anything: what is printed is what the file says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3tool.compiler.plan import Phase, Tensor
from k3tool.isa import device
from k3tool.isa.columns import GATE, PACKET_DIGEST, PACKET_REARM, Columns, spec_of
from k3tool.isa.op_spec import Param
from k3tool.isa.stream import Stream

_FLAGS = {PACKET_DIGEST: "digest", PACKET_REARM: "rearm"}


@dataclass(frozen=True, slots=True)
class Listing:
    """What there is to print of one phase: rows with record fields, waits and slices per row.

    `usual_arrivals` are a plan's thresholds as its slices make them; one that differs is shown, as
    is a grain that is not its op's. None for a stream, which has neither.
    """

    rows: Columns
    n_slices: Columns
    waits: Sequence[Columns]
    signals: Columns
    usual_arrivals: Columns | None = None


def of_plan(phase: Phase, n_ranks: int) -> Listing:
    """Return the listing of a plan's phase; per-rank parameters are strides."""
    packets = phase.packets
    waits = [phase.waits_of(index) for index in range(len(packets))]
    usual = usual_arrivals(packets, n_ranks)
    return Listing(packets, packets["n_slices"], waits, packets["counter"], usual)


def usual_arrivals(packets: Columns, n_ranks: int) -> Columns:
    """Return the arrivals that packets' slices make at their counters, at gates of all ranks."""
    ranks = np.where(packets["counter"] & GATE, n_ranks, 1)
    return packets["n_slices"].astype(np.int64) * ranks


def of_stream(stream: Stream, rank: int) -> Listing:
    """Return the listing of one rank's instructions; per-rank parameters are the rank's."""
    rows = device.unpack(stream.instructions[rank])
    entries = stream.queues.entries
    first = np.full(len(rows), -1, np.int64)
    first[entries["inst"][::-1]] = np.arange(len(entries))[::-1]  # the first entry of each wins
    waits = [
        stream.queues.waits[:0] if at < 0 else _range(stream.queues.waits, entries[at], "wait")
        for at in first
    ]
    n_slices = np.bincount(entries["inst"], minlength=len(rows))
    return Listing(rows, n_slices, waits, stream.queues.signals)


def _range(column: Columns, entry: Any, name: str) -> Columns:
    start = int(entry[f"{name}_ofs"])
    return column[start : start + int(entry[f"n_{name}s"])]


def lines(listing: Listing, tensors: Sequence[Tensor], first: int, last: int) -> Iterator[str]:
    """Yield one line per instruction of first .. last (half-open)."""
    for index in range(first, last):
        slices = f" slices={listing.n_slices[index]}"
        yield _head(listing, tensors, index) + slices + _tail(listing, index)


def queue_lines(
    stream: Stream, listing: Listing, tensors: Sequence[Tensor], workgroup: int, rows: range
) -> Iterator[str]:
    """Yield one line per entry of a workgroup's queue whose instruction is in `rows`."""
    start, stop = stream.queues.queue_ofs[workgroup : workgroup + 2].tolist()
    for entry in stream.queues.entries[start:stop]:
        index = int(entry["inst"])
        if index in rows:
            part = f" slice={entry['slice']} part={entry['unit0']}:{entry['unit1']}"
            yield f"{_head(listing, tensors, index)}{part}{_tail(listing, index)}"


def _head(listing: Listing, tensors: Sequence[Tensor], index: int) -> str:
    row = listing.rows[index]
    spec = spec_of(int(row["op"]))
    assert spec is not None, row["op"]  # readers refuse unknown opcodes
    words = [f"{index:04d} {spec.name}"]
    for operand, handle in zip(spec.operands, spec.handles(row["handles"]), strict=True):
        name = tensors[handle].name if handle < len(tensors) else "?"
        words.append(f"{operand.name}=%{handle}({name})")
    for param, word in zip(spec.params, row["params"], strict=False):
        words.append(f"{param.name}={param_text(param, int(word))}")
    words.append(f"units={row['n_units']}")
    if row["unit_cols"]:
        words.append(f"cols={row['unit_cols']}")
    words.append(f"width={row['width']}")
    return " ".join(words)


def _tail(listing: Listing, index: int) -> str:
    waits = ", ".join(
        f"{counter_text(int(counter))}>={threshold}"
        for counter, threshold in listing.waits[index].tolist()
    )
    flags = flag_names(int(listing.rows["op"][index]), int(listing.rows["flags"][index]))
    shown = f" flags={'+'.join(flags)}" if flags else ""
    signal = f" signal={counter_text(int(listing.signals[index]))}"
    return f" wait=[{waits}]{signal}{shown}{_unusual(listing, index)}"


def _unusual(listing: Listing, index: int) -> str:
    if listing.usual_arrivals is None:
        return ""
    row = listing.rows[index]
    spec = spec_of(int(row["op"]))
    assert spec is not None
    grain = "" if row["grain"] == spec.grain else f" grain={row['grain']}"
    usual = row["threshold"] == listing.usual_arrivals[index]
    return grain + ("" if usual else f" arrivals={row['threshold']}")


def flag_names(op: int, flags: int) -> list[str]:
    """Return the names of a record's flags: the schedule's, then the op's own."""
    spec = spec_of(op)
    assert spec is not None, op
    own = [name for name, is_set in spec.flag_values(flags).items() if is_set]
    return [name for bit, name in _FLAGS.items() if flags & bit] + own


def counter_text(counter: int) -> str:
    """Return p3 for packet 3's counter, g0 for gate 0."""
    return f"g{counter & ~GATE}" if counter & GATE else f"p{counter}"


def param_text(param: Param, word: int) -> str:
    """Return a parameter word as its kind says: the shortest decimal that gives an f32 back.

    A NaN, which no decimal gives back, is shown as its bits.
    """
    if param.kind != "f32":
        return str(word)
    value = np.uint32(word).view(np.float32)
    return f"{word:#010x}" if np.isnan(value) else str(value)

"""Per-domain queues: a stream's entries by L2 domain, and what a domain's elected worker adds.

A window is one domain's entries in instruction order, taken through one cursor by any of the
domain's workers. A cursor walks rising instructions, so the least unfinished instruction of a step
is always at or behind every cursor it concerns and windows cannot lock where queues do not.

Two-level rendezvous: entries of one instruction in one domain count up a counter of (instruction,
domain); the worker that brings it to `arrivals` does the cache maintenance for all of them and adds
that number to the instruction's counter. Thresholds are those of the flat stream. The simulator and
the GPU interpreters (kernels_common/simt_interp.h) read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from k3tool.isa.columns import Columns
from k3tool.targets import Target, get_target

if TYPE_CHECKING:
    from k3tool.isa.queues import Queues
    from k3tool.isa.stream import Stream


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one phase. Domain d owns order[window_ofs[d]] .. order[window_ofs[d + 1]].

    `order` holds entry indices; `arrivals` is (instructions, domains): entries of each there.
    """

    order: Columns
    window_ofs: Columns
    arrivals: Columns


def entry_domains(queues: Queues, target: Target) -> Columns:
    """Return the domain of every entry: its workgroup's."""
    counts = np.diff(queues.queue_ofs.astype(np.int64))
    domain: Columns = np.array([target.domain_of(w) for w in range(len(counts))], np.int64)
    return np.repeat(domain, counts.astype(np.int64))


def build_windows(queues: Queues, target: Target) -> Windows | None:
    """Return the windows of a phase, None where the target has one domain."""
    if target.domains == 1:
        return None
    entries, domain = queues.entries, entry_domains(queues, target)
    order = np.lexsort((entries["slice"], entries["inst"], domain))
    sizes = np.bincount(domain, minlength=target.domains)
    ofs = np.concatenate([[0], np.cumsum(sizes)])
    return Windows(order.astype("<u4"), ofs.astype("<u4"), _arrivals(queues, domain, target))


def _arrivals(queues: Queues, domain: Columns, target: Target) -> Columns:
    n = len(queues.signals)
    cells = queues.entries["inst"].astype(np.int64) * target.domains + domain
    return np.bincount(cells, minlength=n * target.domains).reshape(n, -1).astype("<u4")


def window_faults(stream: Stream, target_name: str) -> tuple[str, list[str]]:
    """Check a phase's windows: each entry once, in its domain's, in order, counted right."""
    target, windows = get_target(target_name), stream.windows
    if windows is None:
        if target.domains == 1:
            return "the target has one domain", []
        return "", [f"no windows, {target.name} has {target.domains} domains"]
    entries, ofs = stream.queues.entries, windows.window_ofs.astype(np.int64)
    if len(ofs) != target.domains + 1 or ofs[0] != 0 or ofs[-1] != len(entries):
        return "", [f"window bounds {ofs.tolist()} are not of {target.domains} domains"]
    if (np.diff(ofs) < 0).any() or (np.sort(windows.order) != np.arange(len(entries))).any():
        return "", ["windows do not hold each entry once"]
    inst = entries["inst"].astype(np.int64)[windows.order]
    domain = np.repeat(np.arange(target.domains), np.diff(ofs))
    faults = []
    strange = entry_domains(stream.queues, target)[windows.order] != domain
    if strange.any():
        at = int(np.argmax(strange))
        faults.append(f"instruction {inst[at]}: an entry in the window of domain {domain[at]}")
    falls = (np.diff(inst) < 0) & (np.diff(domain) == 0)
    if falls.any():
        at = int(np.argmax(falls)) + 1
        faults.append(f"instruction {inst[at]} comes after instruction {inst[at - 1]} in a window")
    need = _arrivals(stream.queues, entry_domains(stream.queues, target), target)
    if windows.arrivals.shape != need.shape or (windows.arrivals != need).any():
        same = windows.arrivals.shape == need.shape
        at = int(np.argwhere(windows.arrivals != need)[0][0]) if same else 0
        faults.append(f"instruction {at}: arrivals by domain are not its entries there")
    return f"{target.domains} windows of {len(entries)} entries", faults

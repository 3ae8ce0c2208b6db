"""A trace of experts replayed against caches of any size: LRU, LFU, and the best that could be.

The best (Belady's) drops what is wanted again latest, which no cache can know: it bounds what any
policy could save. A step's experts of one layer are wanted together, so none of them may be dropped
for another of them. Beside each size stands what the same bytes save spent on the trunk, of which
every token reads every byte.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from k3tool.runtime.expert_trace import ExpertTrace

Key = int
Request = tuple[Key, ...]  # experts wanted together


@dataclass(frozen=True, slots=True)
class Replay:
    """One size: hits by policy, and bytes read per step; `trunk_bytes` if the room went there."""

    slots: int
    hits: dict[str, int]
    asked: int
    bytes_per_step: dict[str, float]
    trunk_bytes_per_step: float


def requests_of(trace: ExpertTrace) -> list[Request]:
    """Return the trace as sets of experts, in the order of asking."""
    events = trace.events
    new = np.flatnonzero(
        (np.diff(events["step"].astype(np.int64)) != 0)
        | (np.diff(events["group"].astype(np.int64)) != 0)
    )
    keys = (events["group"].astype(np.int64) + events["expert"]).tolist()
    bounds = [0, *(new + 1).tolist(), len(events)]
    return [tuple(keys[a:b]) for a, b in pairwise(bounds)]


def replay(trace: ExpertTrace, slots: int) -> Replay:
    """Return what caches of one size give on a trace, from empty on."""
    wanted = requests_of(trace)
    n_steps = len(np.unique(trace.events["step"]))
    asked = len(trace.events)
    hits = {name: policy(wanted, slots) for name, policy in POLICIES.items()}
    read = {name: (asked - n) * trace.expert_bytes / n_steps for name, n in hits.items()}
    least = max(map(len, wanted))
    spare = max(0, slots - least) * trace.expert_bytes
    trunk = POLICIES["lru"](wanted, least)
    saved = min(spare, trace.streamed_bytes)
    whole = (asked - trunk) * trace.expert_bytes / n_steps + trace.streamed_bytes - saved
    both = {name: n_bytes + trace.streamed_bytes for name, n_bytes in read.items()}
    return Replay(slots, hits, asked, both, whole)


def _lru(wanted: Sequence[Request], slots: int) -> int:
    last: dict[Key, int] = {}  # in order of use: a dict keeps it
    hits = 0
    for request in wanted:
        hits += sum(key in last for key in request)
        here = set(request)
        for key in request:
            if key not in last and len(last) >= slots:
                del last[next(old for old in last if old not in here)]
            last.pop(key, None)
            last[key] = 0
    return hits


def _lfu(wanted: Sequence[Request], slots: int) -> int:
    count: dict[Key, int] = defaultdict(int)
    used: dict[Key, int] = {}
    hits, now = 0, 0
    for request in wanted:
        hits += sum(key in used for key in request)
        here = set(request)
        for key in request:
            now += 1
            if key not in used and len(used) >= slots:
                del used[min((k for k in used if k not in here), key=lambda k: (count[k], used[k]))]
            count[key] += 1
            used[key] = now
    return hits


def _optimal(wanted: Sequence[Request], slots: int) -> int:
    later: dict[Key, list[int]] = defaultdict(list)
    for at in range(len(wanted) - 1, -1, -1):
        for key in wanted[at]:
            later[key].append(at)
    held: dict[Key, int] = {}  # key -> when it is wanted next
    heap: list[tuple[int, Key]] = []
    hits = 0
    for request in wanted:
        hits += sum(key in held for key in request)
        here = set(request)
        for key in request:
            later[key].pop()
        for key in request:
            if key not in held and len(held) >= slots:
                _drop_latest(held, heap, here)
            held[key] = later[key][-1] if later[key] else len(wanted)
            heapq.heappush(heap, (-held[key], key))
    return hits


def _drop_latest(held: dict[Key, int], heap: list[tuple[int, Key]], here: set[Key]) -> None:
    kept = []
    while True:
        at, key = heapq.heappop(heap)
        if held.get(key) != -at:
            continue  # an older note of it
        if key not in here:
            del held[key]
            break
        kept.append((at, key))
    for entry in kept:
        heapq.heappush(heap, entry)


POLICIES: dict[str, Callable[[Sequence[Request], int], int]] = {
    "lru": _lru, "lfu": _lfu, "optimal": _optimal,
}  # fmt: skip

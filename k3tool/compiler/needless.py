"""Whether each wait of a program orders something, and whether a step ends where it says it does.

A wait is there for a row that touches the same bytes, and what the other waits imply is not waited
for again: one too many is a hand-off that the chain has no reason for. So a wait list is what the
memory accesses make it, no less (``hazards``) and no more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Protocol

from k3tool.compiler.hazards import conflicts
from k3tool.compiler.order import Ordering, counter_name
from k3tool.isa.columns import GATE, PACKET_REARM, spec_of


class Waiting(Ordering, Protocol):
    """An ordering whose wait lists can be asked for."""

    producers: dict[int, list[int]]


Lists = Mapping[int, Sequence[Sequence[int]]]  # of counters: those that each row waits for


def needless_waits(c: Waiting, lists: Lists) -> Iterator[str]:
    """Yield waits that order nothing. `lists` holds every row's.

    The row that clears the counters' other bank ends the step, so it waits for all that compute.
    Weights that arrive are waited for beside what their readers waited for anyway: residency leaves
    the compute packets' own waits as they are, so those are judged by themselves.
    """
    need = conflicts(c)
    moves = [_is_load(c, index) for index in range(len(c.rows))]
    for index, found in lists.items():
        ends_step = bool(int(c.rows["flags"][index]) & PACKET_REARM)
        wanted = need[index] | ({(i, False) for i in range(index)} if ends_step else set())
        for counters in found:
            for at, counter in enumerate(counters):
                mine = c.producers.get(counter, [])
                rest = [other for i, other in enumerate(counters) if i != at]
                if counter in rest[at:]:
                    yield f"{c.name(index)}: waits for {counter_name(counter)} twice"
                elif not any(row in mine for row, _ in wanted):
                    yield _fault(c, index, counter, "touches none of its bytes")
                elif not any(moves[row] for row in mine):
                    computed = [
                        w for w in rest if not any(moves[p] for p in c.producers.get(w, []))
                    ]
                    if _implied(c, computed, [pair for pair in wanted if not moves[pair[0]]]):
                        yield _fault(c, index, counter, "its other waits imply")


def rearm_faults(c: Waiting, lists: Lists, signals: Mapping[int, Set[int]]) -> Iterator[str]:
    """Yield what is wrong with clearing the counters' other bank, and gates that hold nobody up.

    It happens before the arrival at the gate that ends the step on every rank, when everything but
    that gate's readers (and weights on their way) is over. `signals` are the counters that each row
    arrives at.
    """
    waits = {index: {w for counters in found for w in counters} for index, found in lists.items()}
    waited = {w for own in waits.values() for w in own}
    for gate in sorted({s for own in signals.values() for s in own if s & GATE} - waited):
        yield f"{c.name(c.producers[gate][0])}: nobody waits for {counter_name(gate)}"
    flagged = [index for index, row in enumerate(c.rows) if int(row["flags"]) & PACKET_REARM]
    if len(flagged) != 1:
        yield f"packets {flagged} clear the other bank, exactly one has to"
        return
    last = flagged[0]
    gates = signals.get(last, set())
    if not gates or not all(s & GATE and s in waited for s in gates):
        yield f"{c.name(last)} clears the other bank but signals no gate that is waited for"
        return
    for index in range(len(c.rows)):
        is_over = c.before[last] >> index & 1
        is_reader = c.before[index] >> last & 1 and bool(gates & waits[index])
        if index != last and not is_over and not is_reader and not _is_load(c, index):
            yield (
                f"{c.name(last)} clears the other bank at a gate that does not end the step: "
                f"{c.name(index)} is not over"
            )
            return


def _is_load(c: Ordering, index: int) -> bool:
    spec = spec_of(int(c.rows["op"][index]))
    return spec is not None and spec.is_load


def _implied(c: Waiting, counters: Iterable[int], wanted: Iterable[tuple[int, bool]]) -> bool:
    """Return whether waits for these counters alone order all that has to be over before."""
    here = everywhere = 0
    for counter in counters:
        for producer in c.producers.get(counter, []):
            done = c.before[producer] | 1 << producer
            here |= done
            everywhere |= c.before_everywhere[producer] | (done if counter & GATE else 0)
    return all((everywhere if across else here) >> row & 1 for row, across in wanted)


def _fault(c: Waiting, index: int, counter: int, why: str) -> str:
    makers = " and ".join(c.name(p) for p in c.producers.get(counter, [])) or "nobody"
    return f"{c.name(index)}: a wait too many at {counter_name(counter)}: {makers}, which {why}"

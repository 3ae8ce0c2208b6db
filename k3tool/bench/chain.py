"""How long a plan's dependency chain is, and what waiting along it costs: counts, no measurement.

Decode is bound by the depth of its chain, not by bytes, so the numbers here are those that a
shorter chain is judged by. They are derived from packets and waits; the path that the plan states
is recomputed and must agree.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from k3tool.bench.traffic import reread_bytes, traffic_bytes
from k3tool.compiler.hazards import data_edges
from k3tool.compiler.meaning import model_of
from k3tool.compiler.order import Order, longest_paths
from k3tool.compiler.plan import Phase, Plan
from k3tool.errors import UnsoundError
from k3tool.isa.columns import GATE, Columns, spec_of
from k3tool.isa.table import Op

# Cost of a hand-off in the system we start from, in us: its first micro-benchmark, an empty packet
# over 256 workgroups, and its two-level rendezvous.
HANDOFF_US = {"first": 13.2, "empty packet": 5.72, "two-level": 3.46}
# The same model, TP 8, batch 1: (packets, longest path), as first released and as later improved.
PRIOR = {"first": (2459, 1739), "later": (1981, 1377)}
_PRIOR_TP, _PRIOR_BATCH = 8, 1
# What those counts depend on; other widths of the same layers have as many packets.
_PRIOR_MODEL = {"num_hidden_layers": 93, "hidden_size": 7168, "num_experts": 896}
_WIDTHS = (1, 2, 8, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Chain:
    """What one phase's waits add up to. `bytes` are those that one rank moves per packet."""

    phase: str
    target: str
    tp: int
    packets: int
    packet_path: int  # packets on the longest chain
    critical_path: int  # hand-offs on it: every packet gate and every wait inside a packet
    edges: int  # pairs of packets of which one reads what the other wrote
    waits: int  # after transitive reduction
    transitive: int  # edges that no wait is spent on
    waits_per_packet: Mapping[int, int]
    polls: int  # waits times the slices that poll them
    bumps: int  # arrivals, at all ranks for a gate
    polls_by_width: Mapping[str, int]  # by slices of the consumer
    mean_width: float  # packets per step of the longest chain
    live_counters: int  # most counters that somebody has yet to wait for at once
    gates: int
    histogram: Mapping[str, int]
    bytes_total: int
    bytes_mean: float
    bytes_median: int  # of an even number of packets the lower of the middle two
    reread_total: int  # bytes that slices read again, from a cache: see `reread_bytes`
    reread_by_op: Mapping[str, int]
    floor_ms: Mapping[str, float]  # chain times the cost of a hand-off
    below_floor: Mapping[str, int]  # packets whose bytes take less time than their hand-off
    bandwidth: float  # bytes a second that below_floor assumes
    has_prior: bool  # whether PRIOR counts the same: decode of the released model at its degree


def measure_chain(plan: Plan, phase_name: str, bandwidth: float) -> Chain:
    """Return the counts of one phase of a plan.

    Raises: UnsoundError if the path that the plan states is not that of its waits.
    """
    phase = plan.phases[phase_name]
    order = Order(plan, phase)
    depth, handoffs = _stated_paths(order)
    edges = data_edges(order)
    n_waits, slices = phase.packets["n_waits"], phase.packets["n_slices"].astype(np.int64)
    moved, again = _packet_bytes(plan, phase)
    is_gate = (phase.packets["counter"] & GATE) != 0
    kept = sum(1 for a, b in edges if a in _producers(order, b))
    return Chain(
        phase=phase_name,
        target=str(plan.params["target"]),
        tp=plan.tp,
        packets=len(phase.packets),
        packet_path=depth,
        critical_path=handoffs,
        edges=len(edges),
        waits=len(phase.waits),
        transitive=len(edges) - kept,
        waits_per_packet=dict(sorted(Counter(n_waits.tolist()).items())),
        polls=int((n_waits * slices).sum()),
        bumps=int((slices * np.where(is_gate, plan.tp, 1)).sum()),
        polls_by_width=_by_width(slices, n_waits),
        mean_width=len(phase.packets) / depth,
        live_counters=_live_counters(order),
        gates=phase.n_gates,
        histogram=_histogram(phase),
        bytes_total=int(moved.sum()),
        bytes_mean=float(moved.mean()),
        bytes_median=int(np.sort(moved)[(len(moved) - 1) // 2]),
        reread_total=int(again.sum()),
        reread_by_op=_by_op(phase, again),
        floor_ms={name: handoffs * us / 1000 for name, us in HANDOFF_US.items()},
        below_floor={
            name: int((moved / bandwidth < us * 1e-6).sum()) for name, us in HANDOFF_US.items()
        },
        bandwidth=bandwidth,
        has_prior=phase_name == "decode" and _is_priors_program(plan),
    )


def _stated_paths(order: Order) -> tuple[int, int]:
    """Return the longest paths in packets and in hand-offs, which the plan states as well."""
    phase, found = order.phase, longest_paths(order)
    stated = (phase.packet_path, phase.critical_path)
    if found != stated:
        raise UnsoundError(f"{phase.name}: longest path", got=stated, need=found)
    return found


def _packet_bytes(plan: Plan, phase: Phase) -> tuple[Columns, Columns]:
    """Return each packet's bytes, and those that its slices read again. Shapes: (P,) twice."""
    moved = [traffic_bytes(packet, plan.tensors, phase.max_tokens, plan.tp)
             for packet in phase.packets]  # fmt: skip
    again = [
        reread_bytes(packet, int(packet["n_slices"]), plan.tensors, phase.max_tokens)
        for packet in phase.packets
    ]
    return np.array(moved), np.array(again)


def _is_priors_program(plan: Plan) -> bool:
    """Return whether a plan is of the model, degree and batch that PRIOR was counted of."""
    model = model_of(plan.params)
    split = (plan.tp, plan.params.get("batch"))
    return (
        model is not None
        and split == (_PRIOR_TP, _PRIOR_BATCH)
        and all(getattr(model, name) == size for name, size in _PRIOR_MODEL.items())
    )


def _producers(order: Order, index: int) -> set[int]:
    waits = order.phase.waits_of(index)["counter"].tolist()
    return {p for counter in waits for p in order.producers.get(counter, ())}


def inner_waits(op: int) -> int:
    """Return the hand-offs inside one packet of an op, which the op table states.

    No op of the table has any: a body never waits (`kernels_common/k3.h`), its slice reads only
    what earlier packets wrote, and collectives are packets of their own whose gate counts like any
    other.
    """
    spec = spec_of(op)
    assert spec is not None, op
    return spec.inner_waits


def _by_width(slices: Columns, n_waits: Columns) -> dict[str, int]:
    out = {}
    for low, high in zip(_WIDTHS, (*_WIDTHS[1:], 1 << 30), strict=True):
        mine = (slices >= low) & (slices < high)
        last = f"-{high - 1}" if high < 1 << 30 and high - 1 > low else ""
        name = f"{low}{last if high < 1 << 30 else '+'}"
        out[name] = int((n_waits * slices)[mine].sum())
    return out


def _live_counters(order: Order) -> int:
    """Return the most counters that are signalled and still waited for by a later packet."""
    last = {}
    for index in range(len(order.phase.packets)):
        for producer in _producers(order, index):
            last[producer] = index
    change = np.zeros(len(order.phase.packets) + 1, np.int64)
    for producer, consumer in last.items():
        change[producer] += 1
        change[consumer] -= 1
    return int(np.cumsum(change).max())


def _histogram(phase: Phase) -> dict[str, int]:
    counts = Counter(phase.packets["op"].tolist())
    return {Op(op).name: n for op, n in sorted(counts.items(), key=lambda x: (-x[1], x[0]))}


def _by_op(phase: Phase, values: Columns) -> dict[str, int]:
    """Return the sum of a packet's value for every op that has one, largest first."""
    ops = phase.packets["op"]
    sums = {Op(op).name: int(values[ops == op].sum()) for op in np.unique(ops).tolist()}
    return {name: n for name, n in sorted(sums.items(), key=lambda x: (-x[1], x[0])) if n}

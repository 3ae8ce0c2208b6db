"""The numbers of a report's pictures as tables: for who cannot see a picture, and to copy from.

Each has the rows of the picture that is drawn from the same values; it measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from k3tool.bench import page
from k3tool.bench.layers import OUTSIDE, ChainLink
from k3tool.bench.pictures import Array

MOST_EXPERTS = 20  # of a table: the picture has all of them
GB = 1e9


def anatomy_numbers(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the parts of each step, longest first; as Anatomy.as_dict has them, by label."""
    rows = []
    for label, step in steps.items():
        parts = [(op["op"], op["seconds"]) for op in step["ops"]]
        parts += [("hand-offs", step["handoff"]), ("idle", step["idle"])]
        whole = step["wall"] * step["n_workers"]
        for name, seconds in sorted(parts, key=lambda part: -part[1]):
            ms = 1e3 * seconds / step["n_workers"]
            rows.append((label, name, f"{ms:.3f}", f"{seconds / whole:.1%}"))
    return page.numbers(("step", "part", "ms", "of the step"), rows, n_text=2)


def roofline_numbers(points: Sequence[tuple[str, float, float, float]]) -> str:
    """Return what roofline_picture draws: op, operations a byte, operations a second, share."""
    rows = [
        (op, f"{ratio:.3g}", f"{rate / 1e9:.4g}", f"{share:.1%}")
        for op, ratio, rate, share in sorted(points, key=lambda point: -point[3])
    ]
    return page.numbers(("op", "operations a byte", "GFLOP/s", "of the step"), rows)


def timeline_numbers(trace: Mapping[str, Any]) -> str:
    """Return each worker's time by op, longest first; `trace` is what chrome_trace makes."""
    length = float(trace["otherData"]["step_us"])
    found: dict[tuple[int, str], tuple[int, float]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            key = (int(event["tid"]), event["name"])
            count, us = found.get(key, (0, 0.0))
            found[key] = (count + 1, us + event["dur"])
    rows = [
        (str(worker), op, str(count), f"{us / 1e3:.3f}", f"{us / length:.1%}")
        for (worker, op), (count, us) in sorted(
            found.items(), key=lambda one: (one[0][0], -one[1][1], one[0][1])
        )
    ]
    return page.numbers(("worker", "op", "slices", "ms", "of the step"), rows, n_text=2)


def chain_numbers(chain: Sequence[ChainLink]) -> str:
    """Return packets and hand-offs of the longest chain by layer."""
    packets: dict[int, int] = {}
    handoffs: dict[int, int] = {}
    for link in chain:
        packets[link.layer] = packets.get(link.layer, 0) + 1
        handoffs[link.layer] = handoffs.get(link.layer, 0) + link.handoffs
    rows = [
        ("outside" if layer == OUTSIDE else str(layer), str(packets[layer]), str(handoffs[layer]))
        for layer in sorted(packets)
    ]
    return page.numbers(("layer", "packets on the chain", "hand-offs"), rows)


def expert_numbers(events: Array) -> str:
    """Return the experts that were asked for most; `events` as experts_picture has them."""
    groups = {group: at for at, group in enumerate(sorted(set(events["group"].tolist())))}
    counts: dict[tuple[int, int], int] = {}
    for group, expert in zip(events["group"].tolist(), events["expert"].tolist(), strict=True):
        key = (groups[group], expert)
        counts[key] = counts.get(key, 0) + 1
    most = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:MOST_EXPERTS]
    rows = [(str(layer), str(expert), str(count)) for (layer, expert), count in most]
    return page.numbers(("layer with experts, in order", "expert", "times asked for"), rows)


def measured_dial_numbers(budgets: Sequence[Mapping[str, Any]], resident: float) -> str:
    """Return every run in a budget, and the mapped one; seconds of all steps."""
    rows = [(f"{one['memory_bytes'] / GB:.3f}", f"{one['step_seconds']:.3f}") for one in budgets]
    return page.numbers(("GB", "seconds"), [*rows, ("mapped, no budget", f"{resident:.3f}")])


def predicted_dial_numbers(predicted: Sequence[tuple[float, float, float]]) -> str:
    """Return the predictions: bytes, least and most seconds a token."""
    rows = [
        (f"{size / GB:.3f}", f"{least:.4g}", f"{most:.4g}")
        for size, least, most in sorted(predicted)
    ]
    titles = ("GB", "seconds a token, all reading overlapped", "none of it")
    return page.numbers(titles, rows)

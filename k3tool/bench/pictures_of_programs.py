"""More pictures of a report: a token by worker, the chain by layer, experts, memory budgets."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from k3tool.bench.layers import OUTSIDE, ChainLink
from k3tool.bench.pictures import (
    COLOURS,
    INK,
    OTHER,
    Array,
    legend,
    new_figure,
    op_legend,
    patch,
    style,
    svg_text,
)
from k3tool.tables import number_text

_PARTS = 1500  # of a timeline's width: slices of one op that are nearer than that are drawn as one
ZOOM = 0.06  # part of the step that the second timeline shows, where most slices begin
GB = 1e9


# -- timeline --------------------------------------------------------------------------------------


def timeline_picture(name: str, trace: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """Return a token's packets by worker, whole and a part of it enlarged.

    `trace` is what timeline.chrome_trace makes; times in us.
    """
    slices = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    about = trace["otherData"]
    workers, length = int(about["workers"]), float(about["step_us"])
    figure, rows = new_figure(1.9 + 2 * min(0.45 * workers, 3.0), nrows=2)
    first = busiest([event["ts"] for event in slices], ZOOM * length, length)
    windows = ((0.0, length, "the whole step"),
               (first, first + ZOOM * length, f"{ZOOM:.0%} of it, where most packets begin"),
               )  # fmt: skip
    for axes, (start, last, title) in zip(rows, windows, strict=True):
        _lanes(axes, slices, colours, start, last)
        style(axes, "", "worker", grid="x")
        axes.set_title(title, color=INK, fontsize=10, loc="left")
        axes.set_xlim(start / 1e3, last / 1e3)
        axes.set_ylim(workers - 0.5, -0.5)
        axes.set_yticks(range(0, workers, max(1, workers // 8)))
    rows[-1].set_xlabel("ms from the start of the step", color=INK)
    op_legend(figure, colours, [event["name"] for event in slices], gaps=False)
    return svg_text(figure, name)


def busiest(starts: Sequence[float], width: float, length: float) -> float:
    """Return where the window of a width begins that most of `starts` lie in, inside 0 to length.

    A window at a fixed place may show one long packet of one worker, and nothing else.
    """
    at = np.sort(np.array(starts, np.float64))
    at = at[at <= length - width]
    if not len(at):
        return max(0.0, length - width)
    counts = np.searchsorted(np.sort(np.array(starts)), at + width) - np.arange(len(at))
    return float(at[int(np.argmax(counts))])


def _lanes(
    axes: Any, slices: Sequence[Mapping[str, Any]], colours: Mapping[str, str], first: float,
    last: float,
) -> None:  # fmt: skip
    """Draw what lies in a window, slices of one colour that all but touch as one bar."""
    least = (last - first) / _PARTS
    bars: dict[tuple[int, str], list[list[float]]] = {}
    for event in sorted(slices, key=lambda one: one["ts"]):
        start, end = max(event["ts"], first), min(event["ts"] + event["dur"], last)
        if end <= start:
            continue
        lane = bars.setdefault((int(event["tid"]), colours[event["name"]]), [])
        if lane and start - lane[-1][1] < least:
            lane[-1][1] = max(end, lane[-1][1])
        else:
            lane.append([start, end])
    for (worker, colour), spans in bars.items():
        shown = [(start / 1e3, max(end - start, least / 2) / 1e3) for start, end in spans]
        axes.broken_barh(shown, (worker - 0.4, 0.8), color=colour, linewidth=0)


# -- chain -----------------------------------------------------------------------------------------


def chain_picture(name: str, chain: Sequence[ChainLink]) -> str:
    """Return the hand-offs of the longest chain by layer, layers with latent attention apart."""
    layers = sorted({link.layer for link in chain})
    counts = dict.fromkeys(layers, 0)
    has_mla = dict.fromkeys(layers, False)
    for link in chain:
        counts[link.layer] += link.handoffs
        has_mla[link.layer] |= link.op.startswith("MLA_")
    colours = [
        OTHER if layer == OUTSIDE else COLOURS[1] if has_mla[layer] else COLOURS[0]
        for layer in layers
    ]
    figure, axes = new_figure(3.4)
    axes.bar(layers, [counts[layer] for layer in layers], color=colours, width=0.8, linewidth=0)
    style(axes, "layer (left of 0: embedding and head)", "hand-offs on the longest chain", grid="y")
    axes.set_ylim(0, max(counts.values()) * 1.22)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(min(layers) - 0.7, max(layers) + 0.7)
    handles = [patch(colour) for colour in (COLOURS[0], COLOURS[1], OTHER)]
    legend(axes, handles, ["layer with KDA", "layer with MLA", "outside of layers"],
           loc="upper center", ncols=3)  # fmt: skip
    return svg_text(figure, name)


# -- experts ---------------------------------------------------------------------------------------


def experts_picture(name: str, events: Array, experts: int) -> str:
    """Return how often each expert of each layer was asked for, and how uneven that is.

    `events` have EVENT_DTYPE of an expert trace; `experts` are those of one layer.
    """
    groups = sorted(set(events["group"].tolist()))
    counts = np.zeros((len(groups), experts), np.int64)
    rows = np.searchsorted(groups, events["group"])
    np.add.at(counts, (rows, events["expert"]), 1)
    figure, (left, right) = new_figure(4.6, ncols=2, width_ratios=(3, 1.3))
    image = left.imshow(counts, aspect="auto", interpolation="nearest", cmap="viridis")
    style(left, "expert", "layer with experts, in order", grid="")
    left.yaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=left, pad=0.02)
    bar.ax.yaxis.get_major_locator().set_params(integer=True)
    bar.set_label("times asked for", color=INK)
    bar.ax.tick_params(colors=INK)
    bar.outline.set_edgecolor(INK)
    shares = np.sort(counts.ravel())[::-1].cumsum() / counts.sum()
    part = np.arange(1, len(shares) + 1) / len(shares)
    right.plot(100 * part, 100 * shares, color=COLOURS[0], label="as asked for")
    right.plot([0, 100], [0, 100], color=OTHER, linestyle="--", label="were all alike")
    style(right, "% of all experts, the most wanted first", "% of what was asked for", grid="both")
    right.set_xlim(0, 100)
    right.set_ylim(0, 101)
    handles, names = right.get_legend_handles_labels()
    legend(right, handles, names, loc="lower right")
    return svg_text(figure, name)


# -- memory ----------------------------------------------------------------------------------------


def dial_picture(
    name: str,
    measured: Sequence[tuple[float, float]],
    resident: float | None,
    predicted: Sequence[tuple[float, float, float]],
) -> str:
    """Return time by memory, of measured runs or of predictions.

    `measured`: bytes of a budget and seconds of its steps, a run each; `resident`: seconds of the
    mapped run; `predicted`: bytes, least and most seconds a token.
    """
    figure, axes = new_figure(3.9)
    if measured:
        _measured_dial(axes, measured, resident)
    else:
        _predicted_dial(axes, predicted)
    style(axes, "memory of driver and ranks, GB (log)", axes.get_ylabel(), grid="both")
    axes.set_ylim(bottom=0)
    handles, names = axes.get_legend_handles_labels()
    legend(axes, handles, names, loc="upper right")
    return svg_text(figure, name)


def _measured_dial(
    axes: Any, measured: Sequence[tuple[float, float]], resident: float | None
) -> None:
    runs: dict[float, list[float]] = {}
    for size, seconds in measured:
        runs.setdefault(size, []).append(seconds)
    sizes = sorted(runs)
    xs = [size / GB for size in sizes]
    axes.set_xscale("log")
    axes.plot([size / GB for size, _ in measured], [seconds for _, seconds in measured], ".",
              color=OTHER, markersize=7, label="a run")  # fmt: skip
    axes.plot(xs, [float(np.median(runs[size])) for size in sizes], "o-", color=COLOURS[0],
              markersize=4, label="median of a budget")  # fmt: skip
    if resident is not None:
        axes.axhline(resident, color=COLOURS[1], linestyle="--", label="mapped, no budget")
    axes.set_ylabel("seconds of all steps")
    plain_ticks(axes, xs)


def _predicted_dial(axes: Any, predicted: Sequence[tuple[float, float, float]]) -> None:
    rows = sorted(predicted)
    xs = [size / GB for size, _, _ in rows]
    least, most = ([row[at] for row in rows] for at in (1, 2))
    axes.fill_between(xs, least, most, color=COLOURS[0], alpha=0.25, linewidth=0)
    axes.plot(xs, least, "o-", color=COLOURS[0], markersize=4, label="all reading overlapped")
    axes.plot(xs, most, "o--", color=COLOURS[1], markersize=4, label="none of it")
    axes.set_xscale("log")
    axes.set_ylabel("seconds a token")
    plain_ticks(axes, xs)


def plain_ticks(axes: Any, xs: Sequence[float]) -> None:
    """Put ticks with plain numbers on a logarithmic axis: some of the values themselves."""
    from matplotlib.ticker import NullFormatter, NullLocator

    step = max(1, len(xs) // 5)
    ticks = [*xs[::step]]
    axes.set_xticks(ticks, [number_text(x) for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())

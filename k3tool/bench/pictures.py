"""The pictures of a report as SVG text, drawn by matplotlib in the colours of the page.

It draws numbers that it is given and measures nothing. Text becomes outlines, so that no font has
to be there; what has to stand out from white paper and from a dark screen is drawn in two inks that
the page sets (`INK`, `GRID`), data in mid tones that do on both.
"""

import importlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.errors import TargetError, install_extra

Array = npt.NDArray[Any]
Figure = Any
INK, GRID = "#010203", "#040506"  # found again in the SVG's text
_IN_PAGE = {INK: "currentColor", GRID: "var(--grid)"}
COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#c79c2a", "#55aacc", "#aa3377", "#dd7f3d", "#8877cc",
    "#2fa39a", "#99753d",
)  # fmt: skip
OTHER, IDLE, HANDOFF = "#8f979f", "#c4c9ce", "#6b7178"
WIDTH = 10.0  # inches
MOST_NAMED = len(COLOURS)


def require_matplotlib() -> None:
    """Refuse where there is nothing to draw with. Raises: TargetError with the command."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise TargetError(
            "matplotlib", got="not installed", need="it, for pictures",
            hint=install_extra("plot"),
        ) from None  # fmt: skip


def new_figure(height: float, **grid: Any) -> tuple[Figure, Any]:
    """Return an empty figure and its axes, without a window and without global state."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as MatplotlibFigure

    figure = MatplotlibFigure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots(**grid)


def style(axes: Any, x: str, y: str, *, grid: str = "x") -> None:
    """Give axes their labels and inks."""
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK, which="both")
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))
    axes.set_axisbelow(True)
    if grid:
        axes.grid(True, axis=grid, color=GRID, linewidth=0.7)


def legend(target: Any, handles: Sequence[Any], names: Sequence[str], **where: Any) -> None:
    """Draw a legend in the page's ink."""
    found = target.legend(handles, names, frameon=False, labelcolor=INK, fontsize=9, **where)
    found.set_zorder(5)


def svg_text(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element for a page, ids made its own by `name`."""
    import matplotlib

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg (.*?)width="[^"]*"', r"<svg \1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(<svg .*?)height="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\1{name}-", text)
    for mark, colour in _IN_PAGE.items():
        text = text.replace(mark, colour)
    return text.strip()


def patch(colour: str) -> Any:
    """Return what stands for a colour in a legend."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour)


def op_colours(seconds: Mapping[str, float]) -> dict[str, str]:
    """Return a colour for each op: the longest come first and have their own, others share one."""
    by_time = sorted(seconds, key=lambda name: (-seconds[name], name))
    return {
        name: COLOURS[at] if at < MOST_NAMED else OTHER for at, name in enumerate(by_time)
    }  # fmt: skip


def op_legend(figure: Any, colours: Mapping[str, str], ops: Sequence[str], gaps: bool) -> None:
    """Name the colours of the ops that a picture shows, below it."""
    named = [op for op in colours if op in ops and colours[op] != OTHER]
    rest = {"other ops": OTHER} if len(named) < len(set(ops)) else {}
    rest |= {"hand-offs": HANDOFF, "idle": IDLE} if gaps else {}
    handles = [patch(colour) for colour in (*map(colours.__getitem__, named), *rest.values())]
    legend(figure, handles, [*named, *rest], loc="outside lower center", ncols=5)


def log_axis(axis: Any) -> None:
    """Give a logarithmic axis plain numbers, some inside a decade too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


# -- anatomy ---------------------------------------------------------------------------------------


def anatomy_picture(
    name: str, steps: Mapping[str, Mapping[str, Any]], colours: Mapping[str, str]
) -> str:
    """Return stacked bars, one a step: what each op, hand-offs and idle workers took.

    `steps` are anatomies as `Anatomy.as_dict` gives them, by label; ms: worker time over workers.
    """
    figure, rows = new_figure(1.5 + 1.0 * len(steps), nrows=len(steps), squeeze=False)
    for axes, (label, step) in zip(rows[:, 0], steps.items(), strict=True):
        _bar(axes, step, colours)
        style(axes, "", "", grid="x")
        axes.set_yticks([])
        axes.set_title(label, color=INK, fontsize=10, loc="left")
        axes.set_xlim(0, step["wall"] * 1e3)
    rows[-1, 0].set_xlabel("ms of the step (time of all workers over their number)", color=INK)
    ops = [op["op"] for step in steps.values() for op in step["ops"]]
    op_legend(figure, colours, ops, gaps=True)
    return svg_text(figure, name)


def _bar(axes: Any, step: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    left, scale = 0.0, 1e3 / step["n_workers"]
    ops = sorted(step["ops"], key=lambda op: (list(colours).index(op["op"]),))
    others = sum(op["seconds"] for op in ops if colours[op["op"]] == OTHER)
    parts = [(op["seconds"], colours[op["op"]]) for op in ops if colours[op["op"]] != OTHER]
    parts += [(others, OTHER), (step["handoff"], HANDOFF), (step["idle"], IDLE)]
    whole = step["wall"] * step["n_workers"]
    for seconds, colour in parts:
        width = seconds * scale
        axes.barh(0, width, left=left, color=colour, height=0.8, linewidth=0)
        if seconds / whole > 0.04:
            axes.text(left + width / 2, 0, f"{seconds / whole:.0%}", ha="center", va="center",
                      color="#ffffff" if colour != IDLE else "#222222", fontsize=9)  # fmt: skip
        left += width


# -- roofline --------------------------------------------------------------------------------------


def roofline_picture(
    name: str, points: Sequence[tuple[str, float, float, float]], bandwidth: float, peak: float,
    colours: Mapping[str, str],
) -> str:  # fmt: skip
    """Return the roof and every op below it.

    `points`: op, operations a byte, operations a second, and its share of the step (its size).
    """
    unit, scale = ("TFLOP/s", 1e12) if peak >= 1e13 else ("GFLOP/s", 1e9)
    figure, axes = new_figure(5.4)
    xs = [x for _, x, _, _ in points]
    low, high = min([*xs, peak / bandwidth]) / 4, max([*xs, peak / bandwidth]) * 8
    roof = np.geomspace(low, high, 200)
    axes.plot(roof, np.minimum(roof * bandwidth, peak) / scale, color=INK, linewidth=1.4)
    for op, x, y, share in points:
        size = 4 + 12 * share**0.5
        axes.plot([x], [y / scale], "o", markersize=size, color=colours[op], alpha=0.9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    style(axes, "operations a byte", unit, grid="both")
    axes.set_xlim(low, high)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, 1.6 * peak / scale))
    axes.text(high / 1.1, peak / scale * 1.08, f"{peak / scale:.4g} {unit}", color=INK, ha="right",
              va="bottom", fontsize=9)  # fmt: skip
    axes.set_title(f"slope: {bandwidth / 1e9:.4g} GB/s", color=INK, fontsize=10, loc="left")
    _name_points(axes, [(op, x, y / scale, share) for op, x, y, share in points], colours)
    return svg_text(figure, name)


def _name_points(
    axes: Any, points: Sequence[tuple[str, float, float, float]], colours: Mapping[str, str]
) -> None:
    """Write names beside the axes, in the order of height and apart, with a line to each point."""
    by_height = sorted(points, key=lambda point: (-point[2], point[0]))
    bottom, top = axes.get_ylim()
    scale = np.log(top / bottom)
    step = min(0.046, 1.0 / max(1, len(by_height)))
    at = [float(np.log(y / bottom) / scale) for _, _, y, _ in by_height]
    for index in range(1, len(at)):
        at[index] = min(at[index], at[index - 1] - step)
    lift = max(0.0, (0.01 - at[-1]) if at else 0.0)
    ends = [min(1.0 - index * step, value + lift) for index, value in enumerate(at)]
    for (op, x, y, share), end in zip(by_height, ends, strict=True):
        axes.annotate(
            f"{op}  {share:.1%}", xy=(x, y), xytext=(1.04, end),
            textcoords="axes fraction", color=INK, fontsize=8.5, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[op], "linewidth": 0.8, "alpha": 0.8,
                        "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 3},
        )  # fmt: skip

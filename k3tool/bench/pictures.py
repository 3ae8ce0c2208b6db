"""The pictures of a report as SVG text, drawn by matplotlib in the colours of the page.

It draws numbers that it is given and measures nothing. Text becomes outlines, so that no font has
to be there; what has to stand out from white paper and from a dark screen is drawn in two inks that
the page sets (`INK`, `GRID`), data in mid tones that do on both.
"""

import importlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.errors import TargetError, install_extra

Array = npt.NDArray[Any]
Figure = Any
INK, GRID, PAPER = "#010203", "#040506", "#070809"  # found again in the SVG's text
_IN_PAGE = {INK: "currentColor", GRID: "var(--grid)", PAPER: "var(--paper)"}
# Of those that stand out from both papers (2.3 times their luminance, as WCAG counts it), ten that
# lie far apart for who sees all colours and for who lacks one of the three receptors. Wrong if
# chosen by eye: red, green and brown of one lightness are one colour to one man in twelve.
COLOURS = (
    "#0265f8", "#d79b1a", "#a20547", "#25c185", "#0a9aff", "#ca2005", "#08558e", "#d80bbf",
    "#c25d4a", "#4313f5",
)  # fmt: skip
OTHER, IDLE, HANDOFF = "#8f979f", "#c4c9ce", "#5b6168"
WIDTH = 10.0  # inches
MOST_NAMED = len(COLOURS)
MOST_LETTERS = 110  # of a title above a picture
MOST_OP = 24  # letters of an op's name: those of the table are shorter
LEAST_LABEL = 0.04  # of a bar: less has no room for its percentage
LETTER = 0.0095  # of a bar: what a letter of an op's name takes


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


def label_text(text: str, most: int = MOST_LETTERS) -> str:
    """Return a text that came from a file as one line to draw, cut where it is too long.

    Between two dollars matplotlib reads formulas, and refuses what is none.
    """
    line = "".join(letter if letter.isprintable() else "?" for letter in text)
    if len(line) > most:
        line = f"{line[: most - 1]}…"
    return line.replace("$", r"\$")


def ink_on(colour: str) -> str:
    """Return the ink that text on a colour is read best in: black or white."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    luminance = sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def legend(target: Any, handles: Sequence[Any], names: Sequence[str], **where: Any) -> None:
    """Draw a legend in the page's ink."""
    found = target.legend(handles, names, frameon=False, labelcolor=INK, fontsize=9, **where)
    found.set_zorder(5)


def svg_text(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element for a page, ids made its own by `name`."""
    import matplotlib

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with (
        matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}),
        warnings.catch_warnings(),
    ):
        # A letter that the font lacks is drawn as a box; the page names it in letters of its own.
        warnings.filterwarnings("ignore", message="Glyph")
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
    names = [label_text(op, MOST_OP) for op in named]
    legend(figure, handles, [*names, *rest], loc="outside lower center", ncols=5)


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
        axes.set_title(label_text(label), color=INK, fontsize=10, loc="left")
        axes.set_xlim(0, step["wall"] * 1e3)
    rows[-1, 0].set_xlabel("ms of the step (time of all workers over their number)", color=INK)
    ops = [op["op"] for step in steps.values() for op in step["ops"]]
    op_legend(figure, colours, ops, gaps=True)
    return svg_text(figure, name)


def _bar(axes: Any, step: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    left, scale = 0.0, 1e3 / step["n_workers"]
    ops = sorted(step["ops"], key=lambda op: (list(colours).index(op["op"]),))
    others = sum(op["seconds"] for op in ops if colours[op["op"]] == OTHER)
    named = [op for op in ops if colours[op["op"]] != OTHER]
    parts = [(label_text(op["op"], MOST_OP), op["seconds"], colours[op["op"]]) for op in named]
    parts += [("other ops", others, OTHER), ("hand-offs", step["handoff"], HANDOFF),
              ("idle", step["idle"], IDLE)]  # fmt: skip
    whole = step["wall"] * step["n_workers"]
    for name, seconds, colour in parts:
        width, share = seconds * scale, seconds / whole
        axes.barh(0, width, left=left, color=colour, height=0.8, linewidth=0.8, edgecolor=PAPER)
        if share > LEAST_LABEL:
            has_room = share > LETTER * len(name)
            text = f"{name}\n{share:.0%}" if has_room else f"{share:.0%}"
            axes.text(left + width / 2, 0, text, ha="center", va="center", color=ink_on(colour),
                      fontsize=8.5)  # fmt: skip
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
    roof = np.array([low, peak / bandwidth, high])
    axes.plot(roof, np.minimum(roof * bandwidth, peak) / scale, color=INK, linewidth=1.4)
    for op, x, y, share in points:
        size = 4 + 12 * share**0.5
        axes.plot([x], [y / scale], "o", markersize=size, color=colours[op], alpha=0.9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    style(axes, "operations a byte (log)", f"{unit} (log)", grid="both")
    axes.set_xlim(low, high)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, 1.6 * peak / scale))
    roofs = f"roof: {bandwidth / 1e9:.4g} GB/s (slope), {peak / scale:.4g} {unit} (level)"
    axes.set_title(roofs, color=INK, fontsize=10, loc="left")
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
            f"{label_text(op, MOST_OP)}  {share:.1%}", xy=(x, y), xytext=(1.04, end),
            textcoords="axes fraction", color=INK, fontsize=8.5, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[op], "linewidth": 0.8, "alpha": 0.8,
                        "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 3},
        )  # fmt: skip

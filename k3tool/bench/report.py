"""`bench report`: one page of what was measured, with pictures; what was not is said.

It measures nothing and judges nothing: every number comes from a file that a command wrote, and
each part names its file. Definitions and machine stand beside the numbers as those files have them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3tool.atomic import atomic_path
from k3tool.bench import page
from k3tool.bench.devices import MEASURED
from k3tool.bench.gathered import Gathered, gather
from k3tool.bench.picture_numbers import (
    anatomy_numbers,
    chain_numbers,
    expert_numbers,
    measured_dial_numbers,
    predicted_dial_numbers,
    roofline_numbers,
    timeline_numbers,
)
from k3tool.bench.pictures import anatomy_picture, op_colours, require_matplotlib, roofline_picture
from k3tool.bench.pictures_of_programs import (
    chain_picture,
    dial_picture,
    experts_picture,
    timeline_picture,
)
from k3tool.errors import ArtifactError
from k3tool.runtime.expert_trace import ExpertTrace
from k3tool.tables import number_text

TITLE = "k3tool: where the time goes"
FLOORS = ("bytes", "operations", "hand-offs")
Colours = Mapping[str, str]  # of ops, the same in all pictures
Section = tuple[str, list[str]]


def write_report(paths: Sequence[Path], output: Path) -> list[str]:
    """Write the page of some files; return the headings of sections that nobody measured.

    Raises: TargetError without matplotlib; ArtifactError for a file that is nothing of that, or of
    a field that is not as its command writes it.
    """
    require_matplotlib()
    return write_page(gather(paths), output)


def write_page(found: Gathered, output: Path) -> list[str]:
    """Write the page of what was gathered; return the headings that nobody measured."""
    text, missing = report(found)
    with atomic_path(output) as temporary:
        temporary.write_text(text)
    return missing


def report(found: Gathered) -> tuple[str, list[str]]:
    """Return the page, and the headings of its sections that nobody measured."""
    colours = op_colours(shares_of_ops(found))
    sections: list[Section] = [
        ("What was measured", list(_tables(found))),
        ("Anatomy of a step", list(_anatomies(found, colours))),
        ("Roofline", list(_rooflines(found, colours))),
        ("A token by worker", list(_timelines(found, colours))),
        ("Chain depth by layer", list(_chains(found))),
        ("Experts", list(_experts(found))),
        ("Memory", list(_dials(found))),
    ]
    missing = [heading for heading, parts in sections if page.NOT_MEASURED in "".join(parts)]
    return page.page(TITLE, sections), missing


# -- numbers ---------------------------------------------------------------------------------------


def _tables(found: Gathered) -> Iterator[str]:
    some = False
    for file, one in found.measured:
        rows = one.get("measured")
        if not isinstance(rows, list) or not rows:
            continue
        some = True
        yield page.heading(f"bench {one['bench']} ({file})")
        yield page.words(*one["definition"], kind="dim")
        cells = [
            (row["name"], _number(row["median"]), _number(row["least"]), _number(row["most"]),
             str(row["n"]), row["unit"])
            for row in rows
        ]  # fmt: skip
        yield page.table(("measured", "median", "least", "most", "n", "unit"), cells)
        yield from _limits(one)
    if not some:
        yield page.not_measured("No measured values.", "k3tool bench decode CKPT --json")


def _limits(one: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for limit in one["limits"]:
        bounds = (limit.get("at_most"), "at most"), (limit.get("at_least"), "at least")
        bound = ", ".join(f"{words} {value:g}" for value, words in bounds if value is not None)
        held = "held" if limit["held"] else "MISSED"
        rows.append((limit["name"], held, bound, _number(limit["value"])))
    if rows:
        yield page.table(("limit", "verdict", "bound", "value"), rows, n_text=3)
    if one.get("not_judged"):
        yield page.words(f"limits not judged: {one['not_judged']}", kind="none")


def _number(value: float) -> str:
    return number_text(value, 4)


# -- pictures --------------------------------------------------------------------------------------


def anatomies_of(found: Gathered) -> dict[str, dict[str, Any]]:
    """Return all anatomies of measured steps, by label."""
    steps: dict[str, dict[str, Any]] = {}
    for file, one in found.of_bench("decode"):
        mode = one["settings"]["numerics"]
        steps[f"decode, one token, mode {mode} ({file})"] = one["anatomy"]
        chunk = one["settings"]["chunk"]
        label = f"prefill, a chunk of {chunk}, mode {mode} ({file})"
        steps[label] = one["prefill_anatomy"]
    for file, one in found.of_bench("prefill"):
        for each in one["chunks"]:
            mode = one["settings"]["numerics"]
            label = f"prefill, a chunk of {each['chunk']}, mode {mode} ({file})"
            steps[label] = each["anatomy"]
    return steps


def shares_of_ops(found: Gathered) -> dict[str, float]:
    """Return the sum of each op's shares in all that is drawn: the largest get colours."""
    total: dict[str, float] = {}

    def add(op: str, share: float) -> None:
        total[op] = total.get(op, 0.0) + share

    for step in anatomies_of(found).values():
        for op in step["ops"]:
            add(op["op"], op["seconds"] / step["wall"] / step["n_workers"])
    for _, trace in found.timelines:
        about = trace["otherData"]
        for event in trace["traceEvents"]:
            if event.get("ph") == "X":
                add(event["name"], event["dur"] / about["step_us"] / about["workers"])
    for _, one in found.of_bench("roofline"):
        for op in one["ops"]:
            add(op["op"], 0.01 * op["n_bytes"] / one["rank_bytes"])
    return total


def _anatomies(found: Gathered, colours: Colours) -> Iterator[str]:
    steps = anatomies_of(found)
    if not steps:
        yield page.not_measured("No step was cut.", "k3tool bench decode CKPT --json")
        return
    yield page.picture(
        anatomy_picture("anatomy", steps, colours), "stacked bars of ops, hand-offs and idle time",
        "The step of the median time of a run. Ops: time that workers spent in packets of it. "
        "Hand-offs: between two packets of a worker. Idle: before its first and after its last. "
        "Each bar has a scale of its own.",
    )  # fmt: skip
    yield anatomy_numbers(steps)


def _rooflines(found: Gathered, colours: Colours) -> Iterator[str]:
    some = False
    for index, (file, one) in enumerate(found.of_bench("decode", "prefill")):
        for part, (label, step, bandwidth) in enumerate(_measured_steps(one)):
            points, left = _points(step)
            peaks = step.get("peaks") or one["prefill_anatomy"]["peaks"]
            is_pairs = one["settings"]["numerics"] == "bf16" and peaks["pairs"]
            peak = peaks["pairs"] if is_pairs else peaks["f32"]
            if not points:
                continue
            some = True
            kind = "pairs of bf16" if is_pairs else "binary32"
            yield page.heading(f"{label} ({file})")
            yield page.picture(
                roofline_picture(f"roof{index}-{part}", points, bandwidth, peak, colours),
                f"operations a byte and GFLOP/s of every op, {label}",
                f"Roof: reading and multiply-adds on {kind}, both measured in that run. A point is "
                "an op: bytes each once, operations of products, delta rule and attention, over "
                "the time its packets took; its area and number: share of the step. What lies "
                "above the roof was read from caches, or ran while the machine was quicker. "
                f"{left}",
            )  # fmt: skip
            yield roofline_numbers(points)
    for index, (file, one) in enumerate(found.of_bench("roofline")):
        some = True
        yield from _model_roofline(f"model{index}", file, one, colours)
    if not some:
        command = "k3tool bench roofline CKPT --json, or bench decode"
        yield page.not_measured("No op's operations and bytes are known.", command)


def _measured_steps(one: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield label, anatomy and read bandwidth of the steps that a picture of its own shows."""
    bandwidth = one["read_bandwidth"]
    if one["bench"] == "decode":
        yield "decode, one token", one["anatomy"], bandwidth
        label = f"prefill, a chunk of {one['settings']['chunk']}"
        yield label, one["prefill_anatomy"], bandwidth
        return
    last = one["chunks"][-1]
    yield f"prefill, a chunk of {last['chunk']}", last["anatomy"], bandwidth


def _points(step: dict[str, Any]) -> tuple[list[tuple[str, float, float, float]], str]:
    """Return the ops that have a place below a roof, and which have none, in words."""
    workers, whole = step["n_workers"], step["wall"] * step["n_workers"]
    points, without = [], []
    for op in step["ops"]:
        if op["operations"] and op["n_bytes"] and op["seconds"]:
            rate = op["operations"] / op["seconds"] * workers
            ratio = op["operations"] / op["n_bytes"]
            points.append((op["op"], ratio, rate, op["seconds"] / whole))
        elif op["seconds"]:
            without.append(op)
    share = sum(op["seconds"] for op in without) / whole
    names = ", ".join(op["op"] for op in without)
    return points, f"No products or no bytes: {names} ({share:.1%})." if without else ""


def _model_roofline(name: str, file: str, one: dict[str, Any], colours: Colours) -> Iterator[str]:
    device, bandwidth = one["device"], one["bandwidth"]
    is_pairs = one["numerics"] == "bf16" and device["bf16_ops"]
    peak = device["bf16_ops"] if is_pairs else device["f32_ops"]
    points, times = [], {}
    for op in one["ops"]:
        floors = (op["n_bytes"] / bandwidth, op["operations"] / peak,
                  op["packets"] * device["handoff_us"] * 1e-6)  # fmt: skip
        times[op["op"]] = max(floors)
    whole = sum(times.values())
    for op in one["ops"]:
        seconds = times[op["op"]]
        if op["operations"] and op["n_bytes"] and seconds:
            ratio, rate = op["operations"] / op["n_bytes"], op["operations"] / seconds
            points.append((op["op"], ratio, rate, seconds / whole))
    floors_ms = ", ".join(f"{key} {one['floors_ms'][key]:.3f} ms" for key in FLOORS)
    where = "this machine" if device["name"] == MEASURED else device["name"]
    yield page.heading(f"counted, not measured: {where}, TP {one['tp']:g} ({file})")
    if points:
        yield page.picture(
            roofline_picture(name, points, bandwidth, peak, colours),
            f"the least time of every op on {where}",
            "Where an op would be if each of its packets took its bytes, its operations or its "
            "hand-off, whichever is more: what lies below the roof is bound by hand-offs. "
            f"Floors of the step: {floors_ms}.",
        )  # fmt: skip
        yield roofline_numbers(points)
    cells = [
        (part["module"], f"{part['rank_bytes'] / 1e9:.3f}",
         f"{part['rank_bytes'] / bandwidth * 1e3:.3f}", f"{part['operations'] / 1e9:.2f}")
        for part in one["modules"]
    ]  # fmt: skip
    yield page.table(("module", "GB of a rank", "ms to read", "GFLOP"), cells)


def _timelines(found: Gathered, colours: Colours) -> Iterator[str]:
    for index, (file, trace) in enumerate(found.timelines):
        about = trace["otherData"]
        yield page.picture(
            timeline_picture(f"time{index}", trace, colours), "packets by worker over time",
            f"{about['checkpoint']}, mode {about['numerics']}, {about['context']} positions "
            f"before it, {about['step_us'] / 1e3:.2f} ms ({file}; it opens in Perfetto too).",
        )  # fmt: skip
        yield timeline_numbers(trace)
    if not found.timelines:
        yield page.not_measured("No token was traced.", "k3tool bench decode CKPT --chrome-trace F")


def _chains(found: Gathered) -> Iterator[str]:
    for index, (file, chain) in enumerate(found.chains):
        yield page.picture(
            chain_picture(f"chain{index}", chain), "hand-offs of the longest chain by layer",
            f"{sum(link.handoffs for link in chain)} hand-offs on the longest chain of waits, "
            f"each at the layer of its packet ({file}).",
        )  # fmt: skip
        yield chain_numbers(chain)
    if not found.chains:
        yield page.not_measured("No plan was given.", "k3tool compile-plan CKPT --tp 1 -o plan.h5")


def _experts(found: Gathered) -> Iterator[str]:
    for index, (file, trace) in enumerate(found.experts):
        events = trace.events
        steps, groups = len(set(events["step"].tolist())), len(set(events["group"].tolist()))
        experts = _experts_a_layer(file, trace, groups)
        yield page.picture(
            experts_picture(f"experts{index}", events, experts),
            "how often each expert of each layer was asked for",
            f"{len(events)} requests of {steps} steps in {groups} layers of {experts} experts; "
            f"{int(events['is_hit'].sum())} were found in {trace.slots} slots ({file}).",
        )  # fmt: skip
        yield expert_numbers(events)
    if not found.experts:
        command = "k3tool run CKPT --memory SIZE --expert-trace F ..."
        yield page.not_measured("No trace of experts was given.", command)


def _experts_a_layer(file: str, trace: ExpertTrace, groups: int) -> int:
    most = int(trace.events["expert"].max()) + 1
    each = trace.n_experts // groups
    if trace.n_experts % groups or most > each:
        got = f"expert {most - 1} of {trace.n_experts} in {groups} layers"
        raise ArtifactError(file, got=got, need="experts of every layer that has any")
    return each


def _dials(found: Gathered) -> Iterator[str]:
    budgets = found.of_bench("budgets")
    predicted = [
        (float(one["memory_bytes"]), float(one["seconds"][0]), float(one["seconds"][1]))
        for _, one in found.predicted
    ]  # fmt: skip
    for index, (file, one) in enumerate(budgets):
        measured = [(b["memory_bytes"], b["step_seconds"]) for b in one["budgets"]]
        resident = one["resident"]["step_seconds"]
        yield _dial(dial_picture(f"dial{index}", measured, resident, []), f"measured ({file})")
        yield measured_dial_numbers(one["budgets"], resident)
    if predicted:
        files = ", ".join(file for file, _ in found.predicted)
        yield _dial(dial_picture("predicted", [], None, predicted), f"predicted ({files})")
        yield predicted_dial_numbers(predicted)
    if not budgets and not predicted:
        command = "k3tool bench budgets CKPT --json, or run CKPT --memory SIZE --plan-only --json"
        yield page.not_measured("No budget was tried.", command)


def _dial(svg: str, how: str) -> str:
    caption = "The same bits in less memory: what does not fit is read while the run goes on; "
    return page.picture(svg, "time by memory budget", caption + how)

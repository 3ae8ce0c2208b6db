"""What a report is drawn from: files of measurements, told apart by what is in them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tool.atomic import artifact_line
from k3tool.bench.layers import ChainLink, longest_chain
from k3tool.bench.shapes import MEASURED, PREDICTED, SHAPES, fault
from k3tool.bench.timeline import check_trace
from k3tool.checkpoint.regular_file import open_regular, read_regular
from k3tool.compiler.plan import load_plan
from k3tool.errors import ArtifactError
from k3tool.runtime.expert_trace import MAGIC, ExpertTrace, read_expert_trace

NEED = (
    "JSON of bench or of run --plan-only, a trace of bench decode --chrome-trace, a plan.h5 or "
    "a trace of run --expert-trace"
)
_HINT = "k3tool bench report --help says what a page is drawn of"

NOT_DRAWN = ("chain", "simulate", "cache")  # counts that are drawn from the files they are of


@dataclass(slots=True)
class Gathered:
    """Everything by kind, each with the name of the file it came from."""

    measured: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # of bench --json
    predicted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # of --plan-only
    timelines: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    chains: list[tuple[str, list[ChainLink]]] = field(default_factory=list)
    experts: list[tuple[str, ExpertTrace]] = field(default_factory=list)

    def of_bench(self, *names: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the measurements of some benchmarks."""
        return [(file, found) for file, found in self.measured if found["bench"] in names]


def gather(paths: Sequence[Path]) -> Gathered:
    """Read files. Raises: ArtifactError naming one that is nothing a report draws."""
    found = Gathered()
    for path in paths:
        _add(found, path)
    return found


def _add(found: Gathered, path: Path) -> None:
    head = read_head(path)
    if head.startswith(artifact_line("plan")):
        plan = load_plan(path)
        phase = "decode" if "decode" in plan.phases else next(iter(plan.phases))
        found.chains.append((path.name, longest_chain(plan, phase)))
    elif head.startswith(MAGIC):
        found.experts.append((path.name, read_expert_trace(path)))
    else:
        _add_json(found, path)


def read_head(path: Path) -> bytes:
    """Return a file's first bytes. Raises: ArtifactError where it cannot be read."""
    with open(open_regular(path, NEED, is_fetched=False), "rb") as file:  # no pipe: it would wait
        return file.read(64)


def _add_json(found: Gathered, path: Path) -> None:
    try:
        data = json.loads(read_regular(path, "a measurement", is_fetched=False))
    except (ValueError, RecursionError):
        raise ArtifactError(str(path), got="another kind of file", need=NEED, hint=_HINT) from None
    if not isinstance(data, dict):
        raise ArtifactError(str(path), got="another kind of JSON", need=NEED, hint=_HINT)
    if "traceEvents" in data:
        check_trace(path, data)
        found.timelines.append((path.name, data))
    elif data.get("bench") in NOT_DRAWN:
        need = "plan.h5, from which a page draws the chain, or a trace of run --expert-trace"
        raise ArtifactError(
            str(path),
            got=f"JSON of bench {data['bench']}",
            need=need,
            hint="name that file instead",
        )
    elif isinstance(data.get("bench"), str):
        _require(path, SHAPES.get(data["bench"], MEASURED), data)
        found.measured.append((path.name, data))
    elif isinstance(data.get("prediction"), dict):
        _require(path, PREDICTED, data)
        found.predicted.append((path.name, data))
    else:
        raise ArtifactError(str(path), got="another kind of JSON", need=NEED, hint=_HINT)


def _require(path: Path, shape: dict[str, Any], data: dict[str, Any]) -> None:
    wrong = fault(shape, data)
    if wrong is not None:
        where, need = wrong
        hint = "measure it again with --json"
        raise ArtifactError(f"{path}: {where}", got="none of that", need=need, hint=hint)

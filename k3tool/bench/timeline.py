"""One token's packets by worker, in the trace format of chrome://tracing and Perfetto.

Times in microseconds from the step's start; a slice of a packet is one complete event on its
worker's track. The file is what a report draws its timeline from. It holds no weights and no text.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.atomic import atomic_path
from k3tool.bench.decode import WARM_UP, Options, Prepared, prepare, run_traced
from k3tool.bench.layers import OUTSIDE, packet_layers
from k3tool.bench.probe import Probe
from k3tool.bench.shapes import SLICE, TIMELINE, Rows, fault
from k3tool.compiler.plan import Tensor
from k3tool.errors import ArtifactError
from k3tool.isa.table import ALL_PHASES, Op
from k3tool.runtime.trace import Trace

Array = npt.NDArray[Any]
TRACE_MARK = b'{"traceEvents"'  # how a file of ours begins
NS_A_US = 1000.0
NEED = "what bench decode --chrome-trace wrote"


def record_token(options: Options) -> dict[str, Any]:
    """Run a decode once more and return the trace of its token of the median time.

    Raises: as k3tool.bench.decode.prepare and run_traced.
    """
    threads = options.threads or Probe.default_threads()
    ready = prepare(options, threads, n_prompt=1, context=options.context)
    trace = run_traced(ready)
    steps = trace.steps[trace.steps["phase"] == ALL_PHASES.index(ready.phase)][WARM_UP:]
    order = np.argsort(steps["end_ns"] - steps["start_ns"])
    return chrome_trace(trace, int(steps["step"][order[len(order) // 2]]), ready, options)


def chrome_trace(trace: Trace, step: int, ready: Prepared, options: Options) -> dict[str, Any]:
    """Return one step as a trace: metadata of workers, then slices in order of their start."""
    (whole,) = trace.steps[trace.steps["step"] == step]
    slices = trace.slices[trace.slices["step"] == step]
    start = int(whole["start_ns"])
    n_workers = ready.launch.n_threads
    about = {
        "checkpoint": str(options.checkpoint), "numerics": options.numerics,
        "context": options.context, "phase": ready.phase, "workers": n_workers,
        "step_us": (int(whole["end_ns"]) - start) / NS_A_US,
    }  # fmt: skip
    events = [_named("process_name", 0, "rank 0")]
    events += [_named("thread_name", worker, f"worker {worker}") for worker in range(n_workers)]
    events += _events(slices, start, ready.packets, ready.tensors)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _named(kind: str, worker: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": worker, "args": {"name": name}}


def _events(
    slices: Array, start: int, packets: Array, tensors: Sequence[Tensor]
) -> list[dict[str, Any]]:
    layers = packet_layers(packets, tensors)
    events = []
    for row in slices[np.argsort(slices["start_ns"], kind="stable")]:
        packet = int(row["inst"])
        layer = layers[packet]
        events.append(
            {
                "name": Op(int(packets["op"][packet])).name, "ph": "X", "pid": 0,
                "cat": "outside" if layer == OUTSIDE else f"layer {layer}",
                "tid": int(row["worker"]), "ts": (int(row["start_ns"]) - start) / NS_A_US,
                "dur": int(row["end_ns"] - row["start_ns"]) / NS_A_US,
                "args": {"packet": packet, "workgroup": int(row["workgroup"]), "layer": layer},
            }
        )  # fmt: skip
    return events


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all. Raises: K3Error where that fails."""
    with atomic_path(path) as temporary, temporary.open("w") as file:
        json.dump(trace, file)


def check_trace(path: Path, found: object) -> None:
    """Refuse what has no slices with the fields that a picture needs. Raises: ArtifactError."""
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ArtifactError(str(path), got="no trace", need=NEED)
    slices = [event for event in events if event.get("ph") == "X"]
    if not slices or fault(Rows(SLICE), slices) is not None:
        raise ArtifactError(str(path), got="slices without what they are", need=NEED)
    wrong = fault(TIMELINE, found)
    if wrong is not None:
        raise ArtifactError(f"{path}: {wrong[0]}", got="none of that", need=wrong[1])

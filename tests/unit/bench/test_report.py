"""The report: whole, in one file, for a program to read too; nothing drawn that nobody measured."""

import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.bench.decode import Options, prepare
from k3tool.bench.devices import get_device
from k3tool.bench.frame import BenchReport, spread
from k3tool.bench.gathered import gather
from k3tool.bench.layers import OUTSIDE, longest_chain, packet_layers
from k3tool.bench.page import MARK, NOT_MEASURED
from k3tool.bench.pictures import GRID, INK, PAPER
from k3tool.bench.roofline import Asked, as_dict, roofline
from k3tool.bench.timeline import TRACE_MARK, check_trace, record_token
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan, save_plan
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config
from k3tool.runtime.expert_trace import EVENT_DTYPE, MAGIC
from stages.bench import budgets as budgets_stage
from stages.bench import decode as decode_stage
from stages.bench import prefill as prefill_stage

SECTIONS = ["What was measured", "Anatomy of a step", "Roofline", "A token by worker",
            "Chain depth by layer", "Experts", "Memory"]  # fmt: skip
NAMESPACES = re.compile(r'xmlns(?::\w+)?="http://www\.w3\.org/[^"]*"')


@pytest.fixture(scope="module")
def config() -> K3Config:
    return K3Config.from_dict(preset_config(PRESETS["tiny"]))


@pytest.fixture(scope="module")
def plan(config: K3Config) -> Plan:
    return compile_plan(config, tp=2, target="hip:gfx950", workgroups=8, chunk=4, batch=1, ctx=512)


@pytest.fixture(scope="module")
def traced(oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One real token: the program that ran, and its trace."""
    cache = tmp_path_factory.mktemp("cache")
    options = Options(oracle("tiny_tp8"), context=20, tokens=3, threads=2, cache=cache)
    return prepare(options, 2, n_prompt=1, context=20), record_token(options)


def step(*ops: tuple[str, float, int, int]) -> dict[str, Any]:
    """An anatomy of a second on two workers; what ops leave is hand-offs."""
    named = [
        {"op": op, "packets": 1, "n_bytes": n_bytes, "seconds": seconds, "operations": work,
         "pairs": 0}
        for op, seconds, n_bytes, work in ops
    ]  # fmt: skip
    rest = 2.0 - sum(op["seconds"] for op in named)
    return {"ops": named, "handoff": rest, "idle": 0.0, "wall": 1.0, "n_workers": 2, "n_bytes": 9}


def measured_decode() -> dict[str, Any]:
    token = step(("GEMV_BF16", 1.0, 10**9, 10**9), ("ADD", 0.2, 0, 0), ("A<B&C", 0.3, 10**8, 10))
    chunk = step(("GEMV_BF16", 1.5, 10**9, 64 * 10**9)) | {"peaks": {"f32": 1e11, "pairs": None}}
    report = BenchReport("decode", ["defined <here> & now"], [("decode", spread([1.0]), "GB/s")])
    return report.as_dict() | {
        "settings": {"numerics": "f32", "chunk": 64}, "read_bandwidth": 5e10, "anatomy": token,
        "prefill_anatomy": chunk,
    }  # fmt: skip


def write_experts(path: Path) -> None:
    sizes = {"slots": 4, "expert_bytes": 100, "n_experts": 16, "streamed_bytes": 0}
    head = json.dumps(sizes).encode()
    events = np.zeros(6, EVENT_DTYPE)
    events["group"], events["expert"] = [0, 0, 1, 1, 0, 1], [1, 7, 2, 3, 1, 2]
    path.write_bytes(MAGIC + len(head).to_bytes(8, "little") + head + events.tobytes())


@pytest.fixture
def files(tmp_path: Path, plan: Plan, config: K3Config, traced: Any) -> list[Path]:
    """One of everything."""
    names = ("decode", "roof", "trace", "dial", "budgets", "plan.h5", "experts")
    decode, roof, trace, dial, budgets, program, experts = (tmp_path / name for name in names)
    decode.write_text(json.dumps(measured_decode()))
    roof.write_text(json.dumps(as_dict(roofline(config, Asked(2), get_device("MI355X")))))
    trace.write_text(json.dumps(traced[1]))
    dial.write_text(json.dumps({"memory_bytes": 10**9, "prediction": {}, "seconds": [0.1, 0.2]}))
    runs = [{"memory_bytes": size, "step_seconds": 3e9 / size} for size in (10**9, 2 * 10**9)]
    resident = {"peak_bytes": 3 * 10**9, "step_seconds": 1.0}
    budgets.write_text(
        json.dumps(
            {
                "bench": "budgets",
                "budgets": runs,
                "resident": resident,
                "definition": [],
                "measured": [],
                "limits": [],
            }
        )
    )
    save_plan(plan, program)
    write_experts(experts)
    return [decode, roof, trace, dial, budgets, program, experts]


def parse(path: Path) -> ET.Element:
    text = path.read_text()
    assert text.encode().startswith(MARK)
    outside = NAMESPACES.sub("", text)
    assert not re.search(r"(https?:)?//[a-z]", outside), "it asks for nothing from elsewhere"
    assert not re.search(r"<(script|link|iframe|img)\b|@import", outside)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids)), "pictures share no ids"
    for name in re.findall(r'(?:href="#|url\(#)([^")]*)', text):
        assert name in ids, name
    return ET.fromstring(text)


def headings(page: ET.Element) -> list[str]:
    return [node.text or "" for node in page.iter("h2")]


def pictures(page: ET.Element) -> int:
    return len(list(page.iter("{http://www.w3.org/2000/svg}svg")))


def test_everything_is_drawn(files: list[Path], tmp_path: Path, k3tool: Callable) -> None:
    out = tmp_path / "report.html"
    done = k3tool("bench", "report", *files, "-o", out)
    assert done.code == 0, done.err
    assert NOT_MEASURED not in done.out
    page = parse(out)
    assert headings(page) == SECTIONS
    assert pictures(page) == 1 + 3 + 1 + 1 + 1 + 2
    for figure in page.iter("figure"):
        (svg,) = figure.iter("{http://www.w3.org/2000/svg}svg")
        assert svg.get("role") == "img"
        assert svg.get("aria-label"), "said for who does not see it"
        assert len(figure.findtext("figcaption", "")) > 20
    heads = [cell for cell in page.iter("th") if cell.get("scope") != "col"]
    assert not heads, "a reader of a table's cell says its column"
    text = out.read_text()
    assert NOT_MEASURED not in text
    assert "defined &lt;here&gt; &amp; now" in text
    assert "No products or no bytes: ADD (10.0%)" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    for ink in (INK, GRID, PAPER):
        assert ink not in text, "inks are the page's"
    assert text.count("<details>") == pictures(page), "each picture's numbers are a table too"
    assert "<td>1.5e+09</td>" not in text
    again = tmp_path / "again.html"
    assert k3tool("bench", "report", *files, "-o", again).code == 0
    assert again.read_text() == text, "same files, same page"
    assert k3tool("bench", "report", *files, "-o", out).code == 0, "a page of ours may be replaced"


def test_what_nobody_measured_is_said(files: list[Path], tmp_path: Path, k3tool: Callable) -> None:
    out = tmp_path / "report.html"
    done = k3tool("bench", "report", files[5], "-o", out)
    assert done.code == 0
    page = parse(out)
    assert headings(page) == SECTIONS
    assert pictures(page) == 1
    missing = [name for name in SECTIONS if name != "Chain depth by layer"]
    assert out.read_text().count(f">{NOT_MEASURED}<") == len(missing)
    assert [line for line in done.out.splitlines() if line.startswith(NOT_MEASURED)] == [
        f"{NOT_MEASURED}: {name}" for name in missing
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "no JSON",
        '{"traceEvents": []}',
        '{"bench": 3}',
        "\x89HDF",
        '{"traceEvents": [3]}',
        '{"bench": "chain"}',
    ],
)
def test_what_is_nothing_to_draw_is_refused(tmp_path: Path, k3tool: Callable, text: str) -> None:
    path, out = tmp_path / "x", tmp_path / "report.html"
    path.write_text(text)
    done = k3tool("bench", "report", path, "-o", out)
    assert done.code == 3
    assert str(path) in done.err
    assert not out.exists()
    os.mkfifo(tmp_path / "pipe")  # opened, it would wait for ever
    for other in ("none", "pipe"):
        assert k3tool("bench", "report", tmp_path / other, "-o", out).code == 3
    assert k3tool("bench", "report", "-o", out).code == 2


def test_a_measurement_without_its_fields_is_refused(tmp_path: Path, k3tool: Callable) -> None:
    whole = measured_decode()
    for name in ("anatomy", "prefill_anatomy", "read_bandwidth", "settings", "definition"):
        path = tmp_path / f"no-{name}"
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        done = k3tool("bench", "report", path, "-o", tmp_path / "report.html")
        assert done.code == 3, name
        assert name in done.err


def test_other_files_are_not_written_over(files: list[Path], tmp_path: Path, k3tool: Any) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<html>mine</html>")
    for out in (mine, files[0]):
        assert k3tool("bench", "report", files[0], "-o", out).code == 2
    assert mine.read_text() == "<html>mine</html>"


def test_without_matplotlib_it_says_how_to_get_it(
    files: list[Path], tmp_path: Path, k3tool: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as an import finds what is not there
    done = k3tool("bench", "report", files[0], "-o", tmp_path / "report.html")
    assert done.code == 5
    assert "pip install" in done.err


def test_other_commands_write_a_page_too(
    tmp_path: Path, k3tool: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_of = measured_decode()["prefill_anatomy"]
    facts = {"chunks": [{"chunk": 16, "anatomy": step_of}], "read_bandwidth": 5e10}
    report = BenchReport("prefill", ["defined"], [("x", spread([1.0]), "GB/s")], (), facts)
    monkeypatch.setattr(prefill_stage, "run", lambda options, chunks: report)
    page = tmp_path / "report.html"
    assert k3tool("bench", "prefill", tmp_path, "--report", page).code == 0
    assert pictures(parse(page)) == 1 + 1
    assert k3tool("bench", "prefill", tmp_path, "--report", tmp_path / "no" / "x").code == 2
    found = {"budgets": [{"memory_bytes": 10**9, "step_seconds": 2.0}],
             "resident": {"step_seconds": 1.0}}  # fmt: skip
    dial = BenchReport("budgets", ["defined"], [("x", spread([1.0]), "share")], (), found)
    monkeypatch.setattr(budgets_stage, "run", lambda options: dial)
    assert k3tool("bench", "budgets", tmp_path, "--report", page).code == 0
    assert pictures(parse(page)) == 1


# -- the trace of a token --------------------------------------------------------------------------


def test_a_trace_has_the_schema_that_viewers_read(traced: Any) -> None:
    """Complete events in us on named tracks, each worker's apart and in the step."""
    ready, trace = traced
    events = trace["traceEvents"]
    names = {(e["name"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[("process_name", 0)] == "rank 0"
    assert {names[("thread_name", worker)] for worker in (0, 1)} == {"worker 0", "worker 1"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) + len(names) == len(events)
    packets = {e["args"]["packet"] for e in slices}
    assert packets == set(range(len(ready.packets))), "every packet ran"
    length = trace["otherData"]["step_us"]
    for worker in (0, 1):
        own = [e for e in slices if e["tid"] == worker]
        ends = [e["ts"] + e["dur"] for e in own]
        assert min((e["ts"] for e in own), default=0) >= 0
        assert max(ends, default=0) <= length + 1e-6
        assert all(end <= e["ts"] + 1e-6 for end, e in zip(ends, own[1:], strict=False))
    assert json.dumps(trace).encode().startswith(TRACE_MARK)
    check_trace(Path("made"), json.loads(json.dumps(trace)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("checkpoint", None), ("context", "x"), ("workers", 0), ("step_us", float("nan")),
     ("step_us", 0), ("workers", 10**400)],
    ids=["absent", "text", "nobody", "nan", "no time", "beyond all numbers"],
)  # fmt: skip
def test_a_trace_without_its_sizes_is_refused(
    traced: Any, tmp_path: Path, k3tool: Callable, field: str, value: Any
) -> None:
    damaged = json.loads(json.dumps(traced[1]))
    damaged["otherData"][field] = value
    path = tmp_path / "token.json"
    path.write_text(json.dumps(damaged))
    done = k3tool("bench", "report", path, "-o", tmp_path / "report.html")
    assert done.code == 3
    assert f"otherData.{field}" in done.err


@pytest.mark.parametrize("field", ["ts", "dur", "tid", "name", "args"])
def test_a_trace_without_a_field_is_refused(traced: Any, field: str) -> None:
    damaged = json.loads(json.dumps(traced[1]))
    del next(e for e in damaged["traceEvents"] if e["ph"] == "X")[field]
    with pytest.raises(ArtifactError, match="slices without what they are"):
        check_trace(Path("made"), damaged)


def test_the_command_writes_trace_and_page(
    tmp_path: Path, k3tool: Callable, monkeypatch: pytest.MonkeyPatch, traced: Any
) -> None:
    """The measurement itself is tried elsewhere: made up here, a real trace beside it."""
    said = measured_decode()
    facts = {key: said[key] for key in ("read_bandwidth", "anatomy", "prefill_anatomy")}
    report = BenchReport("decode", ["defined"], [("decode", spread([1.0]), "GB/s")], (), facts)
    monkeypatch.setattr(decode_stage, "run", lambda options: report)
    monkeypatch.setattr("k3tool.bench.timeline.record_token", lambda options: traced[1])
    trace, page = tmp_path / "token.json", tmp_path / "report.html"
    asked = ("bench", "decode", tmp_path, "--chrome-trace", trace, "--report", page)
    assert k3tool(*asked).code == 0
    assert gather([trace]).timelines[0][1] == json.loads(json.dumps(traced[1]))
    assert pictures(parse(page)) == 1 + 2 + 1
    assert k3tool(*asked).code == 0, "its own files may be replaced"
    assert k3tool("bench", "decode", tmp_path, "--report", tmp_path / "no" / "x").code == 2


# -- the chain -------------------------------------------------------------------------------------


def test_the_chain_is_the_critical_path(plan: Plan, config: K3Config) -> None:
    for name, phase in plan.phases.items():
        chain = longest_chain(plan, name)
        assert sum(link.handoffs for link in chain) == phase.critical_path
        layers = [link.layer for link in chain if link.layer != OUTSIDE]
        assert set(layers) == set(config.layers)
        assert layers == sorted(layers), "layers come one after the other"
        assert chain[-1].op == "ARGMAX_FOLD"
        assert chain[-1].layer == OUTSIDE


def test_a_packet_is_of_its_weights_layer(plan: Plan) -> None:
    phase = plan.phases["decode"]
    layers = packet_layers(phase.packets, plan.tensors)
    assert layers[0] == OUTSIDE
    for index, layer in enumerate(layers):
        handles = phase.packets["handles"][index].tolist()
        weights = [plan.tensors[h] for h in handles if h < len(plan.tensors)]
        named = [t.leaf for t in weights if t.is_weight and t.leaf.startswith("layers.")]
        if named:
            assert any(leaf.startswith(f"layers.{layer}.") for leaf in named)

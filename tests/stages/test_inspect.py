"""inspect's options, report and bench from the command line."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.artifact import open_artifact
from k3tool.checkpoint.index import INDEX_NAME, read_index
from k3tool.errors import ArtifactError
from k3tool.tables import bytes_text

Oracle = Callable[[str], Path]
REPO = Path(__file__).resolve().parents[2]
HEAD = "language_model.lm_head.weight"
SCALE = "language_model.model.layers.2.block_sparse_moe.experts.4.w2.weight_scale"


def test_report_has_what_a_person_needs(k3tool: Callable, oracle: Oracle) -> None:
    out = k3tool("inspect", oracle("tiny_tp8")).out
    lines = out.splitlines()
    assert len(lines) < 40
    assert "11 files by index, 712 tensors (BF16 " in lines[0]
    index = json.loads((oracle("tiny_tp8") / INDEX_NAME).read_text())
    total = index["metadata"]["total_size"]
    assert lines[0].endswith(f", {bytes_text(total)}")
    report = json.loads(k3tool("inspect", oracle("tiny_tp8"), "--json").out)
    assert report["total_bytes"] == total == report["bytes"] + report["vision"]["n_bytes"]
    text, vision = report["bytes"], report["vision"]["n_bytes"]
    assert vision > 0
    line = f"all tensors: 712 of {total:,} bytes; text model {text:,} bytes, vision {vision:,}"
    assert line in lines
    assert any(line.startswith("experts ") and "504/504" in line for line in lines)
    assert any(line.startswith("a token reads ") for line in lines)
    assert any("TP 8 " in line and "on every rank" in line for line in lines)
    assert any(line.startswith("stored and never read: layers.0.self_attention") for line in lines)
    assert any(line.startswith("vision ") and line.endswith("known, not read") for line in lines)


def test_report_says_that_headers_rule(k3tool: Callable, writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    assert "no index file" not in k3tool("inspect", folder).out  # the control
    (folder / INDEX_NAME).unlink()
    for option in ((), ("--markdown",)):
        outcome = k3tool("inspect", folder, *option)
        assert outcome.code == 0
        assert "headers (no index file)" in outcome.out


def test_some_layers_module_by_module(k3tool: Callable, writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    out = k3tool("inspect", folder, "--layers", "1-2,5").out
    rows = [line.split() for line in out.splitlines() if line[:6].strip().isdecimal()]
    assert {row[0] for row in rows} == {"1", "2", "5"}
    assert len(rows) == 3 * 6
    (folder / "model-00003-of-000011.safetensors").unlink()  # layer 2
    (folder / "model-00005-of-000011.safetensors").unlink()  # layer 4
    outcome = k3tool("inspect", folder, "--layers", "4", "-v")
    assert outcome.code == 3
    assert "layers.4." in outcome.out
    assert "layers.2." not in outcome.out
    report = json.loads(k3tool("inspect", folder, "--layers", "4", "--json").out)
    assert {row["layer"] for row in report["modules"]} == {4}


@pytest.mark.parametrize("layers", ["8", "3-1", "x", "1,,2"])
def test_layers_that_are_none(k3tool: Callable, oracle: Oracle, layers: str) -> None:
    outcome = k3tool("inspect", oracle("tiny_tp8"), "--layers", layers)
    assert outcome.code == 2
    assert outcome.out == ""


@pytest.mark.parametrize("name", [SCALE, SCALE.removeprefix("language_model.")])
def test_one_tensor(k3tool: Callable, oracle: Oracle, name: str) -> None:
    facts = json.loads(k3tool("inspect", oracle("tiny_tp8"), "--tensor", name, "--json").out)
    assert facts["name"] == SCALE
    assert facts["file"] == "model-00003-of-000011.safetensors"
    assert facts["read by"] == "MOE_DOWN_MXFP4"
    assert facts["ranks"]["TP 4"] == "columns [0, 2) [2, 4) [4, 6) [6, 8)"
    text = k3tool("inspect", oracle("tiny_tp8"), "--tensor", name).out
    assert f"file      {facts['file']}" in text


def test_a_tensor_that_is_not_there(k3tool: Callable, oracle: Oracle) -> None:
    outcome = k3tool("inspect", oracle("tiny_tp8"), "--tensor", SCALE.replace("scale", "scales"))
    assert outcome.code == 3
    assert f"hint: near it: {SCALE}" in outcome.err


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lm_head", "lm_head.weight"),  # what holds it all
        ("experts.3.w2", "layers.1.block_sparse_moe.experts.3.w2.weight_packed"),  # and the numbers
        ("layers.2.self_attn.q_porj.weight", "layers.2.self_attn.q_proj.weight"),
        ("foo", "names are such as language_model.lm_head.weight"),
    ],
)
def test_an_absent_tensor_has_names_near_it(
    k3tool: Callable, oracle: Oracle, name: str, near: str
) -> None:
    assert near in k3tool("inspect", oracle("tiny_tp8"), "--tensor", name).err.splitlines()[1]


@pytest.mark.parametrize("more", [("--values",), ("--layers", "1"), ("--markdown",)])
def test_one_tensor_takes_no_options_of_the_report(
    k3tool: Callable, oracle: Oracle, more: tuple[str, ...]
) -> None:
    outcome = k3tool("inspect", oracle("tiny_tp8"), "--tensor", SCALE, *more)
    assert outcome.code == 2
    assert f"{more[0]}: got also --tensor" in outcome.err


def test_one_form_of_report_at_a_time(k3tool: Callable, oracle: Oracle) -> None:
    outcome = k3tool("inspect", oracle("tiny_tp8"), "--json", "--markdown")
    assert outcome.code == 2
    assert outcome.out == ""


def test_markdown(k3tool: Callable, oracle: Oracle) -> None:
    out = k3tool("inspect", oracle("tiny_tp8"), "--markdown").out
    assert "## Layers\n\n| layers | how many |" in out
    assert "\n## Verdict\n\n* whole: 710 tensors" in out


def test_names_are_whole_in_a_pipe_and_cut_on_a_terminal(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    (folder / "model-00003-of-000011.safetensors").unlink()
    command = [sys.executable, "-m", "stages.cli", "inspect", str(folder)]
    piped = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60"}
    child = subprocess.Popen(command, cwd=REPO, stdout=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 65536):
            shown += part
    except OSError:
        pass  # the other end closed
    os.close(leader)
    assert child.wait() == piped.returncode == 3
    table = [line for line in shown.decode().splitlines() if line.startswith("kda moe")]
    assert table
    assert all(len(line) <= 60 for line in table)
    assert "…" not in piped.stdout


# -- the index ---------------------------------------------------------------------------------


def test_an_index_that_names_a_tensor_twice(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    text = (folder / INDEX_NAME).read_text()
    again = f'"weight_map": {{"{HEAD}": "model-00002-of-000011.safetensors",'
    (folder / INDEX_NAME).write_text(text.replace('"weight_map": {', again, 1))
    with pytest.raises(ArtifactError, match=f"{HEAD} twice"):
        read_index(folder)


def test_an_index_with_more_in_it_is_read(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    index = json.loads((folder / INDEX_NAME).read_text())
    index["metadata"] |= {"format": "pt", "list": ["a", {"b": "c"}, 1], "quote": 'a "b" \\'}
    index["more"] = "x"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert len(read_index(folder).weight_map) == 712


def test_values_stand_in_report_markdown_and_artifact(
    k3tool: Callable, oracle: Oracle, tmp_path: Path
) -> None:
    """The same counts everywhere; without --values the artifact has none."""
    output = tmp_path / "coverage.h5"
    folder = oracle("tiny_tp8")
    outcome = k3tool("inspect", folder, "--values", "--json", "-o", output)
    assert outcome.code == 0
    places = json.loads(outcome.out)["values"]["places"]
    experts = [place for place in places if place["module"] == "experts"]
    assert experts
    assert all(place["product_absmax"] > 0 and place["codes"] for place in experts)
    with open_artifact(output, "coverage", 1) as artifact:
        assert list(artifact.read("values/bytes")) == [place["bytes"] for place in places]
        rows = [at for at, place in enumerate(places) if place["codes"]]
        assert len(rows) == len(experts)
        for at in rows:
            codes = artifact.read("values/codes")[at].tolist()
            assert codes == [places[at]["codes"]["low"], places[at]["codes"]["high"]]
            assert artifact.read("values/product_absmax")[at] == places[at]["product_absmax"]
            assert sum(map(sum, codes)) > 0
    text = k3tool("inspect", folder, "--values").out
    assert "codes, 1/1000" in text
    assert "## Codes" in k3tool("inspect", folder, "--values", "--markdown").out
    assert k3tool("inspect", folder, "-o", output).code == 0
    with open_artifact(output, "coverage", 1) as artifact, pytest.raises(ArtifactError):
        artifact.read("values/bytes")


# -- bench -------------------------------------------------------------------------------------


def test_bench_inspect_of_a_small_checkpoint(k3tool: Callable, oracle: Oracle) -> None:
    outcome = k3tool("bench", "inspect", oracle("tiny_tp8"), "--repeats", 1, "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 0
    names = [row["name"] for row in report["measured"]]
    assert "inspect / stock process" in names
    assert all(row["least"] <= row["median"] <= row["most"] for row in report["measured"])
    assert {row["n"] for row in report["measured"]} == {1}, "the run to warm up is not kept"
    assert {limit["name"] for limit in report["limits"]} == {
        "inspect / stock listing alone", "peak memory of inspect, MB",
    }  # fmt: skip


def test_bench_values_of_a_small_checkpoint(
    k3tool: Callable, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = k3tool("bench", "inspect", oracle("tiny_tp8"), "--values", "--repeats", 1, "--json")
    assert outcome.code == 0
    report = json.loads(outcome.out)
    assert report["limits"] == []
    assert "bytes are too few to judge (need at least 500000000)" in report["not_judged"]
    monkeypatch.setattr("k3tool.bench.inspect_values.LEAST_BYTES", 1_000_000)
    arguments = ("bench", "inspect", oracle("tiny_tp8"), "--values", "--repeats", 1, "--json")
    report = json.loads(k3tool(*arguments).out)
    assert (report["limits"][0]["name"], report["not_judged"]) == ("scan / read", "")
    assert report["measured"][0]["name"] == "read(2)", "the same name whichever block was quickest"
    for option in (("--cold",), ("--jobs", 2)):  # of the look at every byte
        assert k3tool("bench", "inspect", oracle("tiny_tp8"), *option).code == 2


def test_strict_bench_fails_on_a_missed_limit(
    k3tool: Callable, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3tool.bench.inspect_values.LEAST_SHARE", 1e9)
    arguments = ("bench", "inspect", oracle("tiny_tp8"), "--values", "--repeats", 1)
    small = k3tool(*arguments, "--strict")
    assert (small.code, "too few to judge" in small.err, "MISSED" in small.out) == (4, True, False)
    monkeypatch.setattr("k3tool.bench.inspect_values.LEAST_BYTES", 1)
    assert k3tool(*arguments).code == 0
    outcome = k3tool(*arguments, "--strict")
    assert outcome.code == 4
    assert "at least 1e+09" in outcome.err

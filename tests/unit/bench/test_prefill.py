"""bench prefill: every chunk against decode and both limits of the machine."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.bench import prefill
from k3tool.bench.decode import Options
from k3tool.bench.prefill import bench_prefill
from k3tool.bench.probe import Probe
from k3tool.errors import UsageError
from k3tool.runtime.interpreter import executable_path


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a machine's limits in little memory: its numbers are not what is tried."""
    monkeypatch.setattr(prefill, "Probe", lambda threads: Probe(threads, 64 << 20))


@pytest.mark.usefixtures("small_probe")
def test_every_chunk_is_measured(
    oracle: Callable[[str], Path], tmp_path: Path, k3tool: Callable
) -> None:
    options = Options(oracle("tiny_tp8"), tokens=2, repeats=4, threads=1, cache=tmp_path)
    report = bench_prefill(options, (4, 8))
    assert [one["chunk"] for one in report.facts["chunks"]] == [4, 8]
    for one in report.facts["chunks"]:
        anatomy = one["anatomy"]
        seconds = sum(op["seconds"] for op in anatomy["ops"])
        parts = seconds + anatomy["handoff"] + anatomy["idle"]
        assert parts == pytest.approx(anatomy["wall"] * anatomy["n_workers"])
        assert one["peak_share"] > 0
        assert one["read_share"] > 0
        rate, decode = (
            next(s for name, s, _ in report.rows if name == f"chunk {one['chunk']}: {what}")
            for what in ("prefill", "decode beside it")
        )
        ratio = one["prefill_over_decode"]  # of runs beside each other, not of the medians
        assert rate.least / decode.most <= ratio <= rate.most / decode.least
    assert {s.n for name, s, _ in report.rows if name.startswith("chunk")} == {4}, "as asked for"
    assert {s.n for name, s, _ in report.rows if not name.startswith("chunk")} == {2 * 4}
    assert report.limits == [], "the limit is of the default chunk"
    found = k3tool("bench", "prefill", options.checkpoint, "--chunk", "4", "--repeats", "1",
                   "--threads", "1", "--cache", tmp_path, "--json")  # fmt: skip
    assert json.loads(found.out)["settings"]["chunks"] == [4]
    other = tmp_path / "other"  # the same interpreter stands for another build's
    shutil.copy2(executable_path(), other)
    both = k3tool("bench", "prefill", options.checkpoint, "--chunk", "4", "--repeats", "1",
                  "--threads", "1", "--cache", tmp_path, "--versus", other, "--json")  # fmt: skip
    rows = {row["name"]: row["median"] for row in json.loads(both.out)["measured"]}
    times = [rows[f"chunk 4, {which}"] for which in ("the other interpreter", "this one in turn")]
    assert rows["chunk 4, this / the other interpreter"] == pytest.approx(times[1] / times[0])
    other.write_text("no interpreter")
    assert k3tool("bench", "prefill", options.checkpoint, "--versus", other).code == 5
    strict = k3tool("bench", "prefill", options.checkpoint, "--chunk", "4", "--repeats", "1",
                    "--threads", "1", "--cache", tmp_path, "--strict")  # fmt: skip
    assert strict.code == 4, "nothing to judge is not all held"
    assert "no limit with these settings" in strict.err


def test_refusals(oracle: Callable[[str], Path], k3tool: Callable) -> None:
    with pytest.raises(UsageError, match="--numerics"):
        bench_prefill(Options(oracle("tiny_tp8"), "fp8"))
    assert k3tool("bench", "prefill", oracle("tiny_tp8"), "--chunk", "100000").code == 2
    twice = k3tool("bench", "prefill", oracle("tiny_tp8"), "--chunk", "16", "--chunk", "16")
    assert twice.code == 2
    assert "16 more than once" in twice.err

"""Counts come out as Prometheus reads them."""

from pathlib import Path

import pytest

from k3tool.serve.metrics import SERIES, Metrics


def test_text() -> None:
    metrics = Metrics()
    metrics.add("k3tool_requests_total", path='/"\n', status="200")
    metrics.add("k3tool_requests_total", path='/"\n', status="200")
    metrics.add("k3tool_generated_tokens_total", 12_345_678)
    metrics.gauge("k3tool_slots", lambda: 4)
    lines = metrics.text().splitlines()
    assert 'k3tool_requests_total{path="/\\"\\n",status="200"} 2' in lines
    assert "k3tool_generated_tokens_total 12345678" in lines
    assert "k3tool_slots 4" in lines
    assert sum(line.startswith("# TYPE") for line in lines) == len(SERIES)
    assert metrics.value("k3tool_requests_total", path='/"\n', status="200") == 2
    assert metrics.value("k3tool_requests_total", path="/", status="200") == 0


def test_an_unknown_series() -> None:
    with pytest.raises(KeyError):
        Metrics().add("k3tool_slots")
    with pytest.raises(KeyError):
        Metrics().gauge("other", lambda: 1)


def test_the_page_has_every_series() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `k3tool_")]
    assert rows == [f"| `{name}` | {kind} | {text} |" for name, (kind, text) in SERIES.items()]

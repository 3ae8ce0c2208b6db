"""A device's rate is measured on data: a hole is read from no device."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.bench import io as bench_io
from k3tool.bench.io import storage_rate
from k3tool.checkpoint.stand_in import has_hole


def test_files_with_holes_have_no_rate(tmp_path: Path) -> None:
    sparse = tmp_path / "a.safetensors"
    with sparse.open("wb") as file:
        file.write(b"header")
        file.truncate(64 << 20)
    assert has_hole(sparse)
    assert storage_rate(tmp_path, 2) is None
    assert storage_rate(tmp_path / "nothing here", 2) is None
    whole = tmp_path / "b.safetensors"
    whole.write_bytes(os.urandom(3 << 20))
    assert not has_hole(whole)
    rate = storage_rate(tmp_path, 2)
    assert rate is not None
    assert rate > 0


def test_the_first_pass_is_not_kept(
    tmp_path: Path, k3tool: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(os.urandom(1 << 20))
    ran: list[bench_io.IoRate] = []

    def counted(*what: Any) -> bench_io.IoRate:
        ran.append(bench_io.IoRate(100, 1.0 if ran else 50.0, True))
        return ran[-1]

    monkeypatch.setattr(bench_io, "measure_io", counted)
    found = k3tool("bench", "io", file, "--repeats", "2", "--json")
    (row,) = json.loads(found.out)["measured"]
    assert len(ran) == 3
    assert (row["n"], row["least"], row["most"]) == (2, 1e-7, 1e-7)

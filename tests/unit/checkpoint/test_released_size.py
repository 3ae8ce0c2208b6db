"""inspect on a checkpoint as large as the release: real headers and index, sparse data."""

import gzip
import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from k3tool.model.config import K3Config
from k3tool.model.vision import expected_vision
from k3tool.model.weights import expected_tensors, n_bytes

REPO = Path(__file__).resolve().parents[3]
DATA = REPO / "tests" / "data"
NAME = "kimi-k3-model.safetensors.index.json.gz"


def write_sparse_release(folder: Path) -> None:
    """Write config, index and 96 files that have headers and length, and no data blocks."""
    config = K3Config.load(DATA / "kimi-k3-config.json")
    (folder / "config.json").write_bytes((DATA / "kimi-k3-config.json").read_bytes())
    raw = gzip.decompress((DATA / NAME).read_bytes())
    (folder / "model.safetensors.index.json").write_bytes(raw)
    weight_map = json.loads(raw)["weight_map"]
    headers: dict[str, dict[str, object]] = defaultdict(dict)
    offsets: dict[str, int] = defaultdict(int)
    for specs in (expected_tensors(config), expected_vision(config)):
        for spec in specs:
            file = weight_map[spec.name]
            end = offsets[file] + n_bytes(spec.shape, spec.dtype)
            headers[file][spec.name] = {
                "dtype": spec.dtype,
                "shape": spec.shape,
                "data_offsets": [offsets[file], end],
            }
            offsets[file] = end
    for file, header in headers.items():
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + offsets[file])


@pytest.mark.slow
def test_released_size_takes_seconds(tmp_path: Path) -> None:
    write_sparse_release(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 1_560_860_324_864
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "stages.cli", "inspect", str(tmp_path), "--json"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    elapsed_s = time.perf_counter() - start
    report = json.loads(done.stdout)
    assert report["whole"]
    assert report["tensors"] == {"expected": 497_052, "indexed": 497_220}
    assert report["vision"]["expected"] == report["vision"]["found"] == 168
    assert report["bytes"] + report["vision"]["n_bytes"] == 1_560_860_324_864
    assert elapsed_s < 60  # about 8 s on two idle cores
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2_000_000  # KiB

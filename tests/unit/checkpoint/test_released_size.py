"""The stand-in of the released checkpoint, and inspect on it: counts, content, a child's memory.

How fast that is `k3tool bench inspect` measures; nothing here is timed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from k3tool.bench.frame import run_child
from k3tool.checkpoint.headers import DTYPES, read_header
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.released_layout import CONFIG_FILE, RELEASED_DATA, _fill, write_released
from k3tool.checkpoint.value_targets import Targets
from k3tool.checkpoint.values import ValueScan
from k3tool.errors import ArtifactError, UsageError
from k3tool.model.config import K3Config
from k3tool.model.weight_slices import n_bytes
from k3tool.model.weights import find_spec

pytestmark = pytest.mark.slow
TOTAL_BYTES = 1_560_860_324_864


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big") / "released"
    info = write_released(folder, RELEASED_DATA)
    assert (info.n_tensors, info.n_files, info.total_bytes) == (497_220, 96, TOTAL_BYTES)
    return folder


def inspect(folder: Path, output: Path) -> tuple[int, int, dict[str, Any]]:
    """Return exit code, peak memory in bytes and report of a process of its own."""
    command = [sys.executable, "-m", "stages.cli", "inspect", str(folder), "--json"]
    with output.open("w+b") as file:
        child = run_child(command, file.fileno())
    return child.exit_code, child.peak_bytes, json.loads(output.read_text())


def test_files_have_the_published_sizes(released: Path) -> None:
    """The sum, the first and the largest were published, and depend on every byte of a header."""
    sizes = [path.stat().st_size for path in sorted(released.glob("*.safetensors"))]
    assert len(sizes) == 96
    assert sum(sizes) == 1_560_936_091_448
    assert sizes[0] == 2_341_216_112
    assert max(sizes) == 16_990_916_912
    assert (released / "model.safetensors.index.json").stat().st_size == 59_764_096
    on_disk = sum(path.stat().st_blocks * 512 for path in released.iterdir())
    assert on_disk < 300_000_000


def test_stock_library_reads_it_and_experts_lie_together(released: Path) -> None:
    path = released / "model-00013-of-000096.safetensors"
    with safe_open(path, "numpy") as file:
        assert len(file.keys()) == 5404
    infos = sorted(read_header(path).tensors.values(), key=lambda info: info.offset)
    names = [info.name.split(".block_sparse_moe.experts.") for info in infos]
    experts = [parts[1].split(".")[0] for parts in names if len(parts) == 2]
    runs = [number for i, number in enumerate(experts) if i == 0 or number != experts[i - 1]]
    assert len(runs) == len(set(runs)) == 896  # the six of each back to back
    assert len(experts) == 896 * 6
    assert runs != sorted(runs, key=int)


def test_inspect_finds_every_total(released: Path, tmp_path: Path) -> None:
    code, peak_bytes, report = inspect(released, tmp_path / "report.json")
    assert code == 0
    assert report["whole"]
    assert report["tensors"] == {"expected": 497_052, "indexed": 497_220}
    assert report["dtypes"] == {"BF16": 2_122, "F32": 506, "U8": 494_592}
    assert report["experts"] == 82_432
    assert report["vision"]["expected"] == report["vision"]["found"] == 168
    assert report["bytes"] + report["vision"]["n_bytes"] == TOTAL_BYTES
    assert sum(row["n_bytes"] for row in report["modules"]) == report["bytes"]
    assert len({row["layer"] for row in report["modules"]}) == 94
    assert peak_bytes < 500_000_000


def test_the_order_of_experts_does_not_matter(
    released: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Each layer in an order of its own: same sizes, same report, as little memory."""
    folder = tmp_path_factory.mktemp("shuffled") / "released"
    write_released(folder, RELEASED_DATA, shuffled=True)
    orders = []
    for number in (13, 14):
        file = f"model-000{number}-of-000096.safetensors"
        assert (folder / file).stat().st_size == (released / file).stat().st_size
        infos = sorted(read_header(folder / file).tensors.values(), key=lambda info: info.offset)
        names = [info.name.split(".block_sparse_moe.experts.") for info in infos]
        experts = [parts[1].split(".")[0] for parts in names if len(parts) == 2]
        assert experts[::6] == experts[5::6]
        orders.append(experts[::6])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    code, peak_bytes, report = inspect(folder, tmp_path / "shuffled.json")
    _, _, by_name = inspect(released, tmp_path / "by_name.json")
    assert code == 0
    for kept in ("whole", "tensors", "dtypes", "bytes", "modules", "vision"):
        assert report[kept] == by_name[kept]
    assert peak_bytes < 500_000_000


def test_inspect_finds_one_wrong_tensor_among_half_a_million(
    released: Path, tmp_path: Path
) -> None:
    """Layers are accepted whole; one letter, one shape, one absent file must still show."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in released.iterdir():
        os.link(path, folder / path.name)
    _edit(folder / "model-00047-of-000096.safetensors", b"experts.895.w2.weight_scale", b"895_")
    _edit(folder / "model-00048-of-000096.safetensors", b'"shape":[3072,112]', b"[112,3072]")
    (folder / "model-00092-of-000096.safetensors").unlink()
    code, _, report = inspect(folder, tmp_path / "report.json")
    found = [
        (f["kind"], f["file"][6:11], f["name"].split("layers.")[-1]) for f in report["findings"]
    ]
    kinds = {kind for kind, _, _ in found}
    assert code == 3
    assert kinds == {"missing file", "missing", "unclaimed", "mis-shaped", "total_size"}
    assert len([1 for kind, file, _ in found if (kind, file) == ("missing", "00092")]) == 5398
    where = "46.block_sparse_moe.experts.895"
    assert ("missing", "00047", f"{where}.w2.weight_scale") in found
    assert ("unclaimed", "00047", f"{where}_w2.weight_scale") in found
    shaped = [entry for entry in found if entry[0] == "mis-shaped"]
    assert len(shaped) == 1
    assert shaped[0][1] == "00048"


def _edit(path: Path, old: bytes, new: bytes) -> None:
    """Replace once in a header, keeping its length, in a copy of the file (a link is shared)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length)
    at = text.index(old) + (old.index(b"[") if b"[" in new else old.index(b"895"))
    edited = text[:at] + new + text[at + len(new) :]
    assert len(edited) == length
    path.unlink()
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + edited)
        file.truncate(size)


def test_what_cannot_be_written_is_refused_before_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="layers 0 to 92"):
        write_released(tmp_path / "x", RELEASED_DATA, (93,))
    full = os.statvfs_result((4096, 4096, 10**9, 10**6, 10**6, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(UsageError, match=r"got 4\.096 GB free on disk, need 1\.556 TB"):
        write_released(tmp_path / "x", RELEASED_DATA, range(93))
    with pytest.raises(ArtifactError, match="kimi-k3-config"):
        write_released(tmp_path / "x", tmp_path)
    assert list(tmp_path.iterdir()) == []


def filled(tmp_path: Path, name: str, seed: int = 0) -> np.ndarray:
    spec = find_spec(K3Config.load(RELEASED_DATA / CONFIG_FILE), f"language_model.{name}")
    assert spec is not None
    with (tmp_path / "values").open("w+b") as file:
        _fill(file, spec, n_bytes(spec.shape, spec.dtype), seed)
        file.seek(0)
        return np.frombuffer(file.read(), dtype=DTYPES[spec.dtype])


def test_filled_values_are_a_trained_models_in_size(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn."
    norm = filled(tmp_path, "model.layers.0.input_layernorm.weight")
    values = (norm.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(norm, filled(tmp_path, "model.layers.0.input_layernorm.weight"))
    assert not np.array_equal(norm, filled(tmp_path, "model.layers.0.input_layernorm.weight", 1))
    assert not np.array_equal(norm, filled(tmp_path, "model.layers.0.mlp_res_norm.weight"))
    assert np.abs(values).min() >= 2**-13
    assert np.abs(values).max() < 2**-5
    assert 0.4 < (values > 0).mean() < 0.6
    a_log = filled(tmp_path, layer + "A_log")
    assert np.isfinite(a_log).all()
    assert a_log[:96].all()
    assert not a_log[96:].any()
    experts = "model.layers.1.block_sparse_moe.experts.3."
    scales = filled(tmp_path, experts + "w1.weight_scale")
    assert sorted(set(scales.tolist())) == list(range(114, 122))
    assert len(set(filled(tmp_path, experts + "w1.weight_packed").tolist())) == 256


def test_a_look_at_values_stops_within_a_block(released: Path) -> None:
    with Checkpoint.open(released) as checkpoint:
        targets = Targets(checkpoint, (12,))
        assert targets.n_bytes == 16_990_092_800
        scan = ValueScan(checkpoint, targets, n_bytes=targets.n_bytes, jobs=1)
        scan._stop.set()  # as Ctrl-C does: nothing of 17 GB is read
        assert scan.run().n_bytes == 0


@pytest.mark.parametrize("seconds", [1.0, 2.5])
def test_ctrl_c_while_values_are_read(released: Path, tmp_path: Path, seconds: float) -> None:
    """A real signal while a terabyte is read: quiet, 130, and neither output begun."""
    outputs = ("--fingerprint", tmp_path / "f.h5", "-o", tmp_path / "c.h5")
    command = [sys.executable, "-m", "stages.cli", "inspect", released, "--values", *outputs]
    with subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        time.sleep(seconds)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []

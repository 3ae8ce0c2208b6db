"""`bench shard`: splitting against a plain copy, in bytes written a second on one disk.

The source has the release's widths, fewer layers and experts, and random bytes without holes; it is
out of the page cache before every run. Peak memory is that of the process which shards.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.atomic import fsync
from k3tool.bench.frame import BenchReport, Limit, interleave, machine_line, run_child, spread
from k3tool.bench.inspect_headers import drop_cache
from k3tool.checkpoint.headers import DTYPES
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter, TensorLayout
from k3tool.checkpoint.sample_presets import Preset, preset_config
from k3tool.checkpoint.shard_writer import free_bytes
from k3tool.errors import K3Error, UsageError
from k3tool.model.config import K3Config
from k3tool.model.weights import Split, TensorSpec, expected_tensors, n_bytes

ROOT = Path(__file__).resolve().parents[2]
LEAST_SHARE = 0.8
MOST_MEMORY_GB = 1.2
BLOCK_BYTES = 8 << 20
# Dense with KDA, experts with KDA, experts with MLA.
_WIDTHS = Preset(
    text={
        "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 3,
        "num_attention_heads": 96, "num_key_value_heads": 96,
        "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_experts": 16, "num_experts_per_token": 16, "num_shared_experts": 2,
        "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584,
        "attn_res_block_size": 12, "vocab_size": 163840, "max_position_embeddings": 4096,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    full_attn_layers=(3,),
    linear_heads=96,
    linear_head_dim=128,
    vision={
        "vt_hidden_size": 32, "vt_num_hidden_layers": 0, "vt_num_attention_heads": 2,
        "qkv_hidden_size": 48, "vt_intermediate_size": 64, "mm_hidden_size": 32,
        "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4,
        "init_pos_emb_time": 4,
    },
)  # fmt: skip


def bench_shard(
    folder: Path,
    size: int,
    tp: int = 2,
    jobs: int | None = None,
    repeats: int = 5,
    preset: Preset = _WIDTHS,
) -> BenchReport:
    """Measure in `folder`, whose disk is the one measured; everything written is removed again.

    Raises: UsageError where the folder has not the room; K3Error when a command fails.
    """
    vocab_bytes = 4 * preset.text["vocab_size"] * preset.text["hidden_size"]
    need = 3 * size + vocab_bytes * tp  # source and one output
    if free_bytes(folder) < need:  # before the config: the bytes may need more experts than it has
        raise UsageError(str(folder), got=f"{free_bytes(folder)} bytes free", need=need)
    config, raw = _config(size, preset)
    work = Path(tempfile.mkdtemp(prefix=".bench-", dir=folder))
    try:
        largest = _write_source(work / "source", config, raw)
        return _measure(_Sides(work, tp, jobs), largest, repeats)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _measure(sides: "_Sides", largest: int, repeats: int) -> BenchReport:
    # No run to warm up: every run starts with a cold source and ends with its bytes on the disk.
    paired = interleave(sides.copy, sides.shard, repeats, warm_up=0)
    n_source, n_shards = _tree_bytes(sides.source), sides.shard_bytes
    peak = max(sides.peaks)
    definition = [
        "bytes written a second, until all are on the disk; the source is read from the disk;",
        f"source {n_source / 1e9:.2f} GB of the release's widths without holes, largest tensor "
        f"{largest / 1e9:.2f} GB;",
        f"cp -r --reflink=never --sparse=never and fsync of each file, against shard --tp "
        f"{sides.tp}: {n_shards / 1e9:.2f} GB",
        machine_line(),
    ]
    rows = [
        ("cp", spread(paired.first), "GB/s"),
        ("shard", spread(paired.second), "GB/s"),
        ("shard / cp", paired.ratio, "times"),
        ("peak memory of shard", spread([peak / 1e9 for peak in sides.peaks]), "GB"),
    ]
    limits = [
        Limit("shard / cp", paired.ratio.median, at_least=LEAST_SHARE),
        Limit("peak memory, GB", peak / 1e9, at_most=MOST_MEMORY_GB),
    ]
    return BenchReport("shard", definition, rows, limits)


# -- the source --------------------------------------------------------------------------------


def _config(size: int, preset: Preset) -> tuple[K3Config, dict[str, Any]]:
    """Return a config whose checkpoint has `size` bytes or more, by more experts."""
    specs = list(expected_tensors(K3Config.from_dict(preset_config(preset))))
    least = sum(n_bytes(spec.shape, spec.dtype) for spec in specs)
    expert = sum(n_bytes(spec.shape, spec.dtype) for spec in specs if spec.expert == 0)
    extra = max(0, -((least - size) // expert))
    text = {**preset.text, "num_experts": preset.text["num_experts"] + extra}
    raw = preset_config(preset._replace(text=text))
    return K3Config.from_dict(raw), raw


def _write_source(folder: Path, config: K3Config, raw: dict[str, Any]) -> int:
    """Write the checkpoint, one file a layer; return the largest tensor's bytes."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    files: dict[str, list[TensorSpec]] = {}
    for spec in expected_tensors(config):
        number = 0 if spec.layer is None else spec.layer + 1
        files.setdefault(f"model-{number:05d}.safetensors", []).append(spec)
    for name, specs in files.items():
        layout = [
            TensorLayout(spec.name, spec.dtype, spec.shape, n_bytes(spec.shape, spec.dtype))
            for spec in specs
        ]
        with SafetensorsWriter(folder / name, layout, {}) as writer:
            for spec, tensor in zip(specs, layout, strict=True):
                writer.start(spec.name)
                for block in _blocks(spec, tensor.n_bytes, generator):
                    writer.append(block, hashed=False)
                writer.finish("-")
    index = {"weight_map": {spec.name: name for name, specs in files.items() for spec in specs}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(raw))
    return max(n_bytes(spec.shape, spec.dtype) for specs in files.values() for spec in specs)


def _blocks(spec: TensorSpec, size: int, generator: np.random.Generator) -> Iterator[memoryview]:
    if spec.split is Split.LIVE_ROWS:  # zeros behind the live heads, as in the release
        padded = np.zeros(spec.shape, dtype=DTYPES[spec.dtype])
        padded[: spec.live] = 1
        yield padded.view(np.uint8).data
        return
    for start in range(0, size, BLOCK_BYTES):
        block = np.frombuffer(generator.bytes(min(BLOCK_BYTES, size - start)), dtype=np.uint8)
        # A scale of 253 or more is refused; half the range is random enough.
        yield (block & 127 if spec.name.endswith("weight_scale") else block).data


# -- the two sides -----------------------------------------------------------------------------


class _Sides:
    """Both ways to write the source's bytes; each returns GB/s and removes what it wrote."""

    def __init__(self, work: Path, tp: int, jobs: int | None) -> None:
        self.source, self._out = work / "source", work / "out"
        self.tp, self._jobs = tp, jobs
        self.peaks: list[int] = []
        self.shard_bytes = 0

    def copy(self) -> float:
        start = self._start()
        command = ["cp", "-r", "--reflink=never", "--sparse=never"]
        done = subprocess.run([*command, str(self.source), str(self._out)], check=False)
        _require(done.returncode, "cp")
        for path in (*self._out.iterdir(), self._out):
            fsync(path)
        return self._end(time.perf_counter() - start)

    def shard(self) -> float:
        """Run the command as a user does, its start included."""
        self._start()
        program = [sys.executable, "-m", "stages.cli", "shard", str(self.source)]
        options = ["--tp", str(self.tp), "-o", str(self._out), "--json"]
        options += [] if self._jobs is None else ["--jobs", str(self._jobs)]
        with open(os.devnull, "wb") as nowhere, contextlib.chdir(ROOT):
            run = run_child([*program, *options], nowhere.fileno())
        _require(run.exit_code, "k3tool shard")
        self.peaks.append(run.peak_bytes)
        self.shard_bytes = _tree_bytes(self._out)
        return self._end(run.seconds)

    def _start(self) -> float:
        drop_cache(list(self.source.iterdir()))
        return time.perf_counter()

    def _end(self, seconds: float) -> float:
        n_bytes = _tree_bytes(self._out)
        shutil.rmtree(self._out)
        return n_bytes / seconds / 1e9


def _require(code: int, command: str) -> None:
    if code:
        raise K3Error(command, got=f"exit code {code}", need="0")


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

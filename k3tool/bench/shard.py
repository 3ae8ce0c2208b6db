"""Measure shard against a plain copy: bytes written a second, each synced, on one disk in one run.

The source has the release's widths, fewer layers and experts, and random bytes without holes. A
round copies it with cp and shards it, with the source out of the page cache before each; a round's
ratio is shard's rate over cp's. The order within a round alternates. Peak memory is that of the
process which shards.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.checkpoint.headers import DTYPES
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter, TensorLayout
from k3tool.checkpoint.sample_presets import Preset, preset_config
from k3tool.checkpoint.shard_writer import free_bytes
from k3tool.errors import K3Error, UsageError
from k3tool.model.config import K3Config
from k3tool.model.weights import Split, TensorSpec, expected_tensors, n_bytes

BLOCK_BYTES = 8 << 20
EXPERT_BYTES = 17_547_264  # of one routed expert at the release's widths
LAYERS = 3  # dense with KDA, then experts with KDA, then experts with MLA
_WIDTHS = Preset(
    text={
        "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": LAYERS,
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


@dataclass(frozen=True, slots=True)
class Round:
    """One copy and one shard: bytes written and seconds of each."""

    copy_bytes: int
    copy_s: float
    shard_bytes: int
    shard_s: float

    @property
    def ratio(self) -> float:
        """Return shard's rate over the copy's."""
        return (self.shard_bytes / self.shard_s) / (self.copy_bytes / self.copy_s)


@dataclass(frozen=True, slots=True)
class ShardBench:
    """What was measured; `peak_bytes` is the largest resident size of the sharding processes."""

    tp: int
    jobs: int | None
    source_bytes: int
    largest_tensor_bytes: int
    rounds: tuple[Round, ...]
    peak_bytes: int

    @property
    def ratio(self) -> float:
        """Return the median of the rounds' ratios."""
        return statistics.median(round.ratio for round in self.rounds)


def measure_shard(
    folder: Path, size: int, tp: int = 2, rounds: int = 3, jobs: int | None = None
) -> ShardBench:
    """Measure in `folder`, whose disk is the one measured; everything written is removed again.

    Raises: UsageError where the folder has not the room; K3Error when a command fails.
    """
    config, raw = _config(size)
    need = 3 * size + 4 * config.vocab_size * config.hidden_size * tp  # source, one output
    if free_bytes(folder) < need:
        raise UsageError(str(folder), got=f"{free_bytes(folder)} bytes free", need=need)
    work = Path(tempfile.mkdtemp(prefix="k3-bench-shard-", dir=folder))
    try:
        source = work / "source"
        largest = _write_source(source, config, raw)
        n_source = _tree_bytes(source)
        done, peaks = [], []
        for number in range(rounds):
            timed: dict[str, tuple[int, float]] = {}
            for what in ("copy", "shard") if number % 2 == 0 else ("shard", "copy"):
                out = work / what
                _forget(source)
                if what == "copy":
                    timed[what] = _timed_copy(source, out)
                else:
                    timed[what], peak = _timed_shard(source, out, tp, jobs)
                    peaks.append(peak)
                shutil.rmtree(out)
            done.append(Round(*timed["copy"], *timed["shard"]))
        return ShardBench(tp, jobs, n_source, largest, tuple(done), max(peaks))
    finally:
        shutil.rmtree(work, ignore_errors=True)


# -- the source --------------------------------------------------------------------------------


def _config(size: int) -> tuple[K3Config, dict[str, Any]]:
    """Return a config whose checkpoint has at least `size` bytes."""
    few = K3Config.from_dict(preset_config(_WIDTHS))
    base = sum(n_bytes(spec.shape, spec.dtype) for spec in expected_tensors(few))
    extra = -((base - size) // (EXPERT_BYTES * (LAYERS - 1)))
    text = {**_WIDTHS.text, "num_experts": few.num_experts + max(0, extra)}
    raw = preset_config(_WIDTHS._replace(text=text))
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


# -- the two ways to write ---------------------------------------------------------------------


def _forget(folder: Path) -> None:
    """Drop a folder's clean pages, so that both commands read from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _timed_copy(source: Path, out: Path) -> tuple[int, float]:
    start = time.monotonic()
    command = ["cp", "-r", "--reflink=never", "--sparse=never", str(source), str(out)]
    _require(subprocess.run(command, check=False).returncode, command)
    for path in (*out.iterdir(), out):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return _tree_bytes(out), time.monotonic() - start


def _timed_shard(
    source: Path, out: Path, tp: int, jobs: int | None
) -> tuple[tuple[int, float], int]:
    """Return bytes and seconds, and the process's peak resident bytes."""
    code = (
        "from k3tool.checkpoint.shard_writer import shard_checkpoint; "
        f"shard_checkpoint({str(source)!r}, {tp}, {str(out)!r}, jobs={jobs})"
    )
    command = [sys.executable, "-c", code]
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[2])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    _require(process.returncode, command)
    return (_tree_bytes(out), time.monotonic() - start), usage.ru_maxrss * 1024


def _require(code: int, command: list[str]) -> None:
    if code:
        raise K3Error(" ".join(command[:2]), got=f"exit code {code}", need="0")


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- report ------------------------------------------------------------------------------------


def report_lines(bench: ShardBench) -> list[str]:
    """Return what a person reads: definition first, then each round, then the median."""
    copies = [r.copy_bytes / r.copy_s / 1e9 for r in bench.rounds]
    shards = [r.shard_bytes / r.shard_s / 1e9 for r in bench.rounds]
    ratios = [r.ratio for r in bench.rounds]
    return [
        "bytes written a second, synced; source read from disk each time; ratio = shard / cp",
        f"source {bench.source_bytes / 1e9:.2f} GB, largest tensor "
        f"{bench.largest_tensor_bytes / 1e9:.2f} GB, TP {bench.tp}, "
        f"{bench.rounds[0].shard_bytes / 1e9:.2f} GB of shards",
        *(
            f"round {number}: cp {copy:.3f} GB/s, shard {shard:.3f} GB/s, ratio {ratio:.2f}"
            for number, (copy, shard, ratio) in enumerate(
                zip(copies, shards, ratios, strict=True), start=1
            )
        ),
        f"ratio {bench.ratio:.2f} (median of {len(ratios)}; {min(ratios):.2f} to {max(ratios):.2f})",
        f"peak memory {bench.peak_bytes / 1e9:.3f} GB",
    ]


def as_dict(bench: ShardBench) -> dict[str, Any]:
    """Return the measurement as plain values for `--json`."""
    return {
        "tp": bench.tp,
        "jobs": bench.jobs,
        "source_bytes": bench.source_bytes,
        "largest_tensor_bytes": bench.largest_tensor_bytes,
        "rounds": [
            {
                "copy_bytes": r.copy_bytes, "copy_s": r.copy_s,
                "shard_bytes": r.shard_bytes, "shard_s": r.shard_s, "ratio": r.ratio,
            }
            for r in bench.rounds
        ],
        "ratio": bench.ratio,
        "peak_bytes": bench.peak_bytes,
    }  # fmt: skip

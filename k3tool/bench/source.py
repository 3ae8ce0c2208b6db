"""A checkpoint to measure on: the release's widths, fewer layers and experts, random bytes.

Its tensors are as large as the release's, and none of its bytes are holes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.checkpoint.headers import DTYPE_BYTES, DTYPES
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter, TensorLayout
from k3tool.checkpoint.sample_presets import PRESETS, Preset, preset_config
from k3tool.model.config import K3Config
from k3tool.model.weight_slices import n_bytes
from k3tool.model.weights import Split, TensorSpec, expected_tensors

BLOCK_BYTES = 8 << 20
_SLICE = PRESETS["k3-slice"]
# Dense with KDA, experts with KDA, experts with MLA; the release's vocabulary too.
RELEASED_WIDTHS = _SLICE._replace(
    text={
        **_SLICE.text,
        "num_hidden_layers": 3, "num_experts": 16, "attn_res_block_size": 12,
        "vocab_size": 163840, "max_position_embeddings": 4096,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    full_attn_layers=(3,),
    from_table=False,
)  # fmt: skip
# Mostly experts, as the release is: its vocabulary and dense layers would be half of a small one.
MOSTLY_EXPERTS = RELEASED_WIDTHS._replace(
    text={
        **RELEASED_WIDTHS.text,
        "num_hidden_layers": 2, "intermediate_size": 3072, "vocab_size": 4096,
    },
    full_attn_layers=(2,),
)  # fmt: skip


def sized_config(size: int, preset: Preset) -> tuple[K3Config, dict[str, Any]]:
    """Return a config whose checkpoint has `size` bytes or more, by more experts."""
    specs = list(expected_tensors(K3Config.from_dict(preset_config(preset))))
    least = sum(n_bytes(spec.shape, spec.dtype) for spec in specs)
    expert = sum(n_bytes(spec.shape, spec.dtype) for spec in specs if spec.expert == 0)
    extra = max(0, -((least - size) // expert))
    text = {**preset.text, "num_experts": preset.text["num_experts"] + extra}
    raw = preset_config(preset._replace(text=text))
    return K3Config.from_dict(raw), raw


def write_source(folder: Path, config: K3Config, raw: dict[str, Any]) -> int:
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
        block = np.frombuffer(generator.bytes(min(BLOCK_BYTES, size - start)), np.uint8).copy()
        # A scale of 253 or more is refused, and a matrix's scales lie in a few binades: 16 of them
        # are more than a normal distribution's blocks of 32 have. Nor are NaN and Inf what a scan
        # meets: without its exponent's top bit a number is finite.
        if spec.name.endswith("weight_scale"):
            block &= 15
            block += 112
        elif spec.dtype in ("BF16", "F32"):
            width = DTYPE_BYTES[spec.dtype]
            block[width - 1 :: width] &= 0xBF
        yield block.data

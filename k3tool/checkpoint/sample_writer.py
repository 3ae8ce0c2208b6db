"""Write a small synthetic checkpoint in the released on-disk layout.

Same preset and seed, same bytes, on every machine and NumPy version: values come from a counter
hash and integer or exact float64 steps, not from a library's distributions. It is no trained model;
its text means nothing.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3tool.atomic import atomic_folder, atomic_path
from k3tool.checkpoint.headers import DTYPE_BYTES, DTYPES
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter, TensorLayout
from k3tool.checkpoint.sample_presets import PRESETS, Spread, preset_config, spread_of
from k3tool.errors import UsageError
from k3tool.model.config import K3Config
from k3tool.model.config_fields import MXFP4_GROUP
from k3tool.model.vision import expected_vision
from k3tool.model.weights import Split, TensorSpec, expected_tensors

Array = npt.NDArray[Any]
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_MIDDLES = (_E2M1[1:] + _E2M1[:-1]) / 2
_E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2^2


class SampleInfo(NamedTuple):
    """What was written."""

    path: Path
    preset: str
    n_files: int
    n_tensors: int
    total_bytes: int
    legal_tp: list[int]


def write_sample(out: str | Path, preset: str = "tiny", seed: int = 0) -> SampleInfo:
    """Write a checkpoint into a new or empty folder.

    Raises: UsageError on an unknown preset or a folder that holds something.
    """
    out = Path(out)
    if preset not in PRESETS:
        raise UsageError("--preset", got=preset, need=f"one of {sorted(PRESETS)}")
    require_empty(out)
    raw = preset_config(PRESETS[preset])
    config = K3Config.from_dict(raw)
    groups = list(_files(config))
    with atomic_folder(out) as building:
        weight_map, total = _write_all(building, groups, preset, seed)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(building / INDEX_NAME, index)
        _write_json(building / "config.json", raw)
    return SampleInfo(out, preset, len(groups), len(weight_map), total, config.legal_tp())


def require_empty(out: Path) -> None:
    """Refuse a place that holds something. Raises: UsageError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(str(out), got="something there already", need="a new or empty folder")


def _files(config: K3Config) -> Iterator[list[TensorSpec]]:
    """Yield the tensors of each file as the release has them: layers, head, projector, tower.

    Experts are whole but not in id order, as in the release (here in the order of their names).
    """
    text = list(expected_tensors(config))
    for layer in config.layers:
        yield sorted((s for s in text if s.layer == layer), key=lambda s: s.name)
    yield sorted((s for s in text if s.layer is None), key=lambda s: s.name)
    vision = sorted(expected_vision(config), key=lambda s: s.name)
    for module in ("mm_projector.", "vision_tower."):
        yield [spec for spec in vision if spec.name.startswith(module)]


def _write_all(
    folder: Path, groups: Sequence[list[TensorSpec]], preset: str, seed: int
) -> tuple[dict[str, str], int]:
    """Write the files; return which file holds which tensor, and all tensors' bytes."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, specs in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        total += _write_file(folder / name, specs, preset, seed)
        weight_map.update({spec.name: name for spec in specs})
    return weight_map, total


def _write_file(path: Path, specs: Sequence[TensorSpec], preset: str, seed: int) -> int:
    layout = []
    for spec in specs:
        n_bytes = math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        layout.append(TensorLayout(spec.name, spec.dtype, spec.shape, n_bytes))
    metadata = {"kind": "sample", "preset": preset, "seed": seed}
    with SafetensorsWriter(path, layout, metadata) as writer:
        for spec in specs:
            writer.start(spec.name)
            writer.append(tensor_values(spec, seed))
            writer.finish()
    return sum(tensor.n_bytes for tensor in layout)


def _write_json(path: Path, value: object) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


# -- values ------------------------------------------------------------------------------------


def tensor_values(spec: TensorSpec, seed: int) -> Array:
    """Return a tensor's stored bits: u2 for bf16, f4, or u1 for packed and scale bytes."""
    spread = spread_of(spec.row.pattern)
    if spec.dtype == "U8":
        return _mxfp4_part(spec, seed, spread)
    std = spread.std / math.sqrt(spec.shape[-1]) if spread.by_columns else spread.std
    values = spread.mean + std * _normal(spec.name, seed, math.prod(spec.shape))
    if spec.split is Split.LIVE_ROWS:
        values[spec.live :] = 0.0  # A_log is padded with zeros behind the live heads
    narrow = values.reshape(spec.shape).astype(DTYPES["F32"])
    return _bf16_bits(narrow) if spec.dtype == "BF16" else narrow


def _normal(name: str, seed: int, count: int) -> Array:
    """Return about normal numbers: four 16-bit uniforms added, which is exact and bounded by 3.5.

    The stream is keyed by the tensor's name, so that a tensor does not depend on its neighbours.
    """
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    raw = np.random.PCG64(list(np.frombuffer(key, dtype="<u4"))).random_raw(count)
    words = np.asarray(raw, dtype="<u8").view("<u2").reshape(count, 4)
    total = words.astype(np.int64).sum(axis=1)
    normal: Array = (total - 2 * 65535) / (65536 * math.sqrt(4 / 12))
    return normal


def _bf16_bits(values: Array) -> Array:
    """Round to nearest even on the bits; the values are finite."""
    bits = values.view("<u4")
    rounded: Array = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2")


def _mxfp4_part(spec: TensorSpec, seed: int, spread: Spread) -> Array:
    """Return packed or scale bytes of the matrix both belong to: it is made once for each."""
    base, part = spec.name.rsplit(".", 1)
    per_byte = 2 if part == "weight_packed" else MXFP4_GROUP
    rows, cols = spec.shape[0], spec.shape[1] * per_byte
    values = spread.std / math.sqrt(cols) * _normal(base, seed, rows * cols)
    groups = values.reshape(rows, cols // MXFP4_GROUP, MXFP4_GROUP)
    exponent = np.frexp(np.abs(groups).max(axis=2))[1] - 1 - _E2M1_MAX_EXPONENT
    if part == "weight_scale":
        scales: Array = exponent + 127
        return scales.astype(np.uint8)
    scaled = np.ldexp(groups, -exponent[:, :, None])
    code = np.searchsorted(_E2M1_MIDDLES, np.abs(scaled)).astype(np.uint8)
    code |= np.where(scaled < 0, 8, 0).astype(np.uint8)
    flat = code.reshape(rows, cols)
    packed: Array = flat[:, 0::2] | (flat[:, 1::2] << 4)  # low nibble = even column
    return packed

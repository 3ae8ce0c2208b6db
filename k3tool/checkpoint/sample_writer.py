"""Write a synthetic checkpoint in the released on-disk layout.

Same preset and seed, same bytes, on every machine. It is no trained model; its text means nothing,
and its tokenizer is made by rule.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from k3tool.atomic import atomic_folder, atomic_path
from k3tool.checkpoint.headers import DTYPE_BYTES
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.names import weights_name
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter, TensorLayout
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.checkpoint.sample_table_values import table_pieces
from k3tool.checkpoint.sample_values import tensor_values
from k3tool.checkpoint.side_files import TOKENIZER_CONFIG
from k3tool.errors import UsageError, listed
from k3tool.model.config import K3Config
from k3tool.model.vision import expected_vision
from k3tool.model.weights import TensorSpec, expected_tensors
from k3tool.tables import bytes_text
from k3tool.text.rank_file import RANK_FILE
from k3tool.text.sample_tokenizer import sample_config, sample_ranks

Array = npt.NDArray[Any]
Say = Callable[[str], None]


class SampleInfo(NamedTuple):
    """What was written."""

    path: Path
    preset: str
    n_files: int
    n_tensors: int
    total_bytes: int
    legal_tp: list[int]


def write_sample(
    out: str | Path, preset: str = "tiny", seed: int = 0, say: Say | None = None
) -> SampleInfo:
    """Write a checkpoint into a new or empty folder; `say` hears of each file.

    Raises: UsageError on an unknown preset or a folder that holds something.
    """
    out = Path(out)
    if preset not in PRESETS:
        raise UsageError("--preset", got=preset, need=f"one of {listed(sorted(PRESETS))}")
    require_empty(out)
    raw = preset_config(PRESETS[preset])
    config = K3Config.from_dict(raw)
    groups = list(_files(config))
    with atomic_folder(out) as building:
        weight_map, total = _write_all(building, groups, preset, seed, say)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(building / INDEX_NAME, index)
        _write_json(building / "config.json", raw)
        first_id = raw["bos_token_id"]  # of the control tokens: all ids below it are text
        (building / RANK_FILE).write_bytes(sample_ranks(first_id))
        (building / TOKENIZER_CONFIG).write_text(sample_config(first_id, config.vocab_size))
    return SampleInfo(out, preset, len(groups), len(weight_map), total, config.legal_tp())


def require_empty(out: Path) -> None:
    """Refuse a place that holds something. Raises: UsageError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        got, hint = "something there already", f"name another folder, or remove {out} first"
        raise UsageError(str(out), got=got, need="a new or empty folder", hint=hint)


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
    folder: Path, groups: Sequence[list[TensorSpec]], preset: str, seed: int, say: Say | None
) -> tuple[dict[str, str], int]:
    """Write the files; return which file holds which tensor, and all tensors' bytes."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, specs in enumerate(groups, start=1):
        name = weights_name(number, len(groups))
        total += _write_file(folder / name, specs, preset, seed)
        weight_map.update({spec.name: name for spec in specs})
        if say is not None:
            say(f"{number} of {len(groups)} files, {bytes_text(total)}")
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
            for piece in _pieces(spec, preset, seed):
                writer.append(piece)
            writer.finish()
    return sum(tensor.n_bytes for tensor in layout)


def _pieces(spec: TensorSpec, preset: str, seed: int) -> Iterator[Array]:
    if PRESETS[preset].from_table:
        yield from table_pieces(spec, seed)
    else:
        yield tensor_values(spec, seed)


def _write_json(path: Path, value: object) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")

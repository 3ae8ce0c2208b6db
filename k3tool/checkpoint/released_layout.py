"""Write a stand-in of the released checkpoint: its 96 files with true headers, holes for data.

Names come from the released index, dtypes and shapes from the weight table. The bytes of a header
follow from them: the stock writer sorts by dtype width, then by name, has no metadata, and pads to
8 bytes. That this is the release's form is known by size: first file, largest file and sum of all
files come out as published. Sizes do not tell the order among experts, which are equally long; by
the stock writer it is that of their numbers read as text (0, 1, 10, 100), not the numbers' own, six
tensors of each back to back. Nothing published says so, so they can also be shuffled, each layer
its own way, and no layer's header is then another's renumbered. Data are holes, which read as zeros
and need no disk, except in layers that are to be filled. Source: k3_spec B.1.
"""

import hashlib
import json
import os
import random
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from k3tool.atomic import atomic_folder
from k3tool.checkpoint.headers import DTYPE_BYTES
from k3tool.checkpoint.index import INDEX_NAME, parse_index
from k3tool.checkpoint.regular_file import MOST_BYTES, read_regular
from k3tool.checkpoint.sample_writer import SampleInfo, require_empty
from k3tool.errors import ArtifactError, UsageError
from k3tool.model.config import K3Config
from k3tool.model.vision import expected_vision
from k3tool.model.weight_slices import n_bytes
from k3tool.model.weights import Split, TensorSpec, expected_tensors
from k3tool.tables import have_text, need_text

Array = npt.NDArray[Any]
RELEASED_DATA = Path(__file__).resolve().parents[2] / "tests" / "data"  # in a source checkout
CONFIG_FILE = "kimi-k3-config.json"
INDEX_FILE = "kimi-k3-model.safetensors.index.json.gz"
HEADER_ALIGN_BYTES = 8
FILL_BLOCK_BYTES = 8 << 20
_NEXT_STEP = f"--data takes a folder with {CONFIG_FILE} and {INDEX_FILE} of one model"


def write_released(
    out: str | Path,
    data: Path,
    fill_layers: Collection[int] = (),
    seed: int = 0,
    *,
    shuffled: bool = False,
) -> SampleInfo:
    """Write the stand-in into a new or empty folder; `data` holds the released config and index.

    Raises: UsageError on a folder that holds something, a layer the model does not have or too
    little room; ArtifactError if config or index are absent or do not describe one model.
    """
    out = Path(out)
    require_empty(out)
    need = "the released config.json"
    config_bytes = read_regular(data / CONFIG_FILE, need)
    config = K3Config.load(data / CONFIG_FILE)
    index = _read_index(data / INDEX_FILE)
    _check_layers(config, fill_layers)
    weight_map = parse_index(index, data / INDEX_FILE).weight_map
    files = _files(config, weight_map, data / INDEX_FILE)
    if shuffled:
        files = {
            name: _shuffled(group, random.Random(f"{seed} {name}")) for name, group in files.items()
        }
    _check_room(out, files, fill_layers)
    total = 0
    with atomic_folder(out) as building:
        (building / "config.json").write_bytes(config_bytes)
        (building / INDEX_NAME).write_bytes(index)
        for name, specs in sorted(files.items()):
            total += _write_file(building / name, specs, fill_layers, seed)
    n_tensors = sum(map(len, files.values()))
    return SampleInfo(out, "released", len(files), n_tensors, total, config.legal_tp())


def _read_index(path: Path) -> bytes:
    """Return the index, as much as may be read of any file: a few bytes may unpack to millions."""
    need = "the released index, gzipped"
    packed = read_regular(path, need)
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)  # with gzip's header
    try:
        index = unpacker.decompress(packed, MOST_BYTES)
    except zlib.error:
        raise ArtifactError(str(path), got="other bytes", need=need, hint=_NEXT_STEP) from None
    if not unpacker.eof:
        got = f"more than {MOST_BYTES} bytes" if unpacker.unconsumed_tail else "the start of it"
        raise ArtifactError(str(path), got=got, need=need, hint=_NEXT_STEP)
    return index


def _check_layers(config: K3Config, layers: Collection[int]) -> None:
    for layer in layers:
        if layer not in config.layers:
            need = f"layers 0 to {config.num_hidden_layers - 1}"
            raise UsageError("--fill-layers", got=layer, need=need, hint="layers count from 0")


def _files(
    config: K3Config, weight_map: dict[str, str], where: Path
) -> dict[str, list[TensorSpec]]:
    """Return each file's tensors in the order in which the stock writer stores them."""
    files: dict[str, list[TensorSpec]] = {}
    for specs in (expected_tensors(config), expected_vision(config)):
        for spec in specs:
            file = weight_map.pop(spec.name, None)
            if file is None:
                raise ArtifactError(
                    f"{where}: {spec.name}", got="absent", need="a file name", hint=_NEXT_STEP
                )
            files.setdefault(file, []).append(spec)
    if weight_map:
        name = next(iter(weight_map))
        raise ArtifactError(
            f"{where}: {name}", got="a name", need="one the config describes", hint=_NEXT_STEP
        )
    for group in files.values():
        group.sort(key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))
    return files


def _shuffled(group: Sequence[TensorSpec], order: random.Random) -> list[TensorSpec]:
    """Return a file's tensors with the experts in another order, the six of each together."""
    experts = sorted({spec.expert for spec in group if spec.expert is not None})
    places = dict(zip(experts, order.sample(range(len(experts)), len(experts)), strict=True))
    return sorted(group, key=lambda s: -1 if s.expert is None else places[s.expert])


def _check_room(out: Path, files: dict[str, list[TensorSpec]], layers: Collection[int]) -> None:
    filled = [s for group in files.values() for s in group if s.layer in layers]
    need = sum(n_bytes(spec.shape, spec.dtype) for spec in filled)
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if need > free:
        raise UsageError(
            "--fill-layers", got=f"{have_text(free)} free on disk", need=need_text(need),
            hint="fill fewer layers, or write elsewhere",
        )  # fmt: skip


def _write_file(
    path: Path, specs: Sequence[TensorSpec], fill_layers: Collection[int], seed: int
) -> int:
    header: dict[str, object] = {}
    offset = 0
    for spec in specs:
        end = offset + n_bytes(spec.shape, spec.dtype)
        header[spec.name] = {
            "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
        for spec in specs:
            size = n_bytes(spec.shape, spec.dtype)
            if spec.layer in fill_layers:
                _fill(file, spec, size, seed)
            else:
                file.seek(size, os.SEEK_CUR)
    return offset


# -- values ------------------------------------------------------------------------------------


def _fill(file: BinaryIO, spec: TensorSpec, size: int, seed: int) -> None:
    """Write random values of a trained model's magnitude, a bounded block at a time."""
    key = hashlib.sha256(f"{seed} {spec.name}".encode()).digest()
    generator = np.random.PCG64(list(np.frombuffer(key, dtype="<u4")))
    values = _VALUES[spec.dtype, spec.name.endswith("weight_scale")]
    live = spec.live * DTYPE_BYTES[spec.dtype] if spec.split is Split.LIVE_ROWS else size
    for start in range(0, size, FILL_BLOCK_BYTES):
        count = min(FILL_BLOCK_BYTES, size - start)
        words = np.asarray(generator.random_raw(-(-count // 8)), dtype="<u8")
        block = values(words).view(np.uint8)[:count]
        block[max(0, live - start) :] = 0  # A_log is padded with zeros behind the live heads
        file.write(block.data)


def _bf16(words: Array) -> Array:
    """Keep sign and mantissa; one of eight exponents, magnitudes 2^-13 to 2^-5."""
    bits = words.view("<u2")
    result: Array = (bits & 0x807F) | (((bits >> 7 & 7) + 114) << 7).astype("<u2")
    return result


def _f32(words: Array) -> Array:
    bits = words.view("<u4")
    result: Array = (bits & 0x807FFFFF) | (((bits >> 23 & 7) + 120) << 23).astype("<u4")
    return result


def _scales(words: Array) -> Array:
    result: Array = (words.view("u1") & 7) + np.uint8(114)
    return result


def _packed(words: Array) -> Array:
    return words  # every byte is two codes


_VALUES: dict[tuple[str, bool], Callable[[Array], Array]] = {
    ("BF16", False): _bf16,
    ("F32", False): _f32,
    ("U8", True): _scales,
    ("U8", False): _packed,
}

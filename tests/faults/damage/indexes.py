"""Damage to the index: what it says against what the files hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.damage.case import Case, legal, refused
from tests.faults.damage.edit import (
    INDEX,
    LAYERS,
    Tensor,
    count_total,
    edit_json,
    load,
    save,
    shard_name,
    tensors,
)

NORM = LAYERS + "4.mlp_res_norm.weight"
HOME, OTHER = shard_name(5), shard_name(6)
TOTAL = 8_169_200


def _is(text: str | bytes) -> Callable[[Path], None]:
    """Return damage that replaces the whole index."""
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / INDEX).write_bytes(data)


def _map(folder: Path, value: object) -> None:
    with edit_json(folder / INDEX) as index:
        index["weight_map"] = value


def _place(folder: Path, name: str, file: object) -> None:
    with edit_json(folder / INDEX) as index:
        index["weight_map"][name] = file


def _omit(folder: Path, *names: str) -> None:
    with edit_json(folder / INDEX) as index:
        for name in names:
            del index["weight_map"][name]


def _omit_file(folder: Path, file: str) -> None:
    with edit_json(folder / INDEX) as index:
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != file}


def _total(folder: Path, value: object) -> None:
    with edit_json(folder / INDEX) as index:
        index["metadata"]["total_size"] = value


def _deep(folder: Path, depth: int) -> None:
    """Nest a list in the metadata: legal JSON, which Python's reader stops at by its stack."""
    text = (folder / INDEX).read_text()
    assert '"total_size"' in text
    deep = f'"deep": {"[" * depth}{"]" * depth}, "total_size"'
    (folder / INDEX).write_text(text.replace('"total_size"', deep, 1))


def _no(folder: Path, *path: str) -> None:
    with edit_json(folder / INDEX) as index:
        part: Any = index
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]


def _drop_from_file(folder: Path, name: str) -> None:
    """Take a tensor out of its file only."""
    with tensors(folder / HOME) as held:
        del held[name]
    count_total(folder)


def _copy_to(folder: Path, change: int, *, file: str = OTHER) -> None:
    """Store a tensor in a second indexed file as well, the same or one bit other."""
    dtype, shape, data = load(folder / HOME)[NORM]
    with tensors(folder / file) as held:
        held[NORM] = Tensor(dtype, shape, bytes([data[0] ^ change]) + data[1:])
    count_total(folder)


def _copy_without_index(folder: Path, change: int) -> None:
    _copy_to(folder, change)
    (folder / INDEX).unlink()


def _renamed_without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / HOME).rename(folder / "a part of it.safetensors")


def _named_twice(folder: Path) -> None:
    """Name a tensor twice in the index's text: a plain JSON reader takes the last."""
    text = json.dumps(json.loads((folder / INDEX).read_text()))
    key = json.dumps(NORM)
    assert key in text
    (folder / INDEX).write_text(text.replace(key, f'{key}: "{OTHER}", {key}', 1))


def _resplit(folder: Path) -> None:
    """Move a layer's tensors to the end of another file, index told."""
    moved = load(folder / HOME)
    with tensors(folder / OTHER) as held:
        held.update(moved)
    (folder / HOME).unlink()
    with edit_json(folder / INDEX) as index:
        index["weight_map"] = {k: OTHER if v == HOME else v for k, v in index["weight_map"].items()}


def _reverse_order(folder: Path) -> None:
    for number in range(1, 12):
        path = folder / shard_name(number)
        save(path, dict(reversed(load(path).items())))


INDEXES: tuple[Case, ...] = (
    legal("no index", "headers rule", lambda f: (f / INDEX).unlink()),
    legal("no index", "headers rule, files of other names", _renamed_without_index),
    refused("index is no index", "empty", _is(""), INDEX, "JSON"),
    refused("index is no index", "cut", _is('{"metadata": {"total_size": 1'), INDEX, "JSON"),
    refused("index is no index", "bytes that are no UTF-8", _is(b'{"\xff\xfe": 1}'), INDEX, "JSON"),
    refused("index is no index", "list", _is("[]"), INDEX, "object"),
    refused("index is no index", "a web page", _is("<!DOCTYPE html><html></html>"), INDEX, "JSON"),
    refused("index is no index", "no weight_map", lambda f: _no(f, "weight_map"), INDEX,
            "weight_map"),
    refused("index is no index", "weight_map empty", lambda f: _map(f, {}), INDEX, "weight_map"),
    refused("index is no index", "weight_map a list", lambda f: _map(f, [NORM]), INDEX,
            "weight_map"),
    refused("index is no index", "a number for a file", lambda f: _place(f, NORM, 5), INDEX, NORM,
            "plain file name"),
    refused("index is no index", "a list for a file", lambda f: _place(f, NORM, [HOME]), INDEX,
            NORM, "plain file name"),
    refused("index is no index", "null for a file", lambda f: _place(f, NORM, None), INDEX, NORM,
            "plain file name"),
    refused("index names what its file lacks", "it is elsewhere",
            lambda f: _place(f, NORM, OTHER), OTHER, NORM, HOME),
    refused("index names what its file lacks", "it is nowhere", lambda f: _drop_from_file(f, NORM),
            HOME, NORM, "absent", "BF16 [160]"),
    refused("index names what its file lacks", "nobody would read it",
            lambda f: _place(f, NORM + "_2", HOME), HOME, NORM + "_2"),
    refused("index names what its file lacks", "a vision tensor",
            lambda f: _place(f, "vision_tower.more", shard_name(11)), shard_name(11),
            "vision_tower.more"),
    refused("index omits", "a tensor", lambda f: _omit(f, NORM), HOME, NORM, "index"),
    refused("index omits", "a scale",
            lambda f: _omit(f, LAYERS + "4.block_sparse_moe.experts.3.w2.weight_scale"), HOME,
            "experts.3.w2.weight_scale", "index"),
    refused("index omits", "a file", lambda f: _omit_file(f, HOME), HOME, "index"),
    refused("index omits", "the vision file", lambda f: _omit_file(f, shard_name(11)),
            shard_name(11), "index"),
    refused("total_size", "one", lambda f: _total(f, 1), INDEX, "total_size", "got 1 ",
            f"need {TOTAL}"),
    refused("total_size", "one byte more", lambda f: _total(f, TOTAL + 1), INDEX, "total_size",
            f"got {TOTAL + 1}", f"need {TOTAL}"),
    refused("total_size", "text", lambda f: _total(f, str(TOTAL)), INDEX, "total_size",
            "byte count"),
    refused("total_size", "negative", lambda f: _total(f, -1), INDEX, "total_size", "byte count"),
    refused("total_size", "true", lambda f: _total(f, True), INDEX, "total_size", "byte count"),
    refused("total_size", "10^30", lambda f: _total(f, 10**30), INDEX, "total_size",
            "more than 64 bits hold", "byte count", never="e+30"),
    legal("index metadata", "nested 100 deep", lambda f: _deep(f, 100)),
    refused("index metadata", "nested 990 deep", lambda f: _deep(f, 990), INDEX,
            "nested deeper than 128"),
    refused("index metadata", "100,000 brackets", _is('{"metadata":' + "[" * 100_000), INDEX,
            "JSON"),
    refused("index is no index", "null", _is("null"), INDEX, "got a JSON null", "object"),
    refused("index is no index", "half of a surrogate pair in a name",
            lambda f: _place(f, "\ud800", HOME), INDEX, "half of a surrogate pair"),
    refused("index is no index", "a file name with a line break",
            lambda f: _place(f, NORM, "a\nk3tool: well"), "a\\nk3tool: well", "absent"),
    refused("index is no index", "a file name of 100,000 letters",
            lambda f: _place(f, NORM, "x" * 100_000), "xxx...xxx", "absent"),
    legal("total_size", "absent", lambda f: _no(f, "metadata", "total_size")),
    legal("total_size", "no metadata", lambda f: _no(f, "metadata")),
    refused("duplicate tensor", "equal bytes in two indexed files", lambda f: _copy_to(f, 0),
            OTHER, NORM, HOME, "equal bytes"),
    refused("duplicate tensor", "different bytes in two indexed files", lambda f: _copy_to(f, 1),
            OTHER, NORM, HOME, "different bytes"),
    refused("duplicate tensor", "equal bytes, no index", lambda f: _copy_without_index(f, 0),
            OTHER, NORM, HOME, "equal bytes"),
    refused("duplicate tensor", "different bytes, no index", lambda f: _copy_without_index(f, 1),
            OTHER, NORM, HOME, "different bytes"),
    refused("duplicate tensor", "named twice in the index", _named_twice, INDEX, NORM, "twice"),
    legal("other split", "a layer moved to another file", _resplit),
    legal("other split", "tensors stored in reverse order", _reverse_order),
)  # fmt: skip

"""The quick reader of headers accepts only what the careful one accepts, and as the same thing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.checkpoint.header_order import KnownLayout, cut
from k3tool.checkpoint.header_table import TensorTable, quick_table
from k3tool.checkpoint.headers import DTYPE_BYTES, HeaderReader, _careful_table, read_header
from k3tool.errors import ArtifactError


def entry(dtype: str, shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {
    "__metadata__": {"format": "pt"},
    "m.layers.3.a": entry("BF16", [2, 3], 0, 12),
    "m.layers.3.b": entry("BF16", [1, 6], 12, 24),
    "m.layers.3.s": entry("F8_E8M0", [4], 24, 28),
    "m.layers.3.e": entry("F32", [0, 5], 28, 28),
    "x": entry("F32", [], 28, 32),
}


def columns(table: TensorTable) -> list[object]:
    return [table.names, [table.kinds[k] for k in table.kind_of], table.starts, table.n_bytes]


def both(raw: bytes) -> tuple[object, object]:
    """Return what the two readers say: (metadata, columns), or None for a refusal."""
    quick = quick_table(raw, DTYPE_BYTES)
    try:
        careful = _careful_table(Path("f"), raw)
    except ArtifactError:
        careful = None
    return tuple(found and (found[0], columns(found[1])) for found in (quick, careful))


@pytest.mark.parametrize(
    "header",
    [GOOD, {}, {"__metadata__": {}}, {"__metadata__": {"k3": '{"a":"b"}'}, "a": GOOD["x"] | {
        "data_offsets": [0, 4]}}, {"a\nb": entry("U8", [1], 0, 1)}, {"é": entry("U8", [1], 0, 1)}],
)  # fmt: skip
def test_a_sound_header_is_the_same_in_both(header: dict[str, Any]) -> None:
    for ascii_only in (True, False):
        quick, careful = both(json.dumps(header, ensure_ascii=ascii_only).encode())
        assert quick is not None
        assert quick == careful


# What only looks like a sound value: equal to one in Python, or hidden by a dict.
TRAPS = {
    "true is 1": b'{"a":{"dtype":"U8","shape":[1,6],"data_offsets":[0,6]},'
    b'"b":{"dtype":"U8","shape":[true,6],"data_offsets":[6,12]}}',
    "6.0 is 6": b'{"a":{"dtype":"U8","shape":[1,6],"data_offsets":[0,6]},'
    b'"b":{"dtype":"U8","shape":[1,6.0],"data_offsets":[6,12]}}',
    "a name twice": b'{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},'
    b'"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]}}',
    "a name twice, once escaped": b'{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},'
    b'"\\u0061":{"dtype":"U8","shape":[6],"data_offsets":[0,6]}}',
    "a key twice": b'{"a":{"dtype":"U8","dtype":"U8","shape":[6],"data_offsets":[0,6]}}',
    "metadata twice": b'{"__metadata__":{},"__metadata__":{}}',
    "a metadata key twice": b'{"__metadata__":{"a":"b","a":"b"}}',
    "an empty object as shape": b'{"a":{"dtype":"U8","shape":{},"data_offsets":[0,1]}}',
    "three offsets": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}}',
    "negative twice": b'{"a":{"dtype":"U8","shape":[-2,-3],"data_offsets":[0,6]}}',
    "beyond 64 bits": b'{"a":{"dtype":"U8","shape":[18446744073709551616],'
    b'"data_offsets":[0,18446744073709551616]}}',
    "a hole that an overlap pays for": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
    b'"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]},'
    b'"c":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}}',
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_what_only_looks_sound_is_refused_by_both(name: str) -> None:
    quick, careful = both(TRAPS[name])
    assert quick is None
    if name != "beyond 64 bits":  # so large a file cannot be, which its size says
        assert careful is None


def test_unusual_but_sound_is_left_to_the_careful_reader() -> None:
    extra = {"a": {**entry("U8", [1], 0, 1), "more": 1}}
    quick, careful = both(json.dumps(extra).encode())
    assert quick is None
    assert careful is not None
    quick, careful = both(json.dumps({"a\\": entry("U8", [1], 0, 1)}).encode())
    assert quick is None
    assert careful is not None


@pytest.mark.fuzz
def test_mutations_never_pass_the_quick_reader_alone() -> None:
    random = np.random.default_rng(5)
    good = json.dumps(GOOD, separators=(",", ":")).encode()
    accepted = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(random.integers(1, 3)):
            bad[random.integers(len(bad))] = random.choice(list(b'0123456789"[]{},:ae\\-.'))
        quick, careful = both(bytes(bad))
        assert quick is None or quick == careful
        accepted += quick is not None
    assert 50 < accepted < 2000  # letters of names may change


# -- layers share a table ----------------------------------------------------------------------


def layer_file(folder: Path, number: int, names: list[str], data: int = 1) -> Path:
    header, at = {}, 0
    for name in names:
        header[name.replace("{L}", str(number))] = entry("U8", [data], at, at + data)
        at += data
    text = json.dumps(header).encode()
    path = folder / f"{number}.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return path


NAMES = ["m.layers.{L}.a", "m.layers.{L}.experts.3.b", "m.layers.{L}.experts.12.b"]


def test_equal_layers_share_a_table_and_keep_their_names(tmp_path: Path) -> None:
    reader = HeaderReader()
    headers = [reader.read(layer_file(tmp_path, number, NAMES)) for number in (3, 12, 40)]
    assert headers[1].table is headers[2].table
    assert [header.layer for header in headers] == [3, 12, 40]
    for header, number in zip(headers, (3, 12, 40), strict=True):
        names = [name.replace("{L}", str(number)) for name in NAMES]
        assert header.names() == list(header.tensors) == names
        assert header.find(names[2]) == header.tensors[names[2]]
        assert header.find("m.layers.7.a") is None


@pytest.mark.parametrize(
    "names",
    [
        ["m.layers.{L}.a", "m.layers.5.b"],  # two layers in a file
        ["m.layers.{L}.a", "#"],  # our own mark is in a name
        ["m.layers.{L}.a", "m.layers.#.a"],
        ["m.layers.{L}.a", "b\nc"],  # names cannot be joined to one text
        ["m.layers.0{L}.a"],
    ],
)
def test_names_come_back_as_stored(tmp_path: Path, names: list[str]) -> None:
    reader = HeaderReader()
    for number in (3, 4, 12):
        header = reader.read(layer_file(tmp_path, number, names))
        stored = [name.replace("{L}", str(number)) for name in names]
        assert header.names() == list(header.tensors) == stored
        assert all(header.find(name) for name in stored)


def test_a_layer_of_equal_names_and_other_size_is_not_the_same(tmp_path: Path) -> None:
    reader = HeaderReader()
    first = reader.read(layer_file(tmp_path, 12, NAMES))
    second = reader.read(layer_file(tmp_path, 13, NAMES, data=2))
    assert first.table is not second.table
    assert second.tensors["m.layers.13.a"].n_bytes == 2
    path = layer_file(tmp_path, 14, NAMES)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ArtifactError, match=r"14\.safetensors: got"):
        reader.read(path)


# -- the same entries in another order ---------------------------------------------------------


def shuffled_text(names: list[str], order: list[int], head: dict[str, Any] | None = None) -> bytes:
    """Return the header of tensors of different sizes that lie in another order."""
    header: dict[str, Any] = {} if head is None else {"__metadata__": head}
    at = 0
    for row in order:
        header[names[row]] = entry("BF16", [2, row + 1], at, at + 4 * (row + 1))
        at += 4 * (row + 1)
    return json.dumps(header, separators=(",", ":")).encode()


ROWS = [f"m.layers.#.experts.{number}.b" for number in range(6)]


def known(text: bytes) -> KnownLayout:
    quick = quick_table(text, DTYPE_BYTES)
    assert quick is not None
    return KnownLayout(text, *quick)


def reordered(layout: KnownLayout, text: bytes) -> tuple[dict[str, str], TensorTable] | None:
    entries = cut(text)
    return None if entries is None else layout.reordered(entries, DTYPE_BYTES)


@pytest.mark.parametrize("head", [None, {"format": "pt"}])
def test_another_order_is_the_same_layout_at_other_places(head: dict[str, Any] | None) -> None:
    layout = known(shuffled_text(ROWS, [0, 1, 2, 3, 4, 5], head))
    other = shuffled_text(ROWS, [3, 0, 5, 1, 4, 2], head)
    found, careful = reordered(layout, other), _careful_table(Path("f"), other)
    assert found is not None
    assert found[0] == careful[0] == (head or {})
    table, full = found[1], careful[1]
    assert table.names == ROWS
    assert table.starts != sorted(table.starts)
    assert places(table) == places(full)
    assert table.layout is layout._table.layout


def places(table: TensorTable) -> dict[str, tuple[object, int]]:
    kinds = [table.kinds[kind] for kind in table.kind_of]
    return dict(zip(table.names, zip(kinds, table.starts, strict=True), strict=True))


NOT_THE_SAME = {
    "another name": (b"experts.3", b"experts.7"),
    "a name twice": (b"experts.3", b"experts.2"),
    "another shape of equal size": (b"[2,4]", b"[4,2]"),
    "another dtype of equal size": (b'"BF16","shape":[2,4]', b'"F16","shape":[2,4]'),
    "a leading zero": (b"[0,16]", b"[00,16]"),
    "a sign": (b"[0,16]", b"[0,+16]"),
    "an overlap": (b"[0,16]", b"[1,17]"),
    "no comma": (b"]},", b"]}"),
    "two commas": (b"]},", b"]},,"),
    "a comma at the end": (b"]}}", b"]},}"),
    "a space": (b"]},", b"]}, "),
    "more behind": (b"]}}", b"]}}}"),
    "beyond 64 bits": (b"[0,16]", b"[0,18446744073709551632]"),
    "another key": (b'"shape"', b'"shapf"'),
    "metadata": (b"{", b'{"__metadata__":{"format":"pt"},'),
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_what_is_not_the_same_in_another_order_is_left_to_the_full_reader(name: str) -> None:
    layout = known(shuffled_text(ROWS, [0, 1, 2, 3, 4, 5]))
    good = shuffled_text(ROWS, [3, 0, 5, 1, 4, 2])
    old, new = NOT_THE_SAME[name]
    assert reordered(layout, good) is not None  # the control
    assert good.count(old) > 0
    assert reordered(layout, good.replace(old, new, 1)) is None


@pytest.mark.fuzz
def test_mutations_of_another_order_never_pass_unseen() -> None:
    random = np.random.default_rng(6)
    layout = known(shuffled_text(ROWS, [0, 1, 2, 3, 4, 5]))
    good = shuffled_text(ROWS, [3, 0, 5, 1, 4, 2])
    accepted = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(random.integers(1, 3)):
            bad[random.integers(len(bad))] = random.choice(list(b'0123456789"[]{},:e.'))
        found = reordered(layout, bytes(bad))
        if found is not None:
            assert places(found[1]) == places(_careful_table(Path("f"), bytes(bad))[1])
            accepted += bytes(bad) != good
    assert reordered(layout, good) is not None
    assert accepted == 0  # every byte of a sound header matters


def test_a_reader_shares_the_layout_of_layers_in_other_orders(tmp_path: Path) -> None:
    reader = HeaderReader()
    headers = []
    for number, order in ((3, [0, 1, 2]), (12, [2, 0, 1])):
        path = layer_file(tmp_path, number, [NAMES[row] for row in order])
        text = json.dumps(json.loads(path.read_bytes()[8:-3]), separators=(",", ":")).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(3))
        headers.append(reader.read(path))
    assert headers[0].table.layout is headers[1].table.layout
    for header in headers:
        assert header.tensors == read_header(tmp_path / header.file).tensors

"""Raw safetensors headers: one message per thing that can be wrong, and a control that passes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.checkpoint.headers import read_header
from k3tool.errors import ArtifactError


def _entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {
    "__metadata__": {"format": "pt"},
    "a": _entry("BF16", [2, 3], 0, 12),
    "s": _entry("F8_E8M0", [4], 12, 16),
    "e": _entry("F32", [0, 5], 16, 16),
    "x": _entry("F32", [], 16, 20),
}


def _file(path: Path, header: object, n_data: int = 20) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_data))
    return path


def test_control(tmp_path: Path) -> None:
    header = read_header(_file(tmp_path / "a.safetensors", GOOD))
    start = 8 + len(json.dumps(GOOD))
    assert header.metadata == {"format": "pt"}
    assert header.size == start + 20
    info = header.tensors["s"]
    assert (info.dtype, info.shape, info.offset, info.n_bytes) == ("F8_E8M0", (4,), start + 12, 4)
    assert header.tensors["x"].shape == ()


def test_padding_behind_the_json(tmp_path: Path) -> None:
    text = json.dumps(GOOD).encode() + b" " * 9
    assert len(read_header(_file(tmp_path / "a.safetensors", text)).tensors) == 4


@pytest.mark.parametrize(
    ("change", "n_data", "words"),
    [
        ({"a": _entry("BF17", [2, 3], 0, 12)}, 20, "a: dtype"),
        ({"a": _entry("F32", [2, 3], 0, 12)}, 20, "24 for F32"),
        ({"a": _entry("BF16", [2, -3], 0, 12)}, 20, "natural numbers"),
        ({"a": _entry("BF16", [2, 3.0], 0, 12)}, 20, "natural numbers"),
        ({"a": _entry("BF16", [True, 6], 0, 12)}, 20, "natural numbers"),
        ({"a": {"dtype": "BF16", "shape": [2, 3]}}, 20, "natural numbers"),
        ({"a": {"shape": [2, 3], "data_offsets": [0, 12]}}, 20, "a: dtype"),
        ({"a": [1]}, 20, "an object"),
        ({"s": _entry("U8", [4], 11, 15)}, 20, "no hole and no overlap"),
        ({"s": _entry("U8", [4], 13, 17)}, 21, "no hole and no overlap"),
        ({"a": _entry("BF16", [2, 3], 4, 16)}, 24, "no hole and no overlap"),
        ({}, 19, "bytes"),
        ({}, 21, "bytes"),
        ({"__metadata__": {"k": 1}}, 20, "text values"),
        ({"__metadata__": []}, 20, "text values"),
    ],
)
def test_mutants(tmp_path: Path, change: dict[str, Any], n_data: int, words: str) -> None:
    path = _file(tmp_path / "a.safetensors", {**GOOD, **change}, n_data)
    with pytest.raises(ArtifactError) as caught:
        read_header(path)
    assert words in str(caught.value)
    assert "a.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b' {"a":1}', b'{"a":1,"a":1}', b"\xff{}", b"[" * 5000]
)
def test_header_that_is_no_object(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ArtifactError, match="safetensors"):
        read_header(_file(tmp_path / "a.safetensors", text))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "got 0 bytes, need a safetensors file"),
        (b"1234567", "got 7 bytes, need a safetensors file"),
        (b"\x09" + bytes(15), "got a header of 9 bytes in a file of 16 bytes, need at least 17"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes .* at most 100000000"),
        ((1 << 40).to_bytes(8, "little"), "a header of 1099511627776 bytes .* at most 100000000"),
    ],
)
def test_length_word(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ArtifactError, match=words):
        read_header(path)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="got absent"):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.fuzz
def test_mutated_bytes_raise_nothing_else(tmp_path: Path) -> None:
    good = _file(tmp_path / "good", GOOD).read_bytes()
    random = np.random.default_rng(11)
    refused = 0
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(random.integers(1, 4)):
            bad[random.integers(len(bad) - 20)] = random.integers(256)
        (tmp_path / "bad").write_bytes(bad)
        try:
            read_header(tmp_path / "bad")
        except ArtifactError:
            refused += 1
    assert refused > 1000

"""Damage to headers: what a file says about its own tensors."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.faults.damage.case import Case, legal, refused
from tests.faults.damage.edit import (
    LAYERS,
    Raw,
    Tensor,
    add,
    all_files,
    edit_header,
    header_bytes,
    length_word,
    pad_header,
    reshape,
    shard_name,
)

FILE = shard_name(2)
Q = LAYERS + "1.self_attn.q_proj.weight"
NORM = LAYERS + "1.input_layernorm.weight"
SAFETENSORS_CAP = 100_000_000


def _entry(folder: Path, **fields: object) -> None:
    """Change fields of one tensor's entry; None takes a field out."""
    with edit_header(folder / FILE) as header:
        for key, value in fields.items():
            if value is None:
                del header[Q][key]
            else:
                header[Q][key] = value


def _offsets(folder: Path, start: int, stop: int) -> None:
    """Move both offsets of one tensor."""
    with edit_header(folder / FILE) as header:
        low, high = header[Q]["data_offsets"]
        header[Q]["data_offsets"] = [low + start, high + stop]


def _text(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Return damage that replaces the first occurrence of a header's text."""

    def damage(folder: Path) -> None:
        def make(text: bytes) -> bytes:
            assert old in text
            return text.replace(old, new, 1)

        header_bytes(folder / FILE, make)

    return damage


def _is(text: bytes) -> Callable[[Path], None]:
    """Return damage that replaces a whole header."""
    return lambda folder: header_bytes(folder / FILE, lambda _: text)


def _listed(folder: Path) -> None:
    with edit_header(folder / FILE) as header:
        header[Q] = list(header[Q].values())


def _twice(folder: Path) -> None:
    entry = json.loads(Raw.read(folder / FILE).header)[Q]
    _text(b"{", b"{" + json.dumps(Q).encode() + b": " + json.dumps(entry).encode() + b", ")(folder)


def _hole(folder: Path) -> None:
    """Leave four bytes that nobody owns in front of one tensor, as an aligner would."""
    raw = Raw.read(folder / FILE)
    header = json.loads(raw.header)
    start = header[Q]["data_offsets"][0]
    for entry in header.values():
        if entry.get("data_offsets", [-1])[0] >= start:
            entry["data_offsets"] = [offset + 4 for offset in entry["data_offsets"]]
    data = raw.data[:start] + bytes(4) + raw.data[start:]
    Raw(json.dumps(header).encode(), data).write(folder / FILE)


def _overlap(folder: Path) -> None:
    """Let one tensor have the bytes of another of its size."""
    with edit_header(folder / FILE) as header:
        header[Q]["data_offsets"] = header[Q.replace("q_proj", "k_proj")]["data_offsets"]


def _over_cap(path: Path, over: int = 1) -> None:
    length_word(path, SAFETENSORS_CAP + over)
    os.truncate(path, SAFETENSORS_CAP + over + 999_999)  # a hole: no bytes on disk


def _metadata(folder: Path, value: object) -> None:
    with edit_header(folder / FILE) as header:
        header["__metadata__"] = value


def _no_metadata(folder: Path) -> None:
    with edit_header(folder / FILE) as header:
        del header["__metadata__"]


def _reordered(folder: Path) -> None:
    with edit_header(folder / FILE) as header:
        for name in sorted(header, reverse=True):
            header[name] = header.pop(name)


def _k3(folder: Path, text: str) -> None:
    with edit_header(folder / shard_name(1)) as header:
        header["__metadata__"] = {"k3": text}


LONG = "9" * 5000
EMPTY = Tensor("F32", (0, 4), b"")
HEADERS: tuple[Case, ...] = (
    refused("header length", "all ones", lambda f: length_word(f / FILE, 2**64 - 1), FILE,
            "18446744073709551615 bytes"),
    refused("header length", "top bit", lambda f: length_word(f / FILE, 2**63), FILE,
            "9223372036854775808 bytes"),
    refused("header length", "one byte more than the file",
            lambda f: length_word(f / FILE, 1_088_584 - 7), FILE, "1088577 bytes"),
    refused("header length", "zero", lambda f: length_word(f / FILE, 0), FILE, "header"),
    refused("header length", "a hundred bytes short",
            lambda f: length_word(f / FILE, len(Raw.read(f / FILE).header) - 100), FILE, "JSON"),
    refused("header length", "over the format's cap", lambda f: _over_cap(f / FILE), FILE,
            "100000001 bytes", "100000000", never="early truncated"),
    refused("header length", "over the format's cap by twice",
            lambda f: _over_cap(f / shard_name(11), 2 * SAFETENSORS_CAP), shard_name(11),
            "300000000 bytes", "100000000", never="early truncated"),
    refused("header length", "over the format's cap in every file",
            lambda f: [_over_cap(path) for path in all_files(f)], shard_name(1),
            "100000001 bytes", "100000000", never="early truncated"),
    legal("header length", "100,000 bytes", lambda f: pad_header(f / FILE, 100_000)),
    legal("header length", "100,000 bytes, in every file",
          lambda f: [pad_header(path, 100_000) for path in all_files(f)]),
    legal("header length", "823 KB, as in the release", lambda f: pad_header(f / FILE, 823_000)),
    refused("header is no JSON", "random bytes", _is(bytes(range(64))), FILE, "JSON"),
    refused("header is no JSON", "single quotes", _is(b"{'a': 1}"), FILE, "JSON"),
    refused("header is no JSON", "bytes that are no UTF-8", _text(b"BF16", b"B\xff\xfe6"), FILE,
            "JSON"),
    refused("header is no JSON", "NaN as a number", _text(b"[128,160]", b"[NaN,160]"), FILE,
            "NaN"),
    refused("header is no JSON", "100,000 brackets", _is(b"{" + b'"a":[' * 100_000), FILE, "JSON"),
    refused("header is no JSON", "200 brackets", _is(b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"),
            FILE, "nested deeper than 128"),
    refused("header is no JSON", "UTF-16", lambda f: header_bytes(
        f / FILE, lambda text: text.decode().encode("utf-16")), FILE, "UTF-8"),
    refused("header is no JSON", "a comma at the end", _text(b"}}", b"},}"), FILE, "JSON"),
    refused("header is no JSON", "text behind the object",
            lambda f: header_bytes(f / FILE, lambda text: text + b"x"), FILE, "JSON"),
    refused("header is no object", "list", _is(b"[1, 2]"), FILE, "object"),
    refused("header is no object", "text", _is(b'"model"'), FILE, "object"),
    refused("header is no object", "null", _is(b"null"), FILE, "object"),
    refused("header is no object", "an entry is a list", _listed, FILE, Q, "object"),
    refused("duplicate key", "tensor", _twice, FILE, Q, "twice"),
    refused("duplicate key", "dtype", _text(b'"dtype"', b'"dtype": "F32", "dtype"'), FILE,
            "dtype", "twice"),
    refused("duplicate key", "metadata", _text(b"{", b'{"__metadata__": {"a": "b"}, '), FILE,
            "__metadata__", "twice"),
    refused("offsets", "negative", lambda f: _entry(f, data_offsets=[-40960, 0]), FILE, Q,
            "-40960"),
    refused("offsets", "end before start", lambda f: _entry(f, data_offsets=[40960, 0]), FILE, Q),
    refused("offsets", "fractions", lambda f: _entry(f, data_offsets=[0.0, 40960.0]), FILE, Q,
            "natural numbers"),
    refused("offsets", "true and false", lambda f: _entry(f, data_offsets=[False, True]), FILE, Q,
            "natural numbers"),
    refused("offsets", "three", lambda f: _entry(f, data_offsets=[0, 40960, 40960]), FILE, Q),
    refused("offsets", "absent", lambda f: _entry(f, data_offsets=None), FILE, Q),
    refused("offsets", "beyond the file", lambda f: _offsets(f, 2**40, 2**40), FILE, "data_offsets",
            "no hole"),
    refused("offsets", "above 2^64", lambda f: _offsets(f, 2**70, 2**70), FILE, "data_offsets",
            "no hole"),
    refused("offsets", "two tensors share bytes", _overlap, FILE, "overlap"),
    refused("offsets", "one byte into the next", lambda f: _offsets(f, 1, 1), FILE, "self_attn",
            "no hole and no overlap"),
    refused("offsets", "hole", _hole, FILE, Q, "no hole"),
    refused("size is not the shape's", "a row more", lambda f: _entry(f, shape=[129, 160]), FILE, Q,
            "40960 bytes", "41280"),
    refused("size is not the shape's", "wider dtype", lambda f: _entry(f, dtype="F32"), FILE, Q,
            "40960 bytes", "81920"),
    refused("size is not the shape's", "no shape", lambda f: _entry(f, shape=[]), FILE, Q,
            "40960 bytes"),
    refused("size is not the shape's", "product above 2^64",
            lambda f: _entry(f, shape=[2**40, 2**40]), FILE, Q, "40960 bytes"),
    refused("shape", "negative", lambda f: _entry(f, shape=[-128, -160]), FILE, Q,
            "natural numbers"),
    refused("shape", "text", lambda f: _entry(f, shape="128x160"), FILE, Q, "natural numbers"),
    refused("shape", "absent", lambda f: _entry(f, shape=None), FILE, Q),
    refused("unknown dtype", "of another library", lambda f: _entry(f, dtype="bfloat16"), FILE, Q,
            "bfloat16", "BF16"),
    refused("unknown dtype", "lower case", lambda f: _entry(f, dtype="bf16"), FILE, Q, "bf16",
            "BF16"),
    refused("unknown dtype", "a number", lambda f: _entry(f, dtype=16), FILE, Q, "16", "BF16"),
    refused("shape", "500 axes of 2^62", lambda f: _entry(f, shape=[2**62] * 500), FILE, Q,
            "500 axes", "at most 32"),
    refused("shape", "30,000 axes of 2^62", lambda f: _entry(f, shape=[2**62] * 30_000), FILE, Q,
            "30000 axes", "at most 32"),
    refused("shape", "a number of 5000 digits", _text(b"[128,160]", b"[%s,160]" % (b"9" * 5000)),
            FILE, "a number of 5000 digits"),
    legal("name", "a layer's number of 5000 digits, in metadata",
          lambda f: _metadata(f, {"note": f"layers.{LONG}."})),
    refused("name", "a layer's number of 5000 digits",
            lambda f: add(f, f"{LAYERS}{LONG}.x", EMPTY), FILE, "layers.999", "...", "nothing"),
    refused("name", "an expert's number of 5000 digits",
            lambda f: add(f, f"{LAYERS}1.block_sparse_moe.experts.{LONG}.x", EMPTY), FILE,
            "experts.999", "nothing reads"),
    refused("name", "the sign for any layer, escaped",
            _text(b"layers.1.self_attn.q_proj", b"layers.\\u0023.self_attn.q_proj"), FILE, Q,
            "absent"),
    refused("name", "half of a surrogate pair", _text(b"self_attn.q_proj", b"\\ud800"), FILE,
            "half of a surrogate pair"),
    refused("name", "half of a surrogate pair, in metadata",
            _text(b'"__metadata__":{', b'"__metadata__":{"a":"\\uDFFF",'), FILE,
            "half of a surrogate pair"),
    refused("name", "a line break that fakes a line of ours",
            lambda f: add(f, "x\nk3tool: all is well", EMPTY), FILE, "x\\nk3tool: all is well"),
    refused("name", "an escape sequence and a change of direction",
            lambda f: add(f, "x\x1b[2K\u202ey", EMPTY), FILE, "x\\x1b[2K\\u202ey"),
    refused("name", "a zero byte", lambda f: add(f, "x\0y", EMPTY), FILE, "x\\x00y"),
    refused("name", "100,000 letters", lambda f: add(f, "x" * 100_000, EMPTY), FILE, "xxx...xxx",
            "nothing reads"),
    refused("unknown dtype", "half of a surrogate pair", lambda f: _entry(f, dtype="\ud800"), FILE,
            "half of a surrogate pair"),
    refused("unknown dtype", "an escape sequence", lambda f: _entry(f, dtype="\x1b[2J"), FILE, Q,
            "u001b[2J"),
    refused("unknown dtype", "100,000 letters", lambda f: _entry(f, dtype="F" * 100_000), FILE, Q,
            "FFF..."),
    *(refused("rank position", instance, lambda f, text=text: _k3(f, text), shard_name(1), "k3",
              "the shard writer's JSON", "one of 1, 2, 4, 8")
      for instance, text in (
          ("tp 0", '{"tp":0,"rank":0}'), ("tp 3", '{"tp":3,"rank":0}'),
          ("tp -1", '{"tp":-1,"rank":0}'), ("tp 10^12", '{"tp":1000000000000,"rank":0}'),
          ("rank of none", '{"tp":2,"rank":7}'), ("rank -1", '{"tp":2,"rank":-1}'),
          ("rank alone", '{"rank":0}'), ("true", '{"tp":true,"rank":false}'),
          ("a list", "[1, 0]"), ("a key twice", '{"tp":2,"tp":2,"rank":0}'),
          ("100,000 brackets", "[" * 100_000), ("a number of 5000 digits", f'{{"tp":{LONG}}}'),
      )),
    refused("unknown dtype", "absent", lambda f: _entry(f, dtype=None), FILE, Q, "BF16"),
    refused("empty tensor", "more, at the end of a file",
            lambda f: add(f, LAYERS + "1.empty", EMPTY), FILE, LAYERS + "1.empty", "nothing reads",
            never="hole overlap"),
    refused("empty tensor", "in place of a norm", lambda f: reshape(f, NORM, (0,)), FILE, NORM,
            "[0]", "[160]", never="hole overlap"),
    refused("empty tensor", "in place of a matrix", lambda f: reshape(f, Q, (0, 160)), FILE, Q,
            "[0, 160]", "[128, 160]", never="hole overlap"),
    legal("metadata", "more keys", lambda f: _metadata(f, {"format": "pt", "né": "x" * 1000})),
    legal("metadata", "none", _no_metadata),
    legal("metadata", "at the end, names in another order", _reordered),
    refused("metadata", "a number", lambda f: _metadata(f, {"step": 12}), FILE, "__metadata__",
            "text"),
    refused("metadata", "a list", lambda f: _metadata(f, ["pt"]), FILE, "__metadata__", "text"),
)  # fmt: skip

"""A control, then one damaged checkpoint per contract: inspect names it, shard refuses it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.checkpoint.index import INDEX_NAME
from tests.in_place import put

Damage = Callable[[Path], None]
LAYER = "language_model.model.layers."
FILE_2, FILE_3 = "model-00002-of-000011.safetensors", "model-00003-of-000011.safetensors"
Q_PROJ = LAYER + "1.self_attn.q_proj.weight"
SCALE = LAYER + "2.block_sparse_moe.experts.4.w2.weight_scale"


@contextmanager
def _edit_header(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a file's header; write back what the block made of it, data untouched."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    yield header
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@contextmanager
def _edit_index(folder: Path) -> Iterator[dict[str, Any]]:
    index = json.loads((folder / INDEX_NAME).read_text())
    yield index
    (folder / INDEX_NAME).write_text(json.dumps(index))


def _rename_in_header(folder: Path, old: str, new: str) -> None:
    with _edit_header(folder / FILE_2) as header:
        header[new] = header.pop(old)


def _rename_everywhere(folder: Path, old: str, new: str) -> None:
    _rename_in_header(folder, old, new)
    with _edit_index(folder) as index:
        index["weight_map"][new] = index["weight_map"].pop(old)


def _set(folder: Path, name: str, **fields: object) -> None:
    with _edit_header(folder / FILE_2) as header:
        header[name].update(fields)


def _unindex(folder: Path, name: str) -> None:
    with _edit_index(folder) as index:
        del index["weight_map"][name]


def _move_in_index(folder: Path, name: str, file: str) -> None:
    with _edit_index(folder) as index:
        index["weight_map"][name] = file


def _set_total(folder: Path, total: int) -> None:
    with _edit_index(folder) as index:
        index["metadata"]["total_size"] = total


def _cut(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-n_bytes])


EXTRA = LAYER + "1.self_attn.q_proj.bias"
# damage, kind of finding, words that must name it
CASES: dict[str, tuple[Damage, str, list[str]]] = {
    "tensor renamed in its header": (
        lambda f: _rename_in_header(f, Q_PROJ, EXTRA), "missing", [FILE_2, Q_PROJ]),
    "tensor absent everywhere": (
        lambda f: _rename_everywhere(f, Q_PROJ, EXTRA), "missing", [Q_PROJ, "BF16 [128, 160]"]),
    "tensor nobody reads": (
        lambda f: _rename_everywhere(f, Q_PROJ, EXTRA), "unclaimed", [FILE_2, EXTRA]),
    "other shape": (
        lambda f: _set(f, Q_PROJ, shape=[160, 128]), "mis-shaped",
        [FILE_2, Q_PROJ, "got [160, 128], need [128, 160]"]),
    "other dtype": (
        lambda f: _set(f, Q_PROJ, dtype="F16"), "mis-typed",
        [FILE_2, Q_PROJ, "got F16, need BF16"]),
    "absent from the index": (
        lambda f: _unindex(f, Q_PROJ), "unindexed", [FILE_2, Q_PROJ]),
    "in another file than the index says": (
        lambda f: _move_in_index(f, Q_PROJ, FILE_3), "mis-placed", [FILE_3, Q_PROJ, FILE_2]),
    "file absent": (
        lambda f: (f / FILE_2).unlink(), "missing file", [FILE_2]),
    "file cut": (
        lambda f: _cut(f / FILE_2, 1), "damaged file", [FILE_2]),
    "file empty": (
        lambda f: (f / FILE_2).write_bytes(b""), "damaged file", [FILE_2]),
    "file beside the index": (
        lambda f: shutil.copy(f / FILE_2, f / "extra.safetensors"), "unlisted file",
        ["extra.safetensors"]),
    "total size": (
        lambda f: _set_total(f, 1), "total_size", ["got 1 bytes", "need 8169200 bytes"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_inspect_names_it_and_shard_refuses_it(
    k3tool: Callable, writable: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    damage, kind, words = CASES[case]
    folder = writable("tiny_tp8")
    assert k3tool("inspect", folder).code == 0  # the control
    damage(folder)
    outcome = k3tool("inspect", folder)
    lines = [line for line in outcome.out.splitlines() if line.startswith(f"{kind}: ")]
    assert outcome.code == 3
    assert any(all(word in line for word in words) for line in lines), outcome.out
    assert kind in outcome.out.splitlines()[-1]
    assert outcome.out.splitlines()[-1].startswith("not whole: ")
    report = json.loads(k3tool("inspect", folder, "--json").out)
    assert report["whole"] is False
    assert kind in {finding["kind"] for finding in report["findings"]}
    if kind in ("total_size", "unlisted file"):
        return  # every tensor is there once: nothing for shard to refuse
    refused = k3tool("shard", folder, "--tp", 8, "-o", tmp_path / "out")
    assert refused.code == 3
    assert refused.err.count("\n") <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny_tp8"]


def test_many_findings_are_capped_unless_verbose(
    k3tool: Callable, writable: Callable[[str], Path]
) -> None:
    folder = writable("tiny_tp8")
    (folder / FILE_2).unlink()
    outcome = k3tool("inspect", folder)
    assert "missing: 80 more (-v shows all)" in outcome.out
    assert outcome.out.count("\nmissing: ") == 21
    assert k3tool("inspect", folder, "-v").out.count("\nmissing: ") == 100


def test_graph_that_reads_less_or_more(
    k3tool: Callable, oracle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3tool.model.graph import weight_leaves

    leaf = "layers.2.block_sparse_moe.experts.w3"

    def claims(config: object) -> set[str]:
        return weight_leaves(config) - {leaf} | {"layers.2.more"}

    monkeypatch.setattr("stages.inspect_checkpoint.weight_leaves", claims)
    outcome = k3tool("inspect", oracle("tiny_tp8"))
    assert outcome.code == 3
    assert f"unread leaf: {leaf}" in outcome.out
    assert "unknown leaf: layers.2.more" in outcome.out
    monkeypatch.setattr("stages.inspect_checkpoint.weight_leaves", lambda config: set())
    assert k3tool("inspect", oracle("tiny_tp8")).code == 3  # nothing to compare is no pass


# -- values that shard looks at ----------------------------------------------------------------


@pytest.mark.parametrize("value", [253, 254, 255])
def test_scale_that_leaves_the_range(
    k3tool: Callable, writable: Callable[[str], Path], tmp_path: Path, value: int
) -> None:
    folder = writable("tiny_tp8")
    put(folder, SCALE, (9, 5), value)
    outcome = k3tool("shard", folder, "--tp", 8, "-o", tmp_path / "out")
    assert outcome.code == 3
    assert FILE_3 in outcome.err
    assert f"{SCALE}: row 9, group 5: got scale byte {value}" in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny_tp8"]


@pytest.mark.parametrize("value", [0, 1, 252])
def test_scales_that_are_legal(
    k3tool: Callable, writable: Callable[[str], Path], tmp_path: Path, value: int
) -> None:
    folder = writable("tiny_tp8")
    put(folder, SCALE, (9, 5), value)
    assert k3tool("shard", folder, "--tp", 8, "-o", tmp_path / "out").code == 0


def test_values_behind_the_live_heads(
    k3tool: Callable, writable: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = writable("tiny_tp8")
    put(folder, LAYER + "1.self_attn.A_log", (13,), np.float32(0.5))
    outcome = k3tool("shard", folder, "--tp", 8, "-o", tmp_path / "out")
    assert outcome.code == 3
    assert "A_log: element 13: got 0.5, need zero padding behind 8 heads" in outcome.err

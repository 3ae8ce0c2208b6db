"""One layer at a time against NumPy: every kind passes, and a wrong weight fails its own lines."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.blocks import meaning
from k3tool.blocks.models import chosen_layers, opened
from k3tool.blocks.tolerance import Tolerance, worst_of
from k3tool.blocks.weights import Matrix, decode_pairs, numbers
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import ArtifactError, UsageError
from k3tool.isa.table import Op
from k3tool.ref.formats import Array, decode_bf16, decode_mxfp4
from k3tool.ref.ops import REFERENCE
from k3tool.runtime.options import parse_ids
from k3tool.verdict import Check
from stages.verify import blocks
from tests.conftest import SAMPLE_WIDE, Outcome

Oracle = Callable[[str], Path]


def failures(checks: tuple[Check, ...]) -> list[str]:
    return [check.name for check in checks if check.status == "FAIL"]


def of_ops(checks: tuple[Check, ...]) -> list[Check]:
    return [check for check in checks if " prefill " in check.name or " decode " in check.name]


@pytest.mark.parametrize("numerics", ["f32", "bf16"])
@pytest.mark.parametrize("plain", [False, True], ids=["as-run", "plain"])
@pytest.mark.parametrize("name", ["tiny13", "tiny_tp8", SAMPLE_WIDE])
def test_layers_of_every_kind_pass(oracle: Oracle, name: str, plain: bool, numerics: str) -> None:
    result = blocks.run(blocks.Options((oracle(name),), numerics=numerics, plain=plain))
    assert result.sound, failures(result.checks)
    words = {check.name.split()[3] for check in of_ops(result.checks)}
    assert {"KDA_STEP", "ATTN_RES", "MLA_ATTEND", "ROUTER_TOPK"} <= words or not plain
    points = [check for check in result.checks if check not in of_ops(result.checks)]
    missing = [check for check in points if check.status == "NOT RUN"]
    assert bool(missing) != plain
    for layer in result.layers:
        inputs = [check for check in points if f"layer {layer}: input of" in check.name]
        assert len(inputs) == (2 if layer else len(inputs)), inputs
        assert all(check.status == "PASS" for check in inputs)
    assert result.read_bytes > 0


def test_only_the_layers_tensors_are_read(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = Checkpoint.read, set()

    def counting(self: Checkpoint, name: str) -> Array:
        names.add(name)
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", counting)
    result = blocks.run(blocks.Options((oracle("tiny13"),), (3,)))
    assert result.sound
    assert {name.split("layers.")[1].split(".")[0] for name in names} == {"3"}
    with Checkpoint.open(oracle("tiny13")) as checkpoint:
        whole = sum(checkpoint.tensor_info(name).n_bytes for name in names)
    assert result.read_bytes == whole


# -- negative controls ---------------------------------------------------------------------------


def with_swapped_rows(source: Path, to: Path, tensor: str) -> Path:
    """Return a copy of a checkpoint with the first two rows of a matrix exchanged."""
    shutil.copytree(source, to)
    with Checkpoint.open(to) as checkpoint:
        name = next(name for name in checkpoint.index.weight_map if name.endswith(tensor))
        info, rows = checkpoint.tensor_info(name), checkpoint.read(name)
    rows[[0, 1]] = rows[[1, 0]]
    with (to / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(rows.tobytes())
    return to


@pytest.mark.parametrize(
    ("tensor", "op", "point"),
    [
        ("layers.1.self_attn.k_proj.weight", "self_attn.k_in", "attn_out"),
        ("layers.1.block_sparse_moe.gate.weight", "block_sparse_moe.scores", "output of the layer"),
    ],
)
def test_exchanged_rows_fail_the_op_that_reads_them(
    oracle: Oracle, tmp_path: Path, tensor: str, op: str, point: str
) -> None:
    bad = with_swapped_rows(oracle("tiny13"), tmp_path / "bad", tensor)
    good = oracle("tiny13")
    result = blocks.run(blocks.Options((bad,), (1,), against=good, numerics="f32"))
    failed = failures(result.checks)
    ops = [check.name for check in of_ops(result.checks) if check.status == "FAIL"]
    assert {name.split()[-1] for name in ops} == {op}
    assert len(ops) == 2, "prefill and decode"
    assert f"layer 1: {point}" in failed
    assert "layer 1: input of the sub-layer attn_in" not in failed
    assert blocks.run(blocks.Options((bad,), (1,))).sound, "against itself nothing is wrong"


def test_a_rank_of_shards_is_named(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = oracle("tiny_tp8")
    shard_checkpoint(good, 2, tmp_path / "tp2")
    for against in (None, good):
        assert blocks.run(blocks.Options((tmp_path / "tp2",), (3,), against=against)).sound
    bad = with_swapped_rows(good, tmp_path / "bad", "layers.3.self_attn.q_b_proj.weight")
    shard_checkpoint(bad, 2, tmp_path / "bad2")
    result = blocks.run(blocks.Options((tmp_path / "bad2",), (3,), against=good))
    wrong = [check for check in of_ops(result.checks) if check.status == "FAIL"]
    assert {check.name.split()[-1] for check in wrong} == {"self_attn.q"}
    assert all("on rank 0," in check.detail for check in wrong)


def test_a_wrong_meaning_fails_its_op_alone(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared is the engine with NumPy: a mistake on either side shows."""
    right = REFERENCE[Op.MLA_ATTEND]

    @functools.wraps(right)
    def wrong(q: Array, cache: Array, *, latent: int, scale: float, **rest: object) -> Array:
        return np.asarray(right(q, cache, latent=latent, scale=scale * 1.001, **rest))

    monkeypatch.setitem(REFERENCE, Op.MLA_ATTEND, wrong)
    result = blocks.run(blocks.Options((oracle("tiny13"),), (3,), plain=True))
    ops = {check.name.split()[3] for check in of_ops(result.checks) if check.status == "FAIL"}
    assert ops == {"MLA_ATTEND"}


# -- parts -----------------------------------------------------------------------------------------


def test_decoding_by_pairs_is_decoding() -> None:
    rng = np.random.default_rng(5)
    packed = rng.integers(0, 256, (40, 48)).astype(np.uint8)
    scale = rng.integers(0, 253, (40, 3)).astype(np.uint8)
    scale[::7, 1] = 0
    ours, theirs = decode_pairs(packed, scale), decode_mxfp4(packed, scale)
    assert (ours == theirs).all()
    assert (np.signbit(ours) == np.signbit(theirs)).all()


def test_a_large_matrix_is_decoded_in_parts() -> None:
    bits = np.random.default_rng(6).integers(0x3C00, 0x3F80, (1200, 512)).astype(np.uint16)
    matrix, x = numbers(bits), np.random.default_rng(7).normal(size=(3, 512))
    assert isinstance(matrix, Matrix)
    assert np.allclose(x @ matrix.T, x @ decode_bf16(bits).T, rtol=1e-12)
    assert (matrix.reshape(-1, 4) == decode_bf16(bits).reshape(-1, 4)).all()


def test_what_is_no_number_is_infinitely_wrong() -> None:
    want = np.ones((2, 3))
    for bad in (np.nan, np.inf):
        got = want.copy()
        got[1, 2] = bad
        worst = worst_of(want, got, 5, Tolerance(1e-3))
        assert (worst.ratio, worst.position, worst.column) == (np.inf, 6, 2)
    assert worst_of(want, want, 0, Tolerance(1e-3)).ratio == 0
    assert worst_of(want * 0, want, 0, Tolerance(1e-3)).ratio == np.inf


def test_routes_and_candidates_are_read_as_ids() -> None:
    result = meaning.Result("r", "ROUTER_TOPK", 0, "replicated", "tokens", 1, 4, 4, 0)
    bits = np.array([[7, 900, 0x3F800000, 0x40000000]], "<u4")
    assert meaning.numbers_of(result, bits).tolist() == [[7, 900, 1, 2]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": (13,)}, "--layers: got 13"),
        ({"tokens": 1}, "--tokens: got 1"),
        ({"tokens": 64}, "--tokens: got 64"),
        ({"prompt": parse_ids("1,2")}, "--ids: got 2"),
        ({"prompt": (1, 2, 1 << 20)}, "--ids: got 1048576"),
    ],
)
def test_what_does_not_fit_is_refused(oracle: Oracle, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        blocks.run(blocks.Options((oracle("tiny13"),), **change))


def test_another_model_is_no_reference(oracle: Oracle) -> None:
    with (
        pytest.raises(ArtifactError, match="another config"),
        opened((oracle("tiny13"),), oracle("tiny_tp8"), None),
    ):
        pass


def test_a_layer_of_each_kind_is_chosen(oracle: Oracle) -> None:
    with Checkpoint.open(oracle("tiny13")) as checkpoint:
        assert chosen_layers(checkpoint.config, None) == (0, 1, 3, 12)


def test_the_command_prints_and_counts(k3tool: Callable[..., Outcome], oracle: Oracle) -> None:
    asked = ("verify", "blocks", oracle("tiny13"), "--layers", "0-1", "--ids", "3,141,59,26")
    found = json.loads(k3tool(*asked, "--json").out)
    assert (found["sound"], found["layers"]) == (True, [0, 1])
    assert found["input"].startswith("embedded ids")
    said = k3tool(*asked, "--strict")
    assert (said.code, "NOT RUN layer 1: mlp_mix: " in said.out) == (4, True)
    assert "2 layers: " in said.err
    assert k3tool("verify", "blocks", oracle("tiny13"), "--layers", "1,,2").code == 2

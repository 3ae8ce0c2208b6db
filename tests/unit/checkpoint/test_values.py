"""The values of a checkpoint: what is found and named, in numbers and by the command."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint import value_targets
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.value_targets import Targets
from k3tool.checkpoint.values import Values, ValueScan
from k3tool.errors import ArtifactError
from tests.in_place import put

LAYER = "language_model.model.layers."
Q_PROJ = LAYER + "1.self_attn.q_proj.weight"
SCALES = LAYER + "2.block_sparse_moe.experts.4.w2.weight_scale"
CODES = LAYER + "2.block_sparse_moe.experts.4.w1.weight_packed"


# -- checkpoints -------------------------------------------------------------------------------


def look(folder: Path, **options: object) -> Values:
    with Checkpoint.open(folder) as checkpoint:
        layers = options.pop("layers", None)
        targets = Targets(checkpoint, layers)
        scan = ValueScan(checkpoint, targets, n_bytes=targets.n_bytes, **{"jobs": 2, **options})
        return scan.run(tick_s=0.01)


def swap(folder: Path, one: str, other: str) -> None:
    with Checkpoint.open(folder) as checkpoint:
        first, second = checkpoint.read(one), checkpoint.read(other)
    put(folder, one, slice(None), second)
    put(folder, other, slice(None), first)


def test_whole_checkpoint_in_numbers(oracle: Callable[[str], Path]) -> None:
    """Every tensor once, whatever the jobs and pieces; the sums are NumPy's."""
    seen = look(oracle("tiny_tp8"))
    assert seen.findings == []
    assert sum(place.n_tensors for place in seen.places.values()) == 712
    with Checkpoint.open(oracle("tiny_tp8")) as checkpoint:
        assert seen.n_bytes == sum(checkpoint.tensor_info(n).n_bytes for n in checkpoint.names())
        names = [n for n in checkpoint.names() if f"{LAYER}2." in n and n.endswith("weight_scale")]
        scales = np.concatenate([checkpoint.read(name).ravel() for name in names])
        bits = checkpoint.read("language_model.lm_head.weight")
    place = seen.places[2, "experts"]
    assert np.array_equal(place.scales, np.bincount(scales, minlength=256))
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    assert seen.places[None, "head"].absmax >= np.abs(floats).max()


@pytest.mark.parametrize("jobs", [1, 3])
def test_pieces_and_jobs_change_nothing(
    oracle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    whole = look(oracle("tiny_tp8"))
    monkeypatch.setattr(value_targets, "PIECE_BYTES", 3000)
    parts = look(oracle("tiny_tp8"), jobs=jobs)
    assert parts.places.keys() == whole.places.keys()
    for place, seen in parts.places.items():
        other = whole.places[place]
        assert np.array_equal(seen.scales, other.scales)
        for field in ("n_tensors", "n_bytes", "n_zero_rows", "absmax_bits", "product_key"):
            assert getattr(seen, field) == getattr(other, field), (place, field)


def test_layers_are_chosen(oracle: Callable[[str], Path]) -> None:
    seen = look(oracle("tiny_tp8"), layers=(1, 3))
    assert {layer for layer, _ in seen.places} == {1, 3}


@pytest.mark.parametrize(("value", "said"), [(0x7FC0, "[17, 5]"), (0xFF80, "[17, 5]")])
def test_nonfinite_weight_is_named(
    writable: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, value: int, said: str
) -> None:
    folder = writable("tiny_tp8")
    put(folder, Q_PROJ, (17, 5), value)
    put(folder, Q_PROJ, (90, 1), value)
    for piece_bytes in (32 << 20, 1000):
        monkeypatch.setattr(value_targets, "PIECE_BYTES", piece_bytes)
        (finding,) = look(folder).findings
        assert finding.kind == "non-finite"
        assert finding.name == Q_PROJ
        assert finding.got == f"2 NaN or Inf, the first at {said}"


@pytest.mark.parametrize("value", [253, 254, 255])
def test_scale_that_shard_refuses(writable: Callable[[str], Path], value: int) -> None:
    folder = writable("tiny_tp8")
    put(folder, SCALES, (9, 5), value)
    (finding,) = look(folder).findings
    assert (finding.kind, finding.name) == ("scale byte", f"{SCALES}: row 9, group 5")
    assert (finding.got, finding.need) == (f"scale byte {value}", "at most 252")


@pytest.mark.parametrize("value", [0, 1, 252])
def test_scale_that_is_legal_is_counted(writable: Callable[[str], Path], value: int) -> None:
    folder = writable("tiny_tp8")
    put(folder, SCALES, (9, 5), value)
    seen = look(folder)
    assert seen.findings == []
    assert seen.places[2, "experts"].scales[value] == 1


def test_a_part_never_written_is_named(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    put(folder, CODES, slice(None), 0)
    put(folder, Q_PROJ, (3,), 0)  # one row of zeros is counted, not refused
    seen = look(folder)
    assert [(f.kind, f.name) for f in seen.findings] == [("all zeros", CODES)]
    assert seen.places[1, "kda"].n_zero_rows == 1


def test_file_that_shrinks_while_it_is_read(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    with Checkpoint.open(folder) as checkpoint:
        targets = Targets(checkpoint)
        scan = ValueScan(checkpoint, targets, n_bytes=targets.n_bytes, jobs=2)
        info = checkpoint.tensor_info(Q_PROJ)
        os.truncate(folder / info.file, info.offset + 100)
        with pytest.raises(ArtifactError, match="end of file at byte") as caught:
            scan.run()
    assert info.file in str(caught.value)


# -- the command -------------------------------------------------------------------------------


def test_values_from_the_command_line(k3tool: Callable, writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    assert k3tool("inspect", folder, "--values").code == 0
    put(folder, Q_PROJ, (17, 5), 0x7FC0)
    outcome = k3tool("inspect", folder, "--values")
    assert outcome.code == 4
    assert f"{Q_PROJ}: got 1 NaN or Inf, the first at [17, 5], need finite values" in outcome.out
    assert outcome.out.splitlines()[-2].startswith("whole: ")
    assert outcome.out.splitlines()[-1].endswith("not sound: 1 non-finite")
    assert outcome.err == ""  # no bar where stderr is no terminal
    report = json.loads(k3tool("inspect", folder, "--values", "--json").out)
    assert report["whole"] is True
    assert [f["kind"] for f in report["values"]["findings"]] == ["non-finite"]
    assert k3tool("inspect", folder).code == 0  # values are looked at when asked for
    (folder / "model-00003-of-000011.safetensors").unlink()
    assert k3tool("inspect", folder, "--values").code == 3  # what shard refuses comes first


def test_swapped_experts_are_found_against_a_record(
    k3tool: Callable, writable: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, record = writable("tiny_tp8"), tmp_path / "before.h5"
    assert k3tool("inspect", folder, "--values", "--fingerprint", record).code == 0
    same = k3tool("inspect", folder, "--values", "--against", record, "--json")
    assert same.code == 0
    other = CODES.replace("experts.4", "experts.7")
    swap(folder, CODES, other)
    put(folder, Q_PROJ, (0, 0), 0x3F80)
    assert k3tool("inspect", folder, "--values").code == 0  # headers and values are sound
    outcome = k3tool("inspect", folder, "--values", "--against", record, "--json")
    assert outcome.code == 4
    found = {f["name"]: f for f in json.loads(outcome.out)["values"]["findings"]}
    assert set(found) == {CODES, other, Q_PROJ}
    assert found[CODES]["kind"] == found[other]["kind"] == "swapped"
    assert found[CODES]["got"] == f"the bytes that {other} had"
    assert found[Q_PROJ]["kind"] == "changed"


def test_a_record_that_is_none(k3tool: Callable, oracle: Callable, tmp_path: Path) -> None:
    folder = oracle("tiny_tp8")
    assert k3tool("inspect", folder, "--values", "--against", tmp_path / "no.h5").code == 3
    k3tool("inspect", folder, "-o", tmp_path / "coverage.h5")
    wrong = k3tool("inspect", folder, "--values", "--against", tmp_path / "coverage.h5")
    assert wrong.code == 3
    assert "fingerprint" in wrong.err
    part = k3tool(
        "inspect", folder, "--values", "--layers", 1, "--fingerprint", tmp_path / "one.h5"
    )
    assert part.code == 0
    outcome = k3tool("inspect", folder, "--values", "--against", tmp_path / "one.h5")
    assert outcome.code == 4
    assert "not recorded" in outcome.out
    assert k3tool("inspect", folder, "--against", tmp_path / "one.h5").code == 2
    assert k3tool("inspect", folder, "--fingerprint", tmp_path / "two.h5").code == 2
    assert not (tmp_path / "two.h5").exists()

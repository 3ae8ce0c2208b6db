"""Values of the large samples: fixed for ever, of their spread, whatever the pieces."""

import hashlib

import numpy as np
import pytest

from k3tool.checkpoint import sample_table_values
from k3tool.checkpoint.sample_presets import PRESETS, preset_config, spread_of
from k3tool.checkpoint.sample_table_values import table_pieces
from k3tool.model.config import K3Config
from k3tool.model.weights import TensorSpec, expected_tensors
from k3tool.ref.formats import FP4_VALUES

SPECS = {s.name: s for s in expected_tensors(K3Config.from_dict(preset_config(PRESETS["mid"])))}
EXPERT = next(name for name in SPECS if name.endswith("experts.5.w1.weight_packed"))
NORM = next(name for name in SPECS if name.endswith("input_layernorm.weight"))
A_LOG = next(name for name in SPECS if name.endswith("A_log"))
# SHA-256 prefixes at seed 0: a sample that changes is another checkpoint under the same name.
PINNED = {
    EXPERT: "f2dfc82330db3bf7",
    EXPERT.replace("packed", "scale"): "03346df9858bab0f",
    NORM: "2a6b730ddacbac15",
    A_LOG: "46c15afd38e56cd7",
}


def values(spec: TensorSpec, seed: int = 0) -> np.ndarray:
    """Return a tensor's stored bits, flat."""
    return np.concatenate(list(table_pieces(spec, seed)))


@pytest.mark.parametrize("name", PINNED)
def test_bytes_are_pinned(name: str) -> None:
    assert hashlib.sha256(values(SPECS[name]).tobytes()).hexdigest()[:16] == PINNED[name]
    assert not np.array_equal(values(SPECS[name]), values(SPECS[name], seed=1))


@pytest.mark.parametrize("name", [EXPERT, A_LOG])
def test_pieces_change_no_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values(SPECS[name])
    monkeypatch.setattr(sample_table_values, "PIECE_VALUES", 64)
    few = SPECS[name]._replace(shape=(4, *SPECS[name].shape[1:])) if name == EXPERT else SPECS[name]
    pieces = values(few)
    assert len(pieces) > 64 or name == A_LOG
    assert np.array_equal(pieces, whole[: len(pieces)])


def test_an_expert_has_the_size_of_its_spread() -> None:
    packed, scale = SPECS[EXPERT], SPECS[EXPERT.replace("packed", "scale")]
    bytes_, scales = values(packed), values(scale)
    codes = np.stack([bytes_ & 15, bytes_ >> 4], axis=1).reshape(-1, 32)
    weights = np.array(FP4_VALUES)[codes] * 2.0 ** (scales[:, None].astype(float) - 127)
    wanted = spread_of(packed.row.pattern).std / np.sqrt(2 * packed.shape[1])
    assert weights.std() == pytest.approx(wanted, rel=0.03)
    assert abs(weights.mean()) < 0.01 * wanted
    assert len(set(codes.reshape(-1))) == 16
    assert len(set(scales)) == 3


def test_bf16_has_the_spread_and_padding_is_zero() -> None:
    norm = (values(SPECS[NORM]).astype(np.uint32) << 16).view(np.float32)
    assert norm.mean() == pytest.approx(1.0, abs=0.02)
    assert norm.std() == pytest.approx(0.2, rel=0.05)
    a_log = values(SPECS[A_LOG])
    assert a_log[: SPECS[A_LOG].live].all()
    assert not a_log[SPECS[A_LOG].live :].any()

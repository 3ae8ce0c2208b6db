"""Bytes a token reads and a rank holds, against the numbers known of the release."""

import math

import pytest

from k3tool.checkpoint.released_layout import CONFIG_FILE, RELEASED_DATA
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.model.config import K3Config
from k3tool.model.sizes import rank_bytes, token_bytes
from k3tool.model.weight_slices import n_bytes as bytes_of
from k3tool.model.weight_slices import rank_shape
from k3tool.model.weights import Split, expected_tensors, layer_rows, layer_tensors

CONFIGS = {
    "released": lambda: K3Config.load(RELEASED_DATA / CONFIG_FILE),
    "tiny": lambda: K3Config.from_dict(preset_config(PRESETS["tiny"])),
}


def test_released_token() -> None:
    """113,509,540,864 bytes without experts; 16 of them in 92 layers, 17,547,264 bytes each."""
    token = token_bytes(CONFIGS["released"]())
    embedding, row, idle = 2_348_810_240, 2 * 7168, 2 * 2 * 7168
    assert token.trunk == 113_509_540_864 - embedding + row - idle
    assert token.experts == 92 * 16 * 17_547_264


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_add_up(name: str) -> None:
    """What is split is there once over all ranks; what is replicated once on each."""
    config = CONFIGS[name]()
    sizes = [rank_bytes(config, tp) for tp in config.legal_tp()]
    assert [size.tp for size in sizes] == [1, 2, 4, 8]
    assert len({size.replicated for size in sizes}) == 1
    assert len({size.tp * (size.total - size.replicated) for size in sizes}) == 1


@pytest.mark.parametrize("tp", [1, 8])
def test_rows_with_counts_are_the_same_as_tensors_one_by_one(tp: int) -> None:
    config = CONFIGS["tiny"]()
    specs = list(expected_tensors(config))
    held = sum(bytes_of(rank_shape(spec, tp), spec.dtype) for spec in specs)
    same = [spec for spec in specs if spec.split is Split.REPLICATE]
    assert rank_bytes(config, tp).total == held
    assert rank_bytes(config, tp).replicated == sum(bytes_of(s.shape, s.dtype) for s in same)
    for layer in (None, *config.layers):
        counted = sum(count for _, count in layer_rows(config, layer))
        assert counted == sum(1 for _ in layer_tensors(config, layer))
    assert math.prod(specs[0].shape) > 0

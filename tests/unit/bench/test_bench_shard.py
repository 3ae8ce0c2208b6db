"""`bench shard` on a small shape: what it counts and that it cleans up, not how fast it is."""

from pathlib import Path

import pytest

from k3tool.bench import shard
from k3tool.bench.source import MOSTLY_EXPERTS, RELEASED_WIDTHS, sized_config
from k3tool.checkpoint.sample_presets import PRESETS, Preset, preset_config
from k3tool.errors import K3Error, UsageError
from k3tool.model.config import K3Config
from k3tool.model.vision import expected_vision


def test_report_of_a_small_shape(tmp_path: Path) -> None:
    report = shard.bench_shard(tmp_path, 9_000_000, tp=2, repeats=2, preset=PRESETS["tiny"])
    names = [name for name, _, _ in report.rows]
    assert names == ["cp", "shard", "shard / cp", "peak memory of shard"]
    assert all(spread.n == 2 and spread.least > 0 for _, spread, _ in report.rows)
    assert report.limits[1].is_held  # memory; the ratio of so small files says nothing
    assert list(tmp_path.iterdir()) == []
    config, _ = sized_config(9_000_000, PRESETS["tiny"])
    assert config.num_experts > PRESETS["tiny"].text["num_experts"]


def test_a_side_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(K3Error, match="k3tool shard: got exit code 2"):
        shard.bench_shard(tmp_path, 1, tp=3, repeats=1, preset=PRESETS["tiny"])
    assert list(tmp_path.iterdir()) == []


def test_too_little_room(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="B free, need"):
        shard.bench_shard(tmp_path, 1 << 60, preset=PRESETS["tiny"])


@pytest.mark.parametrize("preset", [RELEASED_WIDTHS, MOSTLY_EXPERTS])
def test_the_checkpoints_at_full_width_have_a_config_that_shard_takes(preset: Preset) -> None:
    """They are too large to be written in a test; a refused config would be seen only by users."""
    config = K3Config.from_dict(preset_config(preset))
    config.check_tp(8)
    assert list(expected_vision(config))

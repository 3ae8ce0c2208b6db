"""The bench that damaged checkpoints are put on, and the cache that its runs share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.damage.harness import Bench


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bench(k3tool: Callable, tmp_path: Path, cache: Path) -> Bench:
    (tmp_path / "outputs").mkdir()
    return Bench(k3tool, tmp_path / "outputs", cache)

"""Where files that are written and ended by the dozen lie."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory where there is one: a kill is the same there, fsync is not."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="k3-test-") as folder:
        yield Path(folder)

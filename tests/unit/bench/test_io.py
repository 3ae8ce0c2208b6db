"""A device's rate is measured on data: a hole is read from no device."""

import os
from pathlib import Path

from k3tool.bench.io import has_hole, storage_rate


def test_files_with_holes_have_no_rate(tmp_path: Path) -> None:
    sparse = tmp_path / "a.safetensors"
    with sparse.open("wb") as file:
        file.write(b"header")
        file.truncate(64 << 20)
    assert has_hole(sparse)
    assert storage_rate(tmp_path, 2) is None
    assert storage_rate(tmp_path / "nothing here", 2) is None
    whole = tmp_path / "b.safetensors"
    whole.write_bytes(os.urandom(3 << 20))
    assert not has_hole(whole)
    rate = storage_rate(tmp_path, 2)
    assert rate is not None
    assert rate > 0

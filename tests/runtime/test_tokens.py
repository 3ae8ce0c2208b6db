"""tokens.h5: what is written is read, and what is damaged is refused by name."""

from pathlib import Path

import numpy as np
import pytest

from k3tool.artifact import Dataset, write_artifact
from k3tool.errors import ArtifactError
from k3tool.runtime.tokens import TOKEN_DTYPE, read_tokens
from tests.unit.compare.streams import stream, write


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "t.h5", 2)
    assert file.prompt == (1, 2, 3)
    assert file.tp == 2
    for rank in range(2):
        assert file.ranks[rank].tobytes() == stream(rank, 2).tobytes()


def test_a_record_without_a_column_is_refused(tmp_path: Path) -> None:
    write_artifact(
        tmp_path / "t.h5",
        "tokens",
        1,
        {"rank-00/step": Dataset(np.zeros(2, "<u4"), ("step",), "")},
    )
    with pytest.raises(ArtifactError, match="rank-00/position: got absent"):
        read_tokens(tmp_path / "t.h5")


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    columns = {name: Dataset(np.zeros(2, TOKEN_DTYPE[name]), ("step",), "") for name in
               TOKEN_DTYPE.names or ()}  # fmt: skip
    columns["id"] = Dataset(np.zeros(3, "<u4"), ("step",), "")
    write_artifact(tmp_path / "t.h5", "tokens", 1,
                   {f"rank-00/{name}": data for name, data in columns.items()})  # fmt: skip
    with pytest.raises(ArtifactError, match="rank-00/id"):
        read_tokens(tmp_path / "t.h5")

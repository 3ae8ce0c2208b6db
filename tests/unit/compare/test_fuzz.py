"""Damaged bytes: whatever a file holds, it is read or refused in words; nothing else happens."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from k3tool.compare.logits import compare_logits
from k3tool.compare.logits_files import read_logits
from k3tool.compare.ranks import compare
from k3tool.compare.records import read_records
from k3tool.errors import ArtifactError
from tests.unit.compare import test_logits
from tests.unit.compare.streams import FORMS

ARRAYS = {"prefill": np.linspace(-3, 3, 12).reshape(3, 4), "steps": np.zeros((2, 4))}
small = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def damaged(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """Cut, flip, double or insert a few bytes."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(made) - 1)))
        kind = draw(st.sampled_from(["cut", "flip", "double", "insert"]))
        if kind == "cut":
            del made[at : at + draw(st.integers(1, 40))]
        elif kind == "flip" and made:
            made[at] ^= draw(st.integers(1, 255))
        elif kind == "double":
            made[at:at] = made[at : at + draw(st.integers(1, 40))]
        else:
            made[at:at] = draw(st.binary(min_size=1, max_size=9))
    return bytes(made)


@pytest.mark.fuzz
@pytest.mark.parametrize("form", sorted(set(FORMS) - {"tokens.h5"}))
@small
@given(data=st.data())
def test_damaged_records(tmp_path: Path, form: str, data: st.DataObject) -> None:
    whole = FORMS[form](tmp_path / "whole", [5, 6, 163_839])
    path = tmp_path / "damaged"
    path.write_bytes(damaged(whole.read_bytes(), data.draw))
    with contextlib.suppress(ArtifactError):
        compare([*read_records(path), *read_records(whole)])


@pytest.mark.fuzz
@pytest.mark.parametrize("form", ["npz", "compressed", "safetensors", "lines"])
@small
@given(data=st.data())
def test_damaged_logits(tmp_path: Path, form: str, data: st.DataObject) -> None:
    whole = test_logits.FORMS[form](tmp_path / "whole", ARRAYS)
    path = tmp_path / "damaged"
    path.write_bytes(damaged(whole.read_bytes(), data.draw))
    with contextlib.suppress(ArtifactError):
        compare_logits(read_logits(path), read_logits(whole))

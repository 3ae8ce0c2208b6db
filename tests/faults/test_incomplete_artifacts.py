"""A plan or stream that lacks any one of its parts is refused by name, with a right digest too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.artifact import Dataset, open_artifact, write_artifact
from k3tool.compiler.plan import load_plan, save_plan
from k3tool.errors import ArtifactError
from k3tool.isa.emit import emit
from k3tool.isa.stream import load_isa, save_isa
from k3tool.isa.table import isa_hash
from tests.isa import plans

Load = Callable[[Path], Any]


def save(kind: str, path: Path) -> Load:
    if kind == "plan":
        save_plan(plans.plan(), path)
        return load_plan
    save_isa(emit(plans.plan(), "cpu"), path)
    return load_isa


def rewrite(
    source: Path, path: Path, *, without: str = "", params: dict[str, object] | None = None
) -> None:
    """Write an artifact again less one dataset or attribute, or with other params."""
    with open_artifact(source) as file:
        data = {name: file.read(name) for name in file.names() if name != without}
        attrs = {name: value for name, value in file.attrs.items() if name != without}
        kind, schema, target, old = file.kind, file.schema, file.target, file.params
    datasets = {
        name: Dataset(list(array) if array.dtype.kind == "O" else array, ("x",) * array.ndim)
        for name, array in data.items()
    }
    write_artifact(path, kind, schema, datasets, attrs, params=old if params is None else params,
                   target=target, isa_hash=isa_hash())  # fmt: skip


@pytest.mark.parametrize("kind", ["plan", "isa"])
def test_each_part_is_needed(kind: str, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.h5", tmp_path / f"{kind}.h5"
    load = save(kind, whole)
    rewrite(whole, path)
    load(path)  # the control: rewritten whole, it is accepted
    with open_artifact(whole) as file:
        parts = [*file.names(), *file.attrs]
    assert len(parts) > 20
    for part in parts:
        rewrite(whole, path, without=part)
        with pytest.raises(ArtifactError):
            load(path)


def test_a_stream_says_for_how_many_ranks_and_workgroups_it_is(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.h5", tmp_path / "isa.h5"
    save("isa", whole)
    for params in ({"tp": 2}, {"workgroups": 4}, {"tp": "2", "workgroups": 4}):
        rewrite(whole, path, params=params)
        with pytest.raises(ArtifactError, match=r"params: (tp|workgroups)"):
            load_isa(path)

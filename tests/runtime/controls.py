"""Interpreters with something wrong in them, for controls: each is compiled once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.runtime.build import build


def controls_of(factory: pytest.TempPathFactory, *units: str) -> Callable[..., Path]:
    """Return what compiles `units` again with some defines, and links an interpreter."""
    made: dict[tuple[str, ...], Path] = {}

    def control(*defines: str) -> Path:
        if defines not in made:
            path = factory.mktemp("control") / "k3-cpu"
            made[defines] = build(path, defines=list(defines), only=list(units))
        return made[defines]

    return control

"""The import rules, held on the syntax tree, and what `k3tool --help` may cost."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
FORBIDDEN = {"torch", "transformers", "tensorflow", "jax"}
# Libraries that one place knows, and nobody else.
ONLY_IN = {
    "h5py": {"k3tool/artifact.py"},
    "safetensors": set(),
    "cupy": {"k3tool/runtime/gpu_cupy.py"},
}
HEAVY = ("numpy", "h5py", "egglog", "tokenizers")


def sources(folder: str) -> list[Path]:
    found = sorted((REPO / folder).rglob("*.py"))
    assert found, folder
    return found


def imports(text: str) -> Iterator[str]:
    """Yield the dotted names a module imports, inside functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "import names equal paths: no relative imports"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(path: str, text: str) -> list[str]:
    """Return what a module imports against the rules."""
    wrong = []
    for name in imports(text):
        top = name.split(".")[0]
        if top in FORBIDDEN:
            wrong.append(f"{path}: {name}")
        if top in ONLY_IN and path not in ONLY_IN[top]:
            wrong.append(f"{path}: {name}")
        if path.startswith("k3tool/") and top == "stages":
            wrong.append(f"{path}: {name}")
        if path.startswith("stages/") and top == "stages" and not _may_import(path, name):
            wrong.append(f"{path}: {name}")
    return wrong


def _may_import(path: str, name: str) -> bool:
    """Return whether a stage may import a module of stages: one of all commands, or its own."""
    own = ".".join(path.split("/")[:2])  # stages.bench of stages/bench/chain.py
    allowed = (
        "stages.options",
        "stages.engine_options",
        "stages.help",
        "stages.refusals",
        "stages.streams",
        own,
        *(("stages.signals",) if path == "stages/cli.py" else ()),  # a process has one way to end
    )
    return name == "stages" or any(name == each or name.startswith(f"{each}.") for each in allowed)


@pytest.mark.parametrize("folder", ["k3tool", "stages"])
def test_import_rules(folder: str) -> None:
    wrong = []
    for path in sources(folder):
        wrong += faults(path.relative_to(REPO).as_posix(), path.read_text())
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("k3tool/model/config.py", "from stages import options"),
        ("k3tool/model/config.py", "def f():\n    import stages.cli"),
        ("stages/shard.py", "from stages.run import run"),
        ("stages/shard.py", "from stages import run"),
        ("stages/shard.py", "from stages.bench import shared"),
        ("stages/bench/shard.py", "from stages.shard import run"),
        ("k3tool/compiler/plan.py", "import h5py"),
        ("k3tool/checkpoint/reader.py", "from safetensors import safe_open"),
        ("k3tool/runtime/driver.py", "import cupy as cp"),
        ("k3tool/ref/ops.py", "import torch.nn"),
    ],
)
def test_the_rules_can_fail(path: str, text: str) -> None:
    assert len(faults(path, text)) >= 1
    assert faults(path, "import json\nfrom k3tool.errors import K3Error") == []


def _loaded_by(code: str) -> list[str]:
    """Return which heavy modules a fresh process has loaded after running code."""
    report = f"import sys; print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    return ast.literal_eval(done.stderr.strip().splitlines()[-1])


def test_help_imports_nothing_heavy() -> None:
    assert _loaded_by("from stages.cli import run_command; run_command(['--help'])") == []
    assert "numpy" in _loaded_by("import numpy")  # the control: the report sees a load

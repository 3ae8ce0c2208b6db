"""Shared fixtures: oracle checkpoints, the command line in process, and the ledger of skips.

Material that is not carried in the repository lies beside it in `shared/`; a test that needs it
and does not find it is reported as NOT RUN, never as passed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.errors import K3Error

REPO = Path(__file__).resolve().parent.parent
DATA = REPO / "tests" / "data"
SHARED = REPO.parent / "shared"
# A busy machine is not a failure: time limits belong to whole tests.
hypothesis.settings.register_profile("k3", deadline=None)
hypothesis.settings.load_profile("k3")
DAMAGE_SUITE = "tests/faults/damage/"
ORACLES = ("tiny13", "tiny13_eps", "tiny_tp8", "tiny_wide")
SAMPLE_WIDE = "sample_wide"  # no gold: made here, so that a clone has axes longer than 512


class Outcome(NamedTuple):
    """What a command line gave."""

    code: int
    out: str
    err: str


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden`: write golden texts instead of comparing; review reads the diff."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


# -- messages ----------------------------------------------------------------------------------

# What only Python writes: a list, tuple or dict of texts, None, a type, an array.
PYTHON_LITERAL = re.compile(
    r"""[\[({]'|\[\(|\b(None|True|False)\b|\bb'|<class |object at 0x|\b(array|Path|dtype)\("""
)


@pytest.fixture(scope="session", autouse=True)
def _no_message_is_a_python_literal() -> Iterator[None]:
    """Read every message that any test here provokes: a user should not have to read Python."""
    made = K3Error.__init__

    def read(self: K3Error, object: str, **fields: Any) -> None:
        made(self, object, **fields)
        assert not PYTHON_LITERAL.search(self.text()), self.text()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(K3Error, "__init__", read)
        yield


# -- oracle checkpoints ------------------------------------------------------------------------


def _not_run(name: str) -> None:
    pytest.skip(f"NOT RUN: {name} is not in tests/data nor in ../shared/oracle")


def _assemble_tiny13_eps(folder: Path) -> Path:
    """Copy tiny13 and overwrite the tensors that differ; the headers of both are equal."""
    target = folder / "tiny13_eps"
    shutil.copytree(DATA / "oracle" / "tiny13", target)
    with (
        Checkpoint.open(target) as checkpoint,
        np.load(DATA / "oracle" / "tiny13_eps.delta.npz") as delta,
    ):
        for name in delta.files:
            info = checkpoint.tensor_info(name)
            assert info.n_bytes == delta[name].nbytes, name
            with (target / info.file).open("r+b") as file:
                file.seek(info.offset)
                file.write(delta[name].tobytes())
    return target


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from an oracle's name to its checkpoint folder. Do not write into it."""
    made: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name == SAMPLE_WIDE:
            if name not in made:
                made[name] = tmp_path_factory.mktemp("oracle") / name
                write_sample(made[name], "wide")
            return made[name]
        assert name in ORACLES, name
        if (DATA / "oracle" / name).is_dir():
            return DATA / "oracle" / name
        if name == "tiny13_eps":
            if name not in made:
                made[name] = _assemble_tiny13_eps(tmp_path_factory.mktemp("oracle"))
            return made[name]
        if not (SHARED / "oracle" / name).is_dir():
            _not_run(name)
        return SHARED / "oracle" / name

    return path_of


@pytest.fixture(scope="session")
def device_code(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Return a function from a vendor to the object that its emulated device runs.

    It has all bodies, and pages in shared memory: the build of programs with MLA_PAGES.
    """
    made: dict[str, bytes] = {}

    def code_of(vendor: str) -> bytes:
        from tests.kernels.emulated import Emulated
        from tests.kernels.emulated_device import build_object

        if vendor not in made:
            flash = Emulated(vendor, defines=("K3_FLASH",))
            made[vendor] = build_object(flash, tmp_path_factory.mktemp(vendor))
        return made[vendor]

    return code_of


@pytest.fixture(scope="session")
def gold() -> Callable[[str], dict[str, np.ndarray]]:
    """Return a function from an oracle's name to its gold arrays (`p7.prefill`, ...)."""

    def arrays_of(name: str) -> dict[str, np.ndarray]:
        for folder in (DATA / "oracle", SHARED / "oracle"):
            path = folder / f"{name}.gold.npz"
            if path.is_file():
                with np.load(path) as arrays:
                    return dict(arrays)
        _not_run(name)
        raise AssertionError

    return arrays_of


@pytest.fixture(scope="session")
def prompts() -> Callable[[str], dict[str, list[int]]]:
    """Return a function from an oracle's name to its prompts, by prompt name."""

    def prompts_of(name: str) -> dict[str, list[int]]:
        path = DATA / "oracle" / "prompts.json"
        if name == "tiny_wide":
            path = SHARED / "oracle" / "tiny_wide.prompts.json"
            if not path.is_file():
                _not_run(name)
        return json.loads(path.read_text())

    return prompts_of


@pytest.fixture
def writable(oracle: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies an oracle to a folder the test may damage."""

    def copy_of(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(oracle(name), target)
        for entry in [target, *target.iterdir()]:
            entry.chmod(0o755 if entry.is_dir() else 0o644)
        return target

    return copy_of


# -- the command line --------------------------------------------------------------------------


@pytest.fixture
def k3tool(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs one command line in this process."""
    from stages.cli import run_command

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def k3tool_process() -> Callable[..., Outcome]:
    """Return a function that runs one command line in a new process, from the repository root."""

    def run(*arguments: object, timeout_s: float = 120.0) -> Outcome:
        command = [sys.executable, "-m", "stages.cli", *map(str, arguments)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=REPO,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


# -- the ledger of skips -----------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were not run, by reason: a skip nobody sees is a pass nobody earned."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ").removeprefix("NOT RUN: ")] += 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"NOT RUN: {count} ({reason})")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests in one process, and the damage suite's: its page needs every answer.

    Groups by mark (`--dist loadgroup`) would say it, but xdist 3.8 sets them where pytest 9 does
    not look, and the tests of a group end up in both processes.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return DAMAGE_SUITE if file.startswith(DAMAGE_SUITE) else file

    return ByFile(config, log)

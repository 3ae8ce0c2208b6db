"""`shard --mpi` under mpirun: the same bytes as one process, all or nothing, resumable."""

import filecmp
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.artifact import open_artifact

Oracle = Callable[[str], Path]
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs k3tool in MPI processes."""
    found = shutil.which("mpirun")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("NOT RUN: mpirun or mpi4py is not installed")
    probe = subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True)
    if probe.returncode:
        pytest.skip("NOT RUN: mpi4py finds no MPI library")

    def run(count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
        # Open MPI and MPICH name these differently; unknown variables do no harm.
        more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        more |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PYTHONPATH": str(REPO)}
        command = [found, "-n", str(count), sys.executable, "-m", "stages.cli"]
        return subprocess.run(
            [*command, *map(str, arguments)],
            capture_output=True, text=True, env=os.environ | more, cwd=REPO, timeout=120,
        )  # fmt: skip

    return run


def _same(left: Path, right: Path) -> bool:
    names = [
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        for folder in (left, right)
    ]
    # Artifacts name the tool's revision, which a commit between two runs changes: a digest is of
    # the rest.
    artifacts = [name for name in names[0] if name.endswith(".h5")]
    plain = [name for name in names[0] if not name.endswith(".h5")]
    if names[0] != names[1] or not artifacts:
        return False
    _, differ, errors = filecmp.cmpfiles(left, right, plain, shallow=False)
    return (
        not differ
        and not errors
        and all(
            open_artifact(left / name).digest == open_artifact(right / name).digest
            for name in artifacts
        )
    )


def test_two_processes_write_what_one_does(
    mpirun: Callable, k3tool: Callable, oracle: Oracle, tmp_path: Path
) -> None:
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    assert mpirun(1, "shard", source, "--tp", 4, "-o", tmp_path / "one").returncode == 0
    done = mpirun(2, "shard", source, "--tp", 4, "-o", out, "--mpi")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("digest") == 1  # process 0 speaks for all
    assert "ranks 0, 1, 2, 3 of 4" in done.stdout
    assert _same(out, tmp_path / "one")
    again = mpirun(2, "shard", source, "--tp", 4, "-o", out, "--mpi")
    assert again.returncode == 2
    assert again.stderr.count("finished shards") == 1
    # Another degree, over what stands there; more processes than ranks.
    forced = mpirun(3, "shard", source, "--tp", 2, "-o", out, "--mpi", "--force")
    assert forced.returncode == 0, forced.stderr
    assert k3tool("shard", source, "--tp", 2, "-o", tmp_path / "two").code == 0
    assert _same(out, tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out", "two"]


def test_one_that_fails_ends_all_and_the_rest_is_kept(
    mpirun: Callable, k3tool: Callable, oracle: Oracle, tmp_path: Path
) -> None:
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    blocked = tmp_path / ".out.shard-01-03"  # where process 1 would work
    blocked.write_text("")
    failed = mpirun(2, "shard", source, "--tp", 4, "-o", out, "--mpi")
    assert failed.returncode == 2
    assert failed.stderr.count("k3tool shard:") == 1
    assert not out.exists()
    blocked.unlink()
    assert mpirun(2, "shard", source, "--tp", 4, "-o", out, "--mpi").returncode == 0
    assert k3tool("shard", source, "--tp", 4, "-o", tmp_path / "one").code == 0
    assert _same(out, tmp_path / "one")


def test_without_mpi4py_the_message_says_what_to_install(
    k3tool: Callable, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    outcome = k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", tmp_path / "s", "--mpi")
    assert outcome.code == 5
    assert "pip install -e '.[mpi]'" in outcome.err
    assert list(tmp_path.iterdir()) == []

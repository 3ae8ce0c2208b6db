"""The interpreter under AddressSanitizer and ThreadSanitizer, on the toy and on a whole model.

ThreadSanitizer sees counters, waits and signals as they are: a wait that a plan lacks is a data
race whatever the bits happen to be, so the control removes one.
"""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3tool.errors import K3Error, UnsoundError
from k3tool.isa.columns import Columns
from k3tool.runtime.build import build
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import run_model
from k3tool.trace.kept import Kept
from tests.runtime import toy
from tests.runtime.test_memory_budget import plan_with

pytestmark = pytest.mark.slow
UNITS = (
    "scalar",
    "interp",
    "team",
    "waiting",
    "observe",
    "hashes",
    "io",
    "devices",
    "residency",
    "memory",
    "image",
    "main",
)


def sanitized(folder: Path, *flags: str) -> Path:
    """Build with a sanitizer in everything the scalar leaves run through."""
    try:
        made = build(folder / "k3-cpu", flags=("-O1", *flags), only=UNITS)
        subprocess.run([made, "--identity"], capture_output=True, check=True)
    except (K3Error, subprocess.CalledProcessError) as error:
        pytest.skip(f"NOT RUN: {flags[0]} does not work on this machine ({error})")
    return made


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asan")
    return sanitized(folder, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture
def thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TSAN_OPTIONS", "halt_on_error=1")
    return sanitized(tmp_path, "-fsanitize=thread")


def whole_model(source: Path, cache: Path, interpreter: Path, tp: int) -> tuple[int, ...]:
    options = RunOptions(
        source, (5, 9, 2, 40, 7), 3, tp=tp, threads=2, leaves="scalar", cache=cache,
        ignore_eos=True, interpreter=interpreter, trace_hashes=cache.parent / "trace.h5",
        trace_at=Kept(0, 6),
    )  # fmt: skip
    return run_model(options).tokens


@pytest.mark.parametrize("which", ["address", "thread"])
def test_clean_on_the_toy_and_on_a_model(
    request: pytest.FixtureRequest, oracle: Callable[[str], Path], tmp_path: Path, which: str
) -> None:
    interpreter = request.getfixturevalue(which)
    made = toy.images(toy.toy_isa(2, 5), tmp_path)
    start = toy.launch(made, interpreter=interpreter, leaves="scalar", n_threads=2)
    assert toy.run(start) == toy.expected_tokens(toy.random_weights(), (5,), 6)
    for tp in (1, 2):
        assert len(whole_model(oracle("tiny_tp8"), tmp_path / "cache", interpreter, tp)) == 3


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("which", ["address", "thread"])
def test_clean_under_a_memory_budget(
    request: pytest.FixtureRequest, oracle: Callable[[str], Path], tmp_path: Path, which: str,
    tp: int,
) -> None:  # fmt: skip
    """Every weight through the least ring, experts through the fewest slots."""
    source = oracle("tiny_tp8")
    plan = plan_with(source, tmp_path / "plan.h5", tp, 1.0, 12)
    asked = RunOptions(
        source, (5, 9, 2, 40, 7), 3, tp=tp, threads=2, leaves="scalar", cache=tmp_path / "cache",
        ignore_eos=True, plan=plan,
    )  # fmt: skip
    want = run_model(asked).tokens
    assert run_model(replace(asked, interpreter=request.getfixturevalue(which))).tokens == want


def test_a_missing_wait_is_a_data_race(tmp_path: Path, thread: Path) -> None:
    def forget(waits: Columns) -> Columns:
        waits["threshold"][waits["counter"] == toy.HEAD] = 0
        return waits

    isa = toy.change_queues(toy.toy_isa(1, 4), waits=forget)
    made = toy.images(isa, tmp_path, n_gen=200)
    start = toy.launch(made, interpreter=thread, leaves="scalar", n_threads=3)
    with pytest.raises(UnsoundError, match="data race"):
        toy.run(start)


def test_a_read_past_the_arena_is_found(tmp_path: Path, address: Path) -> None:
    """The image's checks do not know what an op reads; the sanitizer must."""

    def widen(rows: Columns) -> None:
        rows[toy.NORM, 8] = 1 << 26  # width

    isa = toy.change_records(toy.toy_isa(), widen)
    made = toy.images(isa, tmp_path)
    with pytest.raises(UnsoundError, match=r"Sanitizer|SIGSEGV"):
        toy.run(toy.launch(made, interpreter=address, leaves="scalar"))

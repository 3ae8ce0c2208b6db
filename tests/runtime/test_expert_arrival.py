"""Each expert is used as it arrives: work on the others goes on while one of them is still read."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.compiler.plan import load_plan
from k3tool.errors import UnsoundError
from k3tool.isa.device import unpack
from k3tool.isa.emit import emit
from k3tool.isa.table import ALL_PHASES, Op
from k3tool.runtime.image import Request, build_image
from k3tool.runtime.ranks import FaultError, Launch, RankGroup
from k3tool.runtime.trace import Trace
from k3tool.runtime.weights import RankWeights
from tests.runtime.controls import controls_of
from tests.runtime.test_memory_budget import bits, options, plan_with, run_model

LATE_MS = 20
LATE = f"K3_CONTROL_LATE_MS={LATE_MS}"
IDS, GEN = (5, 9, 2), 6


@pytest.fixture
def tiny(oracle: Callable[[str], Path]) -> Path:
    return oracle("tiny_tp8")


@pytest.fixture
def plan(tiny: Path, tmp_path: Path) -> Path:
    return plan_with(tiny, tmp_path / "plan.h5", 1, 1.0, 12)


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return controls_of(tmp_path_factory, "residency", "interp")


def traced(source: Path, plan: Path, interpreter: Path, deadline: float = 60.0) -> Trace:
    made = load_plan(plan)
    isa = emit(made, "cpu", plan.name)
    with Checkpoint.open(source) as checkpoint:
        vocab = checkpoint.config.vocab_size
        image = build_image(isa, 0, RankWeights(checkpoint, 1), Request(IDS, GEN, (), 4), vocab)
    launch = Launch(
        interpreter, [image], deadline_seconds=deadline, trace_events=100_000,
        n_io=isa.crew.load + isa.crew.fetch,
    )  # fmt: skip
    with RankGroup(launch) as group:
        group.wait_ready()
        list(group.steps())
        return group.trace(0)


def expert_slices(plan: Path, trace: Trace) -> Iterator[np.ndarray]:
    """Yield, for each slice of a decode step's first expert product, its events in order."""
    isa = emit(load_plan(plan), "cpu", plan.name)
    ops = unpack(isa.streams["decode"].instructions[0])["op"]
    events = trace.slices[trace.slices["phase"] == ALL_PHASES.index("decode")]
    events = events[ops[events["inst"]] == Op.MOE_GLU_TOPK]
    assert len(events)
    keys = events[["step", "inst", "workgroup"]]
    for key in np.unique(keys):
        found = events[keys == key]
        yield found[np.argsort(found["start_ns"])]


def test_others_are_used_while_one_is_awaited(
    tiny: Path, plan: Path, controls: Callable[..., Path]
) -> None:
    """The last expert of each fetch comes 20 ms late; what came before has been worked on."""
    slices = list(expert_slices(plan, traced(tiny, plan, controls(LATE))))
    gaps = [int(one[-1]["start_ns"] - one[0]["end_ns"]) for one in slices if len(one) > 1]
    assert len(gaps) > len(slices) / 2
    assert np.median(gaps) > LATE_MS * 1e6 / 4


def test_a_fetch_that_is_awaited_whole_is_noticed(
    tiny: Path, plan: Path, controls: Callable[..., Path]
) -> None:
    """The control: then every slice runs once."""
    whole = controls(LATE, "K3_CONTROL_WHOLE_FETCH")
    assert all(len(one) == 1 for one in expert_slices(plan, traced(tiny, plan, whole)))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_bits_do_not_depend_on_when_they_arrive(
    tiny: Path, tmp_path: Path, controls: Callable[..., Path], tp: int
) -> None:
    want = bits(run_model(options(tiny, tmp_path, tp=tp)))
    made = plan_with(tiny, tmp_path / "made.h5", tp, 1.3, 20)
    for defines in ((LATE,), (LATE, "K3_CONTROL_WHOLE_FETCH")):
        late = options(tiny, tmp_path, tp=tp, plan=made, interpreter=controls(*defines))
        assert bits(run_model(late)) == want


def test_an_op_that_is_given_its_route_waits_for_all(
    tiny: Path, tmp_path: Path, controls: Callable[..., Path]
) -> None:
    """Without fusing, experts are checked before the op starts; it waits, and gives the bits."""
    without = ("topk-glu-fuse", "topk-down-fuse", "moe-in-fuse")
    want = bits(run_model(options(tiny, tmp_path)))
    late = options(
        tiny, tmp_path, without=without, memory_bytes=200_000_000, interpreter=controls(LATE)
    )
    assert bits(run_model(late)) == want


def test_one_that_never_comes_is_named(
    tiny: Path, plan: Path, controls: Callable[..., Path]
) -> None:
    with pytest.raises((FaultError, UnsoundError)) as stop:
        traced(tiny, plan, controls("K3_CONTROL_LATE_MS=1500"), deadline=0.6)
    if isinstance(stop.value, FaultError):  # else the driver has lost its patience first
        assert "is not in memory" in stop.value.fault.error().text()

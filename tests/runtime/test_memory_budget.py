"""One model in any memory: the same bits, within the budget, no token where a weight is lost."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.bench.memory_watch import MemoryWatch
from k3tool.checkpoint import sample_presets
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan, save_plan
from k3tool.compiler.residency import Residency, streamable, with_residency
from k3tool.compiler.ring import least_ring, ring_places
from k3tool.errors import ArtifactError, K3Error, TargetError, UnsoundError
from k3tool.model.config import K3Config
from k3tool.runtime.budget import (
    COPY_BYTES,
    DRIVER_BYTES,
    Floor,
    budget_ends,
    compile_bytes,
    fit,
    floor_bytes,
    run_floor,
)
from k3tool.runtime.options import RunOptions, parse_size
from k3tool.runtime.prediction import predict
from k3tool.runtime.run import Event, RunResult, run_model
from k3tool.tables import need_text
from tests.runtime.bits import bits
from tests.runtime.controls import controls_of

IDS = (5, 9, 2, 40, 7)
MEGABYTES = 10**6
REPO = Path(__file__).parents[2]


def options(source: Path, cache: Path, **changes: Any) -> RunOptions:
    asked = RunOptions(source, IDS, 5, cache=cache, ignore_eos=True, logits=True)
    return replace(asked, **changes)


def plan_with(source: Path, out: Path, tp: int, ring: float, slots: int, chunk: int = 4) -> Path:
    """Return a plan that streams every weight but the embedding through `ring` times the least."""
    with Checkpoint.open(source) as checkpoint:
        plan = compile_plan(
            checkpoint.config, tp=tp, target="cpu", workgroups=8, chunk=chunk, batch=1, ctx=256,
            inputs=[checkpoint.as_input()], checkpoint_identity=checkpoint.identity,
        )  # fmt: skip
    names = streamable(plan)
    size = int(least_ring(plan, names) * ring) // 4096 * 4096
    while ring_places(plan, names, size) is None:
        size += 4096
    made = with_residency(plan, Residency(names, size, slots, 2, 3))
    save_plan(made, out)
    return out


@pytest.fixture
def tiny(oracle: Callable[[str], Path]) -> Path:
    return oracle("tiny_tp8")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("ring", "slots"), [(1.0, 12), (1.0, 13), (1.7, 30), (4.0, 84), (1000.0, 84)]
)
def test_every_ring_and_cache_gives_the_resident_bits(
    tiny: Path, tmp_path: Path, tp: int, ring: float, slots: int
) -> None:
    resident = run_model(options(tiny, tmp_path, tp=tp))
    assert resident.reading is None
    plan = plan_with(tiny, tmp_path / "plan.h5", tp, ring, slots)
    result = run_model(options(tiny, tmp_path, tp=tp, plan=plan))
    assert bits(result) == bits(resident)
    assert result.tokens == resident.tokens
    assert result.reading is not None
    assert result.reading.misses > 0
    assert (result.reading.hits > 0) == (slots > 13), "LRU needs a layer's slots to keep any"


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_bits_do_not_depend_on_the_prompts_steps(tiny: Path, tmp_path: Path, chunk: int) -> None:
    resident = run_model(options(tiny, tmp_path))
    plan = plan_with(tiny, tmp_path / "plan.h5", 1, 1.2, 12, chunk)
    assert bits(run_model(options(tiny, tmp_path, plan=plan))) == bits(resident)


# -- budgets ------------------------------------------------------------------------------------


def least(source: Path, cache: Path, tp: int) -> int:
    with pytest.raises(TargetError, match=r"--memory: got 1\.000 MB, need at least") as refused:
        run_model(options(source, cache, tp=tp, memory_bytes=MEGABYTES))
    said = str(refused.value.hint).split()[:4]
    assert said[0::2] == ["--memory", "is"]
    assert said[1] == "".join(str(refused.value.need).split()[2:4]), (
        "one number, given back as it is"
    )
    return parse_size(said[1])


@pytest.mark.parametrize("tp", [1, 2])
def test_a_budget_from_the_least_on_runs_and_below_is_refused(
    tiny: Path, tmp_path: Path, tp: int
) -> None:
    """Plans of before, which may have less than what compiling takes; then what a run compiles."""
    resident = bits(run_model(options(tiny, tmp_path, tp=tp)))
    enough = least(tiny, tmp_path, tp)
    with Checkpoint.open(tiny) as checkpoint:
        floor = run_floor(checkpoint.config, tp, is_copied=tp > 1)
    assert enough - 10**5 < floor.n_bytes <= enough, "said in four digits, never too small"
    with pytest.raises(TargetError, match=f"need at least {need_text(enough)} for this model"):
        run_model(options(tiny, tmp_path, tp=tp, memory_bytes=floor.n_bytes - 1))
    with Checkpoint.open(tiny) as checkpoint:
        config, own = checkpoint.config, [checkpoint.as_input()]

        def compile_chunk(chunk: int) -> Plan:
            return compile_plan(
                config, tp=tp, target="cpu", workgroups=8, chunk=chunk, batch=1, ctx=256,
                inputs=own, checkpoint_identity=checkpoint.identity,
            )  # fmt: skip

        tight = budget_ends(compile_chunk, 16)[0]
        assert tight < enough
        for extra in (0, 3 * MEGABYTES):
            path = tmp_path / "plan.h5"
            save_plan(fit(compile_chunk, 16, tight + extra), path)
            assert bits(run_model(options(tiny, tmp_path, tp=tp, plan=path))) == resident
    for memory in (enough, enough + 100 * MEGABYTES):
        result = run_model(options(tiny, tmp_path, tp=tp, memory_bytes=memory))
        assert bits(result) == resident, memory


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="NOT RUN: no /proc/*/smaps_rollup"
)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_least_budget_holds_what_compiles_too(tiny: Path, tmp_path: Path, tp: int) -> None:
    """With an empty cache, all of the process and its ranks; more than a plan of before needs.

    Also as the driver's own peak resident size: a share is small where others map the libraries.
    """
    enough = least(tiny, tmp_path, tp)
    cache = str(tmp_path / "empty")
    words = ("--tp", str(tp), "--ids", "1,2,3", "--gen", "2", "--ignore-eos", "--json")
    with subprocess.Popen(
        [sys.executable, "-m", "stages.cli", "run", str(tiny), "--memory", str(enough),
         "--cache", cache, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO,
    ) as process:  # fmt: skip
        watch = MemoryWatch(process.pid)
        watch.start()
        assert process.stdout is not None
        begun = process.stdout.readline()  # what compiles and copies is behind it
        own = Path(f"/proc/{process.pid}/status").read_text() if begun else ""
        said = process.communicate(timeout=120)[1]
        watch.stop()
    assert process.returncode == 0, said
    assert "program built" in said
    assert DRIVER_BYTES < watch.peak.total <= enough, "compiling was seen"
    most = next(int(line.split()[1]) for line in own.splitlines() if line.startswith("VmHWM"))
    assert most * 1024 <= enough
    before_ranks = compile_bytes(K3Config.load(tiny / "config.json"))
    need = before_ranks + (COPY_BYTES if tp > 1 else 0)
    assert need <= enough <= 1.001 * need


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_predicted_is_within_the_budget(tiny: Path, tp: int) -> None:
    """From the least on, where packets that bring weights take the most queue entries."""
    with Checkpoint.open(tiny) as checkpoint:
        config = checkpoint.config

    def compile_chunk(chunk: int) -> Plan:
        return compile_plan(
            config, tp=tp, target="cpu", workgroups=8, chunk=chunk, batch=1, ctx=256
        )

    least, full = budget_ends(compile_chunk, 4)
    for memory in (least, (least + full) // 2, full):
        found = predict(fit(compile_chunk, 4, memory))
        assert 0.8 * memory < found.peak_bytes <= memory
        rooms = found.pinned_room_bytes + found.ring_room_bytes + found.cache_room_bytes
        assert found.peak_bytes == found.driver_bytes + tp * (rooms + found.other_bytes)
        assert (found.ring_room_bytes > 0) == (found.streamed_tensors > 0)


def test_a_budget_below_the_floor_is_refused_after_one_compilation(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        config = checkpoint.config
    asked: list[int] = []

    def compile_chunk(chunk: int) -> Plan:
        asked.append(chunk)
        return compile_plan(config, tp=1, target="cpu", workgroups=8, chunk=chunk, batch=1, ctx=256)

    said = []
    floor = floor_bytes(config, 1)
    for given in (Floor(floor), None):
        with pytest.raises(TargetError) as refused:
            fit(compile_chunk, 16, MEGABYTES, floor=given)
        said.append(refused.value.text())
    assert said[0] == said[1], "the minimum is the same"
    assert asked[0] == 1
    assert asked[1] == 16
    assert floor <= budget_ends(compile_chunk, 16)[0], "nothing that runs is below it"


SMALL = sample_presets.PRESETS["mid"]._replace(
    text=sample_presets.PRESETS["mid"].text
    | {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 16,
        "num_experts_per_token": 4, "moe_intermediate_size": 512,
        "routed_expert_hidden_size": 512, "vocab_size": 16384, "bos_token_id": 16000,
        "eos_token_id": 16001, "pad_token_id": 16002,
    },
    full_attn_layers=(3, 6),
    linear_heads=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some 200 MB."""
    patch = pytest.MonkeyPatch()
    patch.setitem(sample_presets.PRESETS, "small", SMALL)
    try:
        return write_sample(tmp_path_factory.mktemp("small") / "ckpt", "small").path
    finally:
        patch.undo()


def pss_bytes(pid: int) -> int:
    """A rank's share of what is resident; one that has not yet become a rank has its parent's."""
    if not os.readlink(f"/proc/{pid}/exe").endswith("k3-cpu"):
        return 0
    found = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            found = int(line.split()[1]) * 1024
    return found


class _Watch(threading.Thread):
    """The most that this process's children had together."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.quit = 0, False

    def run(self) -> None:
        while not self.quit:
            total = 0
            for task in Path(f"/proc/{os.getpid()}/task").iterdir():
                try:
                    children = (task / "children").read_text().split()
                    total += sum(pss_bytes(int(pid)) for pid in children)
                except OSError:
                    continue
            self.peak = max(self.peak, total)
            time.sleep(0.002)


def watched(asked: RunOptions) -> tuple[RunResult, int]:
    watch = _Watch()
    watch.start()
    try:
        result = run_model(asked)
    finally:
        watch.quit = True
        watch.join()
    return result, watch.peak


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="NOT RUN: no /proc/*/smaps_rollup"
)
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_stay_within_the_budget(small: Path, tmp_path: Path, tp: int) -> None:
    """The sum of the ranks' PSS, and at one rank the peak resident size, is below the predicted."""
    resident, most = watched(options(small, tmp_path, tp=tp))
    start = least(small, tmp_path, tp)
    peaks = []
    for memory in (start, start + 30 * MEGABYTES, start + 80 * MEGABYTES):
        result, peak = watched(options(small, tmp_path, tp=tp, memory_bytes=memory))
        assert bits(result) == bits(resident)
        assert 0 < peak <= memory - DRIVER_BYTES, memory
        if tp == 1:
            assert result.peak_memory_bytes <= memory - DRIVER_BYTES
        peaks.append(peak)
    assert peaks[0] < most / 2, "mapped, it takes more: else this test could not fail"


# -- faults -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return controls_of(tmp_path_factory, "io", "residency")


def test_a_weight_that_is_not_loaded_changes_the_result(
    tiny: Path, tmp_path: Path, controls: Callable[[str], Path]
) -> None:
    resident = bits(run_model(options(tiny, tmp_path)))
    plan = plan_with(tiny, tmp_path / "plan.h5", 1, 1.0, 12)
    spoilt = options(tiny, tmp_path, plan=plan, interpreter=controls("K3_CONTROL_NO_LOAD"))
    with contextlib.suppress(UnsoundError):  # a number of it may be none
        assert bits(run_model(spoilt)) != resident


def test_an_expert_that_did_not_come_stops_the_run(
    tiny: Path, tmp_path: Path, controls: Callable[[str], Path]
) -> None:
    heard: list[Event] = []
    plan = plan_with(tiny, tmp_path / "plan.h5", 1, 1.0, 12)
    spoilt = options(tiny, tmp_path, plan=plan, interpreter=controls("K3_CONTROL_NO_FETCH"))
    with pytest.raises(UnsoundError, match="is not in memory"):  # by name, not by a signal
        run_model(spoilt, heard.append)
    assert [event["event"] for event in heard] == ["start"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_read_error_names_file_and_bytes(
    tiny: Path, tmp_path: Path, controls: Callable[[str], Path], tp: int
) -> None:
    plan = plan_with(tiny, tmp_path / "plan.h5", tp, 1.0, 12)
    bad = controls("K3_CONTROL_READ_ERROR=1500")
    asked = options(tiny, tmp_path, tp=tp, gen=100, plan=plan, interpreter=bad)
    with pytest.raises(K3Error, match=r"safetensors: bytes \d+ to \d+: got Input/output") as stop:
        run_model(asked)
    assert stop.value.exit_code == 1


def test_a_device_that_gives_a_page_at_a_time_changes_nothing(
    tiny: Path, tmp_path: Path, controls: Callable[[str], Path]
) -> None:
    plan = plan_with(tiny, tmp_path / "plan.h5", 1, 1.0, 12)
    want = bits(run_model(options(tiny, tmp_path, plan=plan)))
    slow = options(tiny, tmp_path, plan=plan, interpreter=controls("K3_CONTROL_SHORT_READS"))
    assert bits(run_model(slow)) == want


def at_token(number: int, action: Callable[[], object]) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if event["event"] == "token" and event["step"] == number:
            action()

    return on_event


def largest(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("way", ["cut", "written"])
def test_a_file_that_changes_while_running_stops_it(
    writable: Callable[[str], Path], tmp_path: Path, way: str
) -> None:
    source = writable("tiny_tp8")
    plan = plan_with(source, tmp_path / "plan.h5", 1, 1.0, 12)
    file = largest(source)

    def spoil() -> None:
        if way == "cut":
            os.truncate(file, 4096)
        else:
            with file.open("r+b") as out:
                out.seek(file.stat().st_size - 1)
                out.write(b"x")

    heard: list[Event] = []
    spoiler = at_token(2, spoil)
    asked = options(source, tmp_path, gen=200, plan=plan)
    need = "the file ends before|changed since" if way == "cut" else "changed since"
    with pytest.raises(ArtifactError, match=rf"{file.name}: bytes \d+ to \d+: got ({need})"):
        run_model(asked, lambda event: (heard.append(event), spoiler(event))[0])
    assert heard[-1]["event"] == "token"


def test_a_file_that_is_replaced_is_read_to_the_end_as_it_was(
    writable: Callable[[str], Path], tmp_path: Path
) -> None:
    source = writable("tiny_tp8")
    plan = plan_with(source, tmp_path / "plan.h5", 1, 1.0, 12)
    want = run_model(options(source, tmp_path, gen=20, plan=plan)).tokens
    file = largest(source)
    other = tmp_path / "other"
    other.write_bytes(bytes(file.stat().st_size))
    spoiler = at_token(2, lambda: os.replace(other, file))
    assert run_model(options(source, tmp_path, gen=20, plan=plan), spoiler).tokens == want


def test_two_runs_at_once_do_not_disturb_each_other(tiny: Path, tmp_path: Path) -> None:
    plan = plan_with(tiny, tmp_path / "plan.h5", 2, 1.0, 12)
    asked = options(tiny, tmp_path, tp=2, gen=10, plan=plan)
    want = run_model(asked).tokens
    found: list[tuple[int, ...]] = []
    threads = [
        threading.Thread(target=lambda: found.append(run_model(asked).tokens)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [want, want]

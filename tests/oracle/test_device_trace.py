"""A trace of a run on a device, emulated here, is the CPU's; what a device computes wrong is named.

The driver hashes there what ranks hash here (k3tool/trace/downloads.py, kernels_cpu/hashes.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.compiler.rules import FUSIONS
from k3tool.isa.columns import spec_of
from k3tool.isa.op_spec import WORD_HANDLES
from k3tool.isa.stream import Isa
from k3tool.isa.table import ALL_PHASES, PAGE_TOKENS
from k3tool.runtime.cache import open_source, program
from k3tool.runtime.digest import digest_words
from k3tool.runtime.engine import StepToken
from k3tool.runtime.options import RunOptions
from k3tool.runtime.requests import Step
from k3tool.runtime.run import RunResult
from k3tool.targets import get_target
from k3tool.trace.compare import compare_traces
from k3tool.trace.downloads import Downloads
from k3tool.trace.file import TraceFile
from k3tool.trace.kept import Kept
from k3tool.trace.recorder import Recorder
from k3tool.trace.results import cells_of_rank
from k3tool.trace.values import compare_values
from tests.kernels.emulated_device import EmulatedDevice

CUDA, HIP = "cuda:sm_90a", "hip:gfx942"
DEVICES: dict[str, dict[str, Any]] = {CUDA: {}, HIP: {"arch": "gfx942", "n_domains": 8}}
IDS = (5, 9, 2, 7)
ONE_RANK: dict[str, Any] = {"name": "tiny13", "workgroups": 4, "chunk": 3}
TWO_RANKS: dict[str, Any] = {"name": "tiny_tp8", "tp": 2, "workgroups": 9, "numerics": "bf16"}
Code = Callable[[str], bytes]
Traced = Callable[..., Path]


@pytest.fixture(scope="module")
def traced(
    engine: Callable[..., RunResult],
    device_code: Code,
    tmp_path_factory: pytest.TempPathFactory,
) -> Traced:
    """Return a function that traces a run, on a device with what may be wrong with it or here."""
    made: dict[str, Path] = {}

    def run(target: str, given: dict[str, Any], **damage: Any) -> Path:
        key = repr((target, given, damage))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("trace") / "trace.h5"
            on: dict[str, Any] = {"threads": 1}
            if target != "cpu":
                code = device_code(get_target(target).family)
                device = EmulatedDevice(code, **DEVICES[target], **damage)
                on = {"interpreter": None, "target": target, "device": device}
            asked = {"gen": 2, "logits": False, "trace_at": Kept(1, 4)} | given | on
            engine(asked.pop("name"), IDS, trace_hashes=made[key], **asked)
        return made[key]

    return run


@pytest.mark.parametrize(
    ("target", "given"), [(CUDA, ONE_RANK), (HIP, TWO_RANKS)], ids=["one-rank", "two-ranks"]
)
def test_a_device_has_the_trace_of_the_cpu(
    traced: Traced, k3tool: Callable[..., Any], target: str, given: dict[str, Any]
) -> None:
    paths = [traced(where, given) for where in ("cpu", target)]
    done = k3tool("verify", "trace", *paths, "--values")
    assert done.code == 0, done.out
    assert f"PASS: {2 if given is ONE_RANK else 4} PASS, 0 FAIL, 0 NOT RUN" in done.out
    with TraceFile(paths[0]) as cpu, TraceFile(paths[1]) as device:
        assert device.artifact.target == target
        found = compare_traces(cpu, device)
        assert found.n_results > 360
        assert found.n_left_out <= 3  # results of a head that ran on no token, and a fusion
        assert len(cpu) == len(device) >= 2
        n_alike = 0
        for ours, theirs in zip(device.steps(), cpu.steps(), strict=True):
            if device.programs[ours.phase].results == cpu.programs[ours.phase].results:
                n_alike += 1  # one cut: slice by slice
                assert np.array_equal(ours.hashes, theirs.hashes), ours.phase
        assert n_alike > 0


class WrongWeight:
    """A device with one bit of a weight wrong on rank 1: the sign of its first number.

    It is of the first instruction of an op, and the last weight of its operands.
    """

    def __init__(self, op: str) -> None:
        self.op, self.inst = op, -1

    def __call__(self, device: EmulatedDevice, launch: Any) -> None:
        if self.inst >= 0 or launch["rank"] != 1:
            return
        record = device.download(int(launch["insts"]) + 64 * int(launch["segment"]), 64)
        spec = spec_of(int.from_bytes(record[:2], "little"))
        assert spec is not None
        if spec.name != self.op:
            return
        self.inst = int(launch["segment"])
        slot = max(o.slot for o in spec.operands if o.role == "weight")
        handle = int(np.frombuffer(record, "<u2")[2 * WORD_HANDLES + slot])
        pointer = device.download(int(launch["tensor"]) + 8 * handle, 8)
        ctypes.c_uint8.from_address(int.from_bytes(pointer, "little") + 1).value ^= 0x80


def test_a_weight_that_is_wrong_on_one_rank_is_named(traced: Traced) -> None:
    """The control: hashes are of what the device has in its memory, on each rank."""
    wrong = WrongWeight("NORM_GEMV_BF16")
    paths = traced(HIP, TWO_RANKS), traced(HIP, TWO_RANKS, spoil=wrong)
    with TraceFile(paths[0]) as good, TraceFile(paths[1]) as bad:
        first = compare_traces(good, bad).difference
        assert first is not None
        _, largest = compare_values(good, bad, first)
    assert (first.inst, first.op, first.ranks) == (wrong.inst, wrong.op, (1,))
    assert (first.value, first.step, first.slices) == ("layers.0.self_attn.q_in", 0, (0,))
    assert largest is not None
    assert largest.column == first.lo == 64  # row 0 of rank 1's half


# -- the definition -------------------------------------------------------------------------------


def _memory(isa: Isa) -> Callable[[int, int], np.ndarray]:
    """Return a function from a rank and a handle to words that lie there."""
    made: dict[tuple[int, int], np.ndarray] = {}

    def words_of(rank: int, handle: int) -> np.ndarray:
        if (rank, handle) not in made:
            n_words = int(np.prod(isa.tensors[handle].local))
            noise = np.random.default_rng((rank, handle))
            made[rank, handle] = noise.integers(0, 1 << 32, n_words, "u4")
        return made[rank, handle]

    return words_of


def _runs(isa: Isa, cell: Any, entry: Any, step: Step) -> Iterator[tuple[int, int, int, int]]:
    """Yield (token, run, first word, key) of a cell, as kernels_cpu/hashes.c goes through it."""
    by_token = cell["rows"] in (2, 3)
    first = step.head_from if cell["rows"] == 1 else int(entry["unit0"]) if by_token else 0
    last = min(len(step.tokens), int(entry["unit1"])) if by_token else len(step.tokens)
    for token in range(first, last):
        position, row = step.tokens[token].position, token
        if cell["rows"] == 3:
            pages = int(isa.params["pages_per_slot"])
            row = (step.tokens[token].slot * pages) * PAGE_TOKENS + position
        for run in range(int(cell["n_runs"])):
            if cell["rows"] == 4 and (int(entry["unit0"]) + run) * PAGE_TOKENS > position:
                break
            at = int(cell["base"]) + row * int(cell["row_words"])
            at += int(cell["col0"]) + run * int(cell["run_words"])
            yield token, run, at, (position << 32) + int(cell["key0"]) + run * int(cell["key_run"])


def _by_the_definition(
    recorder: Recorder, phase: str, step: Step, rank: int, words_of: Callable[[int, int], Any]
) -> tuple[list[int], list[Any]]:
    """Return the hashes of a rank's cells, and of each result the row of the step's first token."""
    isa, found = recorder.isa, recorder.results[phase]
    stream, places = isa.streams[phase], recorder.kept_rows[phase]
    cells = cells_of_rank(isa, stream, found, rank, places)
    entries = np.repeat(stream.queues.entries, np.diff(found.first.astype(np.int64)))
    hashes = [0] * len(cells)
    rows = [np.zeros(result.words, "u4") for result in found.results]
    for index, cell in enumerate(cells):
        words, n, result = words_of(rank, int(cell["handle"])), int(cell["n_cols"]), found.result
        for token, run, at, key in _runs(isa, cell, entries[index], step):
            hashes[index] += digest_words(words[at : at + n], key)
            if token == 0:
                to = int(cell["kept0"]) - int(places[result[index]]) + run * int(cell["run_words"])
                rows[result[index]][to : to + n] = words[at : at + n]
    return [number % (1 << 64) for number in hashes], rows


@pytest.mark.parametrize(
    ("phase", "positions", "options"),
    [
        ("prefill", range(62, 67), {"without": FUSIONS}),
        ("prefill", range(3), {"tp": 1, "chunk": 3}),
        ("decode", [64], {}),
        ("decode", [200], {"without": FUSIONS}),
    ],
)
def test_the_hashes_are_those_of_the_definition(
    oracle: Callable[[str], Path], tmp_path: Path, phase: str, positions: Any,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Cell by cell on memory of noise, which is of no program: every word is told apart."""
    asked = RunOptions(oracle("tiny_tp8"), IDS, 1, cache=tmp_path, workgroups=5, target=CUDA,
                       **({"tp": 2} | options))  # fmt: skip
    isa = program(open_source(asked), asked, lambda text: None).isa
    words_of = _memory(isa)

    def read(rank: int, handle: int, at: int, n_bytes: int) -> bytes:
        data = words_of(rank, handle).tobytes()[at : at + n_bytes]
        assert len(data) == n_bytes, "outside of a tensor"
        return data

    tokens = [StepToken(1, position, 0) for position in positions]
    step = Step(ALL_PHASES.index(phase), tokens, 1, len(tokens) - 1)
    kept = Kept(tokens[0].position, tokens[0].position)
    with Recorder(tmp_path / "trace", isa, kept) as recorder:
        hashes = Downloads(recorder, read)
        hashes.begin(step)
        for inst in range(len(isa.streams[phase].instructions[0])):
            hashes.take(inst)
        hashes.end()
        (made,) = recorder.steps()
        found_head = (made.position, made.n_tokens, made.head_from)
        assert found_head == (positions[0], len(tokens), len(tokens) - 1)
        for rank in range(isa.tp):
            want, rows = _by_the_definition(recorder, phase, step, rank, words_of)
            assert made.hashes[rank].tolist() == want
            for result, got in enumerate(rows):
                assert np.array_equal(recorder.kept_values(phase, result)[rank][0], got), result

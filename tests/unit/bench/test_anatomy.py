"""The anatomy of a token: its parts are the whole, and its bytes are those touched."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from k3tool.bench import decode
from k3tool.bench.anatomy import Peaks, anatomy, packet_bytes
from k3tool.bench.decode import Options, decode_once, prefill_once, prepare
from k3tool.bench.operations import packet_operations
from k3tool.bench.probe import Probe
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.compile import compile_plan
from k3tool.errors import UnsoundError, UsageError
from k3tool.isa.columns import empty_packets
from k3tool.isa.table import Op
from k3tool.model.config import K3Config
from k3tool.model.weights import expected_tensors
from k3tool.runtime.build import executable_path
from k3tool.runtime.trace import EVENT_DTYPE, WHOLE_STEP, Trace
from tests.conftest import Outcome

STEP = 5


def made_trace(*rows: tuple[int, int, int, int]) -> Trace:
    """Slices (worker, instruction, start, end) in a step from 100 to 200."""
    slices = np.zeros(len(rows), EVENT_DTYPE)
    steps = np.zeros(1, EVENT_DTYPE)
    for row, (worker, inst, start, end) in zip(slices, rows, strict=True):
        row["step"], row["worker"], row["inst"] = STEP, worker, inst
        row["start_ns"], row["end_ns"] = start, end
    steps["step"], steps["inst"], steps["start_ns"], steps["end_ns"] = STEP, WHOLE_STEP, 100, 200
    return Trace(slices, steps, 0)


def two_packets() -> np.ndarray:
    packets = empty_packets(2)
    packets["op"] = Op.GEMV_BF16, Op.ADD
    return packets


def test_the_parts_are_the_whole() -> None:
    trace = made_trace((0, 0, 110, 130), (0, 1, 140, 150), (1, 0, 105, 170))
    found = anatomy(trace, STEP, two_packets(), np.array([1000, 0]), 3)
    assert {op.op: op.seconds for op in found.ops} == {
        "GEMV_BF16": pytest.approx(85e-9), "ADD": pytest.approx(10e-9)
    }  # fmt: skip
    assert found.handoff == pytest.approx(10e-9)
    assert found.idle == pytest.approx((10 + 50 + 5 + 30 + 100) * 1e-9)  # worker 2 did nothing
    assert found.sum_of_parts == pytest.approx(found.worker_seconds)
    assert found.share("ADD") == pytest.approx(10 / 300)
    assert "hand-off" in "\n".join(found.lines())


@pytest.mark.parametrize(
    "rows",
    [
        ((0, 0, 110, 130), (0, 1, 120, 150)),  # two things at a time
        ((0, 0, 90, 130),),
        ((0, 0, 110, 201),),
    ],
)
def test_slices_that_could_not_add_up_are_refused(rows: tuple[tuple[int, int, int, int]]) -> None:
    with pytest.raises(UnsoundError, match="overlap or leave their step"):
        anatomy(made_trace(*rows), STEP, two_packets(), np.zeros(2, np.int64), 1)


def test_bytes_are_those_a_token_touches() -> None:
    """All bf16 and f32 weights once, but one row of the embedding, the experts chosen, states."""
    raw = preset_config(PRESETS["tiny"])
    config = K3Config.from_dict(raw)
    plan = compile_plan(config, tp=1, target="cpu", workgroups=8, chunk=64, batch=1, ctx=512)
    position = 300
    moved = packet_bytes(plan.phases["decode"].packets, plan.tensors, position)
    width = {"BF16": 2, "F32": 4, "U8": 1}
    weights = 0
    for spec in expected_tensors(config):
        n_bytes = int(np.prod(spec.shape)) * width[spec.dtype]
        if spec.dtype == "U8":
            n_bytes = n_bytes * config.num_experts_per_token // config.num_experts
        elif spec.name.endswith("embed_tokens.weight"):
            n_bytes //= config.vocab_size
        weights += n_bytes
    n_mla, n_kda = 3, 5
    latent = (32 + 8) * 4
    state = n_mla * latent * (position + 1 + 1) + n_kda * 2 * 8 * (16 * 16 + 3 * 3 * 16) * 4
    padding = 8 * 4 * n_kda  # A_log is longer than its live heads
    assert weights + state - 4096 <= moved.sum() <= weights + state + padding


@pytest.mark.parametrize(("mode", "on_pairs"), [("f32", False), ("bf16", True)])
def test_operations_are_those_of_matrices_states_and_attention(mode: str, on_pairs: bool) -> None:
    """Every matrix for every token, the head for one, chosen experts, each state and position."""
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    plan = compile_plan(
        config, tp=1, target="cpu", workgroups=8, chunk=64, batch=1, ctx=512, numerics=mode
    )
    first, T = 100, 64
    work = packet_operations(plan.phases["prefill"].packets, plan.tensors, first, T)
    rows, keys = 0, 0
    for spec in expected_tensors(config):
        elements = int(np.prod(spec.shape))
        if spec.name.endswith("weight_packed"):
            rows += T * 2 * 2 * elements * config.num_experts_per_token // config.num_experts
        elif spec.name.endswith("kv_b_proj.weight"):
            nope, v = config.qk_nope_head_dim, config.v_head_dim
            keys += T * 2 * elements * nope // (nope + v)
            rows += T * 2 * elements * v // (nope + v)
        elif spec.dtype == "BF16" and len(spec.shape) == 2 and spec.shape[0] > 1:
            tokens = 0 if "embed_tokens" in spec.name else 1 if "lm_head" in spec.name else T
            rows += tokens * 2 * elements
    state = 5 * T * 6 * 8 * 16 * 16  # layers, tokens, two sums and an update, heads, D, D
    reach = sum(range(first + 1, first + T + 1))
    attention = 3 * reach * 2 * config.num_attention_heads * (2 * 32 + 8)
    assert work.sum() == rows + keys + state + attention
    unrounded = rows if not on_pairs else rows - int(work[:, 1].sum())
    assert work[:, 0].sum() == unrounded + keys + state + attention
    router = 7 * T * 2 * config.num_experts * config.hidden_size
    head = 2 * config.vocab_size * config.hidden_size
    assert (unrounded == router + head) == on_pairs, "neither is fed rounding's other side"


def test_a_share_of_two_peaks() -> None:
    """Pairs have a peak of their own, or cost what binary32 does."""
    trace = made_trace((0, 0, 110, 130))
    work = np.array([[300, 400], [0, 0]])
    found = anatomy(trace, STEP, two_packets(), np.zeros(2, np.int64), 1, work)
    (op,) = (op for op in found.ops if op.op == "GEMV_BF16")
    assert (op.operations, op.pairs) == (700, 400)
    assert found.of_peak(op, Peaks(30e9, 40e9)) == pytest.approx(1.0)
    assert found.of_peak(op, Peaks(35e9, None)) == pytest.approx(1.0)
    assert found.as_dict(Peaks(30e9, 40e9))["peak_share"] == pytest.approx(0.2)
    assert "of peak" in "\n".join(found.lines(Peaks(30e9, 40e9)))


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_a_real_chunk_adds_up(oracle: Callable[[str], Path], tmp_path: Path, mode: str) -> None:
    options = Options(oracle("tiny_tp8"), mode, chunk=8, tokens=2, cache=tmp_path)
    found = prefill_once(prepare(options, 2, n_prompt=16, context=0, phase="prefill"))
    assert found.sum_of_parts == pytest.approx(found.worker_seconds, rel=1e-9)
    assert found.n_bytes == found.whole.n_bytes > 0
    assert found.whole.operations > 0
    assert (found.whole.pairs > 0) == (mode == "bf16")


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_a_real_token_adds_up(oracle: Callable[[str], Path], tmp_path: Path, mode: str) -> None:
    options = Options(oracle("tiny_tp8"), mode, context=100, tokens=3, cache=tmp_path)
    found = decode_once(prepare(options, 2, n_prompt=1, context=100))
    assert found.sum_of_parts == pytest.approx(found.worker_seconds, rel=1e-9)
    assert found.n_workers == 2
    assert sum(op.packets for op in found.ops) > 50
    assert found.n_bytes == sum(op.n_bytes for op in found.ops) > 0
    assert all(op.seconds > 0 for op in found.ops)


def test_the_command_reports_the_share_and_its_reasons(
    oracle: Callable[[str], Path], tmp_path: Path, k3tool: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(decode, "Probe", partial(Probe, n_bytes=1 << 26))
    asked = ["--context", "20", "--gen", "2", "--repeats", "4", "--chunk", "8"]
    other = tmp_path / "other"  # the same interpreter stands for another build's
    shutil.copy2(executable_path(), other)
    checkpoint, cache = str(oracle("tiny_tp8")), str(tmp_path)
    done = k3tool("bench", "decode", checkpoint, *asked, "--cache", cache, "--versus", other,
                  "--json")  # fmt: skip
    assert done.code == 0, done.err
    report = json.loads(done.out)
    rows = {row["name"]: row for row in report["measured"]}
    assert {row["n"] for row in report["measured"]} == {4}, "each side ran as often as asked for"
    ours, theirs = rows["a token, this one in turn"], rows["a token, the other interpreter"]
    ratio = rows["a token, this / the other interpreter"]["median"]
    assert ours["least"] / theirs["most"] <= ratio <= ours["most"] / theirs["least"]
    assert report["read_bandwidth"] > 1e9
    token, share = report["anatomy"], report["bandwidth_share"]
    assert 0 < share < 1
    parts = sum(op["seconds"] for op in token["ops"]) + token["handoff"] + token["idle"]
    assert parts == pytest.approx(token["wall"] * token["n_workers"])
    assert report["bytes_per_token"] == token["n_bytes"]
    chunk = report["prefill_anatomy"]
    parts = sum(op["seconds"] for op in chunk["ops"]) + chunk["handoff"] + chunk["idle"]
    assert parts == pytest.approx(chunk["wall"] * chunk["n_workers"])
    assert chunk["peaks"]["f32"] > 1e9
    assert chunk["operations"] == sum(op["operations"] for op in chunk["ops"]) > 0
    assert chunk["peak_share"] > 0  # of a peak that was measured beside it, on a busy machine
    by_ops = sum(op["peak_share"] * op["seconds"] for op in chunk["ops"])
    assert chunk["peak_share"] * chunk["wall"] * chunk["n_workers"] == pytest.approx(by_ops)
    for option, value in (("--context", 9999999), ("--batch", 10**6), ("--threads", 10**9)):
        refused = k3tool("bench", "decode", checkpoint, option, value)
        assert (refused.code, option in refused.err) == (2, True), "by the option's own name"
    other.write_text("no interpreter")
    assert k3tool("bench", "decode", checkpoint, *asked, "--versus", other).code == 5


def test_a_mode_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--numerics: got f16"):
        decode.bench_decode(Options(tmp_path, numerics="f16"))

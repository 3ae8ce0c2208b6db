"""What the order checks accept never locks or races in any interleaving, and the reverse.

Tiny random streams are executed in every order that their queues, waits and signals allow; the
executable checks must agree with what was seen. The graph of all reachable states is searched, so
no interleaving is left out.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.check_stream import check_stream
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Phase, Plan, Tensor
from k3tool.errors import UnsoundError
from k3tool.isa.columns import GATE, PACKET_REARM, WAIT_DTYPE, empty_packets
from k3tool.isa.emit import emit
from k3tool.isa.execution import execute
from k3tool.isa.queues import final_counts
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.stream_order import StreamOrder
from k3tool.isa.table import Op
from k3tool.model.config import K3Config

WORKGROUPS, RANKS = 2, 2
Program = list[tuple[int, list[tuple[int, int]]]]  # slices, (producer, threshold off by) per packet


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Program, list[bool]]:
    """Up to five packets that wait for earlier ones; some cross ranks; some counts are off."""
    packets: Program = []
    for index in range(draw(st.integers(2, 5))):
        waits = draw(st.lists(st.integers(0, index - 1), max_size=2, unique=True)) if index else []
        off = st.sampled_from([0, 0, 0, 0, 0, 1, -1])
        packets.append((draw(st.integers(1, WORKGROUPS)), [(w, draw(off)) for w in waits]))
    return packets, [draw(st.booleans()) for _ in packets]


def stream_of(program: Program, gated: list[bool]) -> Isa:
    """Copies of one vector, each packet's to the next one's place: only the protocol matters."""
    n = len(program)
    packets, waits = empty_packets(n), []
    gates = list(itertools.accumulate(gated))
    for index, (slices, after) in enumerate(program):
        row = packets[index : index + 1]
        row["op"], row["handles"][0, :2] = Op.SIGMOID, (index, index + 1)
        row["n_units"], row["unit_cols"], row["width"], row["grain"] = 32, 1, 32, 16
        row["n_slices"] = slices
        row["counter"] = GATE | (gates[index] - 1) if gated[index] else index
        row["threshold"] = slices * (RANKS if gated[index] else 1)
        row["wait_ofs"], row["n_waits"] = len(waits), len(after)
        waits += [(int(packets["counter"][p]), max(1, int(packets["threshold"][p]) + off))
                  for p, off in after]  # fmt: skip
    packets["flags"][n - 1] = PACKET_REARM
    tensors = tuple(
        Tensor(f"t{i}", "arena", "f32", (1, 32), (1, 32), 128, 128 * i, "decode")
        for i in range(n + 1)
    )
    phase = Phase("decode", 1, packets, np.array(waits, WAIT_DTYPE), ((),) * n, gates[-1],
                  128 * (n + 1), 0, 1, 1)  # fmt: skip
    params = {"tp": RANKS, "target": "cpu", "workgroups": WORKGROUPS, "batch": 1, "ctx": 1}
    return emit(Plan(tensors, {"decode": phase}, params), "cpu")


def interleavings(isa: Isa) -> tuple[bool, set[tuple[int, int, bool]]]:
    """Search all states. Return whether one is stuck, and pairs (p, q, across) seen unordered.

    (p, q, False): an entry of q started on a rank while one of p there was not over; True: on any.
    """
    stream = isa.streams["decode"]
    queues = stream.queues
    n_queues = stream.n_workgroups
    workers = [(r, w) for r in range(isa.tp) for w in range(n_queues)]
    ofs = queues.queue_ofs.tolist()
    entries = queues.entries
    start = tuple(ofs[w] for _, w in workers)
    seen, stack = {start}, [start]
    stuck = False
    early: set[tuple[int, int, bool]] = set()
    while stack:
        state = stack.pop()
        ended = zip(workers, state, strict=True)
        done = [(r, e) for (r, w), at in ended for e in range(ofs[w], at)]
        moved = 0
        for index, (rank, w) in enumerate(workers):
            at = state[index]
            if at == ofs[w + 1] or not _met(isa, stream, done, rank, at):
                continue
            moved += 1
            _note_early(early, entries, workers, ofs, state, rank, int(entries["inst"][at]))
            after = (*state[:index], at + 1, *state[index + 1 :])
            if after not in seen:
                seen.add(after)
                stack.append(after)
        whole = all(at == ofs[w + 1] for (_, w), at in zip(workers, state, strict=True))
        stuck |= not moved and not whole
    return stuck, early


def _met(isa: Isa, stream: Stream, done: list[tuple[int, int]], rank: int, entry: int) -> bool:
    queues = stream.queues
    row = queues.entries[entry]
    for counter, threshold in queues.waits[row["wait_ofs"] : row["wait_ofs"] + row["n_waits"]]:
        arrived = sum(
            int(queues.signals[queues.entries["signal_ofs"][e]]) == int(counter)
            for r, e in done
            if counter & GATE or r == rank
        )
        if arrived < threshold:
            return False
    return True


def _note_early(early, entries, workers, ofs, state, rank, inst) -> None:
    """Note every instruction that has an entry left when one of `inst` starts on `rank`."""
    for (r, w), at in zip(workers, state, strict=True):
        for e in range(at, ofs[w + 1]):
            other = int(entries["inst"][e])
            if other != inst:
                early.add((other, inst, True))
                if r == rank:
                    early.add((other, inst, False))


@settings(max_examples=60)
@given(graphs())
def test_the_derived_order_holds_in_every_interleaving(made: tuple[Program, list[bool]]) -> None:
    """If the checker says p is over before q, no interleaving starts q while p runs."""
    isa = stream_of(*made)
    order = StreamOrder(isa, isa.streams["decode"])
    stuck, early = interleavings(isa)
    for q in range(len(order.rows)):
        for p in range(len(order.rows)):
            if order.before[q] >> p & 1:
                assert (p, q, False) not in early
            if order.before_everywhere[q] >> p & 1:
                assert (p, q, True) not in early
    exact = all(
        threshold == order.arrivals[counter]
        for i in range(len(order.rows))
        for waits in order.waits_of(i)
        for counter, threshold in waits
    )
    assert not (exact and stuck)  # well-formed streams do not lock
    too_many = any(off > 0 for _, waits in made[0] for _, off in waits)
    assert stuck == too_many  # and a wait for more than arrives always does
    checks = {c.name: c.status for c in check_stream(isa, "x")[0]}
    assert (checks["F thresholds decode"] == "PASS") <= exact
    assert checks["F acyclic decode"] == "PASS"


@settings(max_examples=25)
@given(graphs(), st.integers(0, 3))
def test_random_execution_locks_exactly_where_some_interleaving_does(
    made: tuple[Program, list[bool]], seed: int
) -> None:
    isa = stream_of(*made)
    stuck, _ = interleavings(isa)
    if stuck:
        with pytest.raises(UnsoundError, match="no worker can go on"):
            execute(isa, isa.streams["decode"], seed)
    else:
        execute(isa, isa.streams["decode"], seed)


# -- the theorem ---------------------------------------------------------------------------------


def transcribed_well_formed(isa: Isa) -> bool:
    """Return `well_formed` of proofs/Protocol.v, word for word, on all entries of all ranks.

    There a program is a list of entries in one global order, with a queue, (counter, threshold)
    pairs and signalled counters each; counters of different ranks are different counters.
    """
    queues = isa.streams["decode"].queues
    owner = np.repeat(np.arange(len(queues.queue_ofs) - 1), np.diff(queues.queue_ofs))
    entries = sorted(
        (int(e["inst"]), rank, int(owner[i]), i)
        for rank in range(isa.tp)
        for i, e in enumerate(queues.entries)
    )
    waits, signals = [], []
    for _, rank, _, i in entries:
        e = queues.entries[i]
        listed = queues.waits[e["wait_ofs"] : e["wait_ofs"] + e["n_waits"]]
        waits.append([((rank, int(c)), int(k)) for c, k in listed])
        sent = queues.signals[e["signal_ofs"] : e["signal_ofs"] + e["n_signals"]].tolist()
        signals.append([
            (r, c) for c in sent for r in (range(isa.tp) if c & GATE else (rank,))
        ])  # fmt: skip
    size = len(entries)
    for e in range(size):
        for c, k in waits[e]:
            if k != sum(sent.count(c) for sent in signals):
                return False
            if any(c in signals[p] and not p < e for p in range(size)):
                return False
    return True


@st.composite
def altered_streams(draw: st.DrawFn) -> Isa:
    """A random stream with up to two random edits of waits, wait lists and signal lists."""
    program, gated = draw(graphs())
    isa = stream_of(program, gated)
    stream = isa.streams["decode"]
    waits, entries = stream.queues.waits.copy(), stream.queues.entries.copy()
    n = len(program)
    for _ in range(draw(st.integers(0, 2))):
        match draw(st.sampled_from(["counter", "threshold", "list", "signal"])):
            case "counter" if len(waits):
                at = draw(st.integers(0, len(waits) - 1))
                waits["counter"][at] = draw(st.sampled_from(stream.queues.signals.tolist()))
            case "threshold" if len(waits):
                at = draw(st.integers(0, len(waits) - 1))
                waits["threshold"][at] = draw(st.integers(1, 2 * RANKS * WORKGROUPS))
            case "list":
                at = draw(st.integers(0, len(entries) - 1))
                entries["n_waits"][at] = draw(st.integers(0, int(entries["n_waits"][at])))
            case "signal":
                at = draw(st.integers(0, len(entries) - 1))
                entries["signal_ofs"][at] = draw(st.integers(0, n - 1))
    queues = replace(stream.queues, waits=waits, entries=entries)
    local, gates = final_counts(entries, queues.signals, n, RANKS)
    gates = np.resize(np.append(gates, np.zeros(n, "<u4")), len(stream.queues.gate_counts))
    queues = replace(queues, local_counts=local, gate_counts=gates.astype("<u4"))
    return replace(isa, streams={"decode": replace(stream, queues=queues)})


@settings(max_examples=150)
@given(altered_streams())
def test_the_checks_accept_exactly_what_the_theorem_calls_well_formed(isa: Isa) -> None:
    checks = {c.name: c for c in check_stream(isa, "x")[0]}
    order_holds = checks["F tables"].status == "PASS"
    # The audit and the flags are no part of the theorem: only faults of waits count here.
    if order_holds:
        order = StreamOrder(isa, isa.streams["decode"])
        order_holds = checks["F acyclic decode"].status == "PASS" and all(
            threshold == order.arrivals.get(counter, 0)
            for index in range(len(order.rows))
            for waits in order.waits_of(index)
            for counter, threshold in waits
        )
    assert order_holds == transcribed_well_formed(isa)


@settings(max_examples=40)
@given(altered_streams())
def test_what_is_accepted_never_locks_and_a_lock_is_never_accepted(isa: Isa) -> None:
    """The theorem's conclusion, and its contraposition, by search of all interleavings."""
    stuck, _ = interleavings(isa)
    if transcribed_well_formed(isa):
        assert not stuck
        execute(isa, isa.streams["decode"], 1)
    if stuck:
        checks = {c.name: c.status for c in check_stream(isa, "x")[0]}
        assert "FAIL" in {checks["F tables"], checks.get("F thresholds decode", "PASS"),
                          checks.get("F acyclic decode", "PASS")}  # fmt: skip


# -- a compiled program --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> Isa:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    plan = compile_plan(config, tp=2, target="hip:gfx950", workgroups=16, chunk=4, batch=1, ctx=512)
    return emit(plan, "hip:gfx950")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by_window", [False, True])
def test_a_compiled_stream_runs_to_its_end_in_any_order(
    compiled: Isa, seed: int, by_window: bool
) -> None:
    for stream in compiled.streams.values():
        done = execute(compiled, stream, seed, by_window=by_window)
        assert done.entries == compiled.tp * len(stream.queues.entries)


def test_a_wait_for_one_more_locks_and_names_its_instruction(compiled: Isa) -> None:
    stream = compiled.streams["decode"]
    waits = stream.queues.waits.copy()
    first = int(stream.queues.entries["wait_ofs"][stream.queues.entries["inst"] == 40][0])
    waits["threshold"][first] += 1
    altered = replace(stream, queues=replace(stream.queues, waits=waits))
    for by_window in (False, True):
        with pytest.raises(UnsoundError, match="first waits instruction"):
            execute(compiled, altered, 0, by_window=by_window)


def test_a_window_out_of_order_locks(compiled: Isa) -> None:
    """The first domain's window backwards: a cursor then meets a consumer before its producer."""
    stream = compiled.streams["decode"]
    assert stream.windows is not None
    order = stream.windows.order.copy()
    last = int(stream.windows.window_ofs[1])
    order[:last] = order[:last][::-1]
    altered = replace(stream, windows=replace(stream.windows, order=order))
    with pytest.raises(UnsoundError, match="no worker can go on"):
        execute(compiled, altered, 0, by_window=True)

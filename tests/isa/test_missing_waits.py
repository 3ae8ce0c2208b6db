"""Every wait of a real plan is needed: without it the checks refuse, and wrong numbers come out.

Each wait is taken out by itself. Checks D and F have to refuse the rest; an exact search for worst
orders has to find an entry that runs too soon; and that order, executed on real values, has to
leave other logits, tokens or states than the whole program does. Were a wait redundant, all three
would say so: none is, and the counts are asserted.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.hazards import check_ordered
from k3tool.compiler.order import Order
from k3tool.compiler.plan import Plan
from k3tool.isa.columns import WAIT_DTYPE
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa
from k3tool.isa.stream_order import StreamOrder
from k3tool.ref.vm import FolderWeights, Vm
from tests.isa.interleave import Machine, conflicts, races, spread, without_wait
from tests.isa.sliced_vm import SlicedVm

STEPS = {"prefill": [4, 5, 6], "decode": [7]}  # each after a prefill of PROMPT, so states count
PROMPT = [1, 2, 3]


class Made(NamedTuple):
    """A plan, its stream with a worker an entry, and every rank's weights."""

    plan: Plan
    isa: Isa
    folders: list[Checkpoint]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Made]]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("waits")
        write_sample(folder / "ckpt", "tiny")

        def of(tp: int) -> Made:
            if tp == 1:
                folders = [stack.enter_context(Checkpoint.open(folder / "ckpt"))]
            else:
                shard_checkpoint(folder / "ckpt", tp, folder / f"tp{tp}")
                shards = Shards.open(folder / f"tp{tp}")
                folders = [stack.enter_context(shards.rank(rank)) for rank in range(tp)]
            plan = compile_plan(
                folders[0].config, tp=tp, target="cpu", workgroups=4, chunk=3, batch=1, ctx=64
            )
            return Made(plan, spread_isa(plan), folders)

        made_at = {tp: of(tp) for tp in (1, 2)}
        yield made_at.__getitem__


def spread_isa(plan: Plan) -> Isa:
    isa = emit(plan, "cpu")
    return replace(isa, streams={name: spread(s) for name, s in isa.streams.items()})


def machine(isa: Isa, phase: str) -> Machine:
    return Machine(isa, isa.streams[phase])


def after_prompt(made: Made, phase: str) -> Callable[[list[tuple[int, int]]], list[np.ndarray]]:
    """Return a function from an order of entries to what a step in that order leaves behind."""
    start = SlicedVm(made.isa, list(map(FolderWeights, made.folders)))
    start.step_in("prefill", PROMPT, machine(made.isa, "prefill").order()[0])
    lasting = [h for h, t in enumerate(made.isa.tensors) if t.role in ("state", "output", "logits")]
    kept = [[memory[h].copy() for h in lasting] for memory in start.memories]

    def run(order: list[tuple[int, int]]) -> list[np.ndarray]:
        start.position = len(PROMPT)
        for memory, values in zip(start.memories, kept, strict=True):
            for handle, value in zip(lasting, values, strict=True):
                memory[handle][...] = value
        start.step_in(phase, STEPS[phase], order)
        return [memory[handle].copy() for memory in start.memories for handle in lasting]

    return run


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


def refused(plan: Plan, phase: str) -> tuple[bool, bool]:
    """Return whether check D refuses a plan's phase, and whether F refuses the emitted stream."""
    isa = emit(plan, "cpu")
    by_plan = check_ordered(Order(plan, plan.phases[phase]))[1]
    return bool(by_plan), bool(check_ordered(StreamOrder(isa, isa.streams[phase]))[1])


# -- the whole program: the controls -------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_no_order_of_the_whole_stream_races(
    made: Callable[[int], Made], tp: int, phase: str
) -> None:
    """Exact: every entry is held back once, and nothing that conflicts with it runs before it."""
    plan, isa, _ = made(tp)
    pairs = conflicts(isa, isa.streams[phase])
    assert len(pairs) > 1000
    assert sum(pairs.values()) > 100, "peers' buffers are among them"
    for stream in (isa.streams[phase], emit(plan, "cpu").streams[phase]):  # spread, and as emitted
        whole = Machine(isa, stream)
        assert not list(races(whole, pairs, range(len(whole.inst))))
    assert refused(plan, phase) == (False, False)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_any_order_of_the_whole_stream_gives_the_host_vms_values(
    made: Callable[[int], Made], tp: int, phase: str
) -> None:
    _, isa, folders = made(tp)
    vm = Vm(isa, list(map(FolderWeights, folders)))
    vm.step("prefill", PROMPT)
    with np.errstate(invalid="ignore"):
        vm.step(phase, STEPS[phase])
    lasting = [h for h, t in enumerate(isa.tensors) if t.role in ("state", "output", "logits")]
    want = [memory[handle] for memory in vm.memories for handle in lasting]
    run, whole = after_prompt(made(tp), phase), machine(isa, phase)
    held = [None, *((0, entry) for entry in range(0, len(whole.inst), 97))]
    assert len(held) > 4
    for place in held:
        assert same(run(whole.order(place)[0]), want)


# -- each wait by itself -------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "phase"), [(1, "prefill"), (2, "decode")])
def test_without_any_one_wait_checks_refuse_and_some_order_computes_something_else(
    made: Callable[[int], Made], tp: int, phase: str
) -> None:
    plan, isa, _ = made(tp)
    pairs = conflicts(isa, isa.streams[phase])
    run = after_prompt(made(tp), phase)
    want = run(machine(isa, phase).order()[0])
    packets = plan.phases[phase].packets
    waits = [(p, n) for p in range(len(packets)) for n in range(int(packets["n_waits"][p]))]
    assert len(waits) > 100
    for packet, nth in waits:
        cut = without_wait(plan, phase, packet, nth)
        assert refused(cut, phase) == (True, True), (packet, nth)
        loose = machine(spread_isa(cut), phase)
        counter = plan.phases[phase].waits_of(packet)["counter"][nth]
        producers = set(np.flatnonzero(packets["counter"] == counter).tolist())
        first = [e for e, inst in enumerate(loose.inst) if inst in producers]
        rest = [e for e, i in enumerate(loose.inst) if i < packet and i not in producers]
        found = races(loose, pairs, [*first, *rest])
        assert any(not same(run(loose.order((0, e))[0]), want) for e in found), (packet, nth)


def test_a_wait_that_others_imply_is_not_missed(made: Callable[[int], Made]) -> None:
    """The control: without a wait that changes nothing, nobody refuses and nothing races."""
    plan, isa, _ = made(2)
    old = plan.phases["decode"]
    packet = next(i for i in range(20, len(old.packets)) if old.packets["n_waits"][i])
    far = old.waits_of(next(i for i in range(packet) if old.packets["n_waits"][i]))[:1]
    lists = [old.waits_of(i) for i in range(len(old.packets))]
    lists[packet] = np.concatenate([lists[packet], far]).astype(WAIT_DTYPE)
    packets = old.packets.copy()
    packets["n_waits"] = [len(waits) for waits in lists]
    packets["wait_ofs"] = np.cumsum(packets["n_waits"]) - packets["n_waits"]
    more = replace(old, packets=packets, waits=np.concatenate(lists))
    plan = replace(plan, phases={**plan.phases, "decode": more})
    cut = without_wait(plan, "decode", packet, len(lists[packet]) - 1)
    assert refused(cut, "decode") == (False, False)
    loose = machine(spread_isa(cut), "decode")
    assert not list(races(loose, conflicts(isa, isa.streams["decode"]), range(len(loose.inst))))

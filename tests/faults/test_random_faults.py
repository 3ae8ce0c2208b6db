"""Random faults of a stream: what the checks accept computes what the whole stream does.

One word, entry, list or bound is altered at random. Whatever is accepted (an unread word, a larger
arena) is executed on real values: every entry runs, nothing races, and the same numbers come out.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.compiler.checks import check_program, is_proved
from k3tool.compiler.compile import compile_plan
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa
from k3tool.ref.vm import FolderWeights
from tests.faults.mutations import with_queues, with_stream
from tests.isa.interleave import Machine, conflicts, races
from tests.isa.sliced_vm import SlicedVm

SEEDS = range(80)


def near(dice: random.Random, value: int) -> int:
    return dice.choice([value + 1, max(value - 1, 0), 0, value * 2, value ^ 1 << dice.randrange(9)])


def entry(isa: Isa, dice: random.Random) -> Isa:
    entries = isa.streams["decode"].queues.entries.copy()
    name = dice.choice(entries.dtype.names)
    at = dice.randrange(len(entries))
    most = 256 ** entries.dtype[name].itemsize - 1
    entries[name][at] = min(near(dice, int(entries[name][at])), most)
    return with_queues(isa, entries=entries)


def swapped_entries(isa: Isa, dice: random.Random) -> Isa:
    entries = isa.streams["decode"].queues.entries.copy()
    pair = dice.sample(range(len(entries)), 2)
    for name in dice.sample(list(entries.dtype.names), dice.randint(1, 3)):
        entries[name][pair] = entries[name][pair[::-1]]
    return with_queues(isa, entries=entries)


def wait(isa: Isa, dice: random.Random) -> Isa:
    queues = isa.streams["decode"].queues
    waits, at = queues.waits.copy(), dice.randrange(len(queues.waits))
    if dice.random() < 0.5:
        waits["counter"][at] = dice.choice(queues.signals.tolist())
    else:
        waits["threshold"][at] = near(dice, int(waits["threshold"][at]))
    return with_queues(isa, waits=waits)


def signal(isa: Isa, dice: random.Random) -> Isa:
    signals = isa.streams["decode"].queues.signals.copy()
    signals[dice.randrange(len(signals))] = dice.choice(signals.tolist())
    return with_queues(isa, signals=signals)


def word(isa: Isa, dice: random.Random) -> Isa:
    records = [words.copy() for words in isa.streams["decode"].instructions]
    at = dice.randrange(len(records[0])), dice.randrange(records[0].shape[1])
    value = int(records[0][at])
    for words in records:
        words[at] = (value ^ 1 << dice.randrange(32)) if dice.random() < 0.5 else value + 1 & 0xFFFF
    return with_stream(isa, instructions=tuple(records))


def place(isa: Isa, dice: random.Random) -> Isa:
    rows = list(isa.tensors)
    at = dice.randrange(len(rows))
    offset = max(0, rows[at].offset + dice.choice([-512, -256, 4, 256, 512, 4096]))
    rows[at] = rows[at]._replace(offset=offset)
    return replace(isa, tensors=tuple(rows))


def bound(isa: Isa, dice: random.Random) -> Isa:
    name = dice.choice(["max_tokens", "arena_bytes", "peer_bytes", "scratch_floats"])
    value = getattr(isa.streams["decode"], name)
    return with_stream(isa, **{name: max(0, value + dice.choice([-256, -1, 1, 256]))})


FAULTS: list[Callable[[Isa, random.Random], Isa]] = [
    entry, swapped_entries, wait, signal, word, place, bound
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "ckpt"
    write_sample(path, "tiny")
    return path


def computed(isa: Isa, checkpoint: Checkpoint) -> list[np.ndarray]:
    machines = {name: Machine(isa, stream) for name, stream in isa.streams.items()}
    orders = {name: machine.order()[0] for name, machine in machines.items()}
    for name, order in orders.items():
        assert len(order) == len(machines[name].inst), "an entry that never runs"
    vm = SlicedVm(isa, [FolderWeights(checkpoint)])
    vm.step_in("prefill", [1, 2, 3], orders["prefill"])
    vm.step_in("decode", [7], orders["decode"])
    lasting = [h for h, t in enumerate(isa.tensors) if t.role in ("state", "output", "logits")]
    return [vm.memories[0][handle].copy() for handle in lasting]


def test_what_is_accepted_computes_the_same(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        plan = compile_plan(
            checkpoint.config, tp=1, target="cpu", workgroups=4, chunk=3, batch=1, ctx=64
        )
        whole = emit(plan, "cpu")
        want = computed(whole, checkpoint)
        refused = accepted = 0
        for seed in SEEDS:
            dice = random.Random(seed)
            isa = FAULTS[seed % len(FAULTS)](whole, dice)
            if not is_proved(check_program(isa, "stream")):
                refused += 1
                continue
            accepted += 1
            found = computed(isa, checkpoint)
            assert all(
                np.array_equal(a, b, equal_nan=True) for a, b in zip(found, want, strict=True)
            ), seed
            machine = Machine(isa, isa.streams["decode"])
            pairs = conflicts(isa, isa.streams["decode"])
            assert not list(races(machine, pairs, range(0, len(machine.inst), 9))), seed
    assert refused > len(SEEDS) // 2
    assert accepted > 0

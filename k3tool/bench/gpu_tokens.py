"""Tokens a second of a model on a device, what they are measured against, and where the time goes.

One launch a token is timed beside a launch for each op, and beside those captured in a graph, in
turn. Bodies are taken out by writing NOP over their opcodes in the device's memory: what is left
without any is the protocol. Results of such a step mean nothing and are not looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from k3tool.bench.frame import Spread, spread
from k3tool.errors import K3Error, TargetError
from k3tool.isa.op_spec import RECORD_WORDS
from k3tool.isa.table import ALL_PHASES, SPECS, Op
from k3tool.runtime.engine import StepToken
from k3tool.runtime.gpu_group import GpuGroup
from k3tool.runtime.gpu_memory import RankMemory
from k3tool.runtime.gpu_object import LAUNCH_DTYPE
from k3tool.runtime.gpu_runtime import Device, Launched
from k3tool.runtime.options import RunOptions
from k3tool.runtime.prepare import prepare, running
from k3tool.runtime.ranks import FaultError

Open = Callable[[str], Device]
Array = npt.NDArray[Any]
DECODE = ALL_PHASES.index("decode")
ONE, EACH, GRAPH = "in one launch", "in one for each op", "in a graph of those"
LEAST_SHARE = 0.01  # of a token: an op whose body takes less has no line


class Graphed:
    """A Device whose launches between two looks at it become a graph, kept and replayed.

    One stream: ranks that wait for each other are no graph of launches.
    """

    def __init__(self, device: Device) -> None:
        """Take the device over."""
        self._device = device
        self._queued: list[Launched] = []
        self._graphs: dict[tuple[Launched, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what the device has."""
        return getattr(self._device, name)

    def members(self) -> tuple[Graphed, ...]:
        """Return it alone."""
        return (self,)

    def member(self, rank: int, n_ranks: int) -> Graphed:
        """Return it, whatever the rank."""
        return self

    def launch(
        self, kernel: Any, n_blocks: int, lanes: int, arguments: Sequence[int], stream: int
    ) -> None:
        """Put a launch behind those before. Raises: TargetError for a second stream."""
        if stream:
            raise TargetError("a graph of launches", got="several ranks", need="one")
        self._queued.append(Launched(kernel, n_blocks, lanes, tuple(arguments)))

    def is_idle(self) -> bool:
        """Start what is queued; return whether nothing runs."""
        if not self._queued:
            return self._device.is_idle()
        key, self._queued = tuple(self._queued), []
        if key not in self._graphs:
            self._graphs[key] = self._device.capture(key)
        self._device.replay(self._graphs[key])
        return False


@dataclass(frozen=True, slots=True)
class Asked:
    """A model at TP 1 and how long it decodes: `gen` steps a turn, `repeats` turns."""

    options: RunOptions
    prompt: tuple[int, ...]
    gen: int = 16
    repeats: int = 3


@contextlib.contextmanager
def engine(options: RunOptions, device: Device) -> Iterator[GpuGroup]:
    """Give a model's engine on a device, ready for steps."""
    job = prepare(options, lambda text: None, lambda text: None, device, is_engine=True)
    with running(job, lambda text: None) as group:
        assert isinstance(group, GpuGroup)
        yield group


def turn(group: GpuGroup, asked: Asked, n_slots: int = 1) -> float:
    """Read the prompt in every slot, then decode; return seconds a step, the median."""
    prompt, chunk = asked.prompt, group.most_tokens
    for slot in range(n_slots):
        for first in range(0, len(prompt), chunk):
            ids = enumerate(prompt[first : first + chunk], first)
            group.step([StepToken(token, at, slot) for at, token in ids], 0)
    times = []
    for at in range(len(prompt), len(prompt) + asked.gen):
        found = group.step([StepToken(prompt[-1], at, slot) for slot in range(n_slots)], n_slots)
        times.append(found.ns * 1e-9)
    return spread(times).median


class Rates(NamedTuple):
    """Tokens a second by how a step is launched, and each time's ratio to one launch's."""

    rates: dict[str, Spread]
    ratios: dict[str, Spread]
    refused: str = ""


def rates(asked: Asked, open_device: Open) -> Rates:
    """Measure the three ways of launching in turn. Raises: what an engine is refused with."""
    each = replace(asked.options, is_launch_per_op=True)
    ways: dict[str, tuple[RunOptions, Callable[[Device], Device]]] = {
        ONE: (asked.options, lambda device: device),
        EACH: (each, lambda device: device),
        GRAPH: (each, lambda device: cast(Device, Graphed(device))),
    }
    refused = ""
    with contextlib.ExitStack() as stack:
        groups: dict[str, GpuGroup] = {}
        for name, (options, wrap) in ways.items():
            device = wrap(open_device(options.target))
            try:
                groups[name] = stack.enter_context(engine(options, device))
            except K3Error as error:
                if name != GRAPH:
                    raise
                refused = error.text().partition("\n")[0]  # a vendor without graphs
        return compare(groups, asked, refused)


def compare(groups: dict[str, GpuGroup], asked: Asked, refused: str = "") -> Rates:
    """Measure groups in turn."""
    times: dict[str, list[float]] = {name: [] for name in groups}
    for number in range(1 + asked.repeats):
        for name, group in groups.items():
            taken = turn(group, asked)
            if number:  # the first warms up
                times[name].append(taken)
    return Rates(
        {name: spread([1 / one for one in found]) for name, found in times.items()},
        {
            name: spread([b / a for a, b in zip(times[ONE], found, strict=True)])
            for name, found in times.items() if name != ONE
        },
        refused,
    )  # fmt: skip


# ---- where the time goes ------------------------------------------------------------------------


def decode_records(rank: RankMemory) -> Array:
    """Return a copy of decode's instructions, (n, RECORD_WORDS) words."""
    data = rank.view.sections["inst", DECODE].tobytes()
    return np.frombuffer(data, "<u4").reshape(-1, RECORD_WORDS).copy()


def used_ops(rank: RankMemory) -> set[Op]:
    """Return the ops of decode that do something."""
    return {Op(int(op)) for op in decode_records(rank)[:, 0] & 0xFFFF} - {Op.NOP}


def take_out(device: Device, rank: RankMemory, ops: Collection[Op]) -> None:
    """Write NOP over the opcodes of `ops` in decode; all others are what they were."""
    rows = decode_records(rank)
    is_out = np.isin(rows[:, 0] & 0xFFFF, [int(op) for op in ops])
    rows[is_out, 0] = rows[is_out, 0] & np.uint32(0xFFFF0000) | np.uint32(Op.NOP)
    device.upload(rank.at(("inst", DECODE)), rows.tobytes())


class BlockTimes:
    """Time of a rank's blocks in decode's launches, in bodies and in all."""

    def __init__(self, device: Device, rank: RankMemory) -> None:
        """Point the rank's launches at new words."""
        self._device, self._n_bytes = device, 16 * rank.n_blocks
        self._at = device.alloc(self._n_bytes)
        fields = LAUNCH_DTYPE.fields
        assert fields is not None
        for address in rank.launches(DECODE):
            device.upload(address + int(fields["busy"][1]), self._at.to_bytes(8, "little"))

    def take(self) -> tuple[float, float]:
        """Return the seconds of all blocks together, in bodies and in all, and begin again."""
        ticks = np.frombuffer(self._device.download(self._at, self._n_bytes), "<u8").reshape(-1, 2)
        self._device.upload(self._at, bytes(self._n_bytes))
        bodies, whole = ticks.sum(axis=0) / self._device.ticks_per_second
        return float(bodies), float(whole)


class Anatomy(NamedTuple):
    """Shares of a token's time. `bodies` are of all blocks; `ops` what is saved without one.

    `stopped` says why there are no more of those.
    """

    token_seconds: float
    protocol: float
    bodies: float
    ops: dict[str, float]
    stopped: str = ""

    @property
    def idle(self) -> float:
        """Return the rest: blocks that wait for other blocks' bodies."""
        return 1.0 - self.protocol - self.bodies


def anatomy(asked: Asked, device: Device) -> Anatomy:
    """Take a model's decode step apart. Raises: what an engine is refused with."""
    with engine(asked.options, device) as group:
        return dissect(group, device, asked)


def dissect(group: GpuGroup, device: Device, asked: Asked) -> Anatomy:
    """Take a decode step of one rank apart; the group can run nothing sound after it."""
    (rank,) = group.ranks
    used = used_ops(rank)

    def token() -> float:
        return min(turn(group, asked) for _ in range(asked.repeats))

    token()
    whole = token()
    clock = BlockTimes(device, rank)
    token()
    bodies, blocks = clock.take()
    take_out(device, rank, used)
    protocol = token()
    ops: dict[str, float] = {}
    stopped = ""
    for op in sorted(used):
        take_out(device, rank, {op})
        try:
            gain = 1 - token() / whole
        except (FaultError, K3Error) as error:  # what is left in its place was no number
            stopped = f"without {SPECS[op].name}: {error}"
            break
        if gain >= LEAST_SHARE:
            ops[SPECS[op].name] = gain
    return Anatomy(whole, protocol / whole, bodies / blocks, ops, stopped)

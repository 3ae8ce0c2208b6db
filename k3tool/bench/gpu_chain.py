"""Programs made by hand and run on a device: packets one after the other, without a model.

What a launch costs cancels: a chain is timed against one twice as long, and the difference divided.
All tensors are zeros in device memory; `k3tool.bench.gpu_measures` says what is measured so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k3tool.compiler.plan import Tensor
from k3tool.errors import UnsoundError
from k3tool.isa import device as records
from k3tool.isa import queues
from k3tool.isa.columns import PACKET_REARM, WAIT_DTYPE, empty_packets
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.table import ALL_PHASES, SPECS, Op
from k3tool.isa.windows import build_windows
from k3tool.runtime.engine import StepToken
from k3tool.runtime.gpu_memory import RankMemory, require_memory
from k3tool.runtime.gpu_object import check_object, read_identity
from k3tool.runtime.gpu_runtime import Device, wait_idle
from k3tool.runtime.gpu_source import builds, program_ops
from k3tool.runtime.image import build_image
from k3tool.runtime.requests import Step
from k3tool.targets import get_build, get_target

PHASE = "decode"
PATIENCE_SECONDS = 20.0
_LINE = 64
_HEADS = ("output", "logits")


class Packet(NamedTuple):
    """One instruction: operands by tensor name; `params` as words. Every unit is a column."""

    op: Op
    operands: tuple[str, ...]
    n_units: int
    width: int
    params: tuple[int, ...] = ()


def chain(target: str, workgroups: int, sizes: dict[str, int], packets: Sequence[Packet]) -> Isa:
    """Return the program of packets that wait one for the other, on tensors of `sizes` bytes.

    Every packet is cut for all workgroups. One more, of one slice, clears the other bank.
    """
    tensors, at = [], 0
    for name, n_bytes in sizes.items():
        shape = (n_bytes // 4,)
        tensors.append(Tensor(name, "arena", "f32", shape, shape, n_bytes, at, PHASE))
        at += -(-n_bytes // 256) * 256
    tensors += [Tensor(role, role, "f32", (1, 4), (1, 4), 16, 0, PHASE) for role in _HEADS]
    handles = {tensor.name: handle for handle, tensor in enumerate(tensors)}
    rows = empty_packets(len(packets) + 1)
    waits = np.zeros(len(packets), WAIT_DTYPE)
    for number, packet in enumerate([*packets, Packet(Op.NOP, ("output",), 1, 4)]):
        row, is_last = rows[number : number + 1], number == len(packets)
        grain = -(-packet.n_units // workgroups)
        slots = [handles[name] for name in packet.operands]
        row["op"], row["handles"][0, : len(slots)] = packet.op, slots
        row["n_units"], row["width"], row["grain"] = packet.n_units, packet.width, grain
        row["unit_cols"], row["flags"] = 1, PACKET_REARM if is_last else 0
        row["params"][0, : len(packet.params)] = packet.params
        row["n_slices"] = row["threshold"] = -(-packet.n_units // grain)
        row["counter"] = number
        if number:
            waits[number - 1] = (number - 1, int(rows["threshold"][number - 1]))
            row["wait_ofs"], row["n_waits"] = number - 1, 1
    scratch = queues.scratch_floats(rows, 1)
    made = queues.build(rows, waits, queues.Crew(workgroups), 1)
    windows = build_windows(made, get_target(target))
    stream = Stream(PHASE, 1, scratch, at, _LINE, (records.pack(rows, 0),), made, windows)
    params = {"tp": 1, "workgroups": workgroups, "ctx": 256, "batch": 1, "target": target}
    return Isa(target, tuple(tensors), {PHASE: stream}, params, ())


class _NoWeights:
    """What an image asks of a rank's weights, of a program without any."""

    def copies(self, path: str) -> list[tuple[str, int]]:
        return []


class Loaded:
    """A program of `chain` on a device; the device's owner closes it."""

    def __init__(self, device: Device, isa: Isa, folder: Path) -> None:
        """Compile or read its interpreter and place it. Raises: as GpuGroup's start."""
        no_weights: Any = _NoWeights()
        self.memory = RankMemory(isa, build_image(isa, 0, no_weights, None, 1), 1)
        self._device, self._epoch = device, 0
        ((phases, ops),) = builds(program_ops(isa)).items()
        data = device.build(isa.target, phases, ops, folder)
        check_object(read_identity(data, f"interpreter of {isa.target}"), isa, PHASE)
        build = get_build(isa.target, PHASE, ops)
        self._kernel, self.lanes = device.load(data, build.kernel), build.lanes
        self.object = data
        require_memory(device, [self.memory])
        segments = device.map_ranks(1, self.memory.segment_bytes)
        ticks = int(PATIENCE_SECONDS * device.ticks_per_second)
        self.memory.place(device, segments, device.alloc(4), ticks, lambda n_bytes: None)

    def address(self, name: str) -> int:
        """Return where a tensor lies."""
        names = [tensor.name for tensor in self.memory.isa.tensors]
        return self.memory.tensor_address(names.index(name))

    def seconds(self) -> float:
        """Run it once and return the time from the launch to its end, as the host sees it.

        Raises: UnsoundError where it stopped, or does not end.
        """
        device, memory = self._device, self.memory
        phase = ALL_PHASES.index(PHASE)
        memory.write_step(device, Step(phase, [StepToken(0, 0, 0)], 0, 1), self._epoch)
        self._epoch += 1
        (argument,) = memory.launches(phase)
        start = time.perf_counter()
        device.launch(self._kernel, memory.n_blocks, self.lanes, (argument,), 0)
        wait_idle(device, PATIENCE_SECONDS, lambda: memory.progress(device), lambda: None)
        taken = time.perf_counter() - start
        control = memory.control(device)
        if control["stop"]:
            got = f"fault {control['fault']['code']} at instruction {control['fault']['inst']}"
            raise UnsoundError(f"{device.name}: a chain", got=got, need="its end")
        return taken


def nop_chain(target: str, workgroups: int, n_packets: int) -> Isa:
    """Return a chain of empty packets, each with a slice for every workgroup."""
    assert SPECS[Op.NOP].is_emitted
    empty = Packet(Op.NOP, ("output",), workgroups, workgroups)
    return chain(target, workgroups, {}, [empty] * n_packets)

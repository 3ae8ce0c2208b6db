"""Measures of a device without a model: hand-offs, products, copies; `make gpu` shows them.

Every time is a difference of two runs, the second twice as long, so that what starting costs
cancels. Numbers of one comparison come from turns beside each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3tool.bench.frame import Spread, spread
from k3tool.bench.gpu_chain import PATIENCE_SECONDS, Loaded, Packet, chain, nop_chain
from k3tool.errors import K3Error, UnsoundError
from k3tool.isa.stream import Isa
from k3tool.isa.table import Op
from k3tool.model.config_fields import MXFP4_GROUP
from k3tool.runtime.gpu_runtime import BARRIER, Device, Launched, wait_idle

_LOOKS = 1 << 26  # of a block in one round of the barrier: some seconds
_F32, _BF16, _POINTER = 4, 2, 8


class Sizes(NamedTuple):
    """How much is measured; a test asks for less."""

    packets: int = 1000  # of a chain, rounds of a barrier, launches in a graph
    repeats: int = 5
    copy_bytes: int = 1 << 30
    products: int = 24  # in a chain
    copies: int = 4  # of a matrix, in turn: nothing is still in a cache


class Product(NamedTuple):
    """A product with one token's x: `rows` of `columns`, of each of `experts` if there are."""

    name: str
    rows: int
    columns: int
    experts: int = 0

    @property
    def n_bytes(self) -> int:
        """Return the bytes of weights and scales."""
        if self.experts:
            return self.experts * self.rows * (self.columns // 2 + self.columns // MXFP4_GROUP)
        return self.rows * self.columns * _BF16


# Of the released model: the widest of its trunk, and a token's experts of one layer.
PRODUCTS = (Product("bf16", 12288, 7168), Product("MXFP4", 3072, 3584, 16))


class Handoff(NamedTuple):
    """Seconds of an empty packet in a chain, a round of a barrier, a launch in a graph.

    `graph` is empty where the vendor's CuPy has none.
    """

    packet: Spread
    barrier: Spread
    graph: Spread | None
    refused: str = ""


def copy_bandwidth(device: Device, sizes: Sizes) -> Spread:
    """Return the bytes a second of a copy inside the device's memory, read and written."""
    start, to = device.alloc(sizes.copy_bytes), device.alloc(sizes.copy_bytes)

    def seconds(times: int) -> float:
        begin = time.perf_counter()
        device.copy(to, start, sizes.copy_bytes, times)
        return time.perf_counter() - begin

    each = [_twice(seconds, 4) for _ in range(1 + sizes.repeats)][1:]
    return spread([2 * sizes.copy_bytes / one for one in each])


def handoff(device: Device, target: str, blocks: int, folder: Path, sizes: Sizes) -> Handoff:
    """Measure what separates two packets, beside the two ways to do without an interpreter."""
    short, long = (
        Loaded(device, nop_chain(target, blocks, n), folder)
        for n in (sizes.packets, 2 * sizes.packets)
    )
    barrier = _Barrier(device, short, blocks)
    refused = ""
    try:
        graphs = [barrier.graph(n * sizes.packets) for n in (1, 2)]
    except K3Error as error:
        graphs, refused = [], error.text().partition("\n")[0]
    found: list[list[float]] = []
    for _ in range(1 + sizes.repeats):
        row = [
            (long.seconds() - short.seconds()) / sizes.packets,
            _twice(barrier.seconds, sizes.packets),
        ]
        if graphs:
            row.append((graphs[1]() - graphs[0]()) / sizes.packets)
        found.append(row)
    packet, rounds, *launches = (spread(column) for column in zip(*found[1:], strict=True))
    return Handoff(packet, rounds, launches[0] if launches else None, refused)


def _twice(seconds: Callable[[int], float], n: int) -> float:
    """Return what one of `n` costs beyond the start."""
    first, second = seconds(n), seconds(2 * n)
    return (second - first) / n


class _Barrier:
    """The object's kernel in which all blocks wait for all, and its launches without a round."""

    def __init__(self, device: Device, loaded: Loaded, blocks: int) -> None:
        self._device, self._blocks, self._lanes = device, blocks, loaded.lanes
        self._kernel = device.load(loaded.object, BARRIER)
        self._asked, self._arrived = device.alloc(12), device.alloc(4)

    def _ask(self, rounds: int) -> None:
        asked = np.array([self._blocks, rounds, _LOOKS], "<u4")
        self._device.upload(self._asked, asked.tobytes())
        self._device.upload(self._arrived, bytes(4))

    def seconds(self, rounds: int) -> float:
        """Run so many rounds. Raises: UnsoundError where a block gave up."""
        device = self._device
        self._ask(rounds)
        begin = time.perf_counter()
        device.launch(self._kernel, self._blocks, self._lanes, (self._asked, self._arrived), 0)
        wait_idle(device, PATIENCE_SECONDS, lambda: b"", lambda: None)
        taken = time.perf_counter() - begin
        arrived = int(np.frombuffer(device.download(self._arrived, 4), "<u4")[0])
        if arrived != self._blocks * rounds:
            need = f"{self._blocks * rounds} arrivals"
            raise UnsoundError(f"{device.name}: a barrier", got=arrived, need=need)
        return taken

    def graph(self, n: int) -> Callable[[], float]:
        """Return what runs a graph of so many empty launches and says how long it took."""
        device = self._device
        one = Launched(self._kernel, self._blocks, self._lanes, (self._asked, self._arrived))
        made = device.capture([one] * n)

        def seconds() -> float:
            self._ask(0)
            begin = time.perf_counter()
            device.replay(made)
            wait_idle(device, PATIENCE_SECONDS, lambda: b"", lambda: None)
            return time.perf_counter() - begin

        return seconds


def product_bandwidth(
    device: Device, target: str, blocks: int, folder: Path, product: Product, sizes: Sizes
) -> Spread:
    """Return the bytes of weights a second of a chain of products, hand-offs among them."""
    short, long = (
        load_products(device, target, blocks, folder, product, sizes._replace(products=n))
        for n in (sizes.products, 2 * sizes.products)
    )
    each = [(long.seconds() - short.seconds()) / sizes.products for _ in range(1 + sizes.repeats)]
    return spread([product.n_bytes / one for one in each[1:]])


def load_products(
    device: Device, target: str, blocks: int, folder: Path, product: Product, sizes: Sizes
) -> Loaded:
    """Return a chain of products with copies of one matrix in turn, on the device."""
    loaded = Loaded(device, product_chain(target, blocks, product, sizes), folder)
    if product.experts:
        _point_at_experts(device, loaded, product, sizes.copies)
    return loaded


def product_chain(target: str, blocks: int, product: Product, sizes: Sizes) -> Isa:
    """Return the program of such a chain."""
    width = product.rows * max(product.experts, 1)
    tensors = {"x": product.columns * _F32, "y": width * _F32}
    if product.experts:
        tensors["route"] = 2 * product.experts * _F32
    for n in range(sizes.copies):
        tensors[f"w{n}"] = product.n_bytes
        if product.experts:
            tensors[f"table{n}"] = 2 * product.experts * _POINTER
    packets = []
    for n in range(sizes.products):
        copy = n % sizes.copies
        if product.experts:
            names, more = ("x", "route", f"table{copy}", "y"), product.experts
            packets.append(
                Packet(Op.MOE_UP_MXFP4, names, product.rows, width, (product.columns, more))
            )
        else:
            names3, shape = ("x", f"w{copy}", "y"), (product.rows, width)
            packets.append(Packet(Op.GEMV_BF16, names3, *shape, (product.columns, 0)))
    return chain(target, blocks, tensors, packets)


def _point_at_experts(device: Device, loaded: Loaded, product: Product, copies: int) -> None:
    """Write each copy's table of experts, and a route that chooses all of them."""
    packed = product.rows * product.columns // 2
    each = packed + product.rows * product.columns // MXFP4_GROUP
    route = np.zeros((2, product.experts), "<u4")
    route[0] = np.arange(product.experts)
    device.upload(loaded.address("route"), route.tobytes())
    for n in range(copies):
        first = loaded.address(f"w{n}") + each * np.arange(product.experts, dtype="<u8")
        table = np.stack([first, first + packed], axis=1).astype("<u8")
        device.upload(loaded.address(f"table{n}"), table.tobytes())

"""What `make gpu` measures, part by part: each gives lines of its page, in the time that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from k3tool.bench import gpu_measures, gpu_tokens
from k3tool.bench.frame import Limit, Spread
from k3tool.bench.gpu_bits import PROMPT, Asked
from k3tool.bench.gpu_chain import nop_chain
from k3tool.bench.gpu_measures import PRODUCTS, Product, Sizes
from k3tool.isa.stream import Isa
from k3tool.runtime.gpu_runtime import Device
from k3tool.runtime.options import RunOptions
from k3tool.tables import Column, Table
from k3tool.targets import get_target

Open = Callable[[str], Device]
LEAST_SHARE = 0.85  # of the copy bandwidth, by a product of more than 64 MB
LEAST_RATIO = 1.5  # tokens a second in one launch, of those in a graph


class Part(NamedTuple):
    """One part: what it does, what it needs of the time, and what gives its lines.

    `run` raises K3Error where something is wrong.
    """

    name: str
    seconds: float
    run: Callable[[], list[str]]


class Scope(NamedTuple):
    """How much of everything; a test asks for less."""

    sizes: Sizes = Sizes()
    products: tuple[Product, ...] = PRODUCTS
    steps: int = 16
    repeats: int = 3


FULL = Scope()


def programs(asked: Asked) -> Iterator[Isa]:
    """Yield programs with the ops of the parts' own chains, so that all is compiled at once."""
    blocks = workgroups(asked)
    yield nop_chain(asked.target, blocks, 1)
    for experts in (0, 1):
        product = Product("", blocks, 64, experts)
        yield gpu_measures.product_chain(asked.target, blocks, product, Sizes(products=1, copies=1))


def workgroups(asked: Asked) -> int:
    """Return the blocks of a launch."""
    return asked.workgroups or get_target(asked.target).workgroups


def parts(asked: Asked, open_device: Open, scope: Scope = FULL) -> list[Part]:
    """Return the parts in the order in which time is given to them."""
    model = asked.large or asked.models[-1]
    options = RunOptions(
        model, (), 1, target=asked.target, tp=1, cache=asked.cache, workgroups=asked.workgroups,
        ignore_eos=True,
    )  # fmt: skip
    decode = gpu_tokens.Asked(options, PROMPT, scope.steps, scope.repeats)

    def small(measured: Callable[[Device], list[str]]) -> list[str]:
        device = open_device(asked.target)
        try:
            return measured(device)
        finally:
            device.close()

    return [
        Part("hand-off", 15, lambda: small(lambda device: _handoff(asked, device, scope))),
        Part("products", 20, lambda: small(lambda device: _products(asked, device, scope))),
        Part("tokens a second", 45, lambda: _rates(decode, open_device)),
        Part("several sequences", 25, lambda: _batch(asked, decode, open_device)),
        Part("anatomy of a token", 30, lambda: _anatomy(decode, open_device(asked.target))),
    ]


def _handoff(asked: Asked, device: Device, scope: Scope) -> list[str]:
    blocks = workgroups(asked)
    found = gpu_measures.handoff(device, asked.target, blocks, asked.cache, scope.sizes)
    rows = [("an empty packet in a chain", found.packet), ("a grid-wide barrier", found.barrier)]
    if found.graph is not None:
        rows.append(("an empty launch in a graph", found.graph))
    lines = [
        f"{blocks} blocks; what one more of each costs in a row of {scope.sizes.packets}: from the "
        "end of the last slice to the end of the next one's last.",
        "",
        *_table("what", "µs", [(name, _scaled(one, 1e6)) for name, one in rows]),
    ]
    return lines + ([f"No graph: {found.refused}"] if found.refused else [])


def _products(asked: Asked, device: Device, scope: Scope) -> list[str]:
    copy = gpu_measures.copy_bandwidth(device, scope.sizes)
    rows, limits = [("copy, read and written", _scaled(copy, 1e-9))], []
    for product in scope.products:
        name = f"{product.name}, {product.rows} rows of {product.columns}"
        name += f", {product.experts} experts" if product.experts else ""
        found = gpu_measures.product_bandwidth(
            device, asked.target, workgroups(asked), asked.cache, product, scope.sizes
        )
        rows.append((name, _scaled(found, 1e-9)))
        share = found.median / copy.median
        limits.append(Limit(f"{product.name} of copying", share, at_least=LEAST_SHARE).text())
    return [*_table("what", "GB/s", rows), "", *(f"* {line}" for line in limits)]


def _rates(decode: gpu_tokens.Asked, open_device: Open) -> list[str]:
    found = gpu_tokens.rates(decode, open_device)
    rows = [(name, one) for name, one in found.rates.items()]
    lines = [
        f"{decode.options.source.name}, one sequence, decode; launches in turn, as the host sees "
        "them.",
        "",
        *_table("launched", "tokens/s", rows),
        "",
    ]
    for name, ratio in found.ratios.items():
        words = f"tokens in one launch, of those {name}"
        least = LEAST_RATIO if name == gpu_tokens.GRAPH else None
        held = Limit(words, ratio.median, at_least=least) if least else None
        lines.append(f"* {held.text() if held else words}: {ratio.text()}")
    return lines + ([f"No graph: {found.refused}"] if found.refused else [])


def _batch(asked: Asked, decode: gpu_tokens.Asked, open_device: Open) -> list[str]:
    rows = []
    for n in (1, asked.batch):
        options = replace(decode.options, batch=n)
        with gpu_tokens.engine(options, open_device(asked.target)) as group:
            gpu_tokens.turn(group, decode, n)  # warms up
            rows.append((n, n / gpu_tokens.turn(group, decode, n)))
    ratio = rows[1][1] / rows[0][1]
    name = decode.options.source.name
    return [
        *(f"* {name}, {n} in a step: {rate:.4g} tokens/s" for n, rate in rows),
        f"* {asked.batch} at once: {ratio:.3g} times the tokens of one",
    ]


def _anatomy(decode: gpu_tokens.Asked, device: Device) -> list[str]:
    found = gpu_tokens.anatomy(decode, device)
    shares = [
        ("protocol: the same step with every body taken out", found.protocol),
        ("bodies: time in bodies, of all blocks", found.bodies),
        ("idle: the rest, waiting for other blocks' bodies", found.idle),
    ]
    lines = [
        f"{decode.options.source.name}, one sequence: {found.token_seconds * 1e6:.4g} µs a token.",
        "",
        *(f"* {name}: {share:.1%}" for name, share in shares),
        "",
        "Saved where one op's bodies are taken out (less than 1 % is left out):",
        "",
        *(f"* {name}: {gain:.1%}" for name, gain in sorted(found.ops.items(), key=_by_gain)),
    ]
    return lines + ([f"* and no more: {found.stopped}"] if found.stopped else [])


def _by_gain(item: tuple[str, float]) -> float:
    return -item[1]


def _scaled(found: Spread, by: float) -> Spread:
    return Spread(found.median * by, found.least * by, found.most * by, found.n)


def _table(what: str, unit: str, rows: Sequence[tuple[str, Spread]]) -> list[str]:
    return Table(
        [Column(what, "left"), Column(unit), Column("least"), Column("most"), Column("n")],
        [
            (name, f"{s.median:.4g}", f"{s.least:.4g}", f"{s.most:.4g}", str(s.n))
            for name, s in rows
        ],
    ).markdown_lines()

"""The least time of a decode step: bytes over bandwidth, operations over peak, and hand-offs.

Bytes and operations come from the weight table and the model's states, by module, for one rank;
packets and hand-offs from the program that the compiler makes of the same model. It measures
nothing. Not counted: activations, which stay in caches, and what ranks send each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from k3tool.bench.anatomy import packet_bytes
from k3tool.bench.devices import Device
from k3tool.bench.operations import DELTA_OPERATIONS, packet_operations
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.handles import F32_BYTES
from k3tool.errors import UsageError
from k3tool.isa.table import ROW_LOOKUPS, Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.model.nodes import StateLeaf
from k3tool.model.weight_slices import n_bytes, rank_shape
from k3tool.model.weights import TensorSpec, Where, layer_rows
from k3tool.tables import Column, Table, bytes_text, count_text
from k3tool.targets import get_target

STATES, LATENTS = "states", "latents"  # modules of what is no weight
_LOOKUPS = frozenset(op.name for op in ROW_LOOKUPS)
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Asked:
    """One decode step of `batch` sequences; a token sees `ctx` positions, its own too."""

    tp: int = 1
    batch: int = 1
    ctx: int = 4096
    numerics: str = "f32"


class Part(NamedTuple):
    """One module in one step: bytes of the model whole, and of one rank; operations of one rank."""

    module: str
    whole_bytes: float
    rank_bytes: float
    operations: float


class OpFloor(NamedTuple):
    """All packets of one op on one rank: bytes, operations, and how many move too little.

    `below` counts the packets whose bytes take less time than their hand-off.
    """

    op: str
    packets: int
    n_bytes: int
    operations: int
    below: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """The floors of a step on one device, and what they are made of."""

    asked: Asked
    device: Device
    parts: Sequence[Part]
    ops: Sequence[OpFloor]
    packets: int
    handoffs: int  # on the longest chain

    @property
    def rank_bytes(self) -> float:
        """Return the bytes that one rank moves."""
        return sum(part.rank_bytes for part in self.parts)

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of weights that the model reads, over all ranks and without copies."""
        return sum(part.whole_bytes for part in self.parts if part.module not in (STATES, LATENTS))

    @property
    def operations(self) -> float:
        """Return the operations of one rank."""
        return sum(part.operations for part in self.parts)

    @property
    def floors_ms(self) -> dict[str, float]:
        """Return the least ms by what sets it."""
        device = self.device
        return {
            "bytes": self.rank_bytes / device.bandwidth * 1e3,
            "operations": device.seconds(self.operations, self.asked.numerics) * 1e3,
            "hand-offs": self.handoffs * device.handoff_us / 1e3,
        }

    @property
    def even_ms(self) -> float:
        """Return the ms of the weights alone, were every byte of them on one rank only."""
        return self.weight_bytes / self.asked.tp / self.device.bandwidth * 1e3

    @property
    def bound_by(self) -> str:
        """Return which floor is the highest."""
        return max(self.floors_ms, key=lambda name: self.floors_ms[name])


# -- bytes and operations --------------------------------------------------------------------------


def parts_of(config: K3Config, asked: Asked) -> list[Part]:
    """Return what each module of a model moves and computes in a step, largest first."""
    found: dict[str, list[float]] = {}

    def add(module: str, whole: float, rank: float, operations: float) -> None:
        sums = found.setdefault(module, [0.0, 0.0, 0.0])
        for index, value in enumerate((whole, rank, operations)):
            sums[index] += value

    for layer in (None, *config.layers):
        for spec, count in layer_rows(config, layer):
            if layer is None or layer >= spec.row.read_from:
                add(spec.row.module, *_weight(spec, count, config, asked))
    for state in build_graph(config, asked.tp).states.values():
        add(LATENTS if state.rows == "pages" else STATES, *_state(state, config, asked))
    parts = [Part(module, *sums) for module, sums in found.items()]
    return sorted(parts, key=lambda part: -part.rank_bytes)


def chosen_experts(config: K3Config, batch: int) -> float:
    """Return how many experts of a layer a step reads, were they chosen evenly and independently.

    One token reads top_k. Wrong if taken as batch x top_k, which counts shared experts twice.
    """
    share = config.num_experts_per_token / config.num_experts
    return config.num_experts * (1.0 - (1.0 - share) ** batch)


def _weight(
    spec: TensorSpec, count: int, config: K3Config, asked: Asked
) -> tuple[float, float, float]:
    """Return (whole bytes, a rank's bytes, a rank's operations) of one row of the weight table."""
    whole = n_bytes((spec.live, *spec.shape[1:]), spec.dtype)
    shape = rank_shape(spec, asked.tp)
    rank, elements = n_bytes(shape, spec.dtype), int(np.prod(shape))
    if spec.row.where is Where.EXPERT:
        read = chosen_experts(config, asked.batch)
        on_values = 2 if spec.name.endswith("weight_packed") else 0  # two values a byte
        each = 2 * on_values * elements * config.num_experts_per_token
        return whole * read, rank * read, each * asked.batch
    assert count == 1, spec.name
    if spec.row.claimed_by in _LOOKUPS:
        rows = min(asked.batch, spec.shape[0])
        return whole * rows / spec.shape[0], rank * rows / spec.shape[0], 0.0
    is_matrix = spec.dtype == "BF16" and len(shape) == 2 and spec.shape[0] > 1
    return whole, rank, 2.0 * elements * asked.batch if is_matrix else 0.0


def _state(state: StateLeaf, config: K3Config, asked: Asked) -> tuple[float, float, float]:
    """Return the same of one state: read and written; of latents, what is filled read, one row
    written.
    """
    parts = 1 if state.sharded_axis is None else asked.tp
    elements = int(np.prod(state.shape)) / parts
    if state.rows == "pages":
        width = state.shape[-1]
        filled = (asked.ctx + 1) * width * F32_BYTES * asked.batch
        heads = config.num_attention_heads / asked.tp
        each = 2 * heads * asked.ctx * (width + config.kv_lora_rank)
        return filled, filled, each * asked.batch
    moved = 2 * elements * F32_BYTES * asked.batch
    operations = DELTA_OPERATIONS * elements * asked.batch if len(state.shape) == 3 else 0.0
    return moved * parts, moved, operations


def check_length(config: K3Config, ctx: int) -> None:
    """Refuse more positions than the model has. Raises: UsageError."""
    if ctx > config.max_position_embeddings:
        need = f"at most {config.max_position_embeddings}, the model's positions"
        raise UsageError("--ctx", got=ctx, need=need)


# -- packets ---------------------------------------------------------------------------------------


def roofline(config: K3Config, asked: Asked, device: Device) -> Roofline:
    """Return a step's floors on a device.

    Raises: UsageError for a degree or a length that is none of the model's; as compile_plan else.
    """
    config.check_tp(asked.tp)
    check_length(config, asked.ctx)
    plan = compile_plan(
        config, tp=asked.tp, target=device.target, workgroups=get_target(device.target).workgroups,
        chunk=1, batch=asked.batch, ctx=asked.ctx,
        phases=("decode",), numerics=asked.numerics,
    )  # fmt: skip
    phase = plan.phases["decode"]
    moved = packet_bytes(phase.packets, plan.tensors, asked.ctx - 1, asked.batch, asked.batch)
    work = packet_operations(phase.packets, plan.tensors, asked.ctx - 1, 1).sum(axis=1)
    too_little = moved / device.bandwidth < device.handoff_us * 1e-6
    ops = []
    for op in np.unique(phase.packets["op"]).tolist():
        of_op = phase.packets["op"] == op
        sums = (int(values[of_op].sum()) for values in (moved, work * asked.batch, too_little))
        ops.append(OpFloor(Op(op).name, int(of_op.sum()), *sums))
    ops.sort(key=lambda one: (-one.n_bytes, -one.packets, one.op))
    parts = parts_of(config, asked)
    return Roofline(asked, device, parts, ops, len(phase.packets), phase.critical_path)


# -- output ----------------------------------------------------------------------------------------


def as_dict(r: Roofline) -> dict[str, Any]:
    """Return it as plain values; bytes and operations are whole, also where they are expected of
    experts that are drawn.
    """
    return {
        "bench": "roofline", **asdict(r.asked), "device": asdict(r.device),
        "bandwidth": r.device.bandwidth, "modules": [_whole(part) for part in r.parts],
        "ops": [op._asdict() for op in r.ops], "packets": r.packets, "handoffs": r.handoffs,
        "rank_bytes": round(r.rank_bytes), "weight_bytes": round(r.weight_bytes),
        "operations": round(r.operations),
        "floors_ms": r.floors_ms, "bound_by": r.bound_by, "even_weights_ms": r.even_ms,
    }  # fmt: skip


def _whole(part: Part) -> dict[str, Any]:
    values = part._asdict()
    return {name: round(one) if isinstance(one, float) else one for name, one in values.items()}


def lines(r: Roofline) -> Iterator[str]:
    """Yield what a person reads: inputs, formula, parts, floors, and where hand-offs are more."""
    yield from _inputs(r)
    yield ""
    yield from _modules(r)
    yield ""
    yield from _floors(r)
    yield ""
    yield from _ops(r)


def _ms(ms: float) -> str:
    """Return ms with three digits behind the point, small ones with two that say something."""
    return f"{ms:.3f}" if ms >= 0.1 or not ms else f"{ms:.2g}"


def _inputs(r: Roofline) -> Iterator[str]:
    d, a = r.device, r.asked
    yield (
        f"a decode step: TP {a.tp}, {count_text(a.batch, 'sequence')}, {a.ctx} positions, "
        f"mode {a.numerics}; device {d.name} ({d.target})"
    )
    read = f"{d.read_bytes / 1e9:.1f} GB/s read" if d.read_bytes else "nobody's reads known"
    bf16 = "" if d.bf16_ops is None else f", {d.bf16_ops / 1e12:.4g} TFLOP/s on bf16"
    peak = f"{d.peak_bytes / 1e9:.0f} GB/s on paper, " if d.peak_bytes else ""
    yield f"{peak}{read}, {d.f32_ops / 1e12:.4g} TFLOP/s on binary32{bf16}"
    yield from (f"  {source}" for source in d.sources)
    yield "floor = max(bytes / bandwidth, operations / peak, hand-offs x cost of one)"
    yield (
        "bytes of a rank: weights as stored (experts as chosen evenly), states read and written, "
        "latents read and one row written; embedding: one row a sequence"
    )


def _modules(r: Roofline) -> list[str]:
    columns = ("of the model", "of a rank", "ms", "MFLOP", "FLOP/byte")
    rows = []
    whole = sum(part.whole_bytes for part in r.parts)
    total = Part("whole", whole, r.rank_bytes, r.operations)
    for part in (*r.parts, total):
        ms = part.rank_bytes / r.device.bandwidth * 1e3
        ratio = part.operations / part.rank_bytes if part.rank_bytes else 0.0
        rows.append(
            (part.module, bytes_text(part.whole_bytes), bytes_text(part.rank_bytes), _ms(ms),
             f"{part.operations / 1e6:.2f}", f"{ratio:.2f}")
        )  # fmt: skip
    table = Table([Column("module", "left"), *(Column(title) for title in columns)], rows)
    return table.text_lines()


def _floors(r: Roofline) -> Iterator[str]:
    floors, d, a = r.floors_ms, r.device, r.asked
    yield f"bytes        {_ms(floors['bytes']):>9} ms at {d.bandwidth / 1e9:.1f} GB/s"
    yield f"operations   {_ms(floors['operations']):>9} ms at the peak of mode {a.numerics}"
    yield (
        f"hand-offs    {_ms(floors['hand-offs']):>9} ms: {r.handoffs} on the longest chain of "
        f"{r.packets} packets, {d.handoff_us:.4g} us each"
    )
    yield f"floor        {_ms(floors[r.bound_by]):>9} ms a step, set by {r.bound_by}"
    each = r.weight_bytes / a.tp
    yield (
        f"weights alone, each byte on one rank only: {r.weight_bytes / GIB:.4g} GiB "
        f"({bytes_text(r.weight_bytes)}), {each / GIB:.4g} GiB ({bytes_text(each)}) a rank, "
        f"{r.even_ms:.3g} ms; the rest is what every rank holds, and states"
    )


def _ops(r: Roofline) -> Iterator[str]:
    below = sum(op.below for op in r.ops)
    yield f"{below} of {r.packets} packets take less for their bytes than for their hand-off"
    if r.asked.batch > 1:
        yield "(below, experts count as far as all sequences together can choose them)"
    rows = []
    for op in r.ops:
        by_bytes = op.n_bytes / r.device.bandwidth * 1e3
        by_handoff = op.packets * r.device.handoff_us / 1e3
        more = "hand-offs" if by_handoff > by_bytes else "bytes"
        rows.append(
            (op.op, str(op.packets), str(op.below), bytes_text(op.n_bytes), _ms(by_bytes),
             _ms(by_handoff), more)
        )  # fmt: skip
    titles = ("packets", "below", "bytes", "their ms", "hand-offs' ms")
    columns = [Column("op", "left"), *(Column(title) for title in titles), Column("more", "left")]
    yield from Table(columns, rows).text_lines()

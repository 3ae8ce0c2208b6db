"""What a memory budget is spent on: the one home of its arithmetic, and what a run under it costs.

Memory goes to what must be there (state, activations, norms, a ring that one packet's weights fit
in, slots for the experts of one step), then to the trunk, which every token reads whole, and only
then to a cache of experts, of which a token reads a few that seldom come again soon. What is left
of the trunk passes through the ring. It measures nothing and reads no weight.

Units: bytes of one rank unless a name says otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from k3tool.bench.traffic import traffic_bytes
from k3tool.compiler.experts import slot_bytes
from k3tool.compiler.plan import EXPERT_ROLES, Plan, Tensor
from k3tool.compiler.residency import Residency, streamable, with_residency
from k3tool.compiler.ring import least_ring, ring_places, row_tables
from k3tool.errors import TargetError
from k3tool.isa.access import paged_bytes
from k3tool.isa.columns import spec_of
from k3tool.isa.queues import scratch_floats
from k3tool.isa.table import Op
from k3tool.model.config import K3Config
from k3tool.model.config_fields import MXFP4_GROUP
from k3tool.runtime.homes import pinned_bytes

# A rank's text, libraries, stacks and counters (measured, 2026-11, tiny and mid models).
RANK_BYTES = 12_000_000
# The driver while ranks run, after what it compiled with was given back: 80 MB with NumPy and HDF5
# on tiny and mid, 429 MB on the release's 497,220 tensors in one rank's folder (measured, 2026-11).
DRIVER_BYTES, NAMED_BYTES = 110_000_000, 700
# What the driver takes at most before ranks start, when it compiles. Measured as its peak resident
# size (2026-11): 160 MB at 4 layers, 170 at 8 and 16, 426 on the released model and its names; 191
# to 201 where it also copies weights for several ranks.
COMPILE_BYTES, COMPILE_LAYER_BYTES, COPY_BYTES = 176_000_000, 800_000, 36_000_000
STREAMED_BYTES = 65536  # a smaller weight stays: a read of its own would cost more than its room
LOAD_QUEUES, FETCH_QUEUES = 4, 4  # a device of 2026 reaches its rate with four reads under way
SCRATCHES = 8  # one a thread that computes: those that read touch little of theirs
ENTRY_BYTES = 64  # of an image: a slice in a queue, with its waits and signals
HUGE_PAGE = 2 << 20  # the ring, what is pinned and the slots are each rounded up to it
# The budgets of the system we start from, of all ranks together; auto is what limits leave.
PRESETS: dict[str, int] = {
    "laptop": 8_700_000_000,
    "desktop": 32_000_000_000,
    "workstation": 96_000_000_000,
    "server": 128_000_000_000,
    "max": 224_000_000_000,
}


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a plan asks for before anything is decided."""

    plan: Plan
    fixed: int  # activations, state, process
    small: int  # weights that always stay
    candidates: tuple[str, ...]  # weights that may be streamed, in order of first use
    ring: int  # the least that works when all candidates are
    slot: int
    n_experts: int  # of a layer
    n_all: int  # of all layers
    top_k: int

    def slots(self, chunk: int) -> int:
        """Return the slots that no step can do without: a prompt's has `chunk` tokens, a decode
        step one of each sequence.
        """
        most = max(chunk, int(self.plan.params["batch"]))
        return min(self.n_experts, most * self.top_k)

    def share(self, memory_bytes: int) -> int:
        """Return one rank's part of a budget."""
        return (memory_bytes - driver_bytes(self.plan)) // self.plan.tp

    def budget(self, per_rank: int) -> int:
        """Return the budget of which so much is one rank's part."""
        return per_rank * self.plan.tp + driver_bytes(self.plan)

    def least(self, chunk: int) -> int:
        """Return the least memory of one rank."""
        slots = _huge(self.slots(chunk) * self.slot)
        return self.fixed + _huge(self.small) + _huge(self.ring) + slots


def fit(
    compile_chunk: Callable[[int], Plan], chunk: int, memory_bytes: int, reserved_bytes: int = 0,
    floor: int = 0,
) -> Plan:  # fmt: skip
    """Return a plan for one memory budget, in bytes of all ranks and the driver.

    `compile_chunk` compiles for a number of prompt tokens in a step; at most `chunk` are used,
    fewer where their experts would not fit, which changes no bit of the result. `reserved_bytes` of
    the budget are for something else: the logits that a run keeps. `floor` bytes are needed
    whatever the plan is: below them the smallest step is compiled alone, to say the minimum, for a
    refusal should not wait for two compilations.
    Raises: TargetError saying the minimum.
    """
    memory = memory_bytes - reserved_bytes
    chunk = 1 if memory < floor else chunk
    needs = _needs(compile_chunk(chunk))
    chosen = _chunk(needs, chunk, needs.share(memory))
    if chosen != chunk:
        needs = _needs(compile_chunk(chosen))
    while needs.least(chosen) > needs.share(memory) and chosen > 1:
        chosen //= 2  # other steps, other fusing, other buffers
        needs = _needs(compile_chunk(chosen))
    need = max(floor, needs.budget(needs.least(chosen)) + reserved_bytes)
    if memory_bytes < need:
        raise TargetError(
            "--memory", got=f"{memory_bytes} bytes", need=f"at least {need} bytes for this model",
            hint="a smaller --ctx needs less" if needs.plan.params["ctx"] > 4096
            else "k3tool doctor SOURCE says which preset fits here",
        )  # fmt: skip
    return with_residency(needs.plan, _spend(needs, chosen, needs.share(memory)))


def floor_bytes(config: K3Config, tp: int) -> int:
    """Return what no budget can be below, by the config alone: compiling takes a while.

    The driver, ranks without a buffer, one token's experts, and lm_head, which one packet reads.
    """
    rows, cols = config.moe_intermediate_size // tp, config.routed_expert_hidden_size
    expert = 3 * rows * cols * (MXFP4_GROUP + 2) // (2 * MXFP4_GROUP)  # half a byte, and the scales
    head = config.vocab_size // tp * config.hidden_size * 2
    return DRIVER_BYTES + tp * (RANK_BYTES + config.num_experts_per_token * expert + head)


def run_floor_bytes(config: K3Config, tp: int, *, is_copied: bool) -> int:
    """Return what no budget of a run can be below, which compiles its program in its own process.

    `is_copied`: it also writes the ranks' weights. The cache may have both, but a budget is kept
    with an empty one as well.
    """
    before_ranks = compile_bytes(config) + (COPY_BYTES if is_copied else 0)
    return max(floor_bytes(config, tp), before_ranks)


def compile_bytes(config: K3Config) -> int:
    """Return what compiling takes at most; the degree and the target hardly matter."""
    n_named = 2 * 3 * config.num_experts * sum(map(config.is_moe, config.layers))
    n_layers = config.num_hidden_layers
    return COMPILE_BYTES + COMPILE_LAYER_BYTES * n_layers + NAMED_BYTES * n_named


def budget_ends(compile_chunk: Callable[[int], Plan], chunk: int) -> tuple[int, int]:
    """Return the least budget, and the least of which every weight stays in memory."""
    least, full = _needs(compile_chunk(1)), _needs(compile_chunk(chunk))
    experts = _huge(full.n_all * full.slot) + HUGE_PAGE
    all_weights = full.fixed + _huge(full.small) + _kept_room(full) + experts
    return least.budget(least.least(1)), full.budget(all_weights)


def _kept_room(needs: _Needs) -> int:
    """Return the room of all weights that may be streamed, were they kept."""
    sizes = (paged_bytes(_tensor(needs, name).n_bytes) for name in needs.candidates)
    return sum(sizes) + 2 * HUGE_PAGE


def _chunk(needs: _Needs, most: int, per_rank: int) -> int:
    """Return the prompt tokens of a step: halved while experts take over half of what is left."""
    chunk = most
    while chunk > 1:
        left = per_rank - needs.least(chunk) + _huge(needs.slots(chunk) * needs.slot)
        if 2 * needs.slots(chunk) * needs.slot <= left:
            return chunk
        chunk //= 2
    return chunk


def _spend(needs: _Needs, chunk: int, per_rank: int) -> Residency:
    """Decide what stays, how long the ring is and how many experts are kept."""
    sizes = {name: paged_bytes(_tensor(needs, name).n_bytes) for name in needs.candidates}
    slots = needs.slots(chunk)
    room = per_rank - needs.fixed - _huge(slots * needs.slot) - 2 * HUGE_PAGE - _huge(needs.small)
    if sum(sizes.values()) <= room:
        extra = (room - sum(sizes.values())) // needs.slot if needs.slot else 0
        return _residency(needs, (), 0, min(needs.n_all, slots + extra))
    room = max(room, needs.ring)
    ring = min(room, 2 * needs.ring)
    for twentieths in range(20, -1, -1):
        streamed = _thinned(sizes, (room - ring) * twentieths // 20)
        kept = sum(sizes.values()) - sum(sizes[name] for name in streamed)
        found = _ring(needs.plan, streamed, room - kept)
        if found is not None:
            return _residency(needs, streamed, found, slots)
    return _residency(needs, needs.candidates, needs.ring, slots)


def _ring(plan: Plan, streamed: Sequence[str], most: int) -> int | None:
    """Return the largest ring found that works, at most `most` bytes."""
    for sixteenths in range(16, 7, -1):
        size = most * sixteenths // 16 // 4096 * 4096
        if ring_places(plan, streamed, size) is not None:
            return size
    return None


def _thinned(sizes: dict[str, int], keep_bytes: int) -> tuple[str, ...]:
    """Return what is streamed when so much stays: evenly through the token, so that reading is."""
    total, seen, kept, streamed = sum(sizes.values()), 0, 0, []
    for name, size in sizes.items():
        seen += size
        if kept + size <= keep_bytes * seen // total:
            kept += size
        else:
            streamed.append(name)
    return tuple(streamed)


def _residency(needs: _Needs, streamed: Sequence[str], ring: int, slots: int) -> Residency:
    return Residency(tuple(streamed), ring, slots, LOAD_QUEUES, FETCH_QUEUES)


# -- what a plan needs ---------------------------------------------------------------------------


def _needs(plan: Plan) -> _Needs:
    may = streamable(plan)
    names = tuple(n for n in may if plan.tensors[plan.handles[n]].n_bytes >= STREAMED_BYTES)
    large = sum(paged_bytes(plan.tensors[plan.handles[name]].n_bytes) for name in names)
    small = pinned_bytes(plan.tensors, row_tables(plan)) - large
    experts = [t for t in plan.tensors if t.role in EXPERT_ROLES]
    n_experts = max((t.local[0] for t in experts), default=0)
    words = [
        dict(zip((p.name for p in spec.params), row["params"].tolist(), strict=False))
        for row in next(iter(plan.phases.values())).packets
        if (spec := spec_of(int(row["op"]))) is not None
    ]
    # What brings weights has queue entries too, which the plan without a budget does not.
    brought = LOAD_QUEUES * len(names) + FETCH_QUEUES * (len(experts) // 3)
    return _Needs(
        plan=plan,
        fixed=_fixed(plan) + ENTRY_BYTES * len(plan.phases) * brought,
        small=small,
        candidates=names,
        ring=least_ring(plan, names),
        slot=slot_bytes(experts),
        n_experts=n_experts,
        n_all=sum(t.local[0] for t in experts) // 3,
        top_k=max((w.get("top_k", 0) for w in words), default=0),
    )


def _fixed(plan: Plan) -> int:
    """Return what a rank needs besides weights: buffers, state, scratch, its image."""
    arena = max(phase.arena_bytes for phase in plan.phases.values())
    peer = max(phase.peer_bytes for phase in plan.phases.values())
    own = sum(t.n_bytes for t in plan.tensors if t.role in ("state", "output", "logits"))
    scratch = max(scratch_floats(p.packets, p.max_tokens) for p in plan.phases.values()) * 4
    n_experts = sum(t.local[0] for t in plan.tensors if t.role in EXPERT_ROLES)
    n_entries = sum(int(p.packets["n_slices"].sum()) for p in plan.phases.values())
    tables = 48 * n_experts + ENTRY_BYTES * n_entries
    return RANK_BYTES + arena + peer + own + SCRATCHES * scratch + tables


def driver_bytes(plan: Plan) -> int:
    """Return what the driver holds while ranks run: it knows each rank's tensors by name."""
    n_experts = sum(t.local[0] for t in plan.tensors if t.role in EXPERT_ROLES)
    return DRIVER_BYTES + NAMED_BYTES * plan.tp * (2 * n_experts + len(plan.tensors))


def _tensor(needs: _Needs, name: str) -> Tensor:
    return needs.plan.tensors[needs.plan.handles[name]]


def _huge(n_bytes: int) -> int:
    return -(-n_bytes // HUGE_PAGE) * HUGE_PAGE


# -- what it costs -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a program under a budget holds and moves. Bytes of one rank, tokens in decode.

    `storage_bytes_per_token` counts every expert as missing unless all are kept: what a cache of
    some of them saves depends on the text.
    """

    ranks: int
    chunk: int
    pinned_bytes: int
    pinned_tensors: int
    streamed_bytes: int
    streamed_tensors: int
    ring_bytes: int
    ring_turns: float  # how often the ring is filled for a token
    expert_slots: int
    experts: int
    cache_bytes: int
    other_bytes: int  # state, activations, the process
    peak_bytes: int  # of all ranks and the driver
    storage_bytes_per_token: int
    memory_bytes_per_token: int

    def seconds(self, storage: float, memory: float) -> tuple[float, float]:
        """Return (overlapped, one after the other) seconds of a token at bytes a second of both.

        Ranks of one machine share its storage and its memory.
        """
        read = self.ranks * self.storage_bytes_per_token / storage
        moved = self.ranks * self.memory_bytes_per_token / memory
        return max(read, moved), read + moved


def predict(plan: Plan) -> Prediction:
    """Return what a plan made by `fit` holds and moves."""
    residency: dict[str, Any] = dict(plan.params["residency"])
    tables = row_tables(plan)
    ring = [t for t in plan.tensors if t.role == "ring"]
    pinned = [t for h, t in enumerate(plan.tensors) if t.role == "weight" and h not in tables]
    experts = [t for t in plan.tensors if t.role in EXPERT_ROLES]
    n_all = sum(t.local[0] for t in experts) // 3
    decode = plan.phases["decode"]
    storage = memory = 0
    for row in decode.packets:
        spec = spec_of(int(row["op"]))
        assert spec is not None
        if spec.op is Op.LOAD:
            storage += plan.tensors[int(row["handles"][0])].n_bytes
        elif spec.op is Op.EXPERT_FETCH and residency["slots"] < n_all:
            storage += int(row["params"][0]) * slot_bytes(experts)
        memory += traffic_bytes(row, plan.tensors, decode.max_tokens, plan.tp)
    cache = residency["slots"] * residency["slot_bytes"]
    kept = pinned_bytes(plan.tensors, tables)
    other = _fixed(plan)
    each = other + _huge(kept) + _huge(residency["ring_bytes"]) + _huge(cache)
    return Prediction(
        ranks=plan.tp,
        chunk=int(plan.params["chunk"]),
        pinned_bytes=kept,
        pinned_tensors=len(pinned),
        streamed_bytes=sum(t.n_bytes for t in ring),
        streamed_tensors=len(ring),
        ring_bytes=residency["ring_bytes"],
        ring_turns=sum(t.n_bytes for t in ring) / max(1, residency["ring_bytes"]),
        expert_slots=residency["slots"],
        experts=n_all,
        cache_bytes=cache,
        other_bytes=other,
        peak_bytes=plan.tp * each + driver_bytes(plan),
        storage_bytes_per_token=storage,
        memory_bytes_per_token=memory,
    )

"""What a memory budget is spent on: the one home of its arithmetic, and the least there can be.

Memory goes to what must be there (state, activations, norms, a ring that one packet's weights fit
in, slots for the experts of one step), then to the trunk, which every token reads whole, and only
then to a cache of experts, of which a token reads a few that seldom come again soon. What is left
of the trunk passes through the ring. It measures nothing and reads no weight.

Units: bytes of one rank unless a name says otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from k3tool.compiler.experts import slot_bytes
from k3tool.compiler.plan import EXPERT_ROLES, Plan, Tensor
from k3tool.compiler.residency import Residency, streamable, with_residency
from k3tool.compiler.ring import least_ring, ring_places, row_tables
from k3tool.errors import TargetError
from k3tool.isa.access import paged_bytes
from k3tool.isa.columns import spec_of
from k3tool.isa.queues import scratch_floats
from k3tool.model.config import K3Config
from k3tool.model.config_fields import MXFP4_GROUP
from k3tool.runtime.homes import pinned_bytes
from k3tool.tables import have_text, need_text, size_option

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
_LONG_CTX = 4096  # of which the caches are much of what a small budget is for
HUGE_PAGE = 2 << 20  # the ring, what is pinned and the slots are each rounded up to it
# The budgets of the system we start from, of all ranks together; auto is what limits leave.
PRESETS: dict[str, int] = {
    "laptop": 8_700_000_000,
    "desktop": 32_000_000_000,
    "workstation": 96_000_000_000,
    "server": 128_000_000_000,
    "max": 224_000_000_000,
}


class Floor(NamedTuple):
    """What no budget can be below whatever the plan is: of all ranks and the driver while they run,
    and before, in a step of its own.
    """

    running_bytes: int = 0
    before_bytes: int = 0
    before: str = ""

    @property
    def n_bytes(self) -> int:
        """Return the larger one."""
        return max(self.running_bytes, self.before_bytes)


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
        slots = huge(self.slots(chunk) * self.slot)
        return self.fixed + huge(self.small) + huge(self.ring) + slots


def fit(
    compile_chunk: Callable[[int], Plan], chunk: int, memory_bytes: int, reserved_bytes: int = 0,
    floor: Floor | None = None,
) -> Plan:  # fmt: skip
    """Return a plan for one memory budget, in bytes of all ranks and the driver.

    `compile_chunk` compiles for a number of prompt tokens in a step; at most `chunk` are used,
    fewer where their experts would not fit, which changes no bit of the result. `reserved_bytes` of
    the budget are for something else: the logits that a run keeps. `floor` is needed whatever the
    plan is: below it the smallest step is compiled alone, to say the minimum, for a refusal should
    not wait for two compilations.
    Raises: TargetError saying the minimum, and which step sets it.
    """
    memory = memory_bytes - reserved_bytes
    floor = floor or Floor()
    chunk = 1 if memory < floor.n_bytes else chunk
    needs = _needs(compile_chunk(chunk))
    chosen = _chunk(needs, chunk, needs.share(memory))
    if chosen != chunk:
        needs = _needs(compile_chunk(chosen))
    while needs.least(chosen) > needs.share(memory) and chosen > 1:
        chosen //= 2  # other steps, other fusing, other buffers
        needs = _needs(compile_chunk(chosen))
    running = needs.budget(needs.least(chosen)) + reserved_bytes
    if memory_bytes < max(floor.n_bytes, running):
        raise _below(memory_bytes, running, floor, int(needs.plan.params["ctx"]))
    return with_residency(needs.plan, _spend(needs, chosen, needs.share(memory)))


def _below(memory_bytes: int, running: int, floor: Floor, ctx: int) -> TargetError:
    """Return the refusal of a budget below what one of a run's two steps takes."""
    need = need_text(max(floor.before_bytes, running))
    is_running = floor.before_bytes <= running
    steps = "running takes that"
    if not is_running:
        steps = f"{floor.before} takes that, running {need_text(running)}"
    more = "k3tool doctor SOURCE says which preset fits here"
    if is_running and ctx > _LONG_CTX:
        more = "a smaller --ctx needs less"
    return TargetError(
        "--memory", got=have_text(memory_bytes),
        need=f"at least {need} for this model: {steps}",
        hint=f"--memory {size_option(max(floor.before_bytes, running))} is enough; {more}",
    )  # fmt: skip


def floor_bytes(config: K3Config, tp: int) -> int:
    """Return what no budget can be below, by the config alone: compiling takes a while.

    The driver, ranks without a buffer, one token's experts, and lm_head, which one packet reads.
    """
    rows, cols = config.moe_intermediate_size // tp, config.routed_expert_hidden_size
    expert = 3 * rows * cols * (MXFP4_GROUP + 2) // (2 * MXFP4_GROUP)  # half a byte, and the scales
    head = config.vocab_size // tp * config.hidden_size * 2
    return DRIVER_BYTES + tp * (RANK_BYTES + config.num_experts_per_token * expert + head)


def run_floor(config: K3Config, tp: int, *, is_copied: bool) -> Floor:
    """Return what no budget of a run can be below, which compiles its program in its own process.

    `is_copied`: it also writes the ranks' weights. The cache may have both, but a budget is kept
    with an empty one as well.
    """
    before_ranks = compile_bytes(config) + (COPY_BYTES if is_copied else 0)
    steps = "compiling and copying the weights" if is_copied else "compiling"
    return Floor(floor_bytes(config, tp), before_ranks, steps)


def compile_bytes(config: K3Config) -> int:
    """Return what compiling takes at most; the degree and the target hardly matter."""
    n_named = 2 * 3 * config.num_experts * sum(map(config.is_moe, config.layers))
    n_layers = config.num_hidden_layers
    return COMPILE_BYTES + COMPILE_LAYER_BYTES * n_layers + NAMED_BYTES * n_named


def budget_ends(compile_chunk: Callable[[int], Plan], chunk: int) -> tuple[int, int]:
    """Return the least budget, and the least of which every weight stays in memory."""
    full = _needs(compile_chunk(chunk))
    experts = huge(full.n_all * full.slot) + HUGE_PAGE
    all_weights = full.fixed + huge(full.small) + _kept_room(full) + experts
    return least_running(compile_chunk), full.budget(all_weights)


def least_running(compile_chunk: Callable[[int], Plan]) -> int:
    """Return the least budget in which ranks run, however much compiling takes before."""
    needs = _needs(compile_chunk(1))
    return needs.budget(needs.least(1))


def _kept_room(needs: _Needs) -> int:
    """Return the room of all weights that may be streamed, were they kept."""
    sizes = (paged_bytes(_tensor(needs, name).n_bytes) for name in needs.candidates)
    return sum(sizes) + 2 * HUGE_PAGE


def _chunk(needs: _Needs, most: int, per_rank: int) -> int:
    """Return the prompt tokens of a step: halved while experts take over half of what is left."""
    chunk = most
    while chunk > 1:
        left = per_rank - needs.least(chunk) + huge(needs.slots(chunk) * needs.slot)
        if 2 * needs.slots(chunk) * needs.slot <= left:
            return chunk
        chunk //= 2
    return chunk


def _spend(needs: _Needs, chunk: int, per_rank: int) -> Residency:
    """Decide what stays, how long the ring is and how many experts are kept."""
    sizes = {name: paged_bytes(_tensor(needs, name).n_bytes) for name in needs.candidates}
    slots = needs.slots(chunk)
    room = per_rank - needs.fixed - huge(slots * needs.slot) - 2 * HUGE_PAGE - huge(needs.small)
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
        fixed=fixed_bytes(plan) + ENTRY_BYTES * len(plan.phases) * brought,
        small=small,
        candidates=names,
        ring=least_ring(plan, names),
        slot=slot_bytes(experts),
        n_experts=n_experts,
        n_all=sum(t.local[0] for t in experts) // 3,
        top_k=max((w.get("top_k", 0) for w in words), default=0),
    )


def fixed_bytes(plan: Plan) -> int:
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


def huge(n_bytes: int) -> int:
    """Return what so many bytes take in huge pages."""
    return -(-n_bytes // HUGE_PAGE) * HUGE_PAGE

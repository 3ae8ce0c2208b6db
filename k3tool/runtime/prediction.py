"""What a program under a budget will hold and move, part by part: the parts are all of the peak."""

from dataclasses import dataclass
from typing import Any

from k3tool.bench.traffic import traffic_bytes
from k3tool.compiler.experts import slot_bytes
from k3tool.compiler.plan import EXPERT_ROLES, Plan
from k3tool.compiler.ring import row_tables
from k3tool.isa.columns import spec_of
from k3tool.isa.table import Op
from k3tool.runtime.budget import driver_bytes, fixed_bytes, huge
from k3tool.runtime.homes import pinned_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a program under a budget holds and moves. Bytes of one rank, tokens in decode.

    `peak_bytes` is the driver and, of each rank, the three rooms and what else there is.
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
    pinned_room_bytes: int  # in huge pages, as the next two
    ring_room_bytes: int
    cache_room_bytes: int
    driver_bytes: int  # Python, NumPy and what knows each rank's tensors by name
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
    other = fixed_bytes(plan)
    rooms = huge(kept), huge(residency["ring_bytes"]), huge(cache)
    driver = driver_bytes(plan)
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
        pinned_room_bytes=rooms[0],
        ring_room_bytes=rooms[1],
        cache_room_bytes=rooms[2],
        driver_bytes=driver,
        peak_bytes=plan.tp * (other + sum(rooms)) + driver,
        storage_bytes_per_token=storage,
        memory_bytes_per_token=memory,
    )

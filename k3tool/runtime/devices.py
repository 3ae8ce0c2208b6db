"""Which folder, a device each, a token's bytes are expected from: files of one come from it alone.

Of a file that lies in several, each gives as much as its rate is a part of theirs; that is what
shortest queues come to (kernels_cpu/devices.c). It reads headers and no weight.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.checkpoint.shards import Shards
from k3tool.checkpoint.spread import open_spread, require_apart, require_used
from k3tool.compiler.experts import slot_bytes
from k3tool.compiler.plan import EXPERT_ROLES, Plan
from k3tool.isa.columns import spec_of
from k3tool.isa.table import SPECS, Op
from k3tool.runtime.weights import RankWeights

Holders = tuple[int, ...]  # numbers of the folders that hold a file


def open_ranks(folders: Sequence[Path]) -> list[RankWeights]:
    """Return every rank's weights. Raises: UsageError, ArtifactError as a run does."""
    require_apart(folders)
    if not os.path.exists(folders[0] / SHARDS_NAME):
        return [RankWeights(open_spread(folders), 1)]
    shards = Shards.open_spread(folders)
    ranks = [RankWeights(shards.rank(rank), shards.tp) for rank in range(shards.tp)]
    require_used([rank.folder for rank in ranks], folders)
    return ranks


def held_bytes(plan: Plan, ranks: Sequence[RankWeights]) -> dict[Holders, float]:
    """Return a decoded token's bytes from storage, of all ranks, by the folders that hold them.

    Experts count as missing, each as likely as any other, unless all of them are kept.
    """
    found: dict[Holders, float] = {}
    experts = [t for t in plan.tensors if t.role in EXPERT_ROLES]
    n_all = sum(t.local[0] for t in experts) // 3
    matrices = [SPECS[Op.EXPERT_FETCH].slot(name) for name in ("w1", "w3", "w2")]
    for weights in ranks:
        for row in plan.phases["decode"].packets:
            spec, handles = spec_of(int(row["op"])), row["handles"].tolist()
            assert spec is not None
            if spec.op is Op.LOAD:
                tensor = plan.tensors[handles[0]]
                _add(found, weights, weights.tensor(tensor).path, tensor.n_bytes)
            elif spec.op is Op.EXPERT_FETCH and plan.params["residency"]["slots"] < n_all:
                paths = [
                    part.path for slot in matrices
                    for expert in weights.experts(plan.tensors[handles[slot]]) for part in expert
                ]  # fmt: skip
                each = int(row["params"][0]) * slot_bytes(experts) / len(paths)
                for path, times in Counter(paths).items():
                    _add(found, weights, path, each * times)
    return found


def _add(found: dict[Holders, float], weights: RankWeights, path: str, n_bytes: float) -> None:
    holders = tuple(number for _, number in weights.copies(path))
    found[holders] = found.get(holders, 0.0) + n_bytes


def share_out(held: dict[Holders, float], rates: Sequence[float]) -> tuple[int, ...]:
    """Return the bytes that each folder gives, by rates in bytes a second."""
    parts = [0.0] * len(rates)
    for holders, n_bytes in held.items():
        total = sum(rates[number] for number in holders)
        for number in holders:
            parts[number] += n_bytes * rates[number] / total
    return tuple(round(part) for part in parts)


def joint_rate(parts: Sequence[int], rates: Sequence[float]) -> float:
    """Return bytes a second of all folders together, each giving its part at its own rate."""
    seconds = max(part / rate for part, rate in zip(parts, rates, strict=True))
    return sum(parts) / seconds if seconds else sum(rates)

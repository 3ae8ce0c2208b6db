"""What latent attention has to do for a token, and how near it comes to what the machine can.

It cannot be quicker than reading the latents once, nor than its multiply-adds at the machine's
peak: the smaller of the read bandwidth and (peak / operations a byte) bounds its bytes a second.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from k3tool.bench.anatomy import Anatomy
from k3tool.compiler.handles import F32_BYTES
from k3tool.isa.columns import spec_of
from k3tool.isa.table import READS_STATE, Op
from k3tool.model.operators import PART_EXTRA

Array = npt.NDArray[Any]
LONG_CONTEXT = 32_000
LEAST_ATTENTION = 0.5  # at LONG_CONTEXT, of the bound
# What a token's attention consists of: scores, softmax and sums of latents, merged.
OPS = frozenset({*(op.name for op in READS_STATE), Op.MLA_MERGE.name})


class Work(NamedTuple):
    """Of one token in all layers: bytes of latents, and multiplications and additions on them."""

    n_bytes: int
    operations: int

    def bound(self, read: float, peak: float) -> float:
        """Return the most bytes a second, from bytes and operations a second of the machine."""
        return min(read, peak * self.n_bytes / self.operations)


def attention_work(packets: Array, position: int) -> Work:
    """Return what attention up to a position takes; 0 where no packet attends.

    Units: bytes and operations of one token of one rank; `packets` are a phase's rows (P,).
    Every head needs a product of latent and shared key with each row, and a sum of its latents.
    """
    n_bytes = operations = 0
    for packet in packets:
        spec = spec_of(int(packet["op"]))
        if spec is None or spec.op not in READS_STATE:
            continue
        words = dict(zip((p.name for p in spec.params), packet["params"].tolist(), strict=False))
        latent, row = words["latent"], words["latent"] + words["rope"]
        by_pages = spec.unit == "page"
        heads = int(packet["unit_cols"]) // (latent + PART_EXTRA) if by_pages else packet["n_units"]
        n_bytes += (position + 1) * row * F32_BYTES
        operations += 2 * int(heads) * (position + 1) * (row + latent)
    return Work(n_bytes, operations)


def attention_seconds(token: Anatomy) -> float:
    """Return the time that attention took of a token: of all workers, divided by their number."""
    return sum(op.seconds for op in token.ops if op.op in OPS) / token.n_workers


def attention_shares(
    work: Work, tokens: Sequence[Anatomy], reads: Sequence[float], peaks: Sequence[float]
) -> list[float]:
    """Return run by run the part of the bound that attention reached."""
    sides = zip(tokens, reads, peaks, strict=True)
    return [
        work.n_bytes / attention_seconds(token) / work.bound(read, peak)
        for token, read, peak in sides
    ]

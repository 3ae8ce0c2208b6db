"""How many bytes a model has, reads for a token, and needs on a rank: from the weight table alone.

Weights only: state, activations and caches are the plan's to say.
"""

from typing import NamedTuple

from k3tool.model.config import K3Config
from k3tool.model.weight_slices import n_bytes, rank_shape
from k3tool.model.weights import Split, Where, layer_rows


class RankBytes(NamedTuple):
    """Bytes of weights on each rank of a TP degree; `replicated` of them every rank has."""

    tp: int
    total: int
    replicated: int


class TokenBytes(NamedTuple):
    """Bytes of weights that one token reads on all ranks together, at TP 1.

    `trunk` is read for every token; `experts` are the router's choice of them.
    """

    trunk: int
    experts: int


def n_tensors(config: K3Config) -> int:
    """Return how many tensors the text model has; a rank has a part of each."""
    layers = (None, *config.layers)
    return sum(count for layer in layers for _, count in layer_rows(config, layer))


def rank_bytes(config: K3Config, tp: int) -> RankBytes:
    """Return what a rank holds of the text model. `tp` must be one of `config.legal_tp()`."""
    total = replicated = 0
    for layer in (None, *config.layers):
        for spec, count in layer_rows(config, layer):
            size = count * n_bytes(rank_shape(spec, tp), spec.dtype)
            total += size
            replicated += size if spec.split is Split.REPLICATE else 0
    return RankBytes(tp, total, replicated)


def token_bytes(config: K3Config) -> TokenBytes:
    """Return what a token reads: one row of the embedding, top-k experts, all else that is read.

    Vectors that a layer stores and no formula reads (before the first finished block) do not count.
    """
    trunk = experts = 0
    for layer in (None, *config.layers):
        for spec, count in layer_rows(config, layer):
            size = n_bytes(spec.shape, spec.dtype)
            if spec.row.where is Where.EXPERT:
                experts += size * config.num_experts_per_token
            elif spec.row.claimed_by == "EMBED_BF16":
                trunk += size // spec.shape[0]
            elif layer is None or layer >= spec.row.read_from:
                trunk += size * count
    return TokenBytes(trunk, experts)

"""Float64 meaning of the mixture of experts: the router's choice and the experts' products.

Shapes: T tokens, k experts a token, E experts. A route row is k ids ascending, then their weights.
Expert weights come as anything indexable by expert id that gives (R, K), so that a large model's
experts can be decoded as they are chosen. Source: modeling_kimi_linear.py@20a4fb101ce8
KimiMoEGate and KimiSparseMoeBlock; k3_spec C.5.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from k3tool.ref.dense import sigmoid, situ
from k3tool.ref.formats import Array, rounded


class Experts(Protocol):
    """One matrix of every expert of a layer."""

    def __getitem__(self, expert: int, /) -> Array:
        """Return the (R, K) matrix of one expert."""


def router_topk(logits: Array, bias: Array, *, top_k: int, scale: float) -> Array:
    """Choose by sigmoid + bias (then the lower id); weigh by the sigmoid alone, renormalised.

    Shapes: logits (T, E), bias (E,) -> (T, 2*top_k).
    Wrong if the bias enters a weight (k3_spec F8).
    """
    score = sigmoid(logits)
    order = np.argsort(-(score + bias), axis=-1, kind="stable")[:, :top_k]
    ids = np.sort(order, axis=-1)
    weight = np.take_along_axis(score, ids, axis=-1)
    weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20) * scale
    return np.concatenate([ids.astype(np.float64), weight], axis=-1)


def split_route(route: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """Return a route's ids (T, k) and weights (T, k)."""
    top_k = route.shape[1] // 2
    return route[:, :top_k].astype(np.int64), route[:, top_k:]


def _chosen(route: Array) -> Iterator[tuple[int, tuple[npt.NDArray[np.int64], ...]]]:
    """Yield each chosen expert in ascending id with the (token, place) pairs that chose it."""
    ids, _ = split_route(route)
    for expert in np.unique(ids):
        yield int(expert), np.nonzero(ids == expert)


def dequant_mxfp4(w: Experts) -> Experts:
    """Return the matrices as they come: whoever reads a checkpoint has decoded them."""
    return w


def moe_up_mxfp4(z: Array, route: Array, w: Experts, *, round: int = 0) -> Array:
    """Multiply each token by its experts' matrices. Shapes: z (T, K) -> (T, k*R)."""
    parts = [(where, z[where[0]] @ w[expert].T) for expert, where in _chosen(route)]
    y = np.empty((len(z), route.shape[1] // 2, parts[0][1].shape[1]))
    for where, part in parts:
        y[where] = part
    return rounded(y.reshape(len(z), -1), round)


def moe_glu_mxfp4(
    z: Array,
    route: Array,
    w1: Experts,
    w3: Experts,
    *,
    beta: float,
    linear_beta: float,
    round: int = 0,
) -> Array:
    """Gated unit of each chosen expert. Shapes: z (T, K) -> (T, k*R)."""
    gate, up = (moe_up_mxfp4(z, route, w, round=round) for w in (w1, w3))
    return situ(gate, up, beta=beta, linear_beta=linear_beta, round=round)


def moe_down_mxfp4(x: Array, route: Array, w2: Experts) -> Array:
    """Add the chosen experts' outputs, each times its weight. Shapes: x (T, k*K) -> (T, R)."""
    _, weight = split_route(route)
    rows = x.reshape(len(x), weight.shape[1], -1)
    y: Array | None = None
    for expert, where in _chosen(route):
        part = weight[where][:, None] * (rows[where] @ w2[expert].T)
        y = np.zeros((len(x), part.shape[1])) if y is None else y
        y[where[0]] += part  # a token chooses an expert once, so no index repeats
    assert y is not None, "a route names at least one expert"
    return y


def moe_down_each(x: Array, route: Array, w2: Experts) -> Array:
    """Return each chosen expert's output by itself. Shapes: x (T, k*K) -> (T, k*R)."""
    ids, _ = split_route(route)
    rows = x.reshape(*ids.shape, -1)
    parts = [(where, rows[where] @ w2[expert].T) for expert, where in _chosen(route)]
    y = np.empty((*ids.shape, parts[0][1].shape[1]))
    for where, part in parts:
        y[where] = part
    return y.reshape(len(x), -1)


def moe_combine(y: Array, route: Array, *, round: int = 0) -> Array:
    """Add the chosen experts' outputs, each times its weight. Shapes: y (T, k*R) -> (T, R)."""
    _, weight = split_route(route)
    rows = y.reshape(*weight.shape, -1)
    return rounded((weight[..., None] * rows).sum(axis=1), round)


def moe_glu_topk(
    z: Array,
    scores: Array,
    bias: Array,
    w1: Experts,
    w3: Experts,
    *,
    top_k: int,
    beta: float,
    linear_beta: float,
    round: int = 0,
) -> Array:
    """Choose, then the gated units of the chosen. Only the choice matters, not its weights.

    Shapes: z (T, K), scores (T, E), bias (E,) -> (T, top_k*R).
    """
    route = router_topk(scores, bias, top_k=top_k, scale=1.0)
    return moe_glu_mxfp4(z, route, w1, w3, beta=beta, linear_beta=linear_beta, round=round)


def moe_down_topk(
    x: Array, scores: Array, bias: Array, w2: Experts, *, top_k: int, scale: float
) -> Array:
    """Choose and weigh, then add the chosen experts' outputs.

    Shapes: x (T, top_k*K), scores (T, E), bias (E,) -> (T, R).
    """
    return moe_down_mxfp4(x, router_topk(scores, bias, top_k=top_k, scale=scale), w2)

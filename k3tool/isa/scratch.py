"""Scratch that an op's body needs, in floats of a workgroup's own memory.

One function for each way to use it, of the parameters ``p`` (by name, with ``n_units``, ``width``,
``unit_cols``) and at most ``t`` tokens in a step. The op table names them row by row; a body that
asks for more at run time is a fault.
"""

from collections.abc import Mapping

_SERVED = 32  # tokens that an expert serves at a time
_TILE = 64  # rows between two leaves
_HEADS = 4  # heads of latent attention that read the cache together
_PAGE_HEADS = 16  # the same where a slice has a page of all heads


def none(p: Mapping[str, int], t: int) -> int:
    """Return 0: no scratch."""
    return 0


def _even_odd(k: int, t: int) -> int:
    """Return floats for ``t`` rows of ``k`` values, odd and even apart, padded to a lane chunk."""
    return t * ((k + 127) // 128 * 128) + 64


def gemv(p: Mapping[str, int], t: int) -> int:
    """Return floats for the step's rows."""
    return _even_odd(p["K"], t)


def norm_gemv(p: Mapping[str, int], t: int) -> int:
    """Return floats for the normed rows and the leaf's."""
    return t * p["K"] + 64 + _even_odd(p["K"], t)


def _glu_rows(t: int) -> int:
    """Return the rows of a tile of a product of two linears: more where several tokens share it."""
    return _TILE if t == 1 else 4 * _TILE


def glu(p: Mapping[str, int], t: int) -> int:
    """Return floats for two tiles of rows and the leaf's."""
    return 2 * t * _glu_rows(t) + 64 + _even_odd(p["K"], t)


def attn_res(p: Mapping[str, int], t: int) -> int:
    """Return floats for f, scores and a row."""
    return 3 * p["width"] + 2 * p["n_blocks"] + 64


def part(p: Mapping[str, int], t: int) -> int:
    """Return floats for f and the scores."""
    return p["width"] + p["n_blocks"] + 64


def parts(p: Mapping[str, int], t: int) -> int:
    """Return floats for one site's f and scores."""
    return p["unit_cols"] + p["n_blocks"] + 64


def mix_linears(p: Mapping[str, int], t: int) -> int:
    """Return floats for f, the normed mixes and the leaf's."""
    return (t + 1) * p["K"] + 64 + _even_odd(p["K"], t)


def situ_gemv(p: Mapping[str, int], t: int) -> int:
    """Return floats for the gated units and the leaf's."""
    return t * p["K"] + 64 + _even_odd(p["K"], t)


def head(p: Mapping[str, int], t: int) -> int:
    """Return floats for a head's vectors."""
    return 8 * p["unit_cols"] + 64


def kda_heads(p: Mapping[str, int], t: int) -> int:
    """Return floats for a head's vectors and the leaf's."""
    return 10 * p["unit_cols"] + 64 + _even_odd(p["rank"], t)


def qlat(p: Mapping[str, int], t: int) -> int:
    """Return floats for a query."""
    return p["nope"] + p["latent"] + 64


def attend(p: Mapping[str, int], t: int) -> int:
    """Return floats for a page's scores and latent sums of the heads taken together."""
    return _HEADS * (p["page_tokens"] + 2 * p["latent"] + 4) + 64


def uv(p: Mapping[str, int], t: int) -> int:
    """Return floats for a tile of rows and the leaf's."""
    return t * 64 + 64 + _even_odd(p["latent"], t)


def mla_heads(p: Mapping[str, int], t: int) -> int:
    """Return floats for a page's scores, latent sums, queries and contexts of such heads."""
    return attend(p, t) + _HEADS * (2 * p["latent"] + p["rope"]) + _even_odd(p["latent"], 1)


def query(p: Mapping[str, int], t: int) -> int:
    """Return floats for the normed rows, a head's query of each token, and the leaf's."""
    return t * (p["K"] + p["nope"] + p["rope"]) + 64 + _even_odd(p["K"], t)


def pages(p: Mapping[str, int], t: int) -> int:
    """Return floats for a page's scores of the heads taken together."""
    return _PAGE_HEADS * p["page_tokens"] + 64


def merge(p: Mapping[str, int], t: int) -> int:
    """Return floats for a head's context and the leaf's."""
    return p["latent"] + 64 + _even_odd(p["latent"], 1)


def router(p: Mapping[str, int], t: int) -> int:
    """Return floats for one token's scores and choice."""
    return 3 * p["n_experts"] + 4 * p["top_k"] + 64


def moe_up(p: Mapping[str, int], t: int) -> int:
    """Return floats for tiles of rows and the leaf's."""
    return 4 * 64 + 64 + _even_odd(p["K"], 1)


def moe_glu(p: Mapping[str, int], t: int) -> int:
    """Return floats for two tiles of rows of the tokens an expert serves, and the leaf's."""
    return 2 * _glu_rows(t) * min(t, _SERVED) + _union(t) + 64 + _even_odd(p["K"], 1)


def moe_down(p: Mapping[str, int], t: int) -> int:
    """Return floats for all tokens' block sums, those of an expert's tokens, and the leaf's."""
    sums = _TILE * (t + min(t, _SERVED))
    return p["n_blocks"] * sums + _union(t) + 64 + _even_odd(p["K"], p["top_k"])


def fetch(p: Mapping[str, int], t: int) -> int:
    """Return floats for the routes."""
    return _topk(p, t)


def glu_topk(p: Mapping[str, int], t: int) -> int:
    """Return floats for the routes, then those of the product."""
    return _topk(p, t) + moe_glu(p, t)


def down_topk(p: Mapping[str, int], t: int) -> int:
    """Return floats for the routes, then those of the product."""
    return _topk(p, t) + moe_down(p, t)


def _topk(p: Mapping[str, int], t: int) -> int:
    """Floats for a step's routes, then one token's scores."""
    return 2 * t * p["top_k"] + 3 * p["n_experts"] + p["top_k"] + 64


def _union(t: int) -> int:
    """Words to walk the experts of ``t`` tokens (kernels_common/ops/moe_union.h)."""
    return t + 2 * _SERVED

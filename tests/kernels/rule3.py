"""Rule 3 written again in NumPy, independently of the C sources: exact fma, flush after rounding.

Slow and simple. Its variants are the mistakes that the leaf tests must be able to see.
"""

from __future__ import annotations

import numpy as np

LEAST = 2.0**-126
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)


def daz(x):
    """Subnormal inputs become zeros of their sign."""
    return np.where(np.abs(x) < LEAST, np.copysign(0.0, x), x)


def round_f32(exact, error, ftz):
    """Round ``exact + error`` (error: what binary64 lost) to binary32, flushing after rounding."""
    bits = exact.view(np.int64)
    even = (bits & 1) == 0
    # Round to odd in binary64 first, so that the second rounding cannot be double.
    away = (error > 0) == (exact > 0)
    odd = np.where(away, bits + 1, bits - 1).view(np.float64)
    sticky = np.where((error != 0) & even & np.isfinite(exact) & (exact != 0), odd, exact)
    if not ftz:
        return sticky.astype(np.float32).astype(np.float64)
    small = np.abs(sticky) < 2.0**-100  # round with room below, as if the exponent had no end
    rounded = np.where(small, sticky * 2.0**64, sticky).astype(np.float32).astype(np.float64)
    return daz(np.where(small, rounded * 2.0**-64, rounded))


def add(a, b, ftz=True):
    """binary32 addition of binary32 values held in binary64."""
    total = a + b
    back = total - a
    error = (a - (total - back)) + (b - back)
    error = np.where(np.isfinite(total), error, 0.0)
    return round_f32(total, error, ftz)


def fma(a, b, c, ftz=True):
    """binary32 fma: the product of two binary32 numbers is exact in binary64."""
    if ftz:
        a, b, c = daz(a), daz(b), daz(c)
    return add(a * b, c, ftz)


def fold(lanes, ftz=True, tree="quads"):
    """Add 64 lanes (last axis) in rule 3's order, or halving only (a mistake)."""
    if tree == "quads":
        a = lanes.reshape(*lanes.shape[:-1], 16, 4)
        lanes = add(add(a[..., 0], a[..., 2], ftz), add(a[..., 1], a[..., 3], ftz), ftz)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = add(lanes[..., :half], lanes[..., half:], ftz)
    return lanes[..., 0]


def pairs(x):
    """Split the last axis into chunks: (..., chunks, 64, 2), and how many elements the last has."""
    K = x.shape[-1]
    chunks = (K + 127) // 128
    padded = np.zeros((*x.shape[:-1], chunks * 128))
    padded[..., :K] = x
    return padded.reshape(*x.shape[:-1], chunks, 64, 2)


def dot(w, x, ftz=True, odd_first=True, tree="quads"):
    """Rule 3 over the last axis of ``w`` and ``x``; binary32."""
    with np.errstate(all="ignore"):
        w, x = np.asarray(w, np.float64), np.asarray(x, np.float64)
        w, x = np.broadcast_arrays(w, x)
        K = w.shape[-1]
        present = pairs(np.ones(K)) != 0
        pw, px = pairs(w), pairs(x)
        acc = np.zeros((*w.shape[:-1], 64))
        for chunk in range(pw.shape[-3]):
            for which in (1, 0) if odd_first else (0, 1):
                step = fma(pw[..., chunk, :, which], px[..., chunk, :, which], acc, ftz)
                acc = np.where(present[chunk, :, which], step, acc)
        return fold(acc, ftz, tree).astype(np.float32)


def plain_sum(a):
    """Rule 3's plain sum over the last axis; binary32."""
    with np.errstate(all="ignore"):
        a = np.asarray(a, np.float64)
        present, pa = pairs(np.ones(a.shape[-1])) != 0, pairs(a)
        acc = np.zeros((*a.shape[:-1], 64))
        for chunk in range(pa.shape[-3]):
            for which in (1, 0):
                step = add(daz(acc), daz(pa[..., chunk, :, which]))
                acc = np.where(present[chunk, :, which], step, acc)
        return fold(acc).astype(np.float32)


def tree(blocks):
    """Rule 5: neighbours first, over the last axis (1, 2, 4 or 8)."""
    with np.errstate(all="ignore"):
        b = np.asarray(blocks, np.float64)
        while b.shape[-1] > 1:
            b = add(b[..., 0::2], b[..., 1::2])
        return b[..., 0].astype(np.float32)


def blocks(w, x, n_blocks, **how):
    """Rule-3 dots of ``n_blocks`` equal parts: (..., n_blocks)."""
    B = w.shape[-1] // n_blocks
    parts = [dot(w[..., b * B : (b + 1) * B], x[..., b * B : (b + 1) * B], **how)
             for b in range(n_blocks)]  # fmt: skip
    return np.stack(parts, -1)


def bf16(words):
    """Widen bf16 words to binary64."""
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def mxfp4(packed, scales, low_is_even=True):
    """Decode to binary64: low nibble = even column; scale byte 0 makes the group +0 (rule 4)."""
    first, second = (packed & 15, packed >> 4) if low_is_even else (packed >> 4, packed & 15)
    codes = np.stack([first, second], -1).reshape(*packed.shape[:-1], -1)
    s = np.repeat(scales.astype(np.int64), 32, axis=-1)
    return np.where(s == 0, 0.0, daz(np.ldexp(E2M1[codes], s - 127)))

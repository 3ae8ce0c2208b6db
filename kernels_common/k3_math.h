/* Elementwise mathematics of the arithmetic contract (rule 7), compiled unchanged into every target.
 *
 * Every function here is a fixed sequence of binary32 additions, multiplications, divisions and explicit
 * fused multiply-adds, so the same bits come out of scalar code, of a loop that a compiler vectorised, and
 * of a GPU lane. There are no branches: selections are ternaries, so that such loops do vectorise.
 *
 *   function      worst error      where the bound is held
 *   k3_exp        1 ulp            tests/kernels/test_math.py
 *   k3_tanh       2 ulp            "
 *   k3_sigmoid    3 ulp            "   (a composition; measured, not derived)
 *   division, k3_sqrt               correctly rounded
 *
 * Subnormals are zero on the way in and on the way out (rule 1). The caller's environment provides that
 * (MXCSR on the CPU, -ftz=true on GPUs); nothing here masks them. A NaN argument gives a NaN.
 * Never replace these by libm, by __expf, or by an approximate reciprocal: other bits. */
/* Named k3_math.h because a directory on the include path that holds a math.h hides the system one. */
#ifndef K3_MATH_H
#define K3_MATH_H

#include "dialect.h" /* k3_fma, k3_sqrt and the bit casts */

#define K3_BITS_INF 0x7f800000u

/* ---- bf16 ---------------------------------------------------------------------------------------- */

/* Widen a bf16 word. A move: copies bits, flushes nothing. */
K3_FN float k3_bf16_to_f32(uint16_t v) { return k3_bits_to_f32((uint32_t)v << 16); }

/* Round to bf16, nearest even. A NaN stays a quiet NaN (adding the rounding bias to one could carry into
 * the sign and give zero). Subnormal inputs keep their bits: rounding to a storage format is a move. */
K3_FN uint16_t k3_f32_to_bf16(float f) {
    const uint32_t u = k3_f32_to_bits(f);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t quiet = (u >> 16) | 0x40u;
    return (uint16_t)((u & 0x7fffffffu) > K3_BITS_INF ? quiet : rounded);
}

/* The nearest bf16 as binary32: the same as through the word, without leaving 32 bits, where a compiler would narrow
 * every vector and widen it again. */
K3_FN float k3_nearest_bf16(float f) {
    const uint32_t u = k3_f32_to_bits(f);
    const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
    const uint32_t quiet = u | 0x400000u;
    return k3_bits_to_f32(((u & 0x7fffffffu) > K3_BITS_INF ? quiet : rounded) & 0xffff0000u);
}

/* ---- classification ------------------------------------------------------------------------------ */

/* True for infinities and NaN. Tests bits, so no compiler option can assume it away. */
K3_FN int k3_not_finite(float f) { return (k3_f32_to_bits(f) & K3_BITS_INF) == K3_BITS_INF; }

/* ---- exp ----------------------------------------------------------------------------------------- */

/* e^x: +0 below -87.34, +inf above 88.73, exp(+-0) = 1 exactly.
 * x = n ln2 + r with n = rint(x / ln2) found by adding 1.5 * 2^23; e^r = 1 + r + r^2 q(r), q of degree 4
 * (near-minimax on |r| <= 1.01 ln2 / 2, relative error 2^-28). The scaling by 2^n is split in two because
 * n = 128 has no binary32 power; the first product is exact, so the last multiplication is the only one
 * that rounds, overflows or flushes. Building 2^n by integer addition to the exponent of e^r instead would
 * keep a subnormal result that every vector unit under FTZ turns into zero. */
K3_INLINE float k3_exp(float x) {
    const float magic = 12582912.0f;
    const float t = k3_fma(x, 1.44269502f, magic);
    const float n = t - magic;
    const float r = k3_fma(n, 1.90465421e-9f, k3_fma(n, -0.693147182f, x));
    float q = 0.00138131448f;
    q = k3_fma(q, r, 0.00836941879f);
    q = k3_fma(q, r, 0.041668456f);
    q = k3_fma(q, r, 0.166665152f);
    q = k3_fma(q, r, 0.49999994f);
    const float p = k3_fma(r * r, q, r) + 1.0f;
    const int32_t k = (int32_t)(k3_f32_to_bits(t) - 0x4b400000u);
    const int32_t k1 = k >> 1;
    const float s1 = k3_bits_to_f32((uint32_t)(k1 + 127) << 23);
    const float s2 = k3_bits_to_f32((uint32_t)(k - k1 + 127) << 23);
    float y = (p * s1) * s2;
    y = x < -87.34f ? 0.0f : y;
    y = x > 88.73f ? k3_bits_to_f32(K3_BITS_INF) : y;
    return x != x ? x : y;
}

/* ---- tanh ---------------------------------------------------------------------------------------- */

/* tanh(x): odd, and exactly +-1 wherever that is the correctly rounded value (|x| > 13 ln 2).
 * |x| < 0.8: x + x^3 p(x^2), p of degree 5 (relative error 2^-28). Elsewhere 1 - 2 / (e^2|x| + 1); used
 * near zero that form would cancel and lose every digit. The sign is put back at the end: carried through the
 * polynomial, -0 would come out as +0. */
K3_INLINE float k3_tanh(float x) {
    const float a = k3_bits_to_f32(k3_f32_to_bits(x) & 0x7fffffffu);
    const float y = a * a;
    float p = 0.00158475665f;
    p = k3_fma(p, y, -0.00740955817f);
    p = k3_fma(p, y, 0.0213029906f);
    p = k3_fma(p, y, -0.0538523309f);
    p = k3_fma(p, y, 0.133322209f);
    p = k3_fma(p, y, -0.333332986f);
    const float near = k3_fma(p * y, a, a);
    const float far = 1.0f - 2.0f / (k3_exp(a + a) + 1.0f);
    const float r = a < 0.8f ? near : far;
    const float odd = k3_bits_to_f32(k3_f32_to_bits(r) | (k3_f32_to_bits(x) & 0x80000000u));
    return x != x ? x : odd;
}

/* ---- compositions, in the order the contract writes them ----------------------------------------- */

K3_INLINE float k3_sigmoid(float x) { return 1.0f / (1.0f + k3_exp(-x)); }

K3_INLINE float k3_silu(float x) { return x * k3_sigmoid(x); }

/* beta tanh(x / beta), a true division: x * (1 / beta) has other bits for every beta but powers of two. */
K3_INLINE float k3_softcap(float x, float beta) { return beta * k3_tanh(x / beta); }

/* SiTU: ((b1 tanh(g / b1)) sigmoid(g)) (b2 tanh(u / b2)). The sigmoid takes the uncapped gate. */
K3_INLINE float k3_situ(float g, float u, float b1, float b2) {
    return (k3_softcap(g, b1) * k3_sigmoid(g)) * k3_softcap(u, b2);
}

#endif

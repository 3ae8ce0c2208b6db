/* The definition of the bits: every leaf written as the contract says it, one element at a time.
 *
 * Does not try to be fast. The AVX2 and AVX-512 leaves must equal this on every input without NaN
 * (tests/kernels/test_leaves.py), and fall back to single functions of it where speed does not matter.
 * Portable C11 that CUDA C++ and HIP C++ also accept. */
#ifndef K3_LEAVES_SCALAR_H
#define K3_LEAVES_SCALAR_H

#include "leaves.h"

typedef struct {
    float lane[K3_LANES];
} K3Lanes;

K3_FN void k3_lanes_zero(K3Lanes *a) {
    uint32_t l;
    for (l = 0; l < K3_LANES; l++) a->lane[l] = 0.0f;
}

/* Rule 3's cross-lane order. Overwrites the lanes. */
K3_FN float k3_lanes_fold(K3Lanes *a) {
    uint32_t t, s;
    float *v = a->lane;
    for (t = 0; t < K3_LANES / 4u; t++) v[t] = (v[4u * t] + v[4u * t + 2u]) + (v[4u * t + 1u] + v[4u * t + 3u]);
    for (s = K3_LANES / 8u; s >= 1u; s >>= 1)
        for (t = 0; t < s; t++) v[t] = v[t] + v[t + s];
    return v[0];
}

/* One dot per element type. FETCH(i) is the weight at element i of the row or block. */
#define K3_SCALAR_DOT(K, FETCH, x)                                                     \
    K3Lanes acc_;                                                                      \
    uint32_t p_;                                                                       \
    k3_lanes_zero(&acc_);                                                              \
    for (p_ = 0; 2u * p_ < (K); p_++) {                                                \
        float *a_ = &acc_.lane[p_ % K3_LANES];                                         \
        const uint32_t even_ = 2u * p_, odd_ = even_ + 1u;                             \
        if (odd_ < (K)) *a_ = k3_fma(FETCH(odd_), (x)[odd_], *a_);                     \
        *a_ = k3_fma(FETCH(even_), (x)[even_], *a_);                                   \
    }                                                                                  \
    return k3_lanes_fold(&acc_);

K3_FN float k3_scalar_dot_bf16(const uint16_t *w, const float *x, uint32_t K) {
#define K3_FETCH(i) k3_bf16_to_f32(w[i])
    K3_SCALAR_DOT(K, K3_FETCH, x)
#undef K3_FETCH
}

K3_FN float k3_scalar_dot_f32(const float *w, const float *x, uint32_t K) {
#define K3_FETCH(i) w[i]
    K3_SCALAR_DOT(K, K3_FETCH, x)
#undef K3_FETCH
}

/* w, s: the whole row; first: the column the block begins at (even, maybe inside a scale group). */
K3_FN float k3_scalar_dot_mxfp4(const uint8_t *w, const uint8_t *s, uint32_t first, const float *x,
                                uint32_t K) {
#define K3_FETCH(i)                                                                    \
    k3_mxfp4_value((uint32_t)(w[(first + (i)) >> 1] >> (4u * ((i)&1u))) & 15u,          \
                   s[(first + (i)) / K3_MX_GROUP])
    K3_SCALAR_DOT(K, K3_FETCH, x)
#undef K3_FETCH
}

K3_FN float k3_scalar_sum_f32(const float *a, uint32_t K) {
    K3Lanes acc;
    uint32_t p;
    k3_lanes_zero(&acc);
    for (p = 0; 2u * p < K; p++) {
        float *v = &acc.lane[p % K3_LANES];
        if (2u * p + 1u < K) *v = *v + a[2u * p + 1u];
        *v = *v + a[2u * p];
    }
    return k3_lanes_fold(&acc);
}

K3_FN float k3_scalar_col_f32(const float *M, uint64_t ld, uint32_t n, uint32_t j, const float *x) {
#define K3_FETCH(i) M[(uint64_t)(i)*ld + j]
    K3_SCALAR_DOT(n, K3_FETCH, x)
#undef K3_FETCH
}

K3_FN float k3_scalar_col_bf16(const uint16_t *M, uint64_t ld, uint32_t n, uint32_t j, const float *x) {
#define K3_FETCH(i) k3_bf16_to_f32(M[(uint64_t)(i)*ld + j])
    K3_SCALAR_DOT(n, K3_FETCH, x)
#undef K3_FETCH
}

#ifdef K3_LEAVES_SCALAR

K3_LEAF float k3_dot_f32(const K3Ctx *c, const float *a, const float *b, uint32_t K) {
    (void)c;
    return k3_scalar_dot_f32(a, b, K);
}

K3_LEAF float k3_sum_f32(const K3Ctx *c, const float *a, uint32_t K) {
    (void)c;
    return k3_scalar_sum_f32(a, K);
}

K3_LEAF void k3_rows_dot_bf16(const K3Ctx *c, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                              uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                              float *Y, uint64_t ldy) {
    const uint32_t B = K / n_blocks;
    float parts[8];
    uint32_t r, t, b;
    (void)c;
    for (r = row0; r < row1; r++)
        for (t = 0; t < n_tok; t++) {
            for (b = 0; b < n_blocks; b++)
                parts[b] = k3_scalar_dot_bf16(W + r * ldw + b * B, X + t * ldx + b * B, B);
            Y[t * ldy + r] = k3_tree(parts, n_blocks);
        }
}

K3_LEAF void k3_rows_dot_f32(const K3Ctx *c, const float *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                             uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                             float *Y, uint64_t ldy) {
    const uint32_t B = K / n_blocks;
    float parts[8];
    uint32_t r, t, b;
    (void)c;
    for (r = row0; r < row1; r++)
        for (t = 0; t < n_tok; t++) {
            for (b = 0; b < n_blocks; b++)
                parts[b] = k3_scalar_dot_f32(W + r * ldw + b * B, X + t * ldx + b * B, B);
            Y[t * ldy + r] = k3_tree(parts, n_blocks);
        }
}

K3_LEAF void k3_rows_blocks_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                  uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, float *D) {
    const uint32_t B = K / n_blocks;
    uint32_t r, b;
    (void)c;
    for (r = row0; r < row1; r++)
        for (b = 0; b < n_blocks; b++)
            D[(uint64_t)(r - row0) * n_blocks + b] =
                k3_scalar_dot_mxfp4(W + (uint64_t)r * (K / 2u), S + (uint64_t)r * (K / K3_MX_GROUP), b * B,
                                    X + b * B, B);
}

K3_LEAF void k3_rows_dot_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                               uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                               uint32_t n_tok, float *Y, uint64_t ldy) {
    float parts[8];
    uint32_t r, t;
    for (r = row0; r < row1; r++)
        for (t = 0; t < n_tok; t++) {
            k3_rows_blocks_mxfp4(c, W, S, r, r + 1u, K, n_blocks, X + t * ldx, parts);
            Y[t * ldy + r] = k3_tree(parts, n_blocks);
        }
}

K3_LEAF void k3_cols_dot_f32(const K3Ctx *c, const float *M, uint64_t ld, uint32_t n, uint32_t col0,
                             uint32_t col1, const float *x, float *y) {
    uint32_t j;
    (void)c;
    for (j = col0; j < col1; j++) y[j] = k3_scalar_col_f32(M, ld, n, j, x);
}

K3_LEAF void k3_cols_dot_bf16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t col0,
                              uint32_t col1, const float *x, float *y) {
    uint32_t j;
    (void)c;
    for (j = col0; j < col1; j++) y[j] = k3_scalar_col_bf16(M, ld, n, j, x);
}

#endif /* K3_LEAVES_SCALAR */
#endif

/* Rows of binary32 with many x: the scores of a page of latent cache with the heads.
 *
 * A vector holds the same lane of rule 3 for K3V_LANES x, so nothing is split and the tree has no cross-lane step: x is
 * transposed once for all rows, and an element of a row is broadcast to K3V_SCORE_ROWS x K3V_LANES products. A dot's
 * 64 lanes are taken four at a time, a quad, in the order in which halving adds the quads, so that few sums wait.
 * Where rows are short, as here, this is twice as quick as tiles_tokens.h, whose trees weigh as much as the products. */
#ifndef K3_LEAVES_TILES_SCORES_H
#define K3_LEAVES_TILES_SCORES_H

#if K3V_LANES == 16
#define K3V_SCORE_ROWS 4
#else
#define K3V_SCORE_ROWS 2
#endif
#define K3V_SCORE_AHEAD 8u    /* rows */
#define K3V_SCORE_MAX 1024u /* elements of a row whose transposed x fits the stack and L2 */
#define K3V_SCORE_LEAST (K3V_LANES / 2u + 1u) /* x below which half of a vector would be empty */

typedef struct {
    _Alignas(64) float x[K3V_SCORE_MAX][K3V_LANES];
    _Alignas(64) float y[K3V_LANES][K3V_LANES]; /* [row][x], then [x][row] */
} k3v_scores;

/* x[i] = element i of n of K3V_LANES x; K a multiple of 8, the absent x are 0. */
K3V_INLINE void k3v_across(k3v_scores *s, const float *X, uint64_t ldx, uint32_t n, uint32_t K) {
    uint32_t i = 0;
    for (; i + K3V_LANES <= K; i += K3V_LANES) {
        k3v_f r[K3V_LANES];
        for (uint32_t t = 0; t < K3V_LANES; t++) r[t] = t < n ? k3v_load(X + t * ldx + i) : k3v_zero();
        k3v_transpose(r);
        for (uint32_t t = 0; t < K3V_LANES; t++) k3v_store(s->x[i + t], r[t]);
    }
    for (; i < K; i++)
        for (uint32_t t = 0; t < K3V_LANES; t++) s->x[i][t] = t < n ? X[t * ldx + i] : 0.0f;
}

/* The four lanes of quad q, added, for the rows at w. */
K3V_INLINE void k3v_score_quad(const k3v_scores *s, const float *const *w, uint32_t q, uint32_t K, k3v_f *sum) {
    k3v_f acc[4][K3V_SCORE_ROWS];
    K3V_UNROLL
    for (int l = 0; l < 4; l++)
        K3V_UNROLL
        for (int r = 0; r < K3V_SCORE_ROWS; r++) acc[l][r] = k3v_zero();
    for (uint32_t i = 8u * q; i < K; i += K3_CHUNK)
        K3V_UNROLL
        for (int l = 0; l < 4; l++) {
            const k3v_f odd = k3v_load(s->x[i + 2u * (uint32_t)l + 1u]), even = k3v_load(s->x[i + 2u * (uint32_t)l]);
            K3V_UNROLL
            for (int r = 0; r < K3V_SCORE_ROWS; r++) {
                acc[l][r] = k3v_fma(k3v_set(w[r][i + 2u * (uint32_t)l + 1u]), odd, acc[l][r]);
                acc[l][r] = k3v_fma(k3v_set(w[r][i + 2u * (uint32_t)l]), even, acc[l][r]);
            }
        }
    K3V_UNROLL
    for (int r = 0; r < K3V_SCORE_ROWS; r++)
        sum[r] = k3v_add(k3v_add(acc[0][r], acc[2][r]), k3v_add(acc[1][r], acc[3][r]));
}

/* y[r] = the dots of row w[r]: quads t and t + 8, then + 4, + 2, + 1. A quad touches every eighth line of a row, which
 * no hardware prefetcher follows: the rows K3V_SCORE_AHEAD further on are asked for a sixteenth at a time. */
static __attribute__((noinline)) void k3v_score_rows(const k3v_scores *s, const float *const *w, uint32_t K, uint64_t ahead,
                                                     float (*y)[K3V_LANES]) {
    k3v_f level[4][K3V_SCORE_ROWS], sum[K3V_SCORE_ROWS];
    for (uint32_t i = 0; i < 16u; i++) {
        const uint32_t q = ((i & 1u) << 3) | ((i & 2u) << 1) | ((i & 4u) >> 1) | ((i & 8u) >> 3);
        const uint64_t first = (uint64_t)i * K / 16u * sizeof(float), last = (i + 1u) * (uint64_t)K / 16u * sizeof(float);
        int at = 0;
        for (int r = 0; r < K3V_SCORE_ROWS; r++)
            for (uint64_t b = first; b < last; b += 64u) _mm_prefetch((const char *)w[r] + ahead + b, _MM_HINT_T0);
        k3v_score_quad(s, w, q, K, sum);
        for (; i >> at & 1u; at++)
            K3V_UNROLL
            for (int r = 0; r < K3V_SCORE_ROWS; r++) sum[r] = k3v_add(level[at][r], sum[r]);
        if (at < 4)
            K3V_UNROLL
            for (int r = 0; r < K3V_SCORE_ROWS; r++) level[at][r] = sum[r];
    }
    K3V_UNROLL
    for (int r = 0; r < K3V_SCORE_ROWS; r++) k3v_store(y[r], sum[r]);
}

/* n <= K3V_LANES x with rows 0 .. n_rows - 1 of W. */
K3V_INLINE void k3v_scores_of(k3v_scores *s, const float *W, uint64_t ldw, uint32_t n_rows, uint32_t K, const float *X,
                              uint64_t ldx, uint32_t n, float *Y, uint64_t ldy) {
    k3v_across(s, X, ldx, n, K);
    for (uint32_t r0 = 0; r0 < n_rows; r0 += K3V_LANES) {
        const uint32_t m = n_rows - r0 < K3V_LANES ? n_rows - r0 : K3V_LANES;
        k3v_f r[K3V_LANES];
        for (uint32_t at = 0; at < m; at += K3V_SCORE_ROWS) {
            const float *w[K3V_SCORE_ROWS];
            for (uint32_t k = 0; k < K3V_SCORE_ROWS; k++) /* rows that do not exist repeat the last */
                w[k] = W + (r0 + (at + k < m ? at + k : m - 1u)) * ldw;
            k3v_score_rows(s, w, K, K3V_SCORE_AHEAD * ldw * sizeof(float), s->y + at);
        }
        for (uint32_t t = 0; t < K3V_LANES; t++) r[t] = k3v_load(s->y[t]);
        k3v_transpose(r);
        for (uint32_t t = 0; t < n; t++) {
            if (m == K3V_LANES) {
                k3v_store(Y + t * ldy + r0, r[t]);
            } else {
                k3v_store(s->y[0], r[t]);
                __builtin_memcpy(Y + t * ldy + r0, s->y[0], m * sizeof(float));
            }
        }
    }
}

/* As many of n_tok x as make vectors that are more than half full; returns how many that was. */
static uint32_t k3v_scores_f32(const float *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K, const float *X,
                               uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    k3v_scores s;
    uint32_t t = 0;
    if (K > K3V_SCORE_MAX || K % 8u != 0 || row1 - row0 < K3V_LANES) return 0;
    for (; n_tok - t >= K3V_SCORE_LEAST; t += n_tok - t < K3V_LANES ? n_tok - t : K3V_LANES)
        k3v_scores_of(&s, W + row0 * ldw, ldw, row1 - row0, K, X + t * ldx, ldx, n_tok - t < K3V_LANES ? n_tok - t : K3V_LANES,
                      Y + t * ldy + row0, ldy);
    return t;
}

#endif

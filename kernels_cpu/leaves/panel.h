/* Several tokens on AVX-512: 16 rows side by side in a vector, each of rule 3's 64 lanes summed on its own.
 *
 * A vector holds one lane of 16 rows, so the whole tree over lanes is plain additions: no element crosses a vector. A
 * dot of 128 elements, one pair a lane, costs little more than its products, where tiles_tokens.h, which has 16 lanes of one row
 * in a vector, spends more on the tree than on them. The price is a transposition of the weights (panel_pack.h), once
 * for all tokens; below K3P_LEAST_TOKENS it does not pay.
 *
 * A *panel* is a block of 16 rows, quad of lanes by quad: [16 quads][chunks][4 lanes][16 rows] pairs of bf16 (of codes:
 * panel_coded.h). x lies beside it as [16 quads][tokens: groups of at most K3P_TOKENS][chunks][token][8 elements], so that the
 * products walk both in memory order and take an element of x as a broadcast operand. Neither read in place would do: the
 * rows of both lie a power of two apart as often as not, and share cache sets.
 *
 * Four neighbouring quads are a *position*. Positions come in the order 0 2 1 3, because quads are halved by 8, then by
 * 4: quad t + 8 is in position v + 2. */
#ifndef K3_LEAVES_PANEL_H
#define K3_LEAVES_PANEL_H

#define K3P_UNROLL _Pragma("GCC unroll 16")
#define K3P_ROWS 16u
#define K3P_TOKENS 6u       /* side by side: 24 accumulators */
#define K3P_FEW 8u         /* the same of products that decode MXFP4 on their way */
#define K3P_BATCH 64u       /* tokens whose x is packed together, at most */
#define K3P_CHUNKS 64u      /* of the longest block */
#define K3P_TILE 128u       /* rows whose block sums are kept, a multiple of K3P_ROWS */
#define K3P_X_BYTES 1048576u /* of packed x: what L2 holds */
#define K3P_SHORT 8u        /* chunks of a panel that stays in L1 whole */

enum { K3P_F32 = 0, K3P_BF16 = 1 }; /* what x is packed as; bf16 where every element is one */

/* Dwords from a quad of a panel to the next, a line more than there is: a power of two apart they would share cache sets. */
K3V_INLINE uint64_t k3p_of_quad(uint32_t n_chunks) { return n_chunks * 64u + 16u; }

K3V_INLINE uint64_t k3p_x_bytes(int kind) { return kind == K3P_F32 ? 4u : 2u; }

/* [quad of the position][token][row]: first position (then both) of a pair, and the first of the second pair. */
typedef float k3p_quads[4][K3P_BATCH + 1u][K3P_ROWS]; /* quads a power of two apart would share cache sets */

/* What the body reads after these rows (k3_soon), and the rows that the last call fetched of it. Hints only, so no arguments
 * of leaves. */
typedef struct {
    const uint8_t *w, *s; /* 0: nothing is known */
} k3v_rows_at;
static _Thread_local k3v_rows_at k3v_soon;
static _Thread_local const uint8_t *k3p_fetched;

K3V_INLINE k3v_rows_at k3v_take_soon(void) {
    const k3v_rows_at soon = k3v_soon;
    k3v_soon.w = k3v_soon.s = 0;
    return soon;
}

K3_LEAF void k3_soon(const K3Ctx *c, const uint8_t *w, const uint8_t *s) {
    (void)c;
    k3v_soon.w = w;
    k3v_soon.s = s;
}

typedef struct {
    _Alignas(64) uint32_t panel[16u * (K3P_CHUNKS * 64u + 16u)];
    k3p_quads first, second;
    float d[8][K3P_BATCH][K3P_TILE];           /* sums of rule 5's blocks */
    uint8_t scales[K3P_CHUNKS * 4u + 16u][16]; /* MXFP4: of a group, 16 rows */
    k3v_rows_at behind;                        /* what follows the last rows */
} k3p_work;

/* A group of T tokens at one position. */
typedef struct {
    const uint32_t *panel; /* of the position */
    const uint8_t *x;
    uint64_t ldx; /* bytes from a quad to the next */
    uint32_t n_chunks;
    int step; /* 0 .. 3 */
    float *first, *second; /* of quad 0 and the group's first token */
} k3p_group;

/* The quad's sum over its four lanes, T tokens. */
K3V_INLINE void k3p_quad_f32(int T, const k3p_group *g, uint32_t quad, k3v_f *sum) {
    const uint32_t *w = g->panel + (uint64_t)quad * k3p_of_quad(g->n_chunks);
    const float *x = (const float *)(const void *)(g->x + quad * g->ldx);
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    k3v_f acc[4][K3P_TOKENS];
    K3V_UNROLL
    for (int l = 0; l < 4; l++)
        K3V_UNROLL
        for (int t = 0; t < T; t++) acc[l][t] = k3v_zero();
    for (uint32_t c = 0; c < g->n_chunks; c++, w += 64, x += 8 * T)
        K3V_UNROLL
        for (int l = 0; l < 4; l++) {
            const __m512i pair = _mm512_load_si512((const void *)(w + 16 * l));
            const k3v_f odd = _mm512_castsi512_ps(_mm512_and_si512(pair, high));
            const k3v_f even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
            K3V_UNROLL
            for (int t = 0; t < T; t++) acc[l][t] = k3v_fma(odd, k3v_set(x[8 * t + 2 * l + 1]), acc[l][t]);
            K3V_UNROLL
            for (int t = 0; t < T; t++) acc[l][t] = k3v_fma(even, k3v_set(x[8 * t + 2 * l]), acc[l][t]);
        }
    K3V_UNROLL
    for (int t = 0; t < T; t++) sum[t] = k3v_add(k3v_add(acc[0][t], acc[2][t]), k3v_add(acc[1][t], acc[3][t]));
}

#ifdef K3_LEAVES_AVX512_BF16
/* The same by vdpbf16ps, which adds the odd product first. */
K3V_INLINE void k3p_quad_bf16(int T, const k3p_group *g, uint32_t quad, k3v_f *sum) {
    const uint32_t *w = g->panel + (uint64_t)quad * k3p_of_quad(g->n_chunks);
    const int32_t *x = (const int32_t *)(const void *)(g->x + quad * g->ldx);
    k3v_f acc[4][K3P_TOKENS];
    K3V_UNROLL
    for (int l = 0; l < 4; l++)
        K3V_UNROLL
        for (int t = 0; t < T; t++) acc[l][t] = k3v_zero();
    for (uint32_t c = 0; c < g->n_chunks; c++, w += 64, x += 4 * T)
        K3V_UNROLL
        for (int l = 0; l < 4; l++) {
            const __m512i pair = _mm512_load_si512((const void *)(w + 16 * l));
            K3V_UNROLL
            for (int t = 0; t < T; t++) acc[l][t] = k3v_dp(acc[l][t], pair, _mm512_set1_epi32(x[4 * t + l]));
        }
    K3V_UNROLL
    for (int t = 0; t < T; t++) sum[t] = k3v_add(k3v_add(acc[0][t], acc[2][t]), k3v_add(acc[1][t], acc[3][t]));
}
#endif

#define K3P_OF_QUAD ((uint64_t)(K3P_BATCH + 1u) * K3P_ROWS)

/* A quad's sum joins what the earlier positions left. */
K3V_INLINE void k3p_join(int T, int step, const k3v_f *sum, float *first, float *second) {
    K3V_UNROLL
    for (int t = 0; t < T; t++) {
        const uint32_t at = (uint32_t)t * K3P_ROWS;
        if (step == 0) k3v_store(first + at, sum[t]);
        else if (step == 1) k3v_store(first + at, k3v_add(k3v_load(first + at), sum[t]));
        else if (step == 2) k3v_store(second + at, sum[t]);
        else k3v_store(first + at, k3v_add(k3v_load(first + at), k3v_add(k3v_load(second + at), sum[t])));
    }
}

/* Quads [q0, q1) of a position join what the earlier positions left. */
K3V_INLINE void k3p_quads_of(int kind, int T, const k3p_group *g, uint32_t q0, uint32_t q1) {
    for (uint32_t q = q0; q < q1; q++) {
        k3v_f sum[K3P_TOKENS];
#ifdef K3_LEAVES_AVX512_BF16
        if (kind == K3P_BF16) k3p_quad_bf16(T, g, q, sum);
        else
#endif
            k3p_quad_f32(T, g, q, sum);
        (void)kind;
        k3p_join(T, g->step, sum, g->first + q * K3P_OF_QUAD, g->second + q * K3P_OF_QUAD);
    }
}

typedef void (*k3p_products)(const k3p_group *g, uint32_t q0, uint32_t q1);
#define K3P_PRODUCTS(name, kind, T)                                                                  \
    static __attribute__((noinline)) void name(const k3p_group *g, uint32_t q0, uint32_t q1) {       \
        k3p_quads_of(kind, T, g, q0, q1);                                                            \
    }
K3P_PRODUCTS(k3p_f32_1, K3P_F32, 1)
K3P_PRODUCTS(k3p_f32_2, K3P_F32, 2)
K3P_PRODUCTS(k3p_f32_3, K3P_F32, 3)
K3P_PRODUCTS(k3p_f32_4, K3P_F32, 4)
K3P_PRODUCTS(k3p_f32_5, K3P_F32, 5)
K3P_PRODUCTS(k3p_f32_6, K3P_F32, 6)
#ifdef K3_LEAVES_AVX512_BF16
K3P_PRODUCTS(k3p_bf16_1, K3P_BF16, 1)
K3P_PRODUCTS(k3p_bf16_2, K3P_BF16, 2)
K3P_PRODUCTS(k3p_bf16_3, K3P_BF16, 3)
K3P_PRODUCTS(k3p_bf16_4, K3P_BF16, 4)
K3P_PRODUCTS(k3p_bf16_5, K3P_BF16, 5)
K3P_PRODUCTS(k3p_bf16_6, K3P_BF16, 6)
#endif

static const k3p_products k3p_by_tokens[2][K3P_TOKENS + 1u] = {
    {0, k3p_f32_1, k3p_f32_2, k3p_f32_3, k3p_f32_4, k3p_f32_5, k3p_f32_6},
#ifdef K3_LEAVES_AVX512_BF16
    {0, k3p_bf16_1, k3p_bf16_2, k3p_bf16_3, k3p_bf16_4, k3p_bf16_5, k3p_bf16_6},
#endif
};

/* Groups of nearly equal size, `most` at most: group i of n tokens begins at k3p_begin(i). */
K3V_INLINE uint32_t k3p_n_groups(uint32_t n_tok, uint32_t most) { return (n_tok + most - 1u) / most; }
K3V_INLINE uint32_t k3p_begin(uint32_t i, uint32_t n_tok, uint32_t most) { return i * n_tok / k3p_n_groups(n_tok, most); }

/* Bytes from a quad of packed x to the next, a line more than there is: 16 quads are written side by side. */
K3V_INLINE uint64_t k3p_ldx(int kind, uint32_t n_chunks, uint32_t n_tok) {
    return (uint64_t)n_tok * n_chunks * 8u * k3p_x_bytes(kind) + 64u;
}

/* The rows of the next panel, which products fetch while they are at this one: a panel takes its bytes as quickly as
 * memory gives them, and products none. */
typedef struct {
    const uint8_t *row, *scale;
    uint64_t ld, ld_scale;
    uint32_t lines, at, r; /* of a row; what was fetched last */
} k3p_soon;

K3V_INLINE void k3p_fetch(k3p_soon *soon, uint32_t n) {
    while (n > 0u && soon->r < K3P_ROWS) {
        const uint32_t left = soon->lines - soon->at, here = n < left ? n : left;
        const uint8_t *p = soon->row + 64u * (uint64_t)soon->at;
        for (uint32_t i = 0; i < here; i++) K3V_PREFETCH(p + 64u * (uint64_t)i);
        n -= here;
        soon->at += here;
        if (here < left) return;
        if (soon->scale != NULL) K3V_PREFETCH(soon->scale);
        soon->at = 0;
        soon->r++;
        soon->row += soon->ld;
        soon->scale += soon->ld_scale;
    }
}

/* All tokens of a batch against position v of the panel, the step-th to come. x: the block's packed x. */
K3V_INLINE void k3p_position(int kind, uint32_t v, int step, uint32_t n_chunks, const uint8_t *x, uint32_t n_tok,
                             k3p_soon *soon, k3p_work *s) {
    const uint64_t per_token = n_chunks * 8u * k3p_x_bytes(kind), ldx = k3p_ldx(kind, n_chunks, n_tok);
    const uint32_t together = n_chunks <= K3P_SHORT ? 4u : 1u, n_groups = k3p_n_groups(n_tok, K3P_TOKENS);
    const uint32_t lines = soon->lines * together / n_groups + 1u; /* of 16 rows, in 16 / together * n_groups calls */
    for (uint32_t q = 0; q < 4u; q += together)
        for (uint32_t i = 0; i < n_groups; i++) {
            const uint32_t t0 = k3p_begin(i, n_tok, K3P_TOKENS), T = k3p_begin(i + 1u, n_tok, K3P_TOKENS) - t0;
            const k3p_group g = {s->panel + 4u * v * k3p_of_quad(n_chunks), x + 4u * v * ldx + t0 * per_token, ldx, n_chunks,
                                 step, s->first[0][t0], s->second[0][t0]};
            k3p_fetch(soon, lines);
            k3p_by_tokens[kind][T](&g, q, q + together);
        }
}

/* Rows' sums of one block, from all positions' quads into those of y[t] that are here, of 16 floats. */
K3V_INLINE void k3p_finish(uint32_t n_tok, const k3p_work *s, float *y, uint64_t ldy, __mmask16 here) {
    for (uint32_t t = 0; t < n_tok; t++)
        _mm512_mask_storeu_ps(y + t * ldy, here, k3v_add(k3v_add(k3v_load(s->first[0][t]), k3v_load(s->first[2][t])),
                                                         k3v_add(k3v_load(s->first[1][t]), k3v_load(s->first[3][t]))));
}

#endif

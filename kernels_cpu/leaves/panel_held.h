/* bf16 rows in blocks of one or two chunks times several tokens, by vdpbf16ps: a narrow model's blocks of rule 5.
 *
 * A quad of positions v and v + 2 is 16 pairs of 16 rows at most: they stay in registers while all tokens pass, and what a
 * token adds is one sum of both. panel.h's tile would load the pairs for every six tokens, and keep a sum of each position. */
#ifndef K3_LEAVES_PANEL_HELD_H
#define K3_LEAVES_PANEL_HELD_H

#define K3P_HELD 2u /* chunks, at most */

#ifdef K3_LEAVES_AVX512_BF16
/* Lane l over n chunks; x: of the quad, chunks ldc pairs apart. */
K3V_INLINE k3v_f k3p_held_lane(int n, __m512i (*pair)[4], const int32_t *x, uint64_t ldc, int l) {
    k3v_f acc = k3v_zero();
    K3P_UNROLL
    for (int c = 0; c < n; c++) acc = k3v_dp(acc, pair[c][l], _mm512_set1_epi32(x[(uint64_t)c * ldc + (uint64_t)l]));
    return acc;
}

K3V_INLINE k3v_f k3p_held_quad(int n, __m512i (*pair)[4], const int32_t *x, uint64_t ldc) {
    k3v_f even = k3v_add(k3p_held_lane(n, pair, x, ldc, 0), k3p_held_lane(n, pair, x, ldc, 2)), odd;
    K3P_ORDER(even);
    odd = k3v_add(k3p_held_lane(n, pair, x, ldc, 1), k3p_held_lane(n, pair, x, ldc, 3));
    return k3v_add(even, odd);
}

/* Positions v and v + 2 of quad q for all tokens, into sums, or joining what is there (v = 1). */
K3V_INLINE void k3p_held_positions(int n, uint32_t v, const uint32_t *panel, const uint8_t *x, uint32_t n_tok, uint32_t q,
                                   float (*sums)[K3P_ROWS]) {
    const uint64_t ldx = k3p_ldx(K3P_BF16, (uint32_t)n, n_tok), ldc = 4u * (uint64_t)n_tok;
    const int32_t *low = (const int32_t *)(const void *)(x + (4u * v + q) * ldx);
    const int32_t *high = (const int32_t *)(const void *)(x + (4u * v + 8u + q) * ldx);
    __m512i pair[2][K3P_HELD][4];
    K3P_UNROLL
    for (uint32_t j = 0; j < 2u; j++)
        K3P_UNROLL
        for (int c = 0; c < n; c++)
            K3P_UNROLL
            for (int l = 0; l < 4; l++)
                pair[j][c][l] = _mm512_load_si512((const void *)(panel + (4u * v + 8u * j + q) * k3p_of_quad((uint32_t)n) + 64 * c + 16 * l));
    for (uint32_t t = 0; t < n_tok; t++, low += 4, high += 4) {
        k3v_f sum = k3p_held_quad(n, pair[0], low, ldc);
        K3P_ORDER(sum);
        sum = k3v_add(sum, k3p_held_quad(n, pair[1], high, ldc));
        k3v_store(sums[t], v == 0u ? sum : k3v_add(k3v_load(sums[t]), sum));
    }
}

/* All positions of a panel; what comes next is fetched an eighth at a time. */
#define K3P_HELD_OF(name, n)                                                                                                    \
    static __attribute__((noinline)) void name(const uint32_t *panel, const uint8_t *x, uint32_t n_tok, k3p_soon *soon,            \
                                               k3p_quads sums) {                                                                   \
        for (uint32_t i = 0; i < 8u; i++) {                                                                                        \
            k3p_fetch(soon, 2u * soon->lines);                                                                                     \
            k3p_held_positions(n, i / 4u, panel, x, n_tok, i % 4u, sums[i % 4u]);                                                  \
        }                                                                                                                          \
    }
K3P_HELD_OF(k3p_held_1, 1)
K3P_HELD_OF(k3p_held_2, 2)
#else
#define k3p_held_1(panel, x, n_tok, soon, sums) ((void)0) /* never called */
#define k3p_held_2 k3p_held_1
#endif

#endif

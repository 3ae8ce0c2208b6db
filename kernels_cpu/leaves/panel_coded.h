/* MXFP4 rows times tokens: codes are decoded between the products, not into a panel.
 *
 * An expert of a chunk has few tokens, and writing decoded weights costs what eight tokens' products do; here the decoding goes
 * where products leave units of the core idle (k3p_decode), for each group of tokens again. The order is panel.h's. */
#ifndef K3_LEAVES_PANEL_CODED_H
#define K3_LEAVES_PANEL_CODED_H

/* T tokens at one position. */
typedef k3p_group k3p_coded;

/* Lanes l0, l0 + 2 (and l0 + 1, l0 + 3 where L is 4) of a quad over all chunks: their sums for T tokens. */
K3V_INLINE void k3p_coded_lanes(int kind, int T, int L, int l0, const k3p_coded *g, uint32_t quad, k3v_f *sum) {
    const uint32_t *w = g->panel;
    const uint8_t *x = g->x + quad * g->ldx;
    const uint64_t of_chunk = (uint64_t)T * 8u * k3p_x_bytes(kind);
    k3v_f acc[4][K3P_FEW];
    K3P_UNROLL
    for (int i = 0; i < L; i++)
        K3P_UNROLL
        for (int t = 0; t < T; t++) acc[i][t] = k3v_zero();
    for (uint32_t c = 0; c < g->n_chunks; c++, w += K3P_CODED, x += of_chunk) {
        const __m512i codes = _mm512_load_si512((const void *)(w + 16u * quad));
        const __m512i scale = _mm512_load_si512((const void *)(w + 64));
        K3P_UNROLL
        for (int i = 0; i < L; i++) {
            const int l = L == 4 ? i : l0 + 2 * i;
            const __m512i pair = k3p_decode(codes, (uint32_t)l, scale);
#ifdef K3_LEAVES_AVX512_BF16
            if (kind == K3P_BF16) {
                const int32_t *p = (const int32_t *)(const void *)x;
                K3P_UNROLL
                for (int t = 0; t < T; t++) acc[i][t] = k3v_dp(acc[i][t], pair, _mm512_set1_epi32(p[4 * t + l]));
                continue;
            }
#endif
            const float *p = (const float *)(const void *)x;
            const k3v_f odd = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u)));
            const k3v_f even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
            K3P_UNROLL
            for (int t = 0; t < T; t++) acc[i][t] = k3v_fma(odd, k3v_set(p[8 * t + 2 * l + 1]), acc[i][t]);
            K3P_UNROLL
            for (int t = 0; t < T; t++) acc[i][t] = k3v_fma(even, k3v_set(p[8 * t + 2 * l]), acc[i][t]);
        }
    }
    K3P_UNROLL
    for (int t = 0; t < T; t++)
        sum[t] = L == 4 ? k3v_add(k3v_add(acc[0][t], acc[2][t]), k3v_add(acc[1][t], acc[3][t])) : k3v_add(acc[0][t], acc[1][t]);
}

K3V_INLINE void k3p_coded_quads(int kind, int T, const k3p_coded *g) {
    for (uint32_t q = 0; q < 4u; q++) {
        k3v_f sum[K3P_FEW], other[K3P_FEW];
        if (T <= (int)K3P_TOKENS) {
            k3p_coded_lanes(kind, T, 4, 0, g, q, sum);
        } else { /* twice as many tokens, half of the lanes at a time */
            k3p_coded_lanes(kind, T, 2, 0, g, q, sum);
            k3p_coded_lanes(kind, T, 2, 1, g, q, other);
            K3P_UNROLL
            for (int t = 0; t < T; t++) sum[t] = k3v_add(sum[t], other[t]);
        }
        k3p_join(T, g->step, sum, g->first + q * K3P_OF_QUAD, g->second + q * K3P_OF_QUAD);
    }
}

typedef void (*k3p_coded_products)(const k3p_coded *g);
#define K3P_CODED_PRODUCTS(name, kind, T) \
    static __attribute__((noinline)) void name(const k3p_coded *g) { k3p_coded_quads(kind, T, g); }
#define K3P_CODED_ALL(name, kind)                                                                              \
    K3P_CODED_PRODUCTS(name##_4, kind, 4) K3P_CODED_PRODUCTS(name##_5, kind, 5) K3P_CODED_PRODUCTS(name##_6, kind, 6)    \
    K3P_CODED_PRODUCTS(name##_7, kind, 7) K3P_CODED_PRODUCTS(name##_8, kind, 8)
#define K3P_CODED_ROW(name) \
    {0, 0, 0, 0, name##_4, name##_5, name##_6, name##_7, name##_8}
K3P_CODED_ALL(k3p_coded_f32, K3P_F32)
#ifdef K3_LEAVES_AVX512_BF16
K3P_CODED_ALL(k3p_coded_bf16, K3P_BF16)
#endif
static const k3p_coded_products k3p_coded_by_tokens[2][K3P_FEW + 1u] = {
    K3P_CODED_ROW(k3p_coded_f32),
#ifdef K3_LEAVES_AVX512_BF16
    K3P_CODED_ROW(k3p_coded_bf16),
#endif
};

/* As k3p_position, of a panel by k3p_panel_coded. */
K3V_INLINE void k3p_coded_position(int kind, uint32_t v, int step, uint32_t n_chunks, const uint8_t *x, uint32_t n_tok,
                                   k3p_soon *soon, k3p_work *s) {
    const uint64_t per_token = n_chunks * 8u * k3p_x_bytes(kind), ldx = k3p_ldx(kind, n_chunks, n_tok);
    const uint32_t n_groups = k3p_n_groups(n_tok, K3P_FEW);
    for (uint32_t i = 0; i < n_groups; i++) {
        const uint32_t t0 = k3p_begin(i, n_tok, K3P_FEW), T = k3p_begin(i + 1u, n_tok, K3P_FEW) - t0;
        const k3p_coded g = {s->panel + (uint64_t)v * n_chunks * K3P_CODED, x + 4u * v * ldx + t0 * per_token, ldx, n_chunks,
                             step, s->first[0][t0], s->second[0][t0]};
        k3p_fetch(soon, 4u * soon->lines / n_groups + 1u);
        k3p_coded_by_tokens[kind][T](&g);
    }
}

#endif

/* MXFP4 leaves.
 *
 * Two ways, same bits. Blocks that are whole scale groups, one token: decode in registers, a table of E2M1
 * values scaled once per group. Otherwise (several tokens, or blocks that begin inside a group): decode four
 * rows to bf16 once and run the bf16 tiles. A product of E2M1 and a power of two has two significant bits, so
 * bf16 holds it exactly, and one that underflows is a zero of the right sign either way. */
#ifndef K3_LEAVES_TILES_MXFP4_H
#define K3_LEAVES_TILES_MXFP4_H

#define K3V_MX_RUN 16u        /* scale bytes widened at once: four chunks */
#define K3V_MX_DECODED 4096u  /* longest row that is decoded to the stack */

typedef struct {
    float scale[4][K3V_MX_RUN];
    int any_zero; /* some group is all +0: rule 4's slow way */
} k3v_mx_run;

/* Widen the scale bytes of groups g .. g + n - 1 (n <= 16) of each row. Absent ones read as 1. */
K3V_INLINE void k3v_mx_scales(int R, k3v_mx_run *run, const uint8_t *const *s, uint32_t g, uint32_t n) {
    __m128i zeros = _mm_setzero_si128();
    K3V_UNROLL
    for (int r = 0; r < R; r++) {
        __m128i bytes;
        if (n == K3V_MX_RUN) {
            bytes = _mm_loadu_si128((const __m128i *)(const void *)(s[r] + g));
        } else {
            uint8_t copy[K3V_MX_RUN];
            __builtin_memset(copy, 127, sizeof copy);
            __builtin_memcpy(copy, s[r] + g, n);
            bytes = _mm_loadu_si128((const __m128i *)(const void *)copy);
        }
        zeros = _mm_or_si128(zeros, _mm_cmpeq_epi8(bytes, _mm_setzero_si128()));
        k3v_mx_widen(bytes, run->scale[r]);
    }
    run->any_zero = _mm_movemask_epi8(zeros) != 0;
}

/* Group q of a run, at position p of its chunk: all rows against one stretch of x. */
K3V_INLINE void k3v_mx_group(int R, int zero, const k3v_mx_run *run, uint32_t q, int p, const uint8_t *const *w,
                             const float *x, k3v_f (*acc)[K3V_PER_ROW]) {
    k3v_pair xv[K3V_MX_VECTORS];
    K3V_UNROLL
    for (int k = 0; k < K3V_MX_VECTORS; k++) xv[k] = k3v_split_f32(x + k * K3V_STEP);
    K3V_UNROLL
    for (int r = 0; r < R; r++) {
        const float scale = run->scale[r][q];
        const k3v_table table = k3v_mx_table(scale);
        K3V_UNROLL
        for (int k = 0; k < K3V_MX_VECTORS; k++) {
            const int v = p * K3V_MX_VECTORS + k;
            k3v_pair wv = k3v_split_mx(w[r] + k * K3V_LANES, table);
            if (zero && scale == 0.0f) wv.odd = wv.even = k3v_zero(); /* the table would keep -0 */
            acc[r][v] = k3v_pair_fma(wv, xv[k], acc[r][v]);
        }
    }
}

/* n groups of a run, starting on a chunk. w, x: at the run's first element. */
K3V_INLINE void k3v_mx_groups(int R, int zero, const k3v_mx_run *run, uint32_t n, const uint8_t *const *w,
                              const float *x, k3v_f (*acc)[K3V_PER_ROW]) {
    uint32_t q = 0;
    const uint8_t *at[4];
    for (; q + 4u <= n; q += 4u) {
        K3V_UNROLL
        for (int p = 0; p < 4; p++) {
            K3V_UNROLL
            for (int r = 0; r < R; r++) {
                at[r] = w[r] + 16u * (q + (uint32_t)p);
                if (p == 0) _mm_prefetch(at[r] + K3V_AHEAD, _MM_HINT_T0);
            }
            k3v_mx_group(R, zero, run, q + (uint32_t)p, p, at, x + K3_MX_GROUP * (q + (uint32_t)p), acc);
        }
    }
    if (q < n) {
        K3V_UNROLL
        for (int p = 0; p < 3; p++) {
            if (q + (uint32_t)p < n) {
                K3V_UNROLL
                for (int r = 0; r < R; r++) at[r] = w[r] + 16u * (q + (uint32_t)p);
                k3v_mx_group(R, zero, run, q + (uint32_t)p, p, at, x + K3_MX_GROUP * (q + (uint32_t)p), acc);
            }
        }
    }
}

/* quads[r] = the quad sums of rule 3 over G scale groups of row r. */
K3V_INLINE void k3v_mx_tile(int R, const uint8_t *const *w, const uint8_t *const *s, const float *x, uint32_t G,
                            k3v_f *quads) {
    k3v_f acc[4][K3V_PER_ROW];
    k3v_mx_run run;
    K3V_UNROLL
    for (int r = 0; r < R; r++)
        K3V_UNROLL
        for (int v = 0; v < K3V_PER_ROW; v++) acc[r][v] = k3v_zero();
    for (uint32_t g = 0; g < G; g += K3V_MX_RUN) {
        const uint32_t n = G - g < K3V_MX_RUN ? G - g : K3V_MX_RUN;
        const uint8_t *at[4];
        K3V_UNROLL
        for (int r = 0; r < R; r++) at[r] = w[r] + 16u * (uint64_t)g;
        k3v_mx_scales(R, &run, s, g, n);
        if (__builtin_expect(run.any_zero, 0))
            k3v_mx_groups(R, 1, &run, n, at, x + K3_MX_GROUP * (uint64_t)g, acc);
        else
            k3v_mx_groups(R, 0, &run, n, at, x + K3_MX_GROUP * (uint64_t)g, acc);
    }
    K3V_UNROLL
    for (int r = 0; r < R; r++) quads[r] = k3v_quads(acc[r]);
}

#define K3V_MX_TILE(name, R)                                                                                  \
    static __attribute__((noinline)) void name(const uint8_t *const *w, const uint8_t *const *s, const float *x, \
                                               uint32_t G, k3v_f *quads) {                                    \
        k3v_mx_tile(R, w, s, x, G, quads);                                                                    \
    }
K3V_MX_TILE(k3v_mx_tile_rows, K3V_ROWS)
#if K3V_ROWS > 1
K3V_MX_TILE(k3v_mx_tile_row, 1)
#else
#define k3v_mx_tile_row k3v_mx_tile_rows
#endif

typedef struct {
    const uint8_t *W, *S;
    uint32_t K, n_blocks, B; /* B = K / n_blocks */
} k3v_mx;

/* Block b of rows r0 .. r0 + n - 1 (n <= 4), groups not cut by blocks. */
K3V_INLINE __m128 k3v_mx_four(const k3v_mx *m, uint32_t r0, uint32_t n, uint32_t b, const float *x) {
    const uint8_t *w[4], *s[4];
    k3v_f quads[4];
    const uint32_t G = m->B / K3_MX_GROUP;
    uint32_t r;
    for (r = 0; r < 4u; r++) {
        const uint64_t row = r0 + (r < n ? r : 0u);
        w[r] = m->W + row * (m->K / 2u) + (uint64_t)b * (m->B / 2u);
        s[r] = m->S + row * (m->K / K3_MX_GROUP) + (uint64_t)b * G;
    }
    if (n == 4u) {
        for (r = 0; r < 4u; r += K3V_ROWS) k3v_mx_tile_rows(w + r, s + r, x, G, quads + r);
    } else {
        for (r = 0; r < n; r++) k3v_mx_tile_row(w + r, s + r, x, G, quads + r);
        for (; r < 4u; r++) quads[r] = quads[0];
    }
    return k3v_fold4(quads[0], quads[1], quads[2], quads[3]);
}

/* Row r as bf16. */
K3V_INLINE void k3v_mx_decode(const k3v_mx *m, uint32_t r, uint16_t *out) {
    const uint8_t *w = m->W + (uint64_t)r * (m->K / 2u), *s = m->S + (uint64_t)r * (m->K / K3_MX_GROUP);
    for (uint32_t g = 0; g < m->K / K3_MX_GROUP; g++) {
        const k3v_table table = k3v_mx_table(k3_bits_to_f32((uint32_t)s[g] << 23));
        for (int k = 0; k < K3V_MX_VECTORS; k++) {
            k3v_pair p = k3v_split_mx(w + 16u * g + k * K3V_LANES, table);
            if (s[g] == 0u) p.odd = p.even = k3v_zero();
            k3v_store_bf16(out + K3_MX_GROUP * g + k * K3V_STEP, p);
        }
    }
}

/* Rows r0 .. of one token, into d[b]; rows that do not exist repeat the first. */
K3V_INLINE void k3v_mx_blocks(const k3v_mx *m, uint32_t r0, uint32_t n, const float *x, __m128 *d) {
    uint32_t b, r;
    if (m->B % K3_MX_GROUP == 0u) {
        for (b = 0; b < m->n_blocks; b++) d[b] = k3v_mx_four(m, r0, n, b, x + (uint64_t)b * m->B);
        return;
    }
    for (b = 0; b < m->n_blocks; b++) { /* blocks inside groups: small models only */
        float four[4] = {0};
        for (r = 0; r < n; r++)
            four[r] = k3_scalar_dot_mxfp4(m->W + (uint64_t)(r0 + r) * (m->K / 2u),
                                          m->S + (uint64_t)(r0 + r) * (m->K / K3_MX_GROUP), b * m->B,
                                          x + (uint64_t)b * m->B, m->B);
        d[b] = _mm_loadu_ps(four);
    }
}

static __attribute__((unused, noinline)) void k3v_mx_decoded(const k3v_mx *m, uint32_t r0, uint32_t n,
                                                            const float *X, uint64_t ldx, uint32_t n_tok, float *Y,
                                                            uint64_t ldy) {
    _Alignas(64) uint16_t rows[4 * K3V_MX_DECODED];
    for (uint32_t r = 0; r < n; r++) k3v_mx_decode(m, r0 + r, rows + (uint64_t)r * m->K);
    k3v_rows(K3V_BF16, (const uint8_t *)rows, m->K, 0, n, m->K, m->n_blocks, X, ldx, n_tok, Y, ldy);
}

K3_LEAF void k3_rows_dot_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                               uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                               uint32_t n_tok, float *Y, uint64_t ldy) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    const int decode = K <= K3V_MX_DECODED && (n_tok > 1u || m.B % K3_MX_GROUP != 0u);
    (void)c;
    for (uint32_t r = row0; r < row1; r += 4u) {
        const uint32_t n = row1 - r < 4u ? row1 - r : 4u;
        if (decode) {
            k3v_mx_decoded(&m, r, n, X, ldx, n_tok, Y + r, ldy);
            continue;
        }
        for (uint32_t t = 0; t < n_tok; t++) {
            __m128 d[8];
            k3v_mx_blocks(&m, r, n, X + t * ldx, d);
            k3v_store_n(Y + t * ldy + r, k3v_tree4(d, n_blocks), n);
        }
    }
}

K3_LEAF void k3_rows_blocks_mxfp4(const K3Ctx *c, const uint8_t *W, const uint8_t *S, uint32_t row0,
                                  uint32_t row1, uint32_t K, uint32_t n_blocks, const float *X, float *D) {
    const k3v_mx m = {W, S, K, n_blocks, K / n_blocks};
    (void)c;
    for (uint32_t r = row0; r < row1; r += 4u) {
        const uint32_t n = row1 - r < 4u ? row1 - r : 4u;
        __m128 d[8];
        k3v_mx_blocks(&m, r, n, X, d);
        for (uint32_t b = 0; b < n_blocks; b++) {
            float four[4];
            _mm_storeu_ps(four, d[b]);
            for (uint32_t i = 0; i < n; i++) D[(uint64_t)(r - row0 + i) * n_blocks + b] = four[i];
        }
    }
}

#endif

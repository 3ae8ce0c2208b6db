/* Column leaves of several tokens: a row of M is read once for a tile of them.
 *
 * At most a chunk of rows: a lane of rule 3 then has one pair, and the eight rows of a quad stay in registers while the
 * tokens of the tile pass. A token's quads come in the order in which halving adds them, so that few sums wait.
 * Columns that fill no tile, and matrices of another height, go through k3_cols_dot_bf16. */
#ifndef K3_LEAVES_TILES_COLUMNS_TOKENS_H
#define K3_LEAVES_TILES_COLUMNS_TOKENS_H

#if K3V_LANES == 16
#define K3V_WIDE 2 /* vectors of columns side by side, which share the broadcasts of x */
#else
#define K3V_WIDE 1
#endif
#define K3V_WIDE_COLUMNS (K3V_WIDE * K3V_LANES)
#define K3V_WIDE_TOKS 16u

typedef struct {
    const uint16_t *m; /* the tile's first column of row 0 */
    uint64_t ld;
    uint32_t n, n_tok;
    const float *x;
    uint64_t ldx;
    uint32_t pairs[K3V_WIDE_TOKS][K3_LANES]; /* x of bf16 values, two a word */
    _Alignas(64) float level[5][K3V_WIDE_TOKS][K3V_WIDE_COLUMNS]; /* sums of 1, 2, 4, 8 quads that wait, and the dots */
} k3v_wide;

/* A quad of one token joins `carries` sums of as many quads as it has by then, and waits for the next. */
K3V_INLINE void k3v_wide_join(k3v_wide *s, uint32_t t, int carries, k3v_f *sum) {
    K3V_UNROLL
    for (int v = 0; v < K3V_WIDE; v++) {
        K3V_UNROLL
        for (int at = 0; at < carries; at++) sum[v] = k3v_add(k3v_load(&s->level[at][t][v * K3V_LANES]), sum[v]);
        k3v_store(&s->level[carries][t][v * K3V_LANES], sum[v]);
    }
}

/* Quad q of all tokens. */
K3V_INLINE void k3v_wide_quad(k3v_wide *s, uint32_t q, int carries) {
    k3v_f w[8][K3V_WIDE];
    K3V_UNROLL
    for (uint32_t i = 0; i < 8u; i++)
        K3V_UNROLL
        for (int v = 0; v < K3V_WIDE; v++) w[i][v] = k3v_load_bf16(s->m + (uint64_t)(8u * q + i) * s->ld + (uint32_t)v * K3V_LANES);
    for (uint32_t t = 0; t < s->n_tok; t++) {
        const float *x = s->x + t * s->ldx + 8u * q;
        k3v_f a[4][K3V_WIDE];
        K3V_UNROLL
        for (int l = 0; l < 4; l++)
            K3V_UNROLL
            for (int v = 0; v < K3V_WIDE; v++)
                a[l][v] = k3v_fma(w[2 * l][v], k3v_set(x[2 * l]), k3v_fma(w[2 * l + 1][v], k3v_set(x[2 * l + 1]), k3v_zero()));
        K3V_UNROLL
        for (int v = 0; v < K3V_WIDE; v++) a[0][v] = k3v_add(k3v_add(a[0][v], a[2][v]), k3v_add(a[1][v], a[3][v]));
        k3v_wide_join(s, t, carries, a[0]);
    }
}

#ifdef K3_X16_LEAVES
/* The same of packed x: a pair of rows is one operand of vdpbf16ps, its columns in the order of an unpacking. */
K3V_INLINE void k3v_wide_quad_x16(k3v_wide *s, uint32_t q, int carries) {
    __m512i w[4][2];
    K3V_UNROLL
    for (uint32_t l = 0; l < 4u; l++) {
        const uint16_t *m = s->m + (uint64_t)(8u * q + 2u * l) * s->ld;
        const __m512i even = _mm512_loadu_si512(m), odd = _mm512_loadu_si512(m + s->ld);
        w[l][0] = _mm512_unpacklo_epi16(even, odd);
        w[l][1] = _mm512_unpackhi_epi16(even, odd);
    }
    for (uint32_t t = 0; t < s->n_tok; t++) {
        const uint32_t *x = s->pairs[t] + 4u * q;
        k3v_f a[4][2];
        K3V_UNROLL
        for (int l = 0; l < 4; l++)
            K3V_UNROLL
            for (int v = 0; v < 2; v++) a[l][v] = k3v_dp(k3v_zero(), w[l][v], _mm512_set1_epi32((int)x[l]));
        K3V_UNROLL
        for (int v = 0; v < 2; v++) a[0][v] = k3v_add(k3v_add(a[0][v], a[2][v]), k3v_add(a[1][v], a[3][v]));
        k3v_wide_join(s, t, carries, a[0]);
    }
}

K3V_INLINE void k3v_wide_pack(k3v_wide *s) {
    for (uint32_t t = 0; t < s->n_tok; t++)
        for (uint32_t i = 0; i < s->n; i += 8u) {
            const float *x = s->x + t * s->ldx + i;
            for (uint32_t p = 0; p < 4u; p++)
                s->pairs[t][i / 2u + p] = k3_f32_to_bits(x[2u * p]) >> 16 | (k3_f32_to_bits(x[2u * p + 1u]) & 0xffff0000u);
        }
}

/* The dots of a token, columns as they lie. */
K3V_INLINE void k3v_wide_unpack(k3v_f *r) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const k3v_f lo = r[0], hi = r[1];
    r[0] = _mm512_permutex2var_ps(lo, first, hi);
    r[1] = _mm512_permutex2var_ps(lo, second, hi);
}
#else
#define k3v_wide_quad_x16 k3v_wide_quad
K3V_INLINE void k3v_wide_pack(k3v_wide *s) { (void)s; }
K3V_INLINE void k3v_wide_unpack(k3v_f *r) { (void)r; }
#endif

K3V_INLINE void k3v_wide_one(k3v_wide *s, int x16, uint32_t q, int carries) {
    if (8u * q >= s->n) { /* absent rows: their lanes are +0 */
        for (uint32_t t = 0; t < s->n_tok; t++) {
            k3v_f none[K3V_WIDE];
            K3V_UNROLL
            for (int v = 0; v < K3V_WIDE; v++) none[v] = k3v_zero();
            k3v_wide_join(s, t, carries, none);
        }
    } else if (x16) {
        k3v_wide_quad_x16(s, q, carries);
    } else {
        k3v_wide_quad(s, q, carries);
    }
}

/* The quads t, t + 8, t + 4, t + 12 for t = 0, 2, 1, 3. */
K3V_INLINE void k3v_wide_tile(k3v_wide *s, int x16) {
    for (uint32_t i = 0; i < 4u; i++) {
        const uint32_t t = (i & 1u) << 1 | i >> 1;
        k3v_wide_one(s, x16, t, 0);
        k3v_wide_one(s, x16, t + 8u, 1);
        k3v_wide_one(s, x16, t + 4u, 0);
        if (i == 3u)
            k3v_wide_one(s, x16, t + 12u, 4);
        else if (i == 1u)
            k3v_wide_one(s, x16, t + 12u, 3);
        else
            k3v_wide_one(s, x16, t + 12u, 2);
    }
}

static __attribute__((noinline)) void k3v_wide_tile_f32(k3v_wide *s) { k3v_wide_tile(s, 0); }
static __attribute__((noinline)) void k3v_wide_tile_x16(k3v_wide *s) { k3v_wide_tile(s, 1); }

/* Up to K3V_WIDE_TOKS tokens, whole tiles of columns; returns how many columns that was. */
K3V_INLINE uint32_t k3v_wide_columns(int x16, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t cols, const float *X,
                                     uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    k3v_wide s;
    uint32_t j = 0;
    s.ld = ld;
    s.n = n;
    s.n_tok = n_tok;
    s.x = X;
    s.ldx = ldx;
    if (x16) k3v_wide_pack(&s);
    for (; j + K3V_WIDE_COLUMNS <= cols; j += K3V_WIDE_COLUMNS) {
        s.m = M + j;
        (x16 ? k3v_wide_tile_x16 : k3v_wide_tile_f32)(&s);
        for (uint32_t t = 0; t < n_tok; t++) {
            k3v_f r[K3V_WIDE];
            K3V_UNROLL
            for (int v = 0; v < K3V_WIDE; v++) r[v] = k3v_load(&s.level[4][t][v * K3V_LANES]);
            if (x16) k3v_wide_unpack(r);
            K3V_UNROLL
            for (int v = 0; v < K3V_WIDE; v++) k3v_store(Y + t * ldy + j + (uint32_t)v * K3V_LANES, r[v]);
        }
    }
    return j;
}

K3V_INLINE void k3v_wide_tokens(int x16, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t cols, const float *X, uint64_t ldx,
                                uint32_t n_tok, float *Y, uint64_t ldy) {
    const int takes = n_tok > 1u && n <= K3_CHUNK && n % 8u == 0u;
    for (uint32_t t = 0; t < n_tok; t += K3V_WIDE_TOKS) {
        const uint32_t here = n_tok - t < K3V_WIDE_TOKS ? n_tok - t : K3V_WIDE_TOKS;
        const uint32_t done = takes ? k3v_wide_columns(x16, M, ld, n, cols, X + t * ldx, ldx, here, Y + t * ldy, ldy) : 0u;
        for (uint32_t k = t; k < t + here && done < cols; k++) k3_cols_dot_bf16(NULL, M, ld, n, done, cols, X + k * ldx, Y + k * ldy);
    }
}

K3_LEAF void k3_cols_tokens_bf16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t cols, const float *X,
                                 uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    (void)c;
    k3v_wide_tokens(0, M, ld, n, cols, X, ldx, n_tok, Y, ldy);
}

#ifdef K3_X16_LEAVES
K3_LEAF void k3_cols_tokens_bf16_x16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t cols, const float *X,
                                     uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    (void)c;
    k3v_wide_tokens(1, M, ld, n, cols, X, ldx, n_tok, Y, ldy);
}
#endif

#endif

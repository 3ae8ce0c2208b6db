/* One token's MXFP4 rows of whole chunks, four side by side, with AVX-512: the expert products of decode.
 *
 * Rows are short here (512 bytes of 1024 weights, a chunk a block), so what surrounds the dots shows: everything that
 * does not depend on the row is outside its loop, four rows' sums over four blocks are reduced by one transposed tree,
 * and each line is prefetched once, also across the end of these rows to what is read next. */
#ifndef K3_LEAVES_TILES_MXFP4_ONE_H
#define K3_LEAVES_TILES_MXFP4_ONE_H

typedef struct {
    const uint8_t *w[4], *s[4];
} k3v_mx_at;

/* How far on lie the weights and the scales that tile `r` has to prefetch. */
typedef struct {
    uint64_t w, s;
} k3v_mx_next;

K3V_INLINE k3v_mx_at k3v_mx_rows_at(const k3v_mx *m, uint32_t r) {
    k3v_mx_at at;
    K3V_UNROLL
    for (uint32_t i = 0; i < 4u; i++) {
        at.w[i] = m->W + (uint64_t)(r + i) * (m->K / 2u);
        at.s[i] = m->S + (uint64_t)(r + i) * (m->K / K3_MX_GROUP);
    }
    return at;
}

/* Groups [g0, g1) of four rows, whole chunks, with their x. */
K3V_INLINE void k3v_mx_chunks(int mode, const k3v_mx_at *at, const uint8_t *x, uint32_t g0, uint32_t g1, uint64_t next,
                              k3v_f (*acc)[K3V_PER_ROW]) {
    K3V_UNROLL
    for (int r = 0; r < 4; r++)
        K3V_UNROLL
        for (int v = 0; v < K3V_PER_ROW; v++) acc[r][v] = k3v_zero();
    for (uint32_t g = g0; g < g1; g += K3V_MX_CHUNK_GROUPS) {
        K3V_UNROLL
        for (int r = 0; r < 4; r++) K3V_PREFETCH(at->w[r] + 16u * (uint64_t)g + next);
        k3v_mx_chunk(mode, at->w, at->s, g, x + (uint64_t)g * K3_MX_GROUP * k3v_x_bytes(mode), acc);
    }
}

/* Four rows over four blocks from group g0 on. */
K3V_INLINE k3v_f k3v_mx_square(int mode, const k3v_mx_at *at, const uint8_t *x, uint32_t g0, uint32_t G, uint64_t next) {
    k3v_f acc[4][K3V_PER_ROW];
#ifdef K3_LEAVES_AVX512_BF16
    if (mode == K3V_X_BF16) {
        k3v_f t[4];
        K3V_UNROLL
        for (uint32_t b = 0; b < 4u; b++) {
            k3v_mx_chunks(mode, at, x, g0 + b * G, g0 + b * G + G, next, acc);
            t[b] = k3v_mx_rows_bf16(acc);
        }
        return k3v_mx_square_bf16(t);
    }
#endif
    k3v_f q[4][4];
    K3V_UNROLL
    for (uint32_t b = 0; b < 4u; b++) {
        k3v_mx_chunks(mode, at, x, g0 + b * G, g0 + b * G + G, next, acc);
        K3V_UNROLL
        for (int r = 0; r < 4; r++) q[r][b] = k3v_quads(acc[r]);
    }
    return k3v_mx_square_f32(q);
}

/* Rows [.., row1) are followed by what comes soon: prefetching the rows behind them would fetch a third too much where
 * a slice has 64 of 512 bytes, and every slice would begin with misses. */
typedef struct {
    uint32_t ahead, row1; /* rows */
    const uint8_t *w, *s; /* 0: nothing is known */
} k3v_mx_course;

K3V_INLINE k3v_mx_course k3v_mx_course_of(const k3v_mx *m, uint32_t row1) {
    const uint32_t tile = 2u * m->K;
    const k3v_rows_at soon = k3v_take_soon();
    const k3v_mx_course c = {4u * (1u + K3V_MX_AHEAD / tile), row1, soon.w, soon.s};
    return c;
}

K3V_INLINE k3v_mx_next k3v_mx_next_of(const k3v_mx *m, const k3v_mx_course *c, uint32_t r, const k3v_mx_at *at) {
    const uint64_t packed = m->K / 2u, scales = m->K / K3_MX_GROUP;
    const uint32_t to = r + c->ahead;
    k3v_mx_next next = {0, 0};
    if (to < c->row1) {
        next.w = c->ahead * packed;
        next.s = c->ahead * scales;
    } else if (c->w != 0) {
        next.w = (uint64_t)(uintptr_t)c->w + (to - c->row1) * packed - (uint64_t)(uintptr_t)at->w[0];
        next.s = (uint64_t)(uintptr_t)c->s + (to - c->row1) * scales - (uint64_t)(uintptr_t)at->s[0];
    }
    return next;
}

K3V_INLINE void k3v_mx_prefetch_scales(const k3v_mx *m, const k3v_mx_at *at, uint64_t next) {
    const uint32_t bytes = 4u * (m->K / K3_MX_GROUP);
    for (uint32_t i = 0; i < bytes; i += 64u) K3V_PREFETCH(at->s[0] + i + next);
}

/* D of rows [row0, row1), a multiple of 4 of them, for a multiple of 4 blocks. */
K3V_INLINE void k3v_mx_walk_blocks_of(int is_chunk, int mode, const k3v_mx *m, uint32_t row0, uint32_t row1, const uint8_t *x, float *D) {
    const uint32_t nb = m->n_blocks, G = m->B / K3_MX_GROUP;
    const k3v_mx_course course = k3v_mx_course_of(m, row1);
    for (uint32_t r = row0; r < row1; r += 4u) {
        const k3v_mx_at at = k3v_mx_rows_at(m, r);
        const k3v_mx_next next = k3v_mx_next_of(m, &course, r, &at);
        k3v_mx_prefetch_scales(m, &at, next.s);
        for (uint32_t b = 0; b < nb; b += 4u) {
            const k3v_f v = is_chunk ? k3v_mx_square(mode, &at, x, b * K3V_MX_CHUNK_GROUPS, K3V_MX_CHUNK_GROUPS, next.w)
                                       : k3v_mx_square(mode, &at, x, b * G, G, next.w);
            float *d = D + (uint64_t)(r - row0) * nb + b;
            const int swap = mode == K3V_X_F32;
            _mm_storeu_ps(d, _mm512_castps512_ps128(v));
            _mm_storeu_ps(d + (swap ? 2u : 1u) * nb, _mm512_extractf32x4_ps(v, 1));
            _mm_storeu_ps(d + (swap ? 1u : 2u) * nb, _mm512_extractf32x4_ps(v, 2));
            _mm_storeu_ps(d + 3u * nb, _mm512_extractf32x4_ps(v, 3));
        }
    }
}

K3V_INLINE void k3v_mx_walk_blocks(int mode, const k3v_mx *m, uint32_t row0, uint32_t row1, const uint8_t *x, float *D) {
    if (m->B == K3_CHUNK) k3v_mx_walk_blocks_of(1, mode, m, row0, row1, x, D);
    else k3v_mx_walk_blocks_of(0, mode, m, row0, row1, x, D);
}

/* y of rows [row0, row1), a multiple of 4 of them, of one block. */
K3V_INLINE void k3v_mx_walk_rows(int mode, const k3v_mx *m, uint32_t row0, uint32_t row1, const uint8_t *x, float *y) {
    const k3v_mx_course course = k3v_mx_course_of(m, row1);
    for (uint32_t r = row0; r < row1; r += 4u) {
        const k3v_mx_at at = k3v_mx_rows_at(m, r);
        const k3v_mx_next next = k3v_mx_next_of(m, &course, r, &at);
        k3v_f acc[4][K3V_PER_ROW];
        k3v_mx_prefetch_scales(m, &at, next.s);
        k3v_mx_chunks(mode, &at, x, 0, m->K / K3_MX_GROUP, next.w, acc);
        _mm_storeu_ps(y + r, k3v_mx_fold(mode, acc));
    }
}

#define K3V_MX_WALK(name, walk, mode)                                                                              \
    static __attribute__((noinline)) void name(const k3v_mx *m, uint32_t row0, uint32_t row1, const uint8_t *x, \
                                               float *out) {                                                       \
        walk(mode, m, row0, row1, x, out);                                                                         \
    }
K3V_MX_WALK(k3v_mx_walk_blocks_f32, k3v_mx_walk_blocks, K3V_X_F32)
K3V_MX_WALK(k3v_mx_walk_rows_f32, k3v_mx_walk_rows, K3V_X_F32)
#ifdef K3_LEAVES_AVX512_BF16
K3V_MX_WALK(k3v_mx_walk_blocks_bf16, k3v_mx_walk_blocks, K3V_X_BF16)
K3V_MX_WALK(k3v_mx_walk_rows_bf16, k3v_mx_walk_rows, K3V_X_BF16)
#else
#define k3v_mx_walk_blocks_bf16 k3v_mx_walk_blocks_f32 /* never called */
#define k3v_mx_walk_rows_bf16 k3v_mx_walk_rows_f32
#endif

#endif

/* The vector leaves: loops over tiles of rows and tokens, written once against the primitives of avx2.h or
 * avx512.h (included before this file).
 *
 * Each result keeps rule 3's order exactly, so tile shape, prefetch distance and loop order change no bit.
 * What shapes the loops:
 *   - Decode (one token): K3V_ROWS rows side by side share each split of x; four rows' lanes are then reduced
 *     by one transposed tree, which costs little more than reducing one.
 *   - Prefill: tiles_tokens.h.
 *   - The last, partial chunk of a row is copied and padded with w = -0, x = +0, which changes nothing. */
#ifndef K3_LEAVES_TILES_H
#define K3_LEAVES_TILES_H

#define K3V_STEP (2 * K3V_LANES) /* elements a vector step covers */

enum { K3V_BF16 = 0, K3V_F32 = 1 };

K3V_INLINE uint64_t k3v_bytes(int type) { return type == K3V_BF16 ? 2u : 4u; }

K3V_INLINE k3v_pair k3v_split(int type, const uint8_t *p) {
    return type == K3V_BF16 ? k3v_split_bf16((const uint16_t *)(const void *)p)
                            : k3v_split_f32((const float *)(const void *)p);
}

K3V_INLINE k3v_f k3v_pair_fma(k3v_pair w, k3v_pair x, k3v_f acc) {
    return k3v_fma(w.even, x.even, k3v_fma(w.odd, x.odd, acc));
}

/* The last n < 128 elements of a row and of x, padded so that the absent pairs change nothing. */
typedef struct {
    uint32_t w[K3_CHUNK]; /* 128 elements of the row's type */
    float x[K3_CHUNK];
} k3v_tail;

K3V_INLINE void k3v_pad_weights(int type, k3v_tail *tail, const uint8_t *w, uint32_t n) {
    uint16_t *h = (uint16_t *)(void *)tail->w;
    uint32_t i;
    if (type == K3V_BF16)
        for (i = 0; i < K3_CHUNK; i++) h[i] = 0x8000u;
    else
        for (i = 0; i < K3_CHUNK; i++) tail->w[i] = 0x80000000u;
    __builtin_memcpy(tail->w, w, n * k3v_bytes(type));
}

K3V_INLINE void k3v_pad_x(k3v_tail *tail, const float *x, uint32_t n) {
    __builtin_memset(tail->x, 0, sizeof tail->x);
    __builtin_memcpy(tail->x, x, n * sizeof(float));
}

K3V_INLINE void k3v_finish_tail(int type, k3v_f *acc, const k3v_tail *tail) {
    K3V_UNROLL
    for (int v = 0; v < K3V_PER_ROW; v++)
        acc[v] = k3v_pair_fma(k3v_split(type, (const uint8_t *)tail->w + (uint64_t)v * K3V_STEP * k3v_bytes(type)),
                              k3v_split_f32(tail->x + v * K3V_STEP), acc[v]);
}

/* ---- one token: R rows (or R blocks that share x) side by side ------------------------------------- */

/* How far ahead of byte `at` of a row to prefetch. Four streams side by side reach the end of their rows together,
 * so the bytes that come next are four rows on, not just behind: prefetching those would fetch what a neighbour
 * has read, and every tile would begin with misses. */
typedef struct {
    uint64_t limit, before, after; /* distance before byte `limit` and from it on */
} k3v_ahead;

#define K3V_AHEAD 4096u      /* bytes within a row, where four are walked side by side */
#define K3V_AHEAD_TILE 8192u /* bytes in memory order, and at least this much where rows are short */
/* Into L2 only: x fills most of L1, and weights prefetched there push it out before they are used (on a Zen 4 with
 * 32 KiB that cost a third of the bandwidth at K = 7168 and half at K = 512). */
#define K3V_PREFETCH(p) _mm_prefetch((p), _MM_HINT_T1)

/* For a block that begins `first` bytes into a row of row_bytes, rows ld_bytes apart. */
K3V_INLINE k3v_ahead k3v_ahead_of(uint64_t row_bytes, uint64_t ld_bytes, uint64_t first) {
    const uint64_t tile = 4u * ld_bytes;
    k3v_ahead a;
    a.limit = 0;
    if (K3V_ROWS == 1) {
        a.before = a.after = K3V_AHEAD_TILE; /* one row after the other: memory order */
    } else if (row_bytes <= K3V_AHEAD) {
        a.before = a.after = tile * (1u + K3V_AHEAD_TILE / tile);
    } else {
        a.before = K3V_AHEAD;
        a.after = K3V_AHEAD + tile - row_bytes;
        if (row_bytes > K3V_AHEAD + first) a.limit = row_bytes - K3V_AHEAD - first;
    }
    return a;
}

/* quads[r] = the 16 quad sums of rule 3 over K elements of row r. */
K3V_INLINE void k3v_tile(int type, int R, const uint8_t *const *w, const float *x, uint32_t K, k3v_ahead ahead,
                         k3v_f *quads) {
    k3v_f acc[K3V_ROWS][K3V_PER_ROW];
    uint32_t i = 0;
    K3V_UNROLL
    for (int r = 0; r < R; r++)
        K3V_UNROLL
        for (int v = 0; v < K3V_PER_ROW; v++) acc[r][v] = k3v_zero();
    for (; i + K3_CHUNK <= K; i += K3_CHUNK) {
        const uint64_t next = i * k3v_bytes(type) < ahead.limit ? ahead.before : ahead.after;
        K3V_UNROLL
        for (int v = 0; v < K3V_PER_ROW; v++) {
            const k3v_pair xv = k3v_split_f32(x + i + (uint32_t)v * K3V_STEP);
            K3V_UNROLL
            for (int r = 0; r < R; r++) {
                const uint8_t *p = w[r] + (uint64_t)(i + (uint32_t)v * K3V_STEP) * k3v_bytes(type);
                acc[r][v] = k3v_pair_fma(k3v_split(type, p), xv, acc[r][v]);
                if ((v * K3V_STEP * (int)k3v_bytes(type)) % 64 == 0) K3V_PREFETCH(p + next);
            }
        }
    }
    if (i < K) {
        k3v_tail tail;
        k3v_pad_x(&tail, x + i, K - i);
        K3V_UNROLL
        for (int r = 0; r < R; r++) {
            k3v_pad_weights(type, &tail, w[r] + (uint64_t)i * k3v_bytes(type), K - i);
            k3v_finish_tail(type, acc[r], &tail);
        }
    }
    K3V_UNROLL
    for (int r = 0; r < R; r++) quads[r] = k3v_quads(acc[r]);
}

/* Out of line, one copy each: inlined where they are used, they were most of the object file. */
#define K3V_TILE(name, type, R)                                                                          \
    static __attribute__((noinline)) void name(const uint8_t *const *w, const float *x, uint32_t K,      \
                                               k3v_ahead ahead, k3v_f *quads) {                          \
        k3v_tile(type, R, w, x, K, ahead, quads);                                                        \
    }
K3V_TILE(k3v_tile_bf16, K3V_BF16, K3V_ROWS)
K3V_TILE(k3v_tile_f32, K3V_F32, K3V_ROWS)
#if K3V_ROWS > 1
K3V_TILE(k3v_row_bf16, K3V_BF16, 1)
K3V_TILE(k3v_row_f32, K3V_F32, 1)
#else
#define k3v_row_bf16 k3v_tile_bf16
#define k3v_row_f32 k3v_tile_f32
#endif

/* Four rows (or fewer, n) over one block. */
K3V_INLINE __m128 k3v_four(int type, const uint8_t *const *w, uint32_t n, const float *x, uint32_t K,
                           k3v_ahead ahead) {
    k3v_f quads[4];
    uint32_t r;
    if (n == 4u) {
        for (r = 0; r < 4u; r += K3V_ROWS)
            (type == K3V_BF16 ? k3v_tile_bf16 : k3v_tile_f32)(w + r, x, K, ahead, quads + r);
    } else {
        for (r = 0; r < n; r++) (type == K3V_BF16 ? k3v_row_bf16 : k3v_row_f32)(w + r, x, K, ahead, quads + r);
        for (; r < 4u; r++) quads[r] = quads[0];
    }
    return k3v_fold4(quads[0], quads[1], quads[2], quads[3]);
}

/* Rule 5's tree, four rows at once: d[b] holds block b of four rows. */
K3V_INLINE __m128 k3v_tree4(const __m128 *d, uint32_t n) {
    if (n == 1u) return d[0];
    if (n == 2u) return _mm_add_ps(d[0], d[1]);
    if (n == 4u) return _mm_add_ps(_mm_add_ps(d[0], d[1]), _mm_add_ps(d[2], d[3]));
    return _mm_add_ps(_mm_add_ps(_mm_add_ps(d[0], d[1]), _mm_add_ps(d[2], d[3])),
                      _mm_add_ps(_mm_add_ps(d[4], d[5]), _mm_add_ps(d[6], d[7])));
}

K3V_INLINE void k3v_store_n(float *y, __m128 v, uint32_t n) {
    float four[4];
    if (n == 4u) {
        _mm_storeu_ps(y, v);
        return;
    }
    _mm_storeu_ps(four, v);
    __builtin_memcpy(y, four, n * sizeof(float));
}

/* Block sums that lie by block, token and row (`ldb` floats from a block to the next, `ldt` from a token)
 * to D, where a row's blocks lie together. */
K3V_INLINE void k3v_store_blocks(const float *sums, uint64_t ldb, uint64_t ldt, uint32_t n_tok, uint32_t n_rows, uint32_t nb,
                                 float *D, uint64_t ldd) {
    for (uint32_t t = 0; t < n_tok; t++)
        for (uint32_t i = 0; i < n_rows; i += 4u)
            for (uint32_t b = 0; b < nb; b += 4u) {
                const uint32_t rows = n_rows - i < 4u ? n_rows - i : 4u, here = nb - b < 4u ? nb - b : 4u;
                __m128 v[4];
                for (uint32_t j = 0; j < 4u; j++) v[j] = _mm_loadu_ps(sums + (j < here ? b + j : b) * ldb + t * ldt + i);
                _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
                for (uint32_t j = 0; j < rows; j++) k3v_store_n(D + t * ldd + (uint64_t)(i + j) * nb + b, v[j], here);
            }
}

/* Rows r0 .. r0 + n - 1 (n <= 4) for one token. */
K3V_INLINE void k3v_rows4(int type, const uint8_t *W, uint64_t ldw, uint32_t r0, uint32_t n, uint32_t K,
                          uint32_t n_blocks, const float *x, float *y) {
    const uint32_t B = K / n_blocks;
    __m128 d[8];
    uint32_t b, r;
    for (b = 0; b < n_blocks; b++) {
        const uint8_t *w[4];
        const uint64_t size = k3v_bytes(type);
        const k3v_ahead ahead = k3v_ahead_of(K * size, ldw * size, (uint64_t)b * B * size);
        for (r = 0; r < 4u; r++)
            w[r] = W + ((uint64_t)(r0 + (r < n ? r : 0u)) * ldw + (uint64_t)b * B) * k3v_bytes(type);
        d[b] = k3v_four(type, w, n, x + (uint64_t)b * B, B, ahead);
    }
    k3v_store_n(y, k3v_tree4(d, n_blocks), n);
}

/* ---- one or several tokens ------------------------------------------------------------------------- */

static uint32_t k3v_scores_f32(const float *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K, const float *X,
                               uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy);
static __attribute__((noinline)) void k3v_rows_tokens(const K3Ctx *c, int type, const uint8_t *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                                                      uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                                                      uint32_t n_tok, float *Y, uint64_t ldy);

/* Rule 5's tree over four or eight blocks that lie in the elements of d. */
K3V_INLINE float k3v_tree_across(const __m128 *d, uint32_t n_blocks) {
    const __m128 pairs = _mm_hadd_ps(d[0], d[n_blocks / 4u - 1u]), fours = _mm_hadd_ps(pairs, pairs);
    return n_blocks == 4u ? _mm_cvtss_f32(fours) : _mm_cvtss_f32(_mm_add_ss(fours, _mm_movehdup_ps(fours)));
}

/* Rows of four or eight blocks go one by one, in memory order, while x stays in L1 from row to row. Longer ones (o_proj:
 * 12288) would bring x from L2 as often as the weights, so there four rows share it. */
#define K3V_NEAR 4096u
K3V_INLINE int k3v_goes_by_blocks(uint32_t K, uint32_t n_blocks) { return n_blocks >= 4u && (K3V_ROWS == 1 || K <= K3V_NEAR); }

/* A row of four or eight blocks, which are rows of their own that lie behind each other: in memory order, four reduced
 * together. Four rows side by side would be four streams that jump at every block. */
K3V_INLINE float k3v_row_blocks(int type, const uint8_t *w, uint32_t B, uint32_t n_blocks, const float *x) {
    const k3v_ahead ahead = {0, K3V_AHEAD_TILE, K3V_AHEAD_TILE};
    __m128 d[2];
    for (uint32_t b = 0; b < n_blocks; b += 4u) {
        k3v_f quads[4];
        for (uint32_t u = 0; u < 4u; u++) {
            const uint8_t *at[1] = {w + (uint64_t)(b + u) * B * k3v_bytes(type)};
            (type == K3V_BF16 ? k3v_row_bf16 : k3v_row_f32)(at, x + (uint64_t)(b + u) * B, B, ahead, quads + u);
        }
        d[b / 4u] = k3v_fold4(quads[0], quads[1], quads[2], quads[3]);
    }
    return k3v_tree_across(d, n_blocks);
}

K3V_INLINE void k3v_rows(const K3Ctx *c, int type, const uint8_t *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K,
                         uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    if (n_tok != 1u) {
        k3v_rows_tokens(c, type, W, ldw, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy);
        return;
    }
    if (k3v_goes_by_blocks(K, n_blocks))
        for (uint32_t r = row0; r < row1; r++)
            Y[r] = k3v_row_blocks(type, W + (uint64_t)r * ldw * k3v_bytes(type), K / n_blocks, n_blocks, X);
    else
        for (uint32_t r = row0; r < row1; r += 4u)
            k3v_rows4(type, W, ldw, r, row1 - r < 4u ? row1 - r : 4u, K, n_blocks, X, Y + r);
}

K3_LEAF void k3_rows_dot_bf16(const K3Ctx *c, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                              uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                              float *Y, uint64_t ldy) {
    k3v_rows(c, K3V_BF16, (const uint8_t *)W, ldw, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy);
}

K3_LEAF void k3_rows_dot_f32(const K3Ctx *c, const float *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                             uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok,
                             float *Y, uint64_t ldy) {
    const uint32_t done = n_blocks == 1u ? k3v_scores_f32(W, ldw, row0, row1, K, X, ldx, n_tok, Y, ldy) : 0u;
    if (done < n_tok)
        k3v_rows(c, K3V_F32, (const uint8_t *)W, ldw, row0, row1, K, n_blocks, X + done * ldx, ldx, n_tok - done, Y + done * ldy, ldy);
}

/* ---- single sums ----------------------------------------------------------------------------------- */

K3_LEAF float k3_dot_f32(const K3Ctx *c, const float *a, const float *b, uint32_t K) {
    const uint8_t *w[1];
    const k3v_ahead ahead = {0, 0, 0}; /* one row: nothing comes next */
    k3v_f quads;
    (void)c;
    w[0] = (const uint8_t *)a;
    k3v_row_f32(w, b, K, ahead, &quads);
    return _mm_cvtss_f32(k3v_fold4(quads, quads, quads, quads));
}

K3_LEAF float k3_sum_f32(const K3Ctx *c, const float *a, uint32_t K) {
    k3v_f acc[K3V_PER_ROW], quads;
    uint32_t i = 0;
    float tail[K3_CHUNK];
    (void)c;
    for (int v = 0; v < K3V_PER_ROW; v++) acc[v] = k3v_zero();
    for (; i < K; i += K3_CHUNK) {
        const float *p = a + i;
        if (K - i < K3_CHUNK) { /* pad with -0: +0 would turn a -0 accumulator into +0 */
            for (uint32_t j = 0; j < K3_CHUNK; j++) tail[j] = -0.0f;
            __builtin_memcpy(tail, p, (K - i) * sizeof(float));
            p = tail;
        }
        K3V_UNROLL
        for (int v = 0; v < K3V_PER_ROW; v++) {
            const k3v_pair x = k3v_split_f32(p + v * K3V_STEP);
            acc[v] = k3v_add(k3v_add(acc[v], x.odd), x.even);
        }
    }
    quads = k3v_quads(acc);
    return _mm_cvtss_f32(k3v_fold4(quads, quads, quads, quads));
}

#endif

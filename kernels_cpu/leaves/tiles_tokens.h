/* Several tokens: a block of rows against K3V_TOKS tokens at a time.
 *
 * The lanes of a vector are partial dots of their own, so one pass over vector position v holds K3V_PASS_ROWS x
 * K3V_TOKS accumulators and the positions are walked one after the other. What makes it quick:
 *   - x is split into odd and even once for a block of rows, in the order in which it is read; the part of one
 *     position stays in L1 while all rows of the block pass. Read in place, four tokens a power of two apart would
 *     fall into the same cache sets.
 *   - A block's rows fit L2 and are read from memory once, however many tokens there are.
 * Order of loops changes no bit: every lane still takes its pairs in increasing order. */
#ifndef K3_LEAVES_TILES_TOKENS_H
#define K3_LEAVES_TILES_TOKENS_H

#define K3V_BLOCK_ROWS 64u
#define K3V_BLOCK_ELEMENTS 196608u /* of weights a block holds, where its rows are long */
#define K3V_SEGMENT 2048u          /* elements of x that are split at a time */
#define K3V_SEGMENT_CHUNKS (K3V_SEGMENT / K3_CHUNK)

typedef struct {
    _Alignas(64) float x[K3V_PER_ROW][K3V_SEGMENT_CHUNKS][K3V_TOKS][2][K3V_LANES];
    float part[K3V_BLOCK_ROWS][K3V_TOKS][K3_LANES]; /* accumulators between passes */
    float d[8][K3V_TOKS][K3V_BLOCK_ROWS];           /* sums of rule 5's blocks */
} k3v_tokens;

/* Rows of W, one of rule 5's blocks of each: B elements from w on, rows ld bytes apart; of x from element `first` on. */
typedef struct {
    const uint8_t *w;
    uint64_t ld;
    uint32_t n_rows, first, B;
} k3v_block;

K3V_INLINE void k3v_split_tokens(k3v_tokens *s, const float *const *x, uint32_t at, uint32_t n_chunks, int T) {
    for (int t = 0; t < T; t++)
        for (uint32_t c = 0; c < n_chunks; c++)
            K3V_UNROLL
            for (int v = 0; v < K3V_PER_ROW; v++) {
                const k3v_pair p = k3v_split_f32(x[t] + at + c * K3_CHUNK + (uint32_t)v * K3V_STEP);
                k3v_store(s->x[v][c][t][0], p.odd);
                k3v_store(s->x[v][c][t][1], p.even);
            }
}

/* K3V_PASS_ROWS rows x T tokens at position v, over the chunks of a segment that begins at byte `at` of the rows. */
K3V_INLINE void k3v_pass(int type, int T, int v, const k3v_block *b, uint32_t r0, uint64_t at, uint32_t n_chunks,
                         k3v_tokens *s) {
    const uint64_t step = K3_CHUNK * k3v_bytes(type);
    const uint8_t *w[K3V_PASS_ROWS];
    k3v_f acc[K3V_PASS_ROWS][K3V_TOKS];
    K3V_UNROLL
    for (int r = 0; r < K3V_PASS_ROWS; r++) { /* rows that do not exist repeat the last */
        const uint32_t row = r0 + (uint32_t)r < b->n_rows ? r0 + (uint32_t)r : b->n_rows - 1u;
        w[r] = b->w + row * b->ld + at + (uint64_t)v * K3V_STEP * k3v_bytes(type);
        K3V_UNROLL
        for (int t = 0; t < T; t++) acc[r][t] = at == 0u ? k3v_zero() : k3v_load(&s->part[r0 + (uint32_t)r][t][v * K3V_LANES]);
    }
    for (uint32_t c = 0; c < n_chunks; c++) {
        k3v_pair wv[K3V_PASS_ROWS];
        K3V_UNROLL
        for (int r = 0; r < K3V_PASS_ROWS; r++) wv[r] = k3v_split(type, w[r] + c * step);
        K3V_UNROLL
        for (int t = 0; t < T; t++) {
            const k3v_f odd = k3v_load(s->x[v][c][t][0]), even = k3v_load(s->x[v][c][t][1]);
            K3V_UNROLL
            for (int r = 0; r < K3V_PASS_ROWS; r++) acc[r][t] = k3v_fma(wv[r].even, even, k3v_fma(wv[r].odd, odd, acc[r][t]));
        }
    }
    K3V_UNROLL
    for (int r = 0; r < K3V_PASS_ROWS; r++)
        K3V_UNROLL
        for (int t = 0; t < T; t++) k3v_store(&s->part[r0 + (uint32_t)r][t][v * K3V_LANES], acc[r][t]);
}

K3V_INLINE void k3v_walk(int type, int T, const k3v_block *b, const float *const *x, k3v_tokens *s) {
    const uint32_t whole = b->B / K3_CHUNK;
    for (uint32_t c = 0; c < whole; c += K3V_SEGMENT_CHUNKS) {
        const uint32_t n = whole - c < K3V_SEGMENT_CHUNKS ? whole - c : K3V_SEGMENT_CHUNKS;
        k3v_split_tokens(s, x, b->first + c * K3_CHUNK, n, T);
        for (int v = 0; v < K3V_PER_ROW; v++)
            for (uint32_t r = 0; r < b->n_rows; r += K3V_PASS_ROWS)
                k3v_pass(type, T, v, b, r, (uint64_t)c * K3_CHUNK * k3v_bytes(type), n, s);
    }
}

#define K3V_WALK(name, type, T)                                                                                           \
    static __attribute__((noinline)) void name(const k3v_block *b, const float *const *x, k3v_tokens *s) {                \
        k3v_walk(type, T, b, x, s);                                                                                       \
    }
K3V_WALK(k3v_walk_bf16_2, K3V_BF16, 2)
K3V_WALK(k3v_walk_bf16_3, K3V_BF16, 3)
K3V_WALK(k3v_walk_bf16_4, K3V_BF16, 4)
K3V_WALK(k3v_walk_f32_2, K3V_F32, 2)
K3V_WALK(k3v_walk_f32_3, K3V_F32, 3)
K3V_WALK(k3v_walk_f32_4, K3V_F32, 4)

/* d[t][row] = the sums of rule 3 of one block's rows, T tokens (2 to K3V_TOKS). */
K3V_INLINE void k3v_block_sums(int type, int T, const k3v_block *b, const float *const *x, k3v_tokens *s,
                               float (*d)[K3V_BLOCK_ROWS]) {
    typedef void (*walk)(const k3v_block *, const float *const *, k3v_tokens *);
    static const walk walks[2][3] = {{k3v_walk_bf16_2, k3v_walk_bf16_3, k3v_walk_bf16_4},
                                     {k3v_walk_f32_2, k3v_walk_f32_3, k3v_walk_f32_4}};
    const uint32_t whole = b->B / K3_CHUNK * K3_CHUNK;
    walks[type][T - 2](b, x, s);
    for (int t = 0; t < T; t++) {
        k3v_tail tail;
        if (whole < b->B) k3v_pad_x(&tail, x[t] + b->first + whole, b->B - whole);
        for (uint32_t r = 0; r < b->n_rows; r += 4u) {
            k3v_f quads[4];
            K3V_UNROLL
            for (uint32_t k = 0; k < 4u; k++) {
                const uint32_t row = r + k < b->n_rows ? r + k : b->n_rows - 1u;
                k3v_f acc[K3V_PER_ROW];
                K3V_UNROLL
                for (int v = 0; v < K3V_PER_ROW; v++) acc[v] = whole == 0u ? k3v_zero() : k3v_load(&s->part[row][t][v * K3V_LANES]);
                if (whole < b->B) {
                    k3v_pad_weights(type, &tail, b->w + row * b->ld + whole * k3v_bytes(type), b->B - whole);
                    k3v_finish_tail(type, acc, &tail);
                }
                quads[k] = k3v_quads(acc);
            }
            _mm_storeu_ps(&d[t][r], k3v_fold4(quads[0], quads[1], quads[2], quads[3]));
        }
    }
}

/* Rows [0, n_rows) of W, at most K3V_BLOCK_ROWS, T tokens: all of rule 5's blocks into s->d. */
K3V_INLINE void k3v_rows_sums(int type, int T, const uint8_t *W, uint64_t ldw, uint32_t n_rows, uint32_t K, uint32_t n_blocks,
                              const float *const *x, k3v_tokens *s) {
    const uint32_t B = K / n_blocks;
    for (uint32_t i = 0; i < n_blocks; i++) {
        const k3v_block b = {W + (uint64_t)i * B * k3v_bytes(type), ldw * k3v_bytes(type), n_rows, i * B, B};
        k3v_block_sums(type, T, &b, x, s, s->d[i]);
    }
}

/* Rows of one block, T tokens, with rule 5's tree into y (row 0 of it). */
K3V_INLINE void k3v_rows_tree(int T, uint32_t n_rows, uint32_t n_blocks, const k3v_tokens *s, float *y, uint64_t ldy) {
    for (int t = 0; t < T; t++)
        for (uint32_t r = 0; r < n_rows; r += 4u) {
            __m128 d[8];
            for (uint32_t i = 0; i < n_blocks; i++) d[i] = _mm_loadu_ps(&s->d[i][t][r]);
            k3v_store_n(y + (uint64_t)t * ldy + r, k3v_tree4(d, n_blocks), n_rows - r < 4u ? n_rows - r : 4u);
        }
}

K3V_INLINE uint32_t k3v_block_rows(uint32_t K) {
    const uint32_t n = K3V_BLOCK_ELEMENTS / K / 4u * 4u;
    return n > K3V_BLOCK_ROWS ? K3V_BLOCK_ROWS : n < 8u ? 8u : n;
}

/* Rows [0, n) of w and up to K3V_TOKS tokens x, results at y[t]. */
K3V_INLINE void k3v_rows_few(int type, const uint8_t *w, uint64_t ldw, uint32_t n, uint32_t K, uint32_t n_blocks,
                             const float *const *x, int T, float *y, uint64_t ldy, k3v_tokens *s) {
    if (T == 1) {
        for (uint32_t k = 0; k < n; k += 4u) k3v_rows4(type, w, ldw, k, n - k < 4u ? n - k : 4u, K, n_blocks, x[0], y + k);
        return;
    }
    k3v_rows_sums(type, T, w, ldw, n, K, n_blocks, x, s);
    k3v_rows_tree(T, n, n_blocks, s, y, ldy);
}

static __attribute__((noinline)) void k3v_rows_tokens(const K3Ctx *c, int type, const uint8_t *W, uint64_t ldw, uint32_t row0, uint32_t row1,
                                                      uint32_t K, uint32_t n_blocks, const float *X, uint64_t ldx,
                                                      uint32_t n_tok, float *Y, uint64_t ldy) {
    const uint32_t most = k3v_block_rows(K);
    k3v_tokens s;
    (void)c;
#if K3V_LANES == 16
    const k3p_matrix m = {W, NULL, ldw, K, n_blocks, K / n_blocks, K3P_F32};
    const k3p_result out = {Y + row0, ldy, 0};
    if (type == K3V_BF16 && k3p_takes(&m, n_tok)) {
        k3p_rows(c, &m, row0, row1, X, ldx, NULL, n_tok, &out);
        return;
    }
#endif
    for (uint32_t r = row0; r < row1; r += most) {
        const uint32_t n = row1 - r < most ? row1 - r : most;
        for (uint32_t t = 0; t < n_tok; t += K3V_TOKS) {
            const int T = n_tok - t < K3V_TOKS ? (int)(n_tok - t) : K3V_TOKS;
            const float *x[K3V_TOKS];
            for (int k = 0; k < T; k++) x[k] = X + (uint64_t)(t + (uint32_t)k) * ldx;
            k3v_rows_few(type, W + (uint64_t)r * ldw * k3v_bytes(type), ldw, n, K, n_blocks, x, T, Y + t * ldy + r, ldy, &s);
        }
    }
}

#endif

/* MXFP4 rows in blocks of one chunk times few tokens: an expert's w2 whose width is 1024.
 *
 * A lane has one pair then, so its accumulator lives for one product and no loop needs it again: a quad of all four
 * positions, 16 lanes of 16 rows, is decoded into registers, and each token's sum over them is a tree from its products up.
 * Nothing is kept between positions, where products of longer blocks leave a partial sum of each. The order is panel.h's. */
#ifndef K3_LEAVES_PANEL_ONCE_H
#define K3_LEAVES_PANEL_ONCE_H

/* What comes before is computed before, so that what lives at once fits the registers. */
#define K3P_ORDER(v) __asm__ volatile("" : "+v"(v))

/* A decoded pair: for binary32 its elements apart. */
typedef struct {
    __m512i both;
    k3v_f odd, even;
} k3p_pair;

K3V_INLINE k3p_pair k3p_once_decode(int kind, __m512i codes, uint32_t l, __m512i scale) {
    k3p_pair p = {k3p_decode(codes, l, scale), k3v_zero(), k3v_zero()};
    if (kind == K3P_BF16) return p;
    p.odd = _mm512_castsi512_ps(_mm512_and_si512(p.both, _mm512_set1_epi32((int)0xffff0000u)));
    p.even = _mm512_castsi512_ps(_mm512_slli_epi32(p.both, 16));
    return p;
}

/* Pair l of a position; x: of the quad at that position. */
K3V_INLINE k3v_f k3p_once_lane(int kind, const k3p_pair *pair, const uint8_t *x, int l) {
#ifdef K3_LEAVES_AVX512_BF16
    if (kind == K3P_BF16) return k3v_dp(k3v_zero(), pair[l].both, _mm512_set1_epi32(((const int32_t *)(const void *)x)[l]));
#endif
    const float *p = (const float *)(const void *)x;
    (void)kind;
    return k3v_fma(pair[l].even, k3v_set(p[2 * l]), k3v_fma(pair[l].odd, k3v_set(p[2 * l + 1]), k3v_zero()));
}

K3V_INLINE k3v_f k3p_once_quad(int kind, const k3p_pair *pair, const uint8_t *x) {
    return k3v_add(k3v_add(k3p_once_lane(kind, pair, x, 0), k3p_once_lane(kind, pair, x, 2)),
                   k3v_add(k3p_once_lane(kind, pair, x, 1), k3p_once_lane(kind, pair, x, 3)));
}

/* Bytes from a token's x to the next: a line more than there is, because a power of two apart tokens would share cache sets. */
K3V_INLINE uint64_t k3p_once_ldx(int kind, uint32_t n_blocks) { return n_blocks * K3_CHUNK * k3p_x_bytes(kind) + 64u; }

/* A token's x, block after block on a chunk of its own: each position of a quad is read once, in whatever order. */
K3V_INLINE void k3p_once_pack(int kind, const float *const *x, uint32_t n_tok, uint32_t n_blocks, uint32_t B, uint8_t *out) {
    for (uint32_t t = 0; t < n_tok; t++)
        for (uint32_t b = 0; b < n_blocks; b++) {
            uint8_t *to = out + t * k3p_once_ldx(kind, n_blocks) + (uint64_t)b * K3_CHUNK * k3p_x_bytes(kind);
            const float *from = x[t] + (uint64_t)b * B;
            float tail[K3_CHUNK];
            if (B < K3_CHUNK) { /* not for each chunk: it costs what packing does */
                __builtin_memset(tail, 0, sizeof tail);
                from = __builtin_memcpy(tail, from, B * sizeof(float));
            }
#ifdef K3_LEAVES_AVX512_BF16
            if (kind == K3P_BF16) {
                K3P_UNROLL
                for (uint32_t i = 0; i < 4u; i++) _mm512_store_si512((void *)(to + 64u * i), k3v_pack_bf16(from + 32u * i));
                continue;
            }
#endif
            __builtin_memcpy(to, from, K3_CHUNK * sizeof(float));
        }
}

/* Positions v and v + 2 of quad q for all tokens, and v + 1 and v + 3 where `n` is 2: into sums, or joining what is there. */
K3V_INLINE void k3p_once_positions(int kind, uint32_t v, int n, int is_first, const uint32_t *panel, const uint8_t *x, uint64_t ldx,
                                   uint32_t n_tok, uint32_t q, float (*sums)[K3P_ROWS]) {
    const uint64_t position = 32u * k3p_x_bytes(kind);
    const uint8_t *xq = x + (4u * v + q) * 8u * k3p_x_bytes(kind);
    k3p_pair pair[2][2][4];
    K3P_UNROLL
    for (int i = 0; i < n; i++)
        K3P_UNROLL
        for (int j = 0; j < 2; j++) {
            const uint32_t *w = panel + (v + (uint32_t)(i + 2 * j)) * K3P_CODED;
            const __m512i codes = _mm512_load_si512((const void *)(w + 16u * q));
            const __m512i scale = _mm512_load_si512((const void *)(w + 64));
            K3P_UNROLL
            for (uint32_t l = 0; l < 4u; l++) pair[i][j][l] = k3p_once_decode(kind, codes, l, scale);
        }
    for (uint32_t t = 0; t < n_tok; t++, xq += ldx) {
        k3v_f sum = k3p_once_quad(kind, pair[0][0], xq);
        K3P_ORDER(sum);
        sum = k3v_add(sum, k3p_once_quad(kind, pair[0][1], xq + 2u * position));
        if (n == 2) {
            k3v_f other;
            K3P_ORDER(sum);
            other = k3p_once_quad(kind, pair[1][0], xq + position);
            K3P_ORDER(other);
            other = k3v_add(other, k3p_once_quad(kind, pair[1][1], xq + 3u * position));
            sum = k3v_add(sum, other);
        }
        k3v_store(sums[t], is_first ? sum : k3v_add(k3v_load(sums[t]), sum));
    }
}

/* y[t] of 16 rows of a panel by k3p_panel_coded of one chunk; x: a block's, by k3p_once_pack. Registers hold the decoded pairs of
 * four positions, or of two where their elements are apart. */
K3V_INLINE void k3p_once_of(int kind, const uint32_t *panel, const uint8_t *x, uint64_t ldx, uint32_t n_tok, float *y, uint64_t ldy,
                            k3p_quads sums) {
    for (uint32_t q = 0; q < 4u; q++) {
        if (kind == K3P_BF16) {
            k3p_once_positions(kind, 0, 2, 1, panel, x, ldx, n_tok, q, sums[q]);
        } else {
            k3p_once_positions(kind, 0, 1, 1, panel, x, ldx, n_tok, q, sums[q]);
            k3p_once_positions(kind, 1, 1, 0, panel, x, ldx, n_tok, q, sums[q]);
        }
    }
    for (uint32_t t = 0; t < n_tok; t++)
        k3v_store(y + t * ldy, k3v_add(k3v_add(k3v_load(sums[0][t]), k3v_load(sums[2][t])), k3v_add(k3v_load(sums[1][t]), k3v_load(sums[3][t]))));
}

typedef void (*k3p_once)(const uint32_t *panel, const uint8_t *x, uint64_t ldx, uint32_t n_tok, float *y, uint64_t ldy,
                         k3p_quads sums);
#define K3P_ONCE(name, kind)                                                                                              \
    static __attribute__((noinline)) void name(const uint32_t *panel, const uint8_t *x, uint64_t ldx, uint32_t n_tok, float *y, \
                                               uint64_t ldy, k3p_quads sums) {                                              \
        k3p_once_of(kind, panel, x, ldx, n_tok, y, ldy, sums);                                                                 \
    }
K3P_ONCE(k3p_once_f32, K3P_F32)
#ifdef K3_LEAVES_AVX512_BF16
K3P_ONCE(k3p_once_bf16, K3P_BF16)
static const k3p_once k3p_once_by_kind[2] = {k3p_once_f32, k3p_once_bf16};
#else
static const k3p_once k3p_once_by_kind[2] = {k3p_once_f32, 0};
#endif

#endif

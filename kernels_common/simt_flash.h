/* Pages of latent attention in shared memory: mla_pages and mla_attend of the flash builds, for long contexts. C++.
 *
 * A page of K3 is 590 KB and every head reads all of it twice, for its scores and for its sum of latents. Here
 * K3_FLASH_HEADS heads (a rank's at TP 8) take both readings together: queries and scores lie in shared memory, a team of
 * 16 lanes makes a head's softmax while the others make theirs, and a lane keeps its columns' sums of all heads in
 * registers. Where a chunk of tokens attends head by head, as many tokens of one sequence take the place of heads.
 * The shared memory is taken from the L1 cache, and registers from whatever else is in the loop: hence builds
 * of their own.
 *
 * Bits: those of k3_page_heads (mla_pages.h) and k3_attend_heads, which say what they are. Dots are the leaves' own tile; a maximum is one
 * number in any order, but for zeros of two signs and NaN, which are walked in order; a head's exponentials are added by
 * the lanes that rule 3 gives them to; latents are added position after position.
 * Gated by tests/kernels/test_simt_flash.py on emulated lanes. It has not run on a GPU. */
#ifndef K3_SIMT_FLASH_H
#define K3_SIMT_FLASH_H

#define K3_FLASH_HEADS 12u
#define K3_FLASH_WIDTH 576u /* latent and shared key; wider rows go the ordinary way */
#define K3_FLASH_ROWS 4u    /* latents that a lane has under way a column */
#define K3_FLASH_COLUMNS (512u / K3_BLOCK_LANES)
K3_STATIC_ASSERT(K3_FLASH_HEADS <= K3_N_TEAMS, "a head's softmax has a team of its own");
K3_STATIC_ASSERT(K3_PART_EXTRA == K3_TEAM, "a lane of the team writes each word behind a part");

struct alignas(16) K3FlashTile {
    float q[K3_FLASH_HEADS * K3_FLASH_WIDTH];
    float e[K3_FLASH_HEADS * K3_PAGE_TOKENS]; /* dots, then exponentials */
    float rest[K3_FLASH_HEADS * K3_PART_EXTRA]; /* of a page: maximum and sum */
    float run[K3_FLASH_HEADS * 4u];             /* of the pages so far: K3Running */
    uint32_t n[K3_FLASH_HEADS];                 /* positions that a token sees of the page */
};

/* The block's, the same one for every body. */
K3_FN K3FlashTile &k3_flash_tile() {
    K3_SHARED(K3FlashTile, tile);
    return tile;
}

/* The larger, or a NaN where there is one. */
K3_FN float k3_flash_larger(float a, float b) {
    if (a != a || b != b) return a != a ? a : b;
    return b > a ? b : a;
}

/* A team: what k3_page_weights' walk over n dots ends with. Only reads. */
K3_FN float k3_flash_max(const float *e, uint32_t n, float scale) {
    float m = k3_bits_to_f32(0xff800000u); /* of a lane that has none */
    for (uint32_t i = K3_TEAM_ELEMENTS * (K3_LANE % K3_TEAM); i < n; i += K3_CHUNK)
        for (uint32_t j = i; j < k3_min(i + K3_TEAM_ELEMENTS, n); j++) m = k3_flash_larger(m, e[j] * scale);
    m = k3_flash_larger(m, k3_team_partner<8>(m));
    m = k3_flash_larger(m, k3_team_partner<4>(m));
    m = k3_flash_larger(m, k3_team_partner<2>(m));
    m = k3_flash_larger(m, k3_team_partner<1>(m));
    if (m == m && m != 0.0f) return m;
    m = e[0] * scale; /* which zero, or NaN, depends on the order */
    for (uint32_t i = 1; i < n; i++) m = e[i] * scale > m ? e[i] * scale : m;
    return m;
}

/* A team: dots become exponentials, and the words behind the part are written. */
K3_FN void k3_flash_exp(float *e, uint32_t n, float scale, float m, float *rest) {
    const uint32_t lane = K3_LANE % K3_TEAM;
    float acc[4] = {}, sum;
    for (uint32_t i = K3_TEAM_ELEMENTS * lane; i < n; i += K3_CHUNK) {
        float v[8];
        K3_UNROLL
        for (uint32_t j = 0; j < 8u; j++) {
            v[j] = i + j < n ? k3_exp(e[i + j] * scale - m) : -0.0f;
            if (i + j < n) e[i + j] = v[j];
        }
        k3_quad_add(acc, v);
    }
    sum = k3_team_fold(acc);
    rest[lane] = lane == 0u ? m : lane == 1u ? sum : 0.0f;
}

/* Of this lane's columns, every head's sum over positions in order. Heads that are not there are computed and not kept. */
K3_FN void k3_flash_mix(const float *rows, uint64_t ld, uint32_t n, uint32_t cols, const float *e, uint32_t n_heads, float *y,
                        uint64_t ldy) {
    for (uint32_t first = K3_LANE; first < cols; first += K3_FLASH_COLUMNS * K3_BLOCK_LANES) {
        float acc[K3_FLASH_HEADS][K3_FLASH_COLUMNS] = {};
        const float *at[K3_FLASH_COLUMNS];
        uint32_t i = 0;
        K3_UNROLL
        for (uint32_t v = 0; v < K3_FLASH_COLUMNS; v++) at[v] = rows + k3_min(first + v * K3_BLOCK_LANES, cols - 1u);
        for (; i + K3_FLASH_ROWS <= n; i += K3_FLASH_ROWS) {
            float l[K3_FLASH_ROWS][K3_FLASH_COLUMNS];
            K3_UNROLL
            for (uint32_t r = 0; r < K3_FLASH_ROWS; r++)
                K3_UNROLL
                for (uint32_t v = 0; v < K3_FLASH_COLUMNS; v++) l[r][v] = at[v][(i + r) * ld];
            K3_UNROLL
            for (uint32_t h = 0; h < K3_FLASH_HEADS; h++) {
                uint32_t w[4];
                k3_load4(e + h * K3_PAGE_TOKENS + i, w);
                K3_UNROLL
                for (uint32_t r = 0; r < K3_FLASH_ROWS; r++)
                    K3_UNROLL
                    for (uint32_t v = 0; v < K3_FLASH_COLUMNS; v++) acc[h][v] = k3_fma(k3_bits_to_f32(w[r]), l[r][v], acc[h][v]);
            }
        }
        for (; i < n; i++)
            K3_UNROLL
            for (uint32_t h = 0; h < K3_FLASH_HEADS; h++)
                K3_UNROLL
                for (uint32_t v = 0; v < K3_FLASH_COLUMNS; v++)
                    acc[h][v] = k3_fma(e[h * K3_PAGE_TOKENS + i], at[v][i * ld], acc[h][v]);
        K3_UNROLL
        for (uint32_t h = 0; h < K3_FLASH_HEADS; h++)
            K3_UNROLL
            for (uint32_t v = 0; v < K3_FLASH_COLUMNS; v++)
                if (h < n_heads && first + v * K3_BLOCK_LANES < cols) y[h * ldy + first + v * K3_BLOCK_LANES] = acc[h][v];
    }
}

/* n positions, rows from `rows`, for n_heads <= K3_FLASH_HEADS whose queries and results lie side by side. */
K3_FN void k3_flash_heads(K3Ctx *c, K3FlashTile *tile, const float *rows, uint32_t n, uint32_t n_heads, uint32_t latent,
                          uint32_t width, float scale, const float *q, float *y) {
    const uint32_t part = latent + K3_PART_EXTRA, own = K3_LANE / K3_TEAM;
    float *e = tile->e + (own < n_heads ? own : 0u) * K3_PAGE_TOKENS, m = 0.0f;
    const K3RowsCall<K3MatrixF32> dots = {{rows, width}, 0u, n, width, 1u, tile->q, width, n_heads, tile->e, K3_PAGE_TOKENS, 0};
    K3_FOR(i, 0, n_heads * width) { tile->q[i] = q[i]; }
    K3_SYNC(c);
    if (dots.W.vector(width)) k3_tiles<4, 4, true>(dots);
    else k3_tiles<1, 1, false>(dots);
    K3_SYNC(c);
    if (own < n_heads) m = k3_flash_max(e, n, scale);
    K3_SYNC(c); /* a walk in order reads what other lanes turn into exponentials */
    if (own < n_heads) k3_flash_exp(e, n, scale, m, y + (uint64_t)own * part + latent);
    K3_SYNC(c);
    k3_flash_mix(rows, width, n, latent, tile->e, n_heads, y, part);
    K3_SYNC(c); /* the next heads overwrite the tile */
}

/* The next page for K3_FLASH_HEADS tokens of a sequence: y, latent sums so far, ldy apart, moves on. n_max and n_min are the
 * most and the least positions that any of them sees; who sees none keeps what it has. */
K3_FN void k3_flash_mix_tokens(const float *rows, uint64_t ld, uint32_t n_min, uint32_t n_max, uint32_t cols,
                               const K3FlashTile *tile, int is_first, float *y, uint64_t ldy) {
    K3_FOR(j, 0, cols) {
        float acc[K3_FLASH_HEADS] = {};
        uint32_t i = 0;
        for (; i + K3_FLASH_ROWS <= n_min; i += K3_FLASH_ROWS) {
            float l[K3_FLASH_ROWS];
            K3_UNROLL
            for (uint32_t r = 0; r < K3_FLASH_ROWS; r++) l[r] = rows[(i + r) * ld + j];
            K3_UNROLL
            for (uint32_t h = 0; h < K3_FLASH_HEADS; h++) {
                uint32_t w[4];
                k3_load4(tile->e + h * K3_PAGE_TOKENS + i, w);
                K3_UNROLL
                for (uint32_t r = 0; r < K3_FLASH_ROWS; r++) acc[h] = k3_fma(k3_bits_to_f32(w[r]), l[r], acc[h]);
            }
        }
        for (; i < n_max; i++) {
            const float l = rows[i * ld + j];
            K3_UNROLL
            for (uint32_t h = 0; h < K3_FLASH_HEADS; h++)
                if (i < tile->n[h]) acc[h] = k3_fma(tile->e[h * K3_PAGE_TOKENS + i], l, acc[h]);
        }
        K3_UNROLL
        for (uint32_t h = 0; h < K3_FLASH_HEADS; h++) {
            float *o = y + h * ldy + j;
            if (tile->n[h] != 0u) *o = is_first ? acc[h] : k3_fma(tile->run[4u * h + 3u], acc[h], tile->run[4u * h + 2u] * *o);
        }
    }
}

/* A token's team: its positions of the page, and what they do to the pages so far. */
K3_FN void k3_flash_merge(K3FlashTile *tile, uint32_t own, int is_first) {
    const float *rest = tile->rest + own * K3_PART_EXTRA;
    float *run = tile->run + own * 4u;
    K3Running r = {run[0], run[1], 0.0f, 0.0f};
    r = k3_merge_page(r, rest[0], rest[1], is_first);
    run[0] = r.m, run[1] = r.s, run[2] = r.fa, run[3] = r.fb;
}

/* One head of n_tok <= K3_FLASH_HEADS tokens from t0 on, of one sequence, queries ldq and results ldy apart. */
K3_FN void k3_flash_tokens(K3Ctx *c, K3FlashTile *tile, const float *cache, uint32_t t0, uint32_t n_tok, uint32_t latent,
                           uint32_t width, float scale, const float *q, uint64_t ldq, float *y, uint64_t ldy, int round) {
    const uint32_t own = K3_LANE / K3_TEAM, first = c->step->position[t0] + 1u, end = c->step->position[t0 + n_tok - 1u] + 1u;
    float *e = tile->e + (own < n_tok ? own : 0u) * K3_PAGE_TOKENS;
    for (uint32_t g = 0; g < n_tok; g++) { K3_FOR(i, 0, width) { tile->q[g * width + i] = q[g * ldq + i]; } }
    for (uint32_t from = 0; from < end; from += K3_PAGE_TOKENS) {
        const float *rows = cache + k3_page_row(c, t0, from / K3_PAGE_TOKENS) * width;
        const uint32_t n_max = k3_min(K3_PAGE_TOKENS, end - from);
        /* Positions rise from token to token: who is first sees least. If it sees none of this page, somebody sees one. */
        const uint32_t n_min = first > from ? k3_min(K3_PAGE_TOKENS, first - from) : 0u;
        const K3RowsCall<K3MatrixF32> dots = {{rows, width}, 0u, n_max, width, 1u, tile->q, width, n_tok, tile->e, K3_PAGE_TOKENS, 0};
        K3_FOR(g, 0, K3_FLASH_HEADS) {
            const uint32_t sees = g < n_tok ? c->step->position[t0 + g] + 1u : 0u;
            tile->n[g] = sees > from ? k3_min(K3_PAGE_TOKENS, sees - from) : 0u;
        }
        K3_SYNC(c);
        if (dots.W.vector(width)) k3_tiles<4, 4, true>(dots);
        else k3_tiles<1, 1, false>(dots);
        K3_SYNC(c);
        const uint32_t n = own < n_tok ? tile->n[own] : 0u;
        const float m = n != 0u ? k3_flash_max(e, n, scale) : 0.0f;
        K3_SYNC(c); /* a walk in order reads what other lanes turn into exponentials */
        if (n != 0u) k3_flash_exp(e, n, scale, m, tile->rest + own * K3_PART_EXTRA);
        K3_SYNC(c);
        if (n != 0u && K3_LANE % K3_TEAM == 0u) k3_flash_merge(tile, own, from == 0u);
        K3_SYNC(c);
        k3_flash_mix_tokens(rows, width, n_min, n_max, latent, tile, from == 0u, y, ldy);
        K3_SYNC(c); /* the next page overwrites the tile */
    }
    for (uint32_t g = 0; g < n_tok; g++) {
        const float s = tile->run[4u * g + 1u];
        K3_FOR(j, 0, latent) { y[g * ldy + j] = k3_rnd(y[g * ldy + j] / s, round); }
    }
    K3_SYNC(c); /* the next tokens overwrite the tile */
}

/* How many tokens from t on go together: of one slot, at rising positions. */
K3_FN uint32_t k3_flash_run(const K3Step *step, uint32_t t) {
    uint32_t n = 1u;
    while (n < K3_FLASH_HEADS && t + n < step->n_tokens && step->slot[t + n] == step->slot[t] &&
           step->position[t + n] > step->position[t + n - 1u])
        n++;
    return n;
}

#endif

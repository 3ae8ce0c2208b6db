/* One token's delta rule on one head's state: two walks over it instead of four, columns by columns.
 *
 * Columns of S share nothing, so a strip of two vectors of columns goes through the whole step while it lies in L1. The
 * decayed state is not stored between the walks but made again, by the same product. At most a chunk of rows: a lane of
 * rule 3 then has one pair, and four lanes' eight rows go straight into their quad. */
#ifndef K3_LEAVES_TILES_DELTA_H
#define K3_LEAVES_TILES_DELTA_H

#define K3V_STRIP 2 /* vectors of columns */

typedef struct {
    float *S; /* column of the strip in row 0 */
    const float *q, *k, *decay;
    uint32_t D;
    int first; /* S is +0 */
} k3v_delta;

/* Row i of the strip, decayed; with an update, updated and stored. */
K3V_INLINE void k3v_delta_row(const k3v_delta *d, uint32_t i, const k3v_f *update, k3v_f *s) {
    float *row = d->S + (uint64_t)i * d->D;
    const k3v_f a = k3v_set(d->decay[i]);
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++) s[v] = a * (d->first ? k3v_zero() : k3v_load(row + v * K3V_LANES));
    if (update == 0) return;
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++) {
        s[v] = k3v_fma(k3v_set(d->k[i]), update[v], s[v]);
        k3v_store(row + v * K3V_LANES, s[v]);
    }
}

/* Lane of rows i (even) and i + 1 with x: the odd row first. */
K3V_INLINE void k3v_delta_lane(const k3v_delta *d, uint32_t i, const float *x, const k3v_f *update, k3v_f *acc) {
    k3v_f odd[K3V_STRIP], even[K3V_STRIP];
    k3v_delta_row(d, i + 1u, update, odd);
    k3v_delta_row(d, i, update, even);
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++)
        acc[v] = k3v_fma(even[v], k3v_set(x[i]), k3v_fma(odd[v], k3v_set(x[i + 1u]), k3v_zero()));
}

/* Quad t's sum; of rows that are absent +0, which is what their lanes are. */
K3V_INLINE void k3v_delta_quad(const k3v_delta *d, uint32_t t, const float *x, const k3v_f *update, k3v_f *sum) {
    k3v_f a[4][K3V_STRIP];
    if (8u * t >= d->D) {
        K3V_UNROLL
        for (int v = 0; v < K3V_STRIP; v++) sum[v] = k3v_zero();
        return;
    }
    K3V_UNROLL
    for (uint32_t l = 0; l < 4u; l++) k3v_delta_lane(d, 8u * t + 2u * l, x, update, a[l]);
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++) sum[v] = k3v_add(k3v_add(a[0][v], a[2][v]), k3v_add(a[1][v], a[3][v]));
}

/* Rule 3 over the rows with x: quads t, t + 8, t + 4, t + 12 meet first, for each t < 4. */
K3V_INLINE void k3v_delta_dot(const k3v_delta *d, const float *x, const k3v_f *update, k3v_f *dot) {
    k3v_f s[4][K3V_STRIP];
    for (uint32_t t = 0; t < 4u; t++) {
        k3v_f p[4][K3V_STRIP];
        k3v_delta_quad(d, t, x, update, p[0]);
        k3v_delta_quad(d, t + 8u, x, update, p[1]);
        k3v_delta_quad(d, t + 4u, x, update, p[2]);
        k3v_delta_quad(d, t + 12u, x, update, p[3]);
        K3V_UNROLL
        for (int v = 0; v < K3V_STRIP; v++) s[t][v] = k3v_add(k3v_add(p[0][v], p[1][v]), k3v_add(p[2][v], p[3][v]));
    }
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++) dot[v] = k3v_add(k3v_add(s[0][v], s[2][v]), k3v_add(s[1][v], s[3][v]));
}

K3_LEAF int k3_delta_f32(const K3Ctx *c, float *S, uint32_t D, const float *q, const float *k, const float *v, const float *decay,
                         float beta, int first, float *y) {
    const uint32_t strip = K3V_STRIP * K3V_LANES;
    (void)c;
    if (D % strip != 0u || D > K3_CHUNK) return 0;
    for (uint32_t j = 0; j < D; j += strip) {
        const k3v_delta d = {S + j, q, k, decay, D, first};
        k3v_f dot[K3V_STRIP], update[K3V_STRIP];
        k3v_delta_dot(&d, k, 0, dot);
        K3V_UNROLL
        for (int n = 0; n < K3V_STRIP; n++) update[n] = k3v_set(beta) * (k3v_load(v + j + n * K3V_LANES) - dot[n]);
        k3v_delta_dot(&d, q, update, dot);
        K3V_UNROLL
        for (int n = 0; n < K3V_STRIP; n++) k3v_store(y + j + n * K3V_LANES, dot[n]);
    }
    return 1;
}

/* ---- tokens behind each other ----
 *
 * A strip is carried in a buffer of its own, because rows a power of two apart would share a few sets of L1. What is
 * carried is the state as the next token's decay leaves it: the walk that updates it for one token gives y, then decays
 * and dots it for the next, so that a token costs one walk of four products where k3_delta_f32 has two of five. */

enum { K3V_RUN_IN, K3V_RUN_ON, K3V_RUN_OUT }; /* a walk before the first token, between two, behind the last */

typedef struct {
    float *S; /* column of the strip in row 0 */
    const float *q, *k; /* of the token whose update is made */
    const float *next_k, *next_decay; /* of the token after it */
    k3v_f update[K3V_STRIP];
    uint32_t D;
    int first; /* S is +0 */
    _Alignas(64) float at[K3_CHUNK][K3V_STRIP * K3V_LANES];
} k3v_delta_run;

/* Row i of the strip: with the update, then decayed for the next token. */
K3V_INLINE void k3v_run_row(int walk, k3v_delta_run *d, uint32_t i, k3v_f *updated, k3v_f *decayed) {
    float *row = d->S + (uint64_t)i * d->D;
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++) {
        float *at = d->at[i] + v * K3V_LANES;
        k3v_f s;
        if (walk == K3V_RUN_IN) {
            s = d->first ? k3v_zero() : k3v_load(row + v * K3V_LANES);
        } else {
            s = updated[v] = k3v_fma(k3v_set(d->k[i]), d->update[v], k3v_load(at));
            if (walk == K3V_RUN_OUT) k3v_store(row + v * K3V_LANES, s);
        }
        if (walk == K3V_RUN_OUT) continue;
        decayed[v] = k3v_set(d->next_decay[i]) * s;
        k3v_store(at, decayed[v]);
    }
}

/* Lane of rows i (even) and i + 1, of y and of the next token's prediction: the odd row first. */
K3V_INLINE void k3v_run_lane(int walk, k3v_delta_run *d, uint32_t i, k3v_f (*acc)[K3V_STRIP]) {
    k3v_f odd[2][K3V_STRIP], even[2][K3V_STRIP];
    k3v_run_row(walk, d, i + 1u, odd[0], odd[1]);
    k3v_run_row(walk, d, i, even[0], even[1]);
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++) {
        if (walk != K3V_RUN_IN)
            acc[0][v] = k3v_fma(even[0][v], k3v_set(d->q[i]), k3v_fma(odd[0][v], k3v_set(d->q[i + 1u]), k3v_zero()));
        if (walk != K3V_RUN_OUT)
            acc[1][v] = k3v_fma(even[1][v], k3v_set(d->next_k[i]), k3v_fma(odd[1][v], k3v_set(d->next_k[i + 1u]), k3v_zero()));
    }
}

K3V_INLINE void k3v_run_add(int walk, k3v_f (*a)[K3V_STRIP], k3v_f (*b)[K3V_STRIP]) {
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++) {
        if (walk != K3V_RUN_IN) a[0][v] = k3v_add(a[0][v], b[0][v]);
        if (walk != K3V_RUN_OUT) a[1][v] = k3v_add(a[1][v], b[1][v]);
    }
}

/* Quad t's sums; of rows that are absent +0. */
K3V_INLINE void k3v_run_quad(int walk, k3v_delta_run *d, uint32_t t, k3v_f (*sum)[K3V_STRIP]) {
    k3v_f a[3][2][K3V_STRIP];
    if (8u * t >= d->D) {
        K3V_UNROLL
        for (int v = 0; v < K3V_STRIP; v++) sum[0][v] = sum[1][v] = k3v_zero();
        return;
    }
    k3v_run_lane(walk, d, 8u * t, sum);
    k3v_run_lane(walk, d, 8u * t + 4u, a[0]);
    k3v_run_add(walk, sum, a[0]);
    k3v_run_lane(walk, d, 8u * t + 2u, a[1]);
    k3v_run_lane(walk, d, 8u * t + 6u, a[2]);
    k3v_run_add(walk, a[1], a[2]);
    k3v_run_add(walk, sum, a[1]);
}

/* A walk over the strip: y in dot[0], what the next token predicts in dot[1]. */
K3V_INLINE void k3v_run_walk(int walk, k3v_delta_run *d, k3v_f (*dot)[K3V_STRIP]) {
    k3v_f s[4][2][K3V_STRIP];
    for (uint32_t t = 0; t < 4u; t++) {
        k3v_f p[3][2][K3V_STRIP];
        k3v_run_quad(walk, d, t, s[t]);
        k3v_run_quad(walk, d, t + 8u, p[0]);
        k3v_run_add(walk, s[t], p[0]);
        k3v_run_quad(walk, d, t + 4u, p[1]);
        k3v_run_quad(walk, d, t + 12u, p[2]);
        k3v_run_add(walk, p[1], p[2]);
        k3v_run_add(walk, s[t], p[1]);
    }
    k3v_run_add(walk, s[0], s[2]);
    k3v_run_add(walk, s[1], s[3]);
    k3v_run_add(walk, s[0], s[1]);
    K3V_UNROLL
    for (int v = 0; v < K3V_STRIP; v++) dot[0][v] = s[0][0][v], dot[1][v] = s[0][1][v];
}

static __attribute__((noinline)) void k3v_run_in(k3v_delta_run *d, k3v_f (*dot)[K3V_STRIP]) { k3v_run_walk(K3V_RUN_IN, d, dot); }
static __attribute__((noinline)) void k3v_run_on(k3v_delta_run *d, k3v_f (*dot)[K3V_STRIP]) { k3v_run_walk(K3V_RUN_ON, d, dot); }
static __attribute__((noinline)) void k3v_run_out(k3v_delta_run *d, k3v_f (*dot)[K3V_STRIP]) { k3v_run_walk(K3V_RUN_OUT, d, dot); }

K3_LEAF int k3_delta_tokens_f32(const K3Ctx *c, float *S, uint32_t D, uint32_t n_tok, const float *q, const float *k,
                                const float *decay, uint64_t ldq, const float *v, uint64_t ldv, const float *beta, int first,
                                float *y, uint64_t ldy) {
    const uint32_t strip = K3V_STRIP * K3V_LANES;
    (void)c;
    if (D % strip != 0u || D > K3_CHUNK) return 0;
    for (uint32_t j = 0; j < D; j += strip) {
        k3v_delta_run d;
        k3v_f dot[2][K3V_STRIP];
        d.S = S + j;
        d.D = D;
        d.first = first;
        d.next_k = k;
        d.next_decay = decay;
        k3v_run_in(&d, dot);
        for (uint32_t t = 0; t < n_tok; t++) {
            d.q = q + t * ldq;
            d.k = k + t * ldq;
            d.next_k = d.k + ldq;
            d.next_decay = decay + (t + 1u) * ldq;
            K3V_UNROLL
            for (int n = 0; n < K3V_STRIP; n++)
                d.update[n] = k3v_set(beta[t]) * (k3v_load(v + t * ldv + j + n * K3V_LANES) - dot[1][n]);
            (t + 1u < n_tok ? k3v_run_on : k3v_run_out)(&d, dot);
            K3V_UNROLL
            for (int n = 0; n < K3V_STRIP; n++) k3v_store(y + t * ldy + j + n * K3V_LANES, dot[0][n]);
        }
    }
    return 1;
}

#endif

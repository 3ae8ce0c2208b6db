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

#endif

/* Weighted sums of rows, several mixes of the same rows side by side: a row is read once for K3V_MIXES of them, and the
 * sums stay in registers from the first row to the last. */
#ifndef K3_LEAVES_TILES_MIX_H
#define K3_LEAVES_TILES_MIX_H

#if K3V_LANES == 16
#define K3V_MIXES 4
#else
#define K3V_MIXES 2
#endif

typedef struct {
    const float *rows, *E;
    uint64_t ld, lde, ldy;
    uint32_t n;
} k3v_mix;

/* M mixes of V vectors of columns. */
K3V_INLINE void k3v_mix_tile(int M, int V, const k3v_mix *m, const float *rows, const float *E, float *Y) {
    k3v_f acc[K3V_MIXES][4];
    K3V_UNROLL
    for (int h = 0; h < M; h++)
        K3V_UNROLL
        for (int v = 0; v < V; v++) acc[h][v] = k3v_zero();
    for (uint32_t i = 0; i < m->n; i++) {
        k3v_f r[4];
        K3V_UNROLL
        for (int v = 0; v < V; v++) r[v] = k3v_load(rows + i * m->ld + (uint32_t)v * K3V_LANES);
        K3V_UNROLL
        for (int h = 0; h < M; h++) {
            const k3v_f e = k3v_set(E[(uint32_t)h * m->lde + i]);
            K3V_UNROLL
            for (int v = 0; v < V; v++) acc[h][v] = k3v_fma(e, r[v], acc[h][v]);
        }
    }
    K3V_UNROLL
    for (int h = 0; h < M; h++)
        K3V_UNROLL
        for (int v = 0; v < V; v++) k3v_store(Y + (uint32_t)h * m->ldy + (uint32_t)v * K3V_LANES, acc[h][v]);
}

K3V_INLINE void k3v_mix_columns(int M, const k3v_mix *m, const float *E, uint32_t cols, float *Y) {
    uint32_t j = 0;
    for (; j + 4u * K3V_LANES <= cols; j += 4u * K3V_LANES) k3v_mix_tile(M, 4, m, m->rows + j, E, Y + j);
    for (; j + K3V_LANES <= cols; j += K3V_LANES) k3v_mix_tile(M, 1, m, m->rows + j, E, Y + j);
    for (; j < cols; j++)
        for (int h = 0; h < M; h++) {
            float acc = 0.0f;
            for (uint32_t i = 0; i < m->n; i++) acc = k3_fma(E[(uint32_t)h * m->lde + i], m->rows[i * m->ld + j], acc);
            Y[(uint32_t)h * m->ldy + j] = acc;
        }
}

K3_LEAF void k3_mix_rows_f32(const K3Ctx *c, const float *rows, uint64_t ld, uint32_t n, uint32_t cols, const float *E,
                             uint64_t lde, uint32_t n_mix, float *Y, uint64_t ldy) {
    const k3v_mix m = {rows, E, ld, lde, ldy, n};
    uint32_t h = 0;
    (void)c;
    for (; h + K3V_MIXES <= n_mix; h += K3V_MIXES) k3v_mix_columns(K3V_MIXES, &m, E + h * lde, cols, Y + h * ldy);
    for (; h < n_mix; h++) k3v_mix_columns(1, &m, E + h * lde, cols, Y + h * ldy);
}

#endif

/* Column leaves: y[j] = rule 3 over i of M[i][j] x[i], several columns a vector.
 *
 * A column's 64 lanes never exist together: four of them make a quad, and 16 vectors of quads are halved. */
#ifndef K3_LEAVES_TILES_COLUMNS_H
#define K3_LEAVES_TILES_COLUMNS_H

typedef struct {
    const uint8_t *m; /* column j of row 0 */
    uint64_t ld;      /* elements */
    uint32_t n;
    const float *x;
} k3v_columns;

K3V_INLINE k3v_f k3v_column_load(int type, const k3v_columns *s, uint32_t i) {
    const uint8_t *p = s->m + (uint64_t)i * s->ld * k3v_bytes(type);
    return type == K3V_BF16 ? k3v_load_bf16((const uint16_t *)(const void *)p)
                            : k3v_load((const float *)(const void *)p);
}

/* Lane `lane` of every column: its pairs are lane, lane + 64, ... */
K3V_INLINE k3v_f k3v_column_lane(int type, const k3v_columns *s, uint32_t lane) {
    k3v_f acc = k3v_zero();
    for (uint32_t even = 2u * lane; even < s->n; even += K3_CHUNK) {
        if (even + 1u < s->n) acc = k3v_fma(k3v_column_load(type, s, even + 1u), k3v_set(s->x[even + 1u]), acc);
        acc = k3v_fma(k3v_column_load(type, s, even), k3v_set(s->x[even]), acc);
    }
    return acc;
}

K3V_INLINE k3v_f k3v_column_quad(int type, const k3v_columns *s, uint32_t q) {
    const k3v_f a0 = k3v_column_lane(type, s, 4u * q), a1 = k3v_column_lane(type, s, 4u * q + 1u);
    const k3v_f a2 = k3v_column_lane(type, s, 4u * q + 2u), a3 = k3v_column_lane(type, s, 4u * q + 3u);
    return k3v_add(k3v_add(a0, a2), k3v_add(a1, a3));
}

K3V_INLINE k3v_f k3v_column_dot(int type, const k3v_columns *s) {
    k3v_f q[16];
    for (uint32_t t = 0; t < 16u; t++) q[t] = k3v_column_quad(type, s, t);
    K3V_UNROLL
    for (int half = 8; half >= 1; half >>= 1)
        for (int t = 0; t < half; t++) q[t] = k3v_add(q[t], q[t + half]);
    return q[0];
}

/* The last vector overlaps the one before instead of being masked: the same bits are stored twice. */
#define K3V_COLUMNS(TYPE, SCALAR)                                                                     \
    uint32_t j;                                                                                       \
    (void)c;                                                                                          \
    if (col1 - col0 < K3V_LANES) {                                                                    \
        for (j = col0; j < col1; j++) y[j] = SCALAR(M, ld, n, j, x);                                  \
        return;                                                                                       \
    }                                                                                                 \
    for (j = col0; j < col1; j += K3V_LANES) {                                                        \
        const uint32_t at = col1 - j < K3V_LANES ? col1 - K3V_LANES : j;                              \
        const k3v_columns s = {(const uint8_t *)(M + at), ld, n, x};                                  \
        k3v_store(y + at, k3v_column_dot(TYPE, &s));                                                  \
    }

K3_LEAF void k3_cols_dot_f32(const K3Ctx *c, const float *M, uint64_t ld, uint32_t n, uint32_t col0,
                             uint32_t col1, const float *x, float *y) {
    K3V_COLUMNS(K3V_F32, k3_scalar_col_f32)
}

K3_LEAF void k3_cols_dot_bf16(const K3Ctx *c, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t col0,
                              uint32_t col1, const float *x, float *y) {
    K3V_COLUMNS(K3V_BF16, k3_scalar_col_bf16)
}

#endif

/* kernels_common/simt_leaves.h with emulated lanes, under the export names of tests/kernels/shim.c, so that one
 * set of tests serves both. Where that file takes a rounding mode, this one takes an order of lanes. */
#include "run_block.h"

#include "../../../kernels_common/simt_leaves.h"

/* A scalar result: every lane must get the same bits. */
template <class Body>
static float run_scalar(uint32_t order, Body body) {
    static float got[K3_HOST_LANES];
    run_block(order, [&] { got[K3_LANE] = body(); });
    for (uint32_t l = 1; l < K3_HOST_LANES; l++)
        if (k3_f32_to_bits(got[l]) != k3_f32_to_bits(got[0]) && got[0] == got[0]) k3_host_fail("lanes got different sums");
    return got[0];
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void t_rows_bf16(uint32_t order, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K,
                        uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    run_block(order, [&] { k3_rows_dot_bf16(0, W, ldw, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy); });
}
EXPORT void t_rows_f32(uint32_t order, const float *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K,
                       uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    run_block(order, [&] { k3_rows_dot_f32(0, W, ldw, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy); });
}
EXPORT void t_rows_mxfp4(uint32_t order, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1, uint32_t K,
                         uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    run_block(order, [&] { k3_rows_dot_mxfp4(0, W, S, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy); });
}
EXPORT void t_blocks_mxfp4(uint32_t order, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1, uint32_t K,
                           uint32_t n_blocks, const float *X, float *D) {
    run_block(order, [&] { k3_rows_blocks_mxfp4(0, W, S, row0, row1, K, n_blocks, X, D); });
}
EXPORT void t_cols_f32(uint32_t order, const float *M, uint64_t ld, uint32_t n, uint32_t col0, uint32_t col1,
                       const float *x, float *y) {
    run_block(order, [&] { k3_cols_dot_f32(0, M, ld, n, col0, col1, x, y); });
}
EXPORT void t_cols_bf16(uint32_t order, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t col0, uint32_t col1,
                        const float *x, float *y) {
    run_block(order, [&] { k3_cols_dot_bf16(0, M, ld, n, col0, col1, x, y); });
}
EXPORT void t_dot_f32(uint32_t order, const float *a, const float *b, uint32_t K, float *y) {
    y[0] = run_scalar(order, [&] { return k3_dot_f32(0, a, b, K); });
}
EXPORT void t_sum_f32(uint32_t order, const float *a, uint32_t K, float *y) {
    y[0] = run_scalar(order, [&] { return k3_sum_f32(0, a, K); });
}
EXPORT void t_axis_dot(uint32_t order, const float *a, const float *b, uint32_t K, float *y) {
    y[0] = run_scalar(order, [&] { return k3_axis_dot(0, a, b, K); });
}
EXPORT uint32_t t_contract_mxcsr(void) { return K3_HOST_FORWARD; }

/* ---- negative controls: what a wrong block program does here --------------------------------------- */

EXPORT void barrier_in_a_branch(void) {
    run_block(K3_HOST_FORWARD, [&] { if (K3_LANE != 3u) k3_host_barrier(); });
}
EXPORT void exchange_in_a_branch(void) {
    run_block(K3_HOST_FORWARD, [&] { if (K3_LANE != 3u) k3_team_partner<8>(1.0f); });
}
EXPORT void misaligned_load(const char *p) {
    run_block(K3_HOST_FORWARD, [&] { uint32_t w[4]; k3_load4(p + 4, w); });
}
/* Scale x by its own sum, in place: every team must have summed before any writes. */
EXPORT void scale_in_place(uint32_t order, float *x, uint32_t n, uint32_t with_barrier) {
    run_block(order, [&] {
        const float sum = k3_sum_f32(0, x, n);
        if (with_barrier) k3_host_barrier();
        K3_FOR(i, 0, n) { x[i] = x[i] * sum; }
    });
}
/* z = x reversed through y, where a barrier between is needed. */
EXPORT void reverse(uint32_t order, const float *x, float *y, float *z, uint32_t n, uint32_t with_barrier) {
    run_block(order, [&] {
        K3_FOR(i, 0, n) { y[i] = x[i]; }
        if (with_barrier) k3_host_barrier();
        K3_FOR(i, 0, n) { z[i] = y[n - 1u - i]; }
    });
}

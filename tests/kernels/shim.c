/* Exports the leaves and the mathematics of one compilation to ctypes. The first argument is the MXCSR value
 * to run under, so that a test can also show what happens without flushing. */
#include <xmmintrin.h>

#include "ftz.h"
#include "k3_math.h"
#include "leaves/select.h"

#define EXPORT __attribute__((visibility("default"), noinline))
#define UNDER(csr, call)                   \
    const uint32_t before_ = _mm_getcsr(); \
    _mm_setcsr(csr);                       \
    call;                                  \
    _mm_setcsr(before_);

/* What a leaf set has twice: for any x, and (_x16) for x that bf16 holds. */
#define EXPORT_ROWS(X16)                                                                                                       \
    EXPORT void t_rows_bf16##X16(uint32_t csr, const uint16_t *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K,      \
                                 uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {    \
        UNDER(csr, k3_rows_dot_bf16##X16(0, W, ldw, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy))                           \
    }                                                                                                                          \
    EXPORT void t_rows_mxfp4##X16(uint32_t csr, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1, uint32_t K,  \
                                  uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {   \
        UNDER(csr, k3_rows_dot_mxfp4##X16(0, W, S, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy))                            \
    }                                                                                                                          \
    EXPORT void t_blocks_mxfp4##X16(uint32_t csr, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,            \
                                    uint32_t K, uint32_t n_blocks, const float *X, float *D) {                                 \
        UNDER(csr, k3_rows_blocks_mxfp4##X16(0, W, S, row0, row1, K, n_blocks, X, D))                                          \
    }                                                                                                                          \
    EXPORT void t_rows_mxfp4_at##X16(uint32_t csr, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,           \
                                     uint32_t K, const float *X, const uint32_t *at, uint32_t n_tok, float *Y, uint64_t ldy) { \
        UNDER(csr, k3_rows_dot_mxfp4_at##X16(0, W, S, row0, row1, K, X, at, n_tok, Y, ldy))                                    \
    }                                                                                                                          \
    EXPORT void t_blocks_mxfp4_at##X16(uint32_t csr, const uint8_t *W, const uint8_t *S, uint32_t row0, uint32_t row1,         \
                                       uint32_t K, uint32_t n_blocks, const float *X, const uint32_t *at, uint32_t n_tok,      \
                                       float *D, uint64_t ldd) {                                                               \
        UNDER(csr, k3_rows_blocks_mxfp4_at##X16(0, W, S, row0, row1, K, n_blocks, X, at, n_tok, D, ldd))                       \
    }
EXPORT_ROWS()
EXPORT_ROWS(_x16)

EXPORT void t_rows_f32(uint32_t csr, const float *W, uint64_t ldw, uint32_t row0, uint32_t row1, uint32_t K,
                       uint32_t n_blocks, const float *X, uint64_t ldx, uint32_t n_tok, float *Y, uint64_t ldy) {
    UNDER(csr, k3_rows_dot_f32(0, W, ldw, row0, row1, K, n_blocks, X, ldx, n_tok, Y, ldy))
}
EXPORT void t_cols_f32(uint32_t csr, const float *M, uint64_t ld, uint32_t n, uint32_t col0, uint32_t col1,
                       const float *x, float *y) {
    UNDER(csr, k3_cols_dot_f32(0, M, ld, n, col0, col1, x, y))
}
EXPORT void t_cols_bf16(uint32_t csr, const uint16_t *M, uint64_t ld, uint32_t n, uint32_t col0, uint32_t col1,
                        const float *x, float *y) {
    UNDER(csr, k3_cols_dot_bf16(0, M, ld, n, col0, col1, x, y))
}
EXPORT void t_mix_f32(uint32_t csr, const float *rows, uint64_t ld, uint32_t n, uint32_t cols, const float *E, uint64_t lde,
                      uint32_t n_mix, float *Y, uint64_t ldy) {
    UNDER(csr, k3_mix_rows_f32(0, rows, ld, n, cols, E, lde, n_mix, Y, ldy))
}
EXPORT void t_dot_f32(uint32_t csr, const float *a, const float *b, uint32_t K, float *y) {
    UNDER(csr, y[0] = k3_dot_f32(0, a, b, K))
}
EXPORT void t_sum_f32(uint32_t csr, const float *a, uint32_t K, float *y) { UNDER(csr, y[0] = k3_sum_f32(0, a, K)) }

static __attribute__((noinline)) float axis_dot(const float *a, const float *b, uint32_t K) {
    return k3_axis_dot(0, a, b, K);
}
EXPORT void t_axis_dot(uint32_t csr, const float *a, const float *b, uint32_t K, float *y) {
    UNDER(csr, y[0] = axis_dot(a, b, K))
}

#define MAP(name, expression)                                                                                 \
    static __attribute__((noinline)) void name##_loop(const float *K3_RESTRICT x, const float *K3_RESTRICT u, \
                                                      float *K3_RESTRICT y, uint32_t n) {                     \
        (void)u;                                                                                              \
        for (uint32_t i = 0; i < n; i++) y[i] = expression;                                                   \
    }                                                                                                         \
    EXPORT void t_##name(uint32_t csr, const float *x, const float *u, float *y, uint32_t n) {                \
        UNDER(csr, name##_loop(x, u, y, n))                                                                   \
    }
MAP(exp, k3_exp(x[i]))
MAP(tanh, k3_tanh(x[i]))
MAP(sigmoid, k3_sigmoid(x[i]))
MAP(silu, k3_silu(x[i]))
MAP(sqrt, k3_sqrt(x[i]))
MAP(div, x[i] / u[i])
MAP(softcap, k3_softcap(x[i], 25.0f))
MAP(situ, k3_situ(x[i], u[i], 4.0f, 25.0f))
MAP(bf16, k3_bf16_to_f32(k3_f32_to_bf16(x[i])))
MAP(mxfp4, k3_mxfp4_value((uint32_t)x[i], (uint32_t)u[i]))

EXPORT int t_canary(uint32_t csr) {
    int r;
    UNDER(csr, r = k3_canary_ftz())
    return r;
}
EXPORT uint32_t t_contract_mxcsr(void) { return K3_MXCSR; }

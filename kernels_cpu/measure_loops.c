/* What `k3-cpu --measure` runs beside the leaves: reading memory, and a peer's order of summation. Compiled once for
 * each leaf set, so that loads are as wide as the set's (K3_MEASURE_NAME is the name of the table). */
#include "measure.h"

#include "leaves/select.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

#define K3_VECTOR_BYTES 64u

typedef uint64_t vector __attribute__((vector_size(K3_VECTOR_BYTES)));

/* ---- read bandwidth -------------------------------------------------------------------------------- */

#define K3_READ_AHEAD 8192u

/* Exclusive or of all words of [p, p + bytes), bytes a multiple of 4096: `n` streams side by side, each through its
 * own part. Nothing but loads that no compiler may leave out. */
static inline __attribute__((always_inline)) uint64_t read_streams(const char *p, uint64_t bytes, uint32_t n, int ahead) {
    const uint64_t part = bytes / n;
    vector sum[4] = {{0}};
    for (uint64_t at = 0; at < part; at += 4u * K3_VECTOR_BYTES / n) {
        for (uint32_t i = 0; i < 4u; i++) {
            const char *line = p + at + (n == 1u ? i * K3_VECTOR_BYTES : i * part);
            if (ahead) __builtin_prefetch(line + K3_READ_AHEAD, 0, 3);
            sum[i] ^= *(const vector *)(const void *)line;
        }
    }
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    uint64_t out = 0;
    for (uint32_t i = 0; i < K3_VECTOR_BYTES / 8u; i++) out ^= sum[0][i];
    return out;
}

static uint64_t read_memory(const char *p, uint64_t bytes, uint32_t n_streams, int ahead) {
    if (n_streams == 1u) return ahead ? read_streams(p, bytes, 1u, 1) : read_streams(p, bytes, 1u, 0);
    return ahead ? read_streams(p, bytes, 4u, 1) : read_streams(p, bytes, 4u, 0);
}

/* ---- fused multiply-adds --------------------------------------------------------------------------- */

/* What the vectors of the leaf set can do at most: nothing is read, nothing waits for its neighbour. */
#define K3_FMA_CHAINS 12u

#if defined(__AVX512F__)
typedef __m512 fma_vector;
#define FMA_LANES 16u
#define FMA_SET(x) _mm512_set1_ps(x)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(__FMA__)
typedef __m256 fma_vector;
#define FMA_LANES 8u
#define FMA_SET(x) _mm256_set1_ps(x)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#else
typedef float fma_vector;
#define FMA_LANES 1u
#define FMA_SET(x) (x)
#define FMA(a, b, c) k3_fma(a, b, c)
#endif

static uint64_t fma_peak(uint64_t rounds, float *sink) {
    fma_vector acc[K3_FMA_CHAINS], a = FMA_SET(0.999f);
    float out[K3_FMA_CHAINS * FMA_LANES];
    for (uint32_t i = 0; i < K3_FMA_CHAINS; i++) acc[i] = FMA_SET((float)i);
    for (uint64_t n = 0; n < rounds; n++) {
        __asm__ volatile("" : "+x"(a)); /* or rounds might be joined */
        _Pragma("GCC unroll 16") for (uint32_t i = 0; i < K3_FMA_CHAINS; i++) acc[i] = FMA(acc[i], a, a);
    }
    __builtin_memcpy(out, acc, sizeof acc);
    for (uint32_t i = 0; i < K3_FMA_CHAINS * FMA_LANES; i++) *sink += out[i];
    return rounds * K3_FMA_CHAINS * FMA_LANES;
}

/* ---- a peer's order: 16 double lanes ---------------------------------------------------------------- */

/* Element i goes to lane i mod 16 by a double fma; lanes are added in fours, then pairs; one rounding to binary32 at
 * the end. The C engine that this project starts from sums like this (its blocks and experts apart). */
#define K3_PEER_LANES 16u

static float peer_fold(const double *lane) {
    double four[4];
    for (uint32_t i = 0; i < 4u; i++) four[i] = (lane[i] + lane[i + 4u]) + (lane[i + 8u] + lane[i + 12u]);
    return (float)((four[0] + four[1]) + (four[2] + four[3]));
}

static void peer_bf16(const uint16_t *W, uint32_t n_rows, uint32_t K, const double *x, float *y) {
    for (uint32_t r = 0; r < n_rows; r++) {
        const uint16_t *w = W + (uint64_t)r * K;
        double lane[K3_PEER_LANES] = {0};
        for (uint32_t i = 0; i + K3_PEER_LANES <= K; i += K3_PEER_LANES)
            for (uint32_t l = 0; l < K3_PEER_LANES; l++)
                lane[l] = __builtin_fma((double)k3_bits_to_f32((uint32_t)w[i + l] << 16), x[i + l], lane[l]);
        y[r] = peer_fold(lane);
    }
}

/* The scale is folded into a table of 16 values once a group. */
static void peer_mxfp4(const uint8_t *W, const uint8_t *S, uint32_t n_rows, uint32_t K, const double *x, float *y) {
    for (uint32_t r = 0; r < n_rows; r++) {
        const uint8_t *w = W + (uint64_t)r * (K / 2u), *s = S + (uint64_t)r * (K / K3_MX_GROUP);
        double lane[K3_PEER_LANES] = {0};
        for (uint32_t g = 0; g < K / K3_MX_GROUP; g++) {
            double value[16];
            for (uint32_t code = 0; code < 16u; code++) value[code] = (double)k3_mxfp4_value(code, s[g]);
            for (uint32_t i = 0; i < K3_MX_GROUP; i += K3_PEER_LANES)
                for (uint32_t l = 0; l < K3_PEER_LANES; l++) {
                    const uint32_t byte = w[g * 16u + (i + l) / 2u], code = l % 2u ? byte >> 4 : byte & 15u;
                    lane[l] = __builtin_fma(value[code], x[g * K3_MX_GROUP + i + l], lane[l]);
                }
        }
        y[r] = peer_fold(lane);
    }
}

const K3MeasureLoops K3_MEASURE_NAME = {
    .read = read_memory, .fma = fma_peak, .peer_bf16 = peer_bf16, .peer_mxfp4 = peer_mxfp4};

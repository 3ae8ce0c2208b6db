/* What vdpbf16ps can do at most: as fma_peak of measure_loops.c, two fused multiply-adds a lane. Only `--measure` asks. */
#ifndef K3_LEAVES_DPBF16_PEAK_H
#define K3_LEAVES_DPBF16_PEAK_H

#include <immintrin.h>

#define K3_PAIR_CHAINS 12u

static uint64_t k3_dpbf16_peak(uint64_t rounds, float *sink) {
    __m512 acc[K3_PAIR_CHAINS];
    __m512i a = _mm512_set1_epi32(0x3f7f3f00);
    for (uint32_t i = 0; i < K3_PAIR_CHAINS; i++) acc[i] = _mm512_set1_ps((float)i);
    for (uint64_t n = 0; n < rounds; n++) {
        __asm__ volatile("" : "+v"(a)); /* or rounds might be joined */
        _Pragma("GCC unroll 16") for (uint32_t i = 0; i < K3_PAIR_CHAINS; i++) acc[i] = k3v_dp(acc[i], a, a);
    }
    for (uint32_t i = 0; i < K3_PAIR_CHAINS; i++) *sink += _mm512_cvtss_f32(acc[i]);
    return rounds * K3_PAIR_CHAINS * 32u;
}

#endif

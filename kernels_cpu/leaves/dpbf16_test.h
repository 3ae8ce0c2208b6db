/* Does vdpbf16ps of this CPU do what rule 3 says: fma of the odd elements, then fma of the even ones, subnormals
 * flushed in and out? Manuals describe it in pseudocode that leaves room; so every process asks before it uses it. */
#ifndef K3_LEAVES_DPBF16_TEST_H
#define K3_LEAVES_DPBF16_TEST_H

#include <immintrin.h>

#include "ftz.h"

#define K3_DPBF16_ROUNDS 2048u /* vectors of 16 lanes; under a millisecond */

/* The negative control of the test, and of who has to fall back, turns the order round. */
#ifdef K3_CONTROL_EVEN_FIRST
#define K3_DPBF16_FIRST even
#define K3_DPBF16_SECOND odd
#else
#define K3_DPBF16_FIRST odd
#define K3_DPBF16_SECOND even
#endif

static uint32_t k3_dpbf16_random(uint32_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

/* Any sign and mantissa, an exponent in [low, low + span). */
static uint32_t k3_dpbf16_value(uint32_t *state, uint32_t low, uint32_t span) {
    const uint32_t bits = k3_dpbf16_random(state), exponent = low + (k3_dpbf16_random(state) >> 8) % span;
    return (bits & 0x807fffffu) | exponent << 23;
}

/* Round `round`'s operands. In turn: products near the accumulator; at the underflow border; that cancel; all. */
static void k3_dpbf16_operands(uint32_t *state, uint32_t round, uint32_t *w, uint32_t *x, uint32_t *acc) {
    static const uint32_t LOW[4][2] = {{118, 120}, {58, 0}, {127, 127}, {0, 0}}, SPAN[4][2] = {{16, 24}, {12, 4}, {1, 2}, {255, 255}};
    const uint32_t kind = round % 4u;
    for (uint32_t l = 0; l < 16u; l++) {
        uint32_t half[4];
        for (uint32_t i = 0; i < 4u; i++) half[i] = k3_dpbf16_value(state, LOW[kind][0], SPAN[kind][0]) & 0xffff0000u;
        w[l] = half[0] | half[1] >> 16;
        x[l] = half[2] | half[3] >> 16;
        acc[l] = k3_dpbf16_value(state, LOW[kind][1], SPAN[kind][1]);
    }
}

/* Lanes whose bits differ; the payload of a NaN is nobody's business. */
static uint32_t k3_dpbf16_mismatches(void) {
    const uint32_t before = k3_set_ftz();
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    uint32_t state = 0x2545f491u, wrong = 0;
    for (uint32_t round = 0; round < K3_DPBF16_ROUNDS; round++) {
        _Alignas(64) uint32_t w[16], x[16], acc[16];
        k3_dpbf16_operands(&state, round, w, x, acc);
        const __m512i wv = _mm512_load_si512(w), xv = _mm512_load_si512(x);
        const __m512 odd[2] = {_mm512_castsi512_ps(_mm512_and_si512(wv, high)), _mm512_castsi512_ps(_mm512_and_si512(xv, high))};
        const __m512 even[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(wv, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(xv, 16))};
        const __m512 a = _mm512_castsi512_ps(_mm512_load_si512(acc));
        const __m512 one = _mm512_fmadd_ps(K3_DPBF16_FIRST[0], K3_DPBF16_FIRST[1], a);
        const __m512 want = _mm512_fmadd_ps(K3_DPBF16_SECOND[0], K3_DPBF16_SECOND[1], one);
        const __m512 got = _mm512_dpbf16_ps(a, (__m512bh)wv, (__m512bh)xv);
        const __mmask16 differ = _mm512_cmpneq_epi32_mask(_mm512_castps_si512(got), _mm512_castps_si512(want));
        const __mmask16 nan = _mm512_cmp_ps_mask(got, got, _CMP_UNORD_Q) & _mm512_cmp_ps_mask(want, want, _CMP_UNORD_Q);
        wrong += (uint32_t)__builtin_popcount(differ & (uint32_t)~nan);
    }
    k3_restore_mxcsr(before);
    return wrong;
}

#endif

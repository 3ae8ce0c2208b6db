/* Rule 1 on x86-64: subnormals are zero, in and out. Called by every worker before its first instruction;
 * a thread that skips it computes other bits only when something underflows, which no test on real weights
 * would notice. Hence k3_canary_ftz. */
#ifndef K3_CPU_FTZ_H
#define K3_CPU_FTZ_H

#include <xmmintrin.h>

#include "dialect.h"

#define K3_MXCSR 0x9fc0u /* FTZ, DAZ, all exceptions masked, round to nearest even, flags clear */

/* Set the contract's mode for this thread. Returns the previous one, for k3_restore_mxcsr. */
static inline uint32_t k3_set_ftz(void) {
    const uint32_t before = _mm_getcsr();
    _mm_setcsr(K3_MXCSR);
    return before;
}

static inline void k3_restore_mxcsr(uint32_t before) { _mm_setcsr(before); }

/* Rule 1's canaries on this thread: returns 0 when all hold, else the number of the first that does not.
 * 1 contracted a*b+c, 2 subnormal input, 3 subnormal result, 4 flush before rounding. Operands are volatile
 * so that the compiler, which knows nothing of MXCSR, cannot fold them. */
static inline int k3_canary_ftz(void) {
    volatile float a = k3_bits_to_f32(0x3f800001u), c = -k3_bits_to_f32(0x3f800002u);
    volatile float sub = k3_bits_to_f32(0x00400000u), least = k3_bits_to_f32(0x00800000u), two = 2.0f, one = 1.0f;
    volatile float w = -k3_bits_to_f32((127u - 76u) << 23), x = k3_bits_to_f32((127u - 76u) << 23);
    if (k3_f32_to_bits(a * a + c) != 0u) return 1;
    if (k3_f32_to_bits(sub * one) != 0u) return 2;
    if (k3_f32_to_bits(least / two) != 0u) return 3;
    if (k3_f32_to_bits(k3_fma(w, x, least)) != 0x00800000u) return 4;
    return 0;
}

#endif

/* E2M1 times 2^(s - 127) for every scale byte s, so that a decoder loads a row instead of scaling one.
 *
 * A row is 64 bytes; a tensor uses few scale values, so a handful of cache lines stay hot. Rule 4 is in the
 * table: row 0 is +0 for every code, and 0.5 with s = 1 (a subnormal) is a zero. Bytes from 253 on are
 * refused before a kernel sees them; K3_MX_ABSENT is ours: groups past the end of a row, whose weights are -0. */
#ifndef K3_LEAVES_MXFP4_TABLE_H
#define K3_LEAVES_MXFP4_TABLE_H

#include <stdint.h>

#define K3_MX_ABSENT 255

/* Bits of a magnitude code m (0..7) under scale s. Exponents 0.5 .. 4 are s - 1 .. s + 2. */
#define K3_MX_BITS(m, s)                                                                     \
    ((s) == 0 || (m) == 0 ? 0u                                                               \
                          : ((uint32_t)((s) + ((m) >> 1) - 1) << 23) | ((m) > 1 && ((m)&1) ? 0x400000u : 0u))

#define K3_MX_4(ROW, s) ROW(s), ROW((s) + 1), ROW((s) + 2), ROW((s) + 3)
#define K3_MX_16(ROW, s) K3_MX_4(ROW, s), K3_MX_4(ROW, (s) + 4), K3_MX_4(ROW, (s) + 8), K3_MX_4(ROW, (s) + 12)
#define K3_MX_64(ROW, s) K3_MX_16(ROW, s), K3_MX_16(ROW, (s) + 16), K3_MX_16(ROW, (s) + 32), K3_MX_16(ROW, (s) + 48)
#define K3_MX_256(ROW) K3_MX_64(ROW, 0), K3_MX_64(ROW, 64), K3_MX_64(ROW, 128), K3_MX_64(ROW, 192)

#endif

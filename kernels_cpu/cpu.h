/* Which leaf sets this CPU can run, and which one is meant. */
#ifndef K3_CPU_CPU_H
#define K3_CPU_CPU_H

#include "bodies.h"

/* The set of that name, or for "auto" the quickest; NULL where this CPU lacks it or nothing has that name.
 * "auto" passes over avx512_bf16 with a line on stderr where k3_dpbf16_mismatches finds any. */
const K3Bodies *k3_choose_bodies(const char *leaves);

/* The set at `index` of the quickest first, NULL from the last on. */
const K3Bodies *k3_bodies_here(uint32_t index);

#endif

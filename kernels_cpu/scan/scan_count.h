/* How often each value occurs, for scan_loops.c.
 *
 * A table in memory counts a byte in several cycles, because increments of one place wait for each
 * other. Here a shuffle makes each value one bit of a byte, for eight values at once, and bytes are
 * added bit-sliced: a carry-save adder takes three bits of one weight to one of it and one of the next.
 * What was added is read out once a part, which is short enough for few levels. */
#ifndef K3_SCAN_COUNT_H
#define K3_SCAN_COUNT_H

#include "scan.h"

#include <string.h>

static void count_codes_table(const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  for (size_t i = 0; i < n_bytes; i++) counts[data[i] & 15]++, counts[16 + (data[i] >> 4)]++;
}

static void count_table(const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  for (size_t i = 0; i < n_bytes; i++) counts[data[i]]++;
}

#if defined(__AVX2__)
#include <immintrin.h>
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#if defined(__AVX512VBMI__)
typedef uint64_t Bits __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));
#define WIDE(op, ...) (Bits) _mm512_##op(__VA_ARGS__)
#define WIDE_TABLE(t) (Bits) _mm512_broadcast_i32x4(t)
typedef __m512i Wide;
#else
typedef uint64_t Bits __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(32)));
#define WIDE(op, ...) (Bits) _mm256_##op(__VA_ARGS__)
#define WIDE_TABLE(t) (Bits) _mm256_broadcastsi128_si256(t)
typedef __m256i Wide;
#endif

enum { IN_LOW_NIBBLE, IN_HIGH_NIBBLE, IN_BYTE };

#define GROUP 16 /* vectors added at once: four levels */
#define LEVELS 10
#define GROUP_BYTES (GROUP * sizeof(Bits))
#define MOST_GROUPS ((1u << LEVELS) / GROUP - 1) /* before the top level overflows */

/* The lower levels of one tree, and where the vectors to be added come from: bit k of a byte of a
 * vector says that the value there is first + k (of nibbles the table says which). */
typedef struct {
  Bits level[4];
  const uint8_t* data;
  Bits table;
  Bytes first;
  int where;
} Adder;

ALWAYS_INLINE Bits next_vector(Adder* adder) {
  Bits bytes;
  memcpy(&bytes, adder->data, sizeof bytes);
  adder->data += sizeof bytes;
  if (adder->where == IN_HIGH_NIBBLE) bytes >>= 4;
#if defined(__AVX512VBMI__) /* it looks at six bits of a byte, and the table repeats after 16 */
  if (adder->where != IN_BYTE) return WIDE(permutexvar_epi8, (Wide)bytes, (Wide)adder->table);
#else
  if (adder->where != IN_BYTE) bytes &= (Bits){0} + 0x0F0F0F0F0F0F0F0Fu;
#endif
  /* The shuffle looks at four bits and makes 0 of a byte with the top bit: so of all from 16 on. */
  if (adder->where == IN_BYTE) {
    bytes = (Bits)((Bytes)bytes - adder->first);
    bytes = WIDE(adds_epu8, (Wide)bytes, (Wide)((Bytes){0} + 0x70));
  }
  return WIDE(shuffle_epi8, (Wide)adder->table, (Wide)bytes);
}

/* Add two vectors to a level; return what goes to the next: of three bits their sum and carry. */
ALWAYS_INLINE Bits carry(Bits* level, Bits a, Bits b) {
  const Bits old = *level;
#if defined(__AVX512VBMI__) /* the compiler does not find these two */
  *level = WIDE(ternarylogic_epi64, (Wide)old, (Wide)a, (Wide)b, 0x96);
  return WIDE(ternarylogic_epi64, (Wide)old, (Wide)a, (Wide)b, 0xE8);
#else
  const Bits sum = a ^ b;
  *level = old ^ sum;
  return (a & b) | (old & sum);
#endif
}

/* Each adds twice as many vectors as the one before, and returns what goes to the next level. */
ALWAYS_INLINE Bits add_2(Adder* adder) {
  const Bits a = next_vector(adder), b = next_vector(adder);
  return carry(&adder->level[0], a, b);
}
ALWAYS_INLINE Bits add_4(Adder* adder) {
  const Bits a = add_2(adder), b = add_2(adder);
  return carry(&adder->level[1], a, b);
}
ALWAYS_INLINE Bits add_8(Adder* adder) {
  const Bits a = add_4(adder), b = add_4(adder);
  return carry(&adder->level[2], a, b);
}
ALWAYS_INLINE Bits add_16(Adder* adder) {
  const Bits a = add_8(adder), b = add_8(adder);
  return carry(&adder->level[3], a, b);
}

/* Count the ones of each bit of all bytes of a vector, as so many of a level's weight. */
ALWAYS_INLINE void read_level(Bits level, unsigned weight, uint64_t* counts) {
  for (unsigned bit = 0; bit < 8; bit++) {
#if defined(__AVX512VBMI__)
    const uint64_t ones = _mm512_test_epi8_mask((Wide)level, _mm512_set1_epi8((char)(1u << bit)));
#else
    const uint64_t ones = (uint32_t)_mm256_movemask_epi8((Wide)(level << (7 - bit)));
#endif
    counts[bit] += (uint64_t)__builtin_popcountll(ones) << weight;
  }
}

/* Add to eight counts how often the values from `first` on stand in at most MOST_GROUPS groups. */
ALWAYS_INLINE void count_eight(const uint8_t* data, size_t n_groups, int where, uint8_t first,
                               uint64_t* counts) {
  const __m128i of_low = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m128i of_high = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, -128);
  const __m128i table = where != IN_BYTE && first == 8 ? of_high : of_low;
  Adder adder = {.data = data, .table = WIDE_TABLE(table), .first = (Bytes){0} + first,
                 .where = where};
  Bits upper[LEVELS - 4] = {0};
  for (size_t group = 0; group < n_groups; group++) {
    Bits up = add_16(&adder);
    for (unsigned l = 0; l < LEVELS - 4; l++) {
      const Bits sum = upper[l] ^ up;
      up &= upper[l];
      upper[l] = sum;
    }
  }
  for (unsigned l = 0; l < 4; l++) read_level(adder.level[l], l, counts);
  for (unsigned l = 4; l < LEVELS; l++) read_level(upper[l - 4], l, counts);
}

static void count_codes(const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  while (n_bytes >= GROUP_BYTES) {
    size_t n_groups = n_bytes / GROUP_BYTES;
    n_groups = n_groups < MOST_GROUPS ? n_groups : MOST_GROUPS;
    count_eight(data, n_groups, IN_LOW_NIBBLE, 0, counts);
    count_eight(data, n_groups, IN_LOW_NIBBLE, 8, counts + 8);
    count_eight(data, n_groups, IN_HIGH_NIBBLE, 0, counts + 16);
    count_eight(data, n_groups, IN_HIGH_NIBBLE, 8, counts + 24);
    data += n_groups * GROUP_BYTES, n_bytes -= n_groups * GROUP_BYTES;
  }
  count_codes_table(data, n_bytes, counts);
}

/* Scales lie in few binades: one walk finds which, and one for every eight of them counts. */
static void histogram(const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  while (n_bytes >= GROUP_BYTES) {
    size_t n_groups = n_bytes / GROUP_BYTES;
    n_groups = n_groups < MOST_GROUPS ? n_groups : MOST_GROUPS;
    const size_t counted = n_groups * GROUP_BYTES;
    uint8_t least = 255, most = 0;
    for (size_t i = 0; i < counted; i++) {
      least = data[i] < least ? data[i] : least;
      most = data[i] > most ? data[i] : most;
    }
    for (unsigned first = least; first <= most; first += 8) { /* of 8 in a row one walk, wherever they begin */
      uint64_t eight[8] = {0};
      count_eight(data, n_groups, IN_BYTE, (uint8_t)first, eight);
      for (unsigned i = 0; i < 8 && first + i < 256; i++) counts[first + i] += eight[i];
    }
    data += counted, n_bytes -= counted;
  }
  count_table(data, n_bytes, counts);
}
#else
#define count_codes count_codes_table
#define histogram count_table
#endif

#endif

/* The loops of the scan, written for the compiler to vectorise: compiled once an instruction set,
 * named by K3_SCAN_NAME. Data come unaligned; every loop takes any length. */
#include "scan.h"

#include <string.h>

/* Largest magnitude as bits: in one pass it tells NaN and Inf (exponent all ones are the largest
 * magnitudes of all), zero rows and the absmax. */
static uint32_t absmax_bf16(const uint8_t* data, size_t n_bytes) {
  uint16_t most = 0;
  for (size_t i = 0; i + 2 <= n_bytes; i += 2) {
    uint16_t bits;
    memcpy(&bits, data + i, 2);
    bits &= 0x7FFF;
    most = bits > most ? bits : most;
  }
  return most;
}

static uint32_t absmax_f32(const uint8_t* data, size_t n_bytes) {
  uint32_t most = 0;
  for (size_t i = 0; i + 4 <= n_bytes; i += 4) {
    uint32_t bits;
    memcpy(&bits, data + i, 4);
    bits &= 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  return most;
}

static uint8_t or_masked(const uint8_t* data, size_t n_bytes, uint8_t mask) {
  uint8_t seen = 0;
  for (size_t i = 0; i < n_bytes; i++) seen |= data[i] & mask;
  return seen;
}

/* -- E2M1 codes --------------------------------------------------------------------------------
 * A table in memory counts a byte in several cycles, because increments of one place wait for each
 * other. Here each nibble becomes one bit of a byte by a shuffle, and bytes are added bit-sliced: a
 * carry-save adder takes three bits of one weight to one of it and one of the next. */
static void count_codes_table(const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  for (size_t i = 0; i < n_bytes; i++) counts[data[i] & 15]++, counts[16 + (data[i] >> 4)]++;
}

/* Count the ones of one bit of every byte of a vector: eight words, each shifted out of the way. */
static uint64_t count_bit(const uint8_t* vector, unsigned bit) {
  uint64_t words[K3_CODE_VECTOR / 8], ones = 0;
  memcpy(words, vector, sizeof words);
  for (unsigned i = 0; i < K3_CODE_VECTOR / 8; i++)
    ones |= (words[i] >> bit & 0x0101010101010101u) << i;
  return (uint64_t)__builtin_popcountll(ones);
}

static void end_codes(K3Codes* codes, uint64_t* counts) {
  if (!codes->n_groups) return;
  for (unsigned tree = 0; tree < K3_CODE_TREES; tree++)
    for (unsigned bit = 0; bit < 8; bit++) {
      uint64_t count = 0;
      for (unsigned level = 0; level < K3_CODE_LEVELS; level++)
        count += count_bit(codes->bits[tree][level], bit) << level;
      for (unsigned i = 0; i < codes->n_waiting; i++)
        count += count_bit(codes->waiting[tree][i], bit) << 4;
      counts[16 * (tree / 2) + 8 * (tree % 2) + bit] += count;
    }
  memset(codes, 0, sizeof *codes);
}

#if defined(__AVX2__)
#include <immintrin.h>
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#if defined(__AVX512VBMI__)
typedef uint64_t Bits __attribute__((vector_size(64)));
ALWAYS_INLINE Bits code_bit(__m512i table, Bits bytes) { /* it takes six bits: the table repeats */
  return (Bits)_mm512_permutexvar_epi8((__m512i)bytes, table);
}
#define CODE_TABLE(t) _mm512_broadcast_i32x4(t)
typedef __m512i CodeTable;
#else
typedef uint64_t Bits __attribute__((vector_size(32)));
ALWAYS_INLINE Bits code_bit(__m256i table, Bits bytes) {
  const Bits nibbles = bytes & ((Bits){0} + 0x0F0F0F0F0F0F0F0Fu);
  return (Bits)_mm256_shuffle_epi8(table, (__m256i)nibbles);
}
#define CODE_TABLE(t) _mm256_broadcastsi128_si256(t)
typedef __m256i CodeTable;
#endif

/* Add two vectors to a level; return what goes to the next: of three bits their sum and carry. */
ALWAYS_INLINE Bits carry(Bits* level, Bits a, Bits b) {
  const Bits old = *level;
#if defined(__AVX512VBMI__) /* the compiler does not find these two */
  *level = (Bits)_mm512_ternarylogic_epi64((__m512i)old, (__m512i)a, (__m512i)b, 0x96);
  return (Bits)_mm512_ternarylogic_epi64((__m512i)old, (__m512i)a, (__m512i)b, 0xE8);
#else
  const Bits sum = a ^ b;
  *level = old ^ sum;
  return (a & b) | (old & sum);
#endif
}

/* Four levels of one tree, and where the vectors to be added come from. */
typedef struct {
  Bits level[4];
  const uint8_t* data;
  size_t step;
  CodeTable table;
  unsigned shift;
  int is_codes; /* else bits that are to be added as they are */
} Adder;

ALWAYS_INLINE Bits next_vector(Adder* adder) {
  Bits bytes;
  memcpy(&bytes, adder->data, sizeof bytes);
  adder->data += adder->step;
  if (!adder->is_codes) return bytes;
  return code_bit(adder->table, bytes >> adder->shift);
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
ALWAYS_INLINE Bits add_16(Adder* adder, uint8_t (*levels)[K3_CODE_VECTOR]) {
  for (unsigned l = 0; l < 4; l++) memcpy(&adder->level[l], levels[l], sizeof(Bits));
  const Bits a = add_8(adder), b = add_8(adder), up = carry(&adder->level[3], a, b);
  for (unsigned l = 0; l < 4; l++) memcpy(levels[l], &adder->level[l], sizeof(Bits));
  return up;
}

/* Add the bits that a table makes of one nibble of each byte of a group. */
ALWAYS_INLINE void add_group(K3Codes* codes, unsigned tree, const uint8_t* data, CodeTable table,
                             unsigned shift) {
  Adder adder = {.data = data, .step = sizeof(Bits), .table = table, .shift = shift, .is_codes = 1};
  const Bits up = add_16(&adder, codes->bits[tree]);
  memcpy(codes->waiting[tree][codes->n_waiting], &up, sizeof up);
}

static void add_waiting(K3Codes* codes) {
  for (unsigned tree = 0; tree < K3_CODE_TREES; tree++) {
    Adder adder = {.data = codes->waiting[tree][0], .step = K3_CODE_VECTOR};
    Bits up = add_16(&adder, codes->bits[tree] + 4);
    for (unsigned l = 8; l < K3_CODE_LEVELS; l++) {
      Bits level;
      memcpy(&level, codes->bits[tree][l], sizeof level);
      const Bits sum = level ^ up;
      up &= level;
      memcpy(codes->bits[tree][l], &sum, sizeof sum);
    }
  }
  codes->n_waiting = 0;
}

static void count_codes(K3Codes* codes, const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  const CodeTable first =
      CODE_TABLE(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));
  const CodeTable second =
      CODE_TABLE(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, -128));
  const size_t group_bytes = K3_CODE_GROUP * sizeof(Bits);
  size_t at = 0;
  for (; at + group_bytes <= n_bytes; at += group_bytes) {
    if ((codes->n_groups + 1) * K3_CODE_GROUP >= 1u << K3_CODE_LEVELS) end_codes(codes, counts);
    add_group(codes, 0, data + at, first, 0);
    add_group(codes, 1, data + at, second, 0);
    add_group(codes, 2, data + at, first, 4);
    add_group(codes, 3, data + at, second, 4);
    codes->n_groups++;
    if (++codes->n_waiting == K3_CODE_GROUP) add_waiting(codes);
  }
  count_codes_table(data + at, n_bytes - at, counts);
}
#else
static void count_codes(K3Codes* codes, const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  (void)codes;
  count_codes_table(data, n_bytes, counts);
}
#endif

/* -- code x scale ------------------------------------------------------------------------------
 * A magnitude of E2M1 code c is 2^(c/2 - 1), times 1.5 where c is odd, but 0.5 for c = 1; so
 * 2 * scale + c (0 for c = 1) orders the products of a group's scale and its codes. Only a group whose
 * scale could beat the largest product so far is looked at. */
static int32_t top_of_group(const uint8_t* data) {
  uint8_t most = 0;
  for (size_t i = 0; i < 16; i++) {
    const uint8_t low = data[i] & 7, high = data[i] >> 4 & 7;
    most = low > most ? low : most;
    most = high > most ? high : most;
  }
  return most;
}

static int32_t top_product(const uint8_t* data, const uint8_t* scales, size_t n_scales,
                           int32_t top) {
  for (size_t at = 0; at < n_scales; at += 64) {
    const size_t end = n_scales - at < 64 ? n_scales : at + 64;
    uint8_t most = 0;
    for (size_t i = at; i < end; i++) most = scales[i] > most ? scales[i] : most;
    if (2 * most + 7 <= top || !or_masked(data + 16 * at, 16 * (end - at), 0x77)) continue;
    for (size_t i = at; i < end; i++) {
      if (2 * scales[i] + 7 <= top) continue;
      const int32_t code = top_of_group(data + 16 * i);
      const int32_t key = 2 * scales[i] + (code == 1 ? 0 : code);
      if (code && key > top) top = key;
    }
  }
  return top;
}

/* Scales lie in few binades: counting one value after the other in vector lanes is several times
 * as fast as a table in memory, whose increments wait for each other. */
#define LANES 64
#define CHUNK (LANES * 255) /* a lane of eight bits counts to 255 */
#define MOST_VALUES 20

static void count_table(const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  for (size_t i = 0; i < n_bytes; i++) counts[data[i]]++;
}

static void histogram(const uint8_t* data, size_t n_bytes, uint64_t* counts) {
  size_t at = 0;
  for (; at + LANES <= n_bytes;) {
    size_t rows = (n_bytes - at) / LANES;
    rows = rows > CHUNK / LANES ? CHUNK / LANES : rows;
    const uint8_t* chunk = data + at;
    uint8_t least = 255, most = 0;
    for (size_t i = 0; i < rows * LANES; i++) {
      least = chunk[i] < least ? chunk[i] : least;
      most = chunk[i] > most ? chunk[i] : most;
    }
    at += rows * LANES;
    if (most - least >= MOST_VALUES) {
      count_table(chunk, rows * LANES, counts);
      continue;
    }
    for (unsigned value = least; value <= most; value++) {
      uint8_t lane[LANES] = {0};
      for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < LANES; i++)
          lane[i] = (uint8_t)(lane[i] + (chunk[row * LANES + i] == (uint8_t)value));
      uint64_t total = 0;
      for (size_t i = 0; i < LANES; i++) total += lane[i];
      counts[value] += total;
    }
  }
  count_table(data + at, n_bytes - at, counts);
}

/* The sum of products NH (Black et al., UMAC 1999) under fixed keys within a block; blocks are
 * chained, so that equal blocks in another order give another result. It finds accidents, not
 * forgeries. */
static uint64_t key_of(uint64_t index) { /* splitmix64 */
  uint64_t z = (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

enum { WORDS = K3_FINGER_BLOCK / 8 };
static uint64_t keys[WORDS];

static void __attribute__((constructor)) fill_keys(void) {
  for (uint64_t i = 0; i < WORDS; i++) keys[i] = key_of(i);
}

/* Add to each lane the products of its words' halves, both halves plus their keys' modulo 2^32, and
 * chain the sums: lane = mix(lane + sum). The compiler makes three instructions of the one product, so
 * it is spelled where there is one; lanes stay in registers from block to block. */
#define CHAIN 0x9E3779B97F4A7C15u
#if defined(__AVX512DQ__)
static void finger(K3Finger* finger, const uint8_t* data, size_t n_blocks) {
  const __m512i factor = _mm512_set1_epi64((long long)CHAIN);
  __m512i lanes = _mm512_loadu_si512(finger->lanes);
  for (size_t block = 0; block < n_blocks; block++, data += K3_FINGER_BLOCK) {
    __m512i total[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 16
    for (size_t word = 0; word < WORDS; word += 8) {
      const __m512i bits = _mm512_loadu_si512(data + 8 * word);
      const __m512i keyed = _mm512_add_epi32(bits, _mm512_loadu_si512(keys + word));
      const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
      total[word / 8 % 2] = _mm512_add_epi64(total[word / 8 % 2], product);
    }
    lanes = _mm512_add_epi64(lanes, _mm512_add_epi64(total[0], total[1]));
    lanes = _mm512_mullo_epi64(lanes, factor);
    lanes = _mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 29));
  }
  _mm512_storeu_si512(finger->lanes, lanes);
}
#else
#if defined(__AVX2__)
static void sum_products(const uint8_t* data, uint64_t* sum) {
  for (size_t half = 0; half < 8; half += 4) {
    __m256i total = _mm256_setzero_si256();
    for (size_t word = half; word < WORDS; word += 8) {
      const __m256i bits = _mm256_loadu_si256((const __m256i*)(data + 8 * word));
      const __m256i key = _mm256_loadu_si256((const __m256i*)(keys + word));
      const __m256i keyed = _mm256_add_epi32(bits, key);
      const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      total = _mm256_add_epi64(total, product);
    }
    _mm256_storeu_si256((__m256i*)(sum + half), total);
  }
}
#else
static void sum_products(const uint8_t* data, uint64_t* sum) {
  memset(sum, 0, K3_FINGER_LANES * sizeof *sum);
  for (size_t word = 0; word < WORDS; word++) {
    uint64_t bits;
    memcpy(&bits, data + 8 * word, 8);
    const uint32_t low = (uint32_t)bits + (uint32_t)keys[word];
    const uint32_t high = (uint32_t)(bits >> 32) + (uint32_t)(keys[word] >> 32);
    sum[word % K3_FINGER_LANES] += (uint64_t)low * high;
  }
}
#endif

static void finger(K3Finger* finger, const uint8_t* data, size_t n_blocks) {
  for (size_t block = 0; block < n_blocks; block++, data += K3_FINGER_BLOCK) {
    uint64_t sum[K3_FINGER_LANES];
    sum_products(data, sum);
    for (size_t lane = 0; lane < K3_FINGER_LANES; lane++) {
      uint64_t mixed = (finger->lanes[lane] + sum[lane]) * CHAIN;
      finger->lanes[lane] = mixed ^ (mixed >> 29);
    }
  }
}
#endif

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
const K3ScanLoops JOIN(k3_scan_loops_, K3_SCAN_NAME) = {
  absmax_bf16, absmax_f32, or_masked, count_codes, end_codes, top_product, histogram, finger,
};

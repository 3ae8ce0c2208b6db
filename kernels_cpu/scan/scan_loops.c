/* The loops of the scan, written for the compiler to vectorise: compiled once an instruction set,
 * named by K3_SCAN_NAME. Data come unaligned; every loop takes any length. */
#include "scan.h"
#include "scan_count.h"

#include <string.h>

/* Largest magnitude as bits: in one pass it tells NaN and Inf (exponent all ones are the largest
 * magnitudes of all) and the absmax. */
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

/* Elements of a part that are NaN or Inf. Sums of the element's own width keep all lanes busy: a file
 * full of NaN takes no longer than the pass that told of it. */
static uint64_t nonfinite_bf16(const uint8_t* data, size_t n_bytes) {
  uint16_t count = 0; /* of K3_PART_BYTES / 2 elements at most */
  for (size_t i = 0; i + 2 <= n_bytes; i += 2) {
    uint16_t bits;
    memcpy(&bits, data + i, 2);
    count = (uint16_t)(count + ((bits & 0x7F80) == 0x7F80));
  }
  return count;
}

static uint64_t nonfinite_f32(const uint8_t* data, size_t n_bytes) {
  uint32_t count = 0;
  for (size_t i = 0; i + 4 <= n_bytes; i += 4) {
    uint32_t bits;
    memcpy(&bits, data + i, 4);
    count += (bits & 0x7F800000u) == 0x7F800000u;
  }
  return count;
}

static uint64_t or_masked(const uint8_t* data, size_t n_bytes, uint64_t mask) {
  uint64_t seen = 0, last = 0, bits;
  size_t i = 0;
  for (; i + 8 <= n_bytes; i += 8) {
    memcpy(&bits, data + i, 8);
    seen |= bits;
  }
  memcpy(&last, data + i, n_bytes - i);
  return (seen | last) & mask;
}

/* -- code x scale ------------------------------------------------------------------------------
 * A magnitude of E2M1 code c is 2^(c/2 - 1), times 1.5 where c is odd, but 0.5 for c = 1; so
 * 2 * scale + c (0 for c = 1) orders the products of a group's scale and its codes. A group of scale
 * byte 0 is all zeros (numerics, rule 4), not 2^-127 times its codes. Only a group whose scale could beat
 * the largest product so far is looked at. */
static int32_t top_of_group(const uint8_t* data) {
  uint8_t most = 0;
  for (size_t i = 0; i < 16; i++) {
    const uint8_t low = data[i] & 7, high = data[i] >> 4 & 7;
    most = low > most ? low : most;
    most = high > most ? high : most;
  }
  return most;
}

static uint8_t largest(const uint8_t* bytes, size_t n_bytes) {
  uint8_t most = 0;
  for (size_t i = 0; i < n_bytes; i++) most = bytes[i] > most ? bytes[i] : most;
  return most;
}

static int32_t top_product(const uint8_t* data, const uint8_t* scales, size_t n_scales,
                           int32_t top) {
  if (2 * largest(scales, n_scales) + 7 <= top) return top;
  for (size_t at = 0; at < n_scales; at += 64) {
    const size_t end = n_scales - at < 64 ? n_scales : at + 64;
    if (2 * largest(scales + at, end - at) + 7 <= top) continue;
    if (!or_masked(data + 16 * at, 16 * (end - at), 0x7777777777777777u)) continue;
    for (size_t i = at; i < end; i++) {
      if (!scales[i] || 2 * scales[i] + 7 <= top) continue;
      const int32_t code = top_of_group(data + 16 * i);
      const int32_t key = 2 * scales[i] + (code == 1 ? 0 : code);
      if (code && key > top) top = key;
    }
  }
  return top;
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
 * chain the sums: lane = mix(lane + sum). What is to be known of the same bytes' magnitudes is found in
 * the same pass, while they are in registers. The compiler makes three instructions of the one product,
 * so it is spelled where there is one; lanes stay in registers from block to block. */
#define CHAIN 0x9E3779B97F4A7C15u
#if defined(__AVX512DQ__)
ALWAYS_INLINE __m512i larger(__m512i most, __m512i bits, size_t width) {
  if (width == 2)
    return _mm512_max_epu16(most, _mm512_and_si512(bits, _mm512_set1_epi16(0x7FFF)));
  return _mm512_max_epu32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
}

/* `width` of the elements whose largest magnitude is returned as bits; 0: none is asked for. */
ALWAYS_INLINE uint32_t finger_absmax(K3Finger* finger, const uint8_t* data, size_t n_blocks,
                                     size_t width) {
  const __m512i factor = _mm512_set1_epi64((long long)CHAIN);
  __m512i lanes = _mm512_loadu_si512(finger->lanes);
  __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (size_t block = 0; block < n_blocks; block++, data += K3_FINGER_BLOCK) {
    __m512i total[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 16
    for (size_t word = 0; word < WORDS; word += 8) {
      const __m512i bits = _mm512_loadu_si512(data + 8 * word);
      const __m512i keyed = _mm512_add_epi32(bits, _mm512_loadu_si512(keys + word));
      const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
      total[word / 8 % 2] = _mm512_add_epi64(total[word / 8 % 2], product);
      if (width) most[word / 8 % 2] = larger(most[word / 8 % 2], bits, width);
    }
    lanes = _mm512_add_epi64(lanes, _mm512_add_epi64(total[0], total[1]));
    lanes = _mm512_mullo_epi64(lanes, factor);
    lanes = _mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 29));
  }
  _mm512_storeu_si512(finger->lanes, lanes);
  if (!width) return 0;
  uint8_t both[2 * sizeof(__m512i)];
  memcpy(both, most, sizeof both);
  return width == 2 ? absmax_bf16(both, sizeof both) : absmax_f32(both, sizeof both);
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

static uint32_t finger_absmax(K3Finger* finger, const uint8_t* data, size_t n_blocks,
                              size_t width) {
  uint32_t most = 0;
  for (size_t block = 0; block < n_blocks; block++, data += K3_FINGER_BLOCK) {
    uint64_t sum[K3_FINGER_LANES];
    sum_products(data, sum);
    for (size_t lane = 0; lane < K3_FINGER_LANES; lane++) {
      uint64_t mixed = (finger->lanes[lane] + sum[lane]) * CHAIN;
      finger->lanes[lane] = mixed ^ (mixed >> 29);
    }
    const uint32_t here = width == 2   ? absmax_bf16(data, K3_FINGER_BLOCK)
                          : width == 4 ? absmax_f32(data, K3_FINGER_BLOCK)
                                       : 0;
    most = here > most ? here : most;
  }
  return most;
}
#endif

static void finger_only(K3Finger* finger, const uint8_t* data, size_t n_blocks) {
  finger_absmax(finger, data, n_blocks, 0);
}
static uint32_t finger_bf16(K3Finger* finger, const uint8_t* data, size_t n_blocks) {
  return finger_absmax(finger, data, n_blocks, 2);
}
static uint32_t finger_f32(K3Finger* finger, const uint8_t* data, size_t n_blocks) {
  return finger_absmax(finger, data, n_blocks, 4);
}

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
const K3ScanLoops JOIN(k3_scan_loops_, K3_SCAN_NAME) = {
  absmax_bf16, absmax_f32, nonfinite_bf16, nonfinite_f32, or_masked,
  count_codes, top_product, histogram, finger_only, finger_bf16, finger_f32,
};

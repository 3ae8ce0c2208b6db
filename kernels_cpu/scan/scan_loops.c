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

/* Slow, and called only until all sixteen codes have been seen in both nibbles. */
static void code_masks(const uint8_t* data, size_t n_bytes, uint32_t* low, uint32_t* high) {
  uint32_t in_low = 0, in_high = 0;
  for (size_t i = 0; i < n_bytes; i++) {
    in_low |= 1u << (data[i] & 15);
    in_high |= 1u << (data[i] >> 4);
  }
  *low |= in_low;
  *high |= in_high;
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

/* Add to each lane the products of its words' halves, both halves plus their keys' modulo 2^32.
 * The compiler makes three instructions of the one product, so it is spelled where there is one. */
#if defined(__AVX512F__)
#include <immintrin.h>
static void sum_products(const uint8_t* data, uint64_t* sum) {
  __m512i total = _mm512_setzero_si512();
  for (size_t word = 0; word < WORDS; word += 8) {
    const __m512i bits = _mm512_loadu_si512(data + 8 * word);
    const __m512i keyed = _mm512_add_epi32(bits, _mm512_loadu_si512(keys + word));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    total = _mm512_add_epi64(total, product);
  }
  _mm512_storeu_si512(sum, total);
}
#elif defined(__AVX2__)
#include <immintrin.h>
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
      uint64_t mixed = (finger->lanes[lane] + sum[lane]) * 0x9E3779B97F4A7C15u;
      finger->lanes[lane] = mixed ^ (mixed >> 29);
    }
  }
}

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
const K3ScanLoops JOIN(k3_scan_loops_, K3_SCAN_NAME) = {
  absmax_bf16, absmax_f32, or_masked, code_masks, histogram, finger,
};

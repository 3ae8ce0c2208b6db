/* k3_scan: read a row-aligned part of a tensor block by block and gather what K3Scan holds.
 * A block is small enough to stay in a cache: it is looked at where read() has just put it.
 * Called from several threads at once; it keeps no state of its own. */
#define _GNU_SOURCE
#include "scan.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#ifndef K3_SOURCE_HASH
#define K3_SOURCE_HASH "unknown"
#endif

const char* k3_scan_source_hash(void) { return K3_SOURCE_HASH; }
size_t k3_scan_size(void) { return sizeof(K3Scan); }

static const K3ScanLoops* pick_loops(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
    return &k3_scan_loops_avx512;
  if (__builtin_cpu_supports("avx2")) return &k3_scan_loops_avx2;
#endif
  return &k3_scan_loops_plain;
}

/* Sets of loops by name for tests: 0 plain, 1 AVX2, 2 AVX-512; NULL where the CPU lacks them. */
static const K3ScanLoops* loops_of(int which) {
  if (which < 0) return pick_loops();
#if defined(__x86_64__)
  if (which == 1) return __builtin_cpu_supports("avx2") ? &k3_scan_loops_avx2 : NULL;
  if (which == 2) return __builtin_cpu_supports("avx512bw") ? &k3_scan_loops_avx512 : NULL;
#endif
  return which == 0 ? &k3_scan_loops_plain : NULL;
}

typedef struct {
  const K3ScanLoops* loops;
  uint32_t kind;
  uint64_t row_bytes;
  uint64_t row;      /* the row the next byte belongs to */
  uint64_t row_left; /* bytes of it to come */
  uint32_t row_seen; /* a bit is set once a value of it is not zero */
  uint64_t at;       /* bytes looked at before this block */
  unsigned high_scale;
  K3Scan* out;
} Walk;

static void keep_max(K3Scan* out, uint32_t bits) {
  if (bits > out->absmax_bits) out->absmax_bits = bits;
}

static void count_bad(Walk* w, const uint8_t* data, size_t n_bytes, uint64_t at, size_t width) {
  for (size_t i = 0; i + width <= n_bytes; i += width) {
    uint32_t bits = 0;
    memcpy(&bits, data + i, width);
    if (width == 2) bits <<= 16;
    if ((bits & 0x7F800000u) != 0x7F800000u) continue;
    if (w->out->n_nonfinite++ == 0) w->out->first_bad = (at + i) / width;
  }
}

/* Every code is a number, so of a row only this is to be known; it mostly shows at once. */
static uint32_t any_set(Walk* w, const uint8_t* data, size_t n_bytes, uint8_t mask) {
  const size_t first = n_bytes < 64 ? n_bytes : 64;
  if (w->row_seen) return 1;
  if (w->loops->or_masked(data, first, mask)) return 1;
  return w->loops->or_masked(data + first, n_bytes - first, mask);
}

/* Look at a part of one row; return whether a value of it is not zero. */
static uint32_t look(Walk* w, const uint8_t* data, size_t n_bytes, uint64_t at) {
  K3Scan* out = w->out;
  switch (w->kind) {
    case K3_SCAN_BF16: {
      const uint32_t most = w->loops->absmax_bf16(data, n_bytes);
      keep_max(out, most << 16);
      if (most >= 0x7F80) count_bad(w, data, n_bytes, at, 2);
      return most;
    }
    case K3_SCAN_F32: {
      const uint32_t most = w->loops->absmax_f32(data, n_bytes);
      keep_max(out, most);
      if (most >= 0x7F800000u) count_bad(w, data, n_bytes, at, 4);
      return most;
    }
    case K3_SCAN_MXFP4:
      return any_set(w, data, n_bytes, 0x77); /* a code's sign is its top bit */
    default:
      return any_set(w, data, n_bytes, 0xFF);
  }
}

static void walk_rows(Walk* w, const uint8_t* data, size_t n_bytes) {
  for (size_t i = 0; i < n_bytes;) {
    const size_t part = w->row_left < n_bytes - i ? (size_t)w->row_left : n_bytes - i;
    w->row_seen |= look(w, data + i, part, w->at + i);
    i += part;
    w->row_left -= part;
    if (w->row_left) return;
    if (!w->row_seen && w->out->n_zero_rows++ == 0) w->out->first_zero_row = w->row;
    w->row++, w->row_left = w->row_bytes, w->row_seen = 0;
  }
}

static void count_scales(Walk* w, const uint8_t* data, size_t n_bytes) {
  K3Scan* out = w->out;
  w->loops->histogram(data, n_bytes, out->histogram);
  if (out->first_high != K3_SCAN_NONE) return;
  uint64_t high = 0;
  for (unsigned value = w->high_scale; value < 256; value++) high += out->histogram[value];
  for (size_t i = 0; high && i < n_bytes; i++)
    if (data[i] >= w->high_scale) {
      out->first_high = w->at + i;
      return;
    }
}

static void look_at_part(Walk* w, const uint8_t* data, size_t n_bytes) {
  K3Scan* out = w->out;
  if (w->kind == K3_SCAN_SCALE) {
    count_scales(w, data, n_bytes);
  } else {
    walk_rows(w, data, n_bytes);
  }
  if (w->kind == K3_SCAN_MXFP4 && (out->low_codes & out->high_codes) != 0xFFFF)
    w->loops->code_masks(data, n_bytes, &out->low_codes, &out->high_codes);
  w->at += n_bytes;
}

/* Read a full block, or what is left; return the bytes read, or -1 with errno set. */
static ssize_t read_block(int fd, uint8_t* block, size_t n_bytes, uint64_t offset) {
  size_t done = 0;
  while (done < n_bytes) {
    const ssize_t got = pread(fd, block + done, n_bytes - done, (off_t)(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    done += (size_t)got;
  }
  return (ssize_t)done;
}

static void finish_finger(const K3Finger* finger, uint64_t n_bytes, uint64_t out[2]) {
  out[0] = out[1] = n_bytes;
  for (size_t lane = 0; lane < K3_FINGER_LANES; lane++) {
    uint64_t* half = &out[lane & 1];
    *half = (*half ^ finger->lanes[lane]) * 0xD6E8FEB86659FD93u;
    *half ^= *half >> 32;
  }
}

/* What is looked at twice, for values and for the fingerprint, before the next part. */
#define PART_BYTES (32 * K3_FINGER_BLOCK)

/* Scan [offset, offset + n_bytes) of an open file. `block` holds block_bytes, a multiple of
 * K3_FINGER_BLOCK, and as many again as K3_FINGER_BLOCK. `stop` is looked at once a block.
 * `which` < 0 picks the fastest loops. Returns K3_SCAN_DONE or why not. */
int k3_scan(int fd, uint64_t offset, uint64_t n_bytes, uint32_t kind, uint64_t row_bytes,
            uint32_t high_scale, uint32_t want_finger, uint8_t* block, uint64_t block_bytes,
            const volatile int* stop, int which, K3Scan* out) {
  memset(out, 0, sizeof *out);
  out->first_bad = out->first_zero_row = out->first_high = K3_SCAN_NONE;
  Walk w = {.loops = loops_of(which), .kind = kind, .row_bytes = row_bytes ? row_bytes : n_bytes,
            .high_scale = high_scale, .out = out};
  w.row_left = w.row_bytes;
  K3Finger finger = {{0}};
  out->error = EINVAL;
  if (!w.loops || block_bytes % K3_FINGER_BLOCK) return K3_SCAN_ERROR;
  out->error = 0;
  while (out->n_bytes < n_bytes) {
    if (*stop) return K3_SCAN_STOPPED;
    const uint64_t left = n_bytes - out->n_bytes;
    const size_t want = left < block_bytes ? (size_t)left : (size_t)block_bytes;
    const ssize_t got = read_block(fd, block, want, offset + out->n_bytes);
    if (got < 0) out->error = errno;
    if (got < 0) return K3_SCAN_ERROR;
    out->n_bytes += (uint64_t)got;
    memset(block + got, 0, -(size_t)got % K3_FINGER_BLOCK); /* the end of the last mixed block */
    for (size_t at = 0; at < (size_t)got; at += PART_BYTES) {
      const size_t part = (size_t)got - at < PART_BYTES ? (size_t)got - at : PART_BYTES;
      look_at_part(&w, block + at, part);
      if (want_finger)
        w.loops->finger(&finger, block + at, (part + K3_FINGER_BLOCK - 1) / K3_FINGER_BLOCK);
    }
    if ((size_t)got < want) return K3_SCAN_ENDED;
  }
  if (want_finger) finish_finger(&finger, n_bytes, out->fingerprint);
  return K3_SCAN_DONE;
}

/* What the scan is measured against: the same reads and nothing else. Returns bytes read, or -1. */
int64_t k3_scan_read_only(int fd, uint64_t offset, uint64_t n_bytes, uint8_t* block,
                          uint64_t block_bytes) {
  uint64_t done = 0;
  while (done < n_bytes) {
    const uint64_t left = n_bytes - done;
    const size_t want = left < block_bytes ? (size_t)left : (size_t)block_bytes;
    const ssize_t got = read_block(fd, block, want, offset + done);
    if (got < 0) return -1;
    if (got == 0) break;
    done += (uint64_t)got;
  }
  return (int64_t)done;
}

/* k3_scan: read row-aligned parts of tensors block by block and gather what K3Scan holds.
 * A block is looked at where read() has just put it, so it is a fraction of a second-level cache; and
 * blocks take turns in a longer buffer, because read() copies more slowly to lines that were in that
 * cache just now. Called from several threads at once; it keeps no state of its own. */
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
size_t k3_scan_job_size(void) { return sizeof(K3ScanJob); }

#if defined(__x86_64__)
static int has_avx512(void) { /* what the unit is compiled for */
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
}
#endif

static const K3ScanLoops* pick_loops(void) {
#if defined(__x86_64__)
  if (has_avx512()) return &k3_scan_loops_avx512;
  if (__builtin_cpu_supports("avx2")) return &k3_scan_loops_avx2;
#endif
  return &k3_scan_loops_plain;
}

/* Sets of loops by name for tests: 0 plain, 1 AVX2, 2 AVX-512; NULL where the CPU lacks them. */
static const K3ScanLoops* loops_of(int which) {
  if (which < 0) return pick_loops();
#if defined(__x86_64__)
  if (which == 1) return __builtin_cpu_supports("avx2") ? &k3_scan_loops_avx2 : NULL;
  if (which == 2) return has_avx512() ? &k3_scan_loops_avx512 : NULL;
#endif
  return which == 0 ? &k3_scan_loops_plain : NULL;
}

typedef struct {
  const K3ScanLoops* loops;
  K3Finger* finger; /* NULL if it is not asked for */
  uint32_t kind;
  uint64_t row_bytes;
  uint64_t row;      /* the row the next byte belongs to */
  uint64_t row_left; /* bytes of it to come */
  int row_seen;      /* a value of it is not zero */
  uint64_t at;       /* bytes looked at before this part */
  unsigned high_scale;
  const uint8_t* scales; /* of E2M1 codes, one byte for 16 of theirs; NULL if they are not known */
  K3Scan* out;
} Walk;

static size_t width_of(uint32_t kind) { return kind == K3_SCAN_F32 ? 4 : 2; }

/* The number is told by a loop over vectors, the first place by one over elements, once. */
static void count_bad(Walk* w, const uint8_t* data, size_t n_bytes) {
  const size_t width = width_of(w->kind);
  K3Scan* out = w->out;
  out->n_nonfinite += width == 2 ? w->loops->nonfinite_bf16(data, n_bytes)
                                 : w->loops->nonfinite_f32(data, n_bytes);
  for (size_t i = 0; out->first_bad == K3_SCAN_NONE && i + width <= n_bytes; i += width) {
    uint32_t bits = 0;
    memcpy(&bits, data + i, width);
    if (width == 2) bits <<= 16;
    if ((bits & 0x7F800000u) == 0x7F800000u) out->first_bad = (w->at + i) / width;
  }
}

/* Look at the numbers of a part and mix it, in one pass where both are asked for. */
static void look_at_floats(Walk* w, const uint8_t* data, size_t n_bytes, size_t n_blocks) {
  const K3ScanLoops* loops = w->loops;
  uint32_t most;
  if (w->kind == K3_SCAN_F32) {
    most = w->finger ? loops->finger_f32(w->finger, data, n_blocks)
                     : loops->absmax_f32(data, n_bytes);
  } else {
    most = w->finger ? loops->finger_bf16(w->finger, data, n_blocks)
                     : loops->absmax_bf16(data, n_bytes);
    most <<= 16;
  }
  if (most > w->out->absmax_bits) w->out->absmax_bits = most;
  if (most >= 0x7F800000u) count_bad(w, data, n_bytes);
}

/* What of eight bytes says that a value is not zero, of either sign. */
static uint64_t value_mask(uint32_t kind) {
  switch (kind) {
    case K3_SCAN_BF16:
      return 0x7FFF7FFF7FFF7FFFu;
    case K3_SCAN_F32:
      return 0x7FFFFFFF7FFFFFFFu;
    case K3_SCAN_MXFP4:
      return 0x7777777777777777u; /* a code's sign is its top bit */
    default:
      return UINT64_MAX;
  }
}

/* Whether a row is nothing but zeros mostly shows in its first values. */
static int row_is_set(const Walk* w, const uint8_t* data, size_t n_bytes) {
  const uint64_t mask = value_mask(w->kind);
  uint64_t first = 0;
  memcpy(&first, data, n_bytes < 8 ? n_bytes : 8);
  return (first & mask) || w->loops->or_masked(data, n_bytes, mask);
}

static void walk_rows(Walk* w, const uint8_t* data, size_t n_bytes) {
  for (size_t i = 0; i < n_bytes;) {
    const size_t part = w->row_left < n_bytes - i ? (size_t)w->row_left : n_bytes - i;
    if (!w->row_seen) w->row_seen = row_is_set(w, data + i, part);
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
  const size_t n_blocks = (n_bytes + K3_FINGER_BLOCK - 1) / K3_FINGER_BLOCK;
  K3Scan* out = w->out;
  if (w->kind == K3_SCAN_BF16 || w->kind == K3_SCAN_F32) {
    look_at_floats(w, data, n_bytes, n_blocks);
  } else if (w->finger) {
    w->loops->finger(w->finger, data, n_blocks);
  }
  if (w->kind == K3_SCAN_SCALE) {
    count_scales(w, data, n_bytes);
  } else {
    walk_rows(w, data, n_bytes);
  }
  if (w->kind == K3_SCAN_MXFP4) {
    if (w->at / K3_PART_BYTES % K3_CODE_SHARE == 0)
      w->loops->count_codes(data, n_bytes, out->codes);
    if (w->scales)
      out->product_key =
          w->loops->top_product(data, w->scales + w->at / 16, n_bytes / 16, out->product_key);
  }
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

/* Where blocks of a file are read to, each behind the one before. */
typedef struct {
  uint8_t* data;
  uint64_t n_bytes; /* and K3_FINGER_BLOCK more */
  uint64_t block_bytes;
  uint64_t at;
} Buffer;

static uint8_t* next_block(Buffer* buffer) {
  if (buffer->at + buffer->block_bytes > buffer->n_bytes) buffer->at = 0;
  uint8_t* block = buffer->data + buffer->at;
  buffer->at += buffer->block_bytes;
  return block;
}

/* Read and look at a job; see k3_scan. */
static int scan_blocks(Walk* w, const K3ScanJob* job, Buffer* buffer, const volatile int* stop) {
  K3Scan* out = w->out;
  while (out->n_bytes < job->n_bytes) {
    if (*stop) return K3_SCAN_STOPPED;
    const uint64_t left = job->n_bytes - out->n_bytes;
    const size_t want = left < buffer->block_bytes ? (size_t)left : (size_t)buffer->block_bytes;
    uint8_t* block = next_block(buffer);
    const ssize_t got = read_block(job->fd, block, want, job->offset + out->n_bytes);
    if (got < 0) out->error = errno;
    if (got < 0) return K3_SCAN_ERROR;
    out->n_bytes += (uint64_t)got;
    memset(block + got, 0, -(size_t)got % K3_FINGER_BLOCK); /* the end of the last mixed block */
    for (size_t at = 0; at < (size_t)got; at += K3_PART_BYTES)
      look_at_part(w, block + at, (size_t)got - at < K3_PART_BYTES ? (size_t)got - at : K3_PART_BYTES);
    if ((size_t)got < want) return K3_SCAN_ENDED;
  }
  return K3_SCAN_DONE;
}

static int scan_job(const K3ScanJob* job, const K3ScanLoops* loops, uint32_t high_scale,
                    uint32_t want_finger, const uint8_t* scales, Buffer* buffer,
                    const volatile int* stop, K3Scan* out) {
  memset(out, 0, sizeof *out);
  out->first_bad = out->first_zero_row = out->first_high = K3_SCAN_NONE;
  out->product_key = scales ? 0 : -1;
  K3Finger finger = {{0}};
  Walk w = {.loops = loops, .kind = job->kind, .high_scale = high_scale, .scales = scales,
            .finger = want_finger ? &finger : NULL,
            .row_bytes = job->row_bytes ? job->row_bytes : job->n_bytes, .out = out};
  w.row_left = w.row_bytes;
  const int code = scan_blocks(&w, job, buffer, stop);
  if (want_finger && code == K3_SCAN_DONE)
    finish_finger(&finger, job->n_bytes, out->fingerprint);
  return code;
}

/* Scan jobs, each a range of an open file, one after the other; `outs` has one result for each and
 * `n_done` says how many were begun. `ring` holds ring_bytes, a multiple of block_bytes, which are one
 * of K3_PART_BYTES, and K3_FINGER_BLOCK more. A job of scales that are to be kept is read as a whole to
 * `kept`, of kept_bytes and K3_FINGER_BLOCK more, and the next job has their codes. `stop` is looked at
 * once a block. `which` < 0 picks the fastest loops. Returns K3_SCAN_DONE or why the last one begun
 * failed. */
int k3_scan(const K3ScanJob* jobs, uint32_t n_jobs, uint32_t high_scale, uint32_t want_finger,
            uint8_t* ring, uint64_t ring_bytes, uint64_t block_bytes, uint8_t* kept,
            uint64_t kept_bytes, const volatile int* stop, int which, K3Scan* outs,
            uint32_t* n_done) {
  const K3ScanLoops* loops = loops_of(which);
  Buffer blocks = {ring, ring_bytes, block_bytes, 0};
  *n_done = 0;
  for (uint32_t i = 0; i < n_jobs; i++) {
    Buffer whole = {kept, kept_bytes, kept_bytes, 0};
    const int keep = jobs[i].keep, has_scales = i && jobs[i - 1].keep;
    ++*n_done;
    outs[i].error = EINVAL;
    if (!loops || block_bytes % K3_PART_BYTES || ring_bytes < block_bytes) return K3_SCAN_ERROR;
    if (keep && (kept_bytes % K3_PART_BYTES || jobs[i].n_bytes > kept_bytes)) return K3_SCAN_ERROR;
    if (has_scales && jobs[i].n_bytes != 16 * jobs[i - 1].n_bytes) return K3_SCAN_ERROR;
    const int code = scan_job(&jobs[i], loops, high_scale, want_finger, has_scales ? kept : NULL,
                              keep ? &whole : &blocks, stop, &outs[i]);
    if (code != K3_SCAN_DONE) return code;
  }
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

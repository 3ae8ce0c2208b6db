/* Reads a range of a file and says what its bytes are, at about the speed of reading them.
 * Shared by scan.c, which reads, and scan_loops.c, which is compiled once an instruction set. */
#ifndef K3_SCAN_H
#define K3_SCAN_H

#include <stddef.h>
#include <stdint.h>

enum {
  K3_SCAN_BYTES = 0,  /* any other dtype: all-zero rows and the fingerprint only */
  K3_SCAN_BF16 = 1,
  K3_SCAN_F32 = 2,
  K3_SCAN_MXFP4 = 3,  /* packed: two E2M1 codes a byte, low nibble = even column */
  K3_SCAN_SCALE = 4,  /* E8M0: 2^(byte - 127) */
};

enum { K3_SCAN_DONE = 0, K3_SCAN_ERROR = 1, K3_SCAN_ENDED = 2, K3_SCAN_STOPPED = 3 };

#define K3_SCAN_NONE UINT64_MAX
#define K3_FINGER_LANES 8

/* Mirrored field by field in k3tool/checkpoint/scan_library.py, which compares the sizes. */
typedef struct {
  uint64_t n_bytes;        /* bytes read */
  uint64_t n_nonfinite;    /* elements that are NaN or Inf */
  uint64_t first_bad;      /* index of the first of them, or K3_SCAN_NONE */
  uint64_t n_zero_rows;    /* rows whose every value is zero (of either sign) */
  uint64_t first_zero_row; /* or K3_SCAN_NONE */
  uint64_t fingerprint[2];
  uint64_t histogram[256]; /* of scale bytes */
  uint64_t first_high;     /* index of the first scale byte >= high_scale, or K3_SCAN_NONE */
  uint32_t absmax_bits;    /* binary32 bits of the largest magnitude, finite or not */
  uint32_t low_codes;      /* bit c: E2M1 code c stands in a low nibble */
  uint32_t high_codes;
  int32_t error;           /* errno of a failed read */
} K3Scan;

/* What the loops keep between blocks. */
typedef struct {
  uint64_t lanes[K3_FINGER_LANES];
} K3Finger;

/* One instruction set's loops. Magnitudes come as the bits of the element's own width. */
typedef struct {
  uint32_t (*absmax_bf16)(const uint8_t* data, size_t n_bytes);
  uint32_t (*absmax_f32)(const uint8_t* data, size_t n_bytes);
  uint8_t (*or_masked)(const uint8_t* data, size_t n_bytes, uint8_t mask);
  void (*code_masks)(const uint8_t* data, size_t n_bytes, uint32_t* low, uint32_t* high);
  void (*histogram)(const uint8_t* data, size_t n_bytes, uint64_t* counts);
  void (*finger)(K3Finger* finger, const uint8_t* data, size_t n_blocks);
} K3ScanLoops;

#define K3_FINGER_BLOCK 1024 /* bytes mixed under one set of keys */

extern const K3ScanLoops k3_scan_loops_plain, k3_scan_loops_avx2, k3_scan_loops_avx512;

#endif

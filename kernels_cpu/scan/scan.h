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
#define K3_FINGER_BLOCK 1024 /* bytes mixed under one set of keys */
#define K3_PART_BYTES (16 * K3_FINGER_BLOCK) /* what is looked at several times: half of a first level
                                              * cache */
#define K3_CODE_SHARE 64 /* counting every code takes half as long as reading it; a matrix of 5 MB still gives 150,000 */

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
  uint64_t codes[32];      /* how often each E2M1 code stands in a low nibble, then in a high one,
                            * in the first of every K3_CODE_SHARE parts */
  uint32_t absmax_bits;    /* binary32 bits of the largest magnitude, finite or not */
  int32_t product_key;     /* of the largest |code x scale|, see top_product: 0 where all are zero, -1
                            * where scales were not given */
  int32_t error;           /* errno of a failed read */
} K3Scan;

/* A range of an open file to look at. */
typedef struct {
  uint64_t offset;
  uint64_t n_bytes;
  uint64_t row_bytes;
  int32_t fd;
  uint32_t kind;
  int32_t keep;     /* of scales: keep the bytes for the next job */
  int32_t unused;
} K3ScanJob;

/* What the loops keep between blocks. */
typedef struct {
  uint64_t lanes[K3_FINGER_LANES];
} K3Finger;

/* One instruction set's loops. Magnitudes come as the bits of the element's own width. Parts are of
 * K3_PART_BYTES at most, those that are mixed of whole blocks. */
typedef struct {
  uint32_t (*absmax_bf16)(const uint8_t* data, size_t n_bytes);
  uint32_t (*absmax_f32)(const uint8_t* data, size_t n_bytes);
  uint64_t (*nonfinite_bf16)(const uint8_t* data, size_t n_bytes);
  uint64_t (*nonfinite_f32)(const uint8_t* data, size_t n_bytes);
  uint64_t (*or_masked)(const uint8_t* data, size_t n_bytes, uint64_t mask); /* of every 8 bytes */
  void (*count_codes)(const uint8_t* data, size_t n_bytes, uint64_t* counts);
  int32_t (*top_product)(const uint8_t* data, const uint8_t* scales, size_t n_scales, int32_t top);
  void (*histogram)(const uint8_t* data, size_t n_bytes, uint64_t* counts);
  void (*finger)(K3Finger* finger, const uint8_t* data, size_t n_blocks);
  uint32_t (*finger_bf16)(K3Finger* finger, const uint8_t* data, size_t n_blocks); /* and absmax */
  uint32_t (*finger_f32)(K3Finger* finger, const uint8_t* data, size_t n_blocks);
} K3ScanLoops;

extern const K3ScanLoops k3_scan_loops_plain, k3_scan_loops_avx2, k3_scan_loops_avx512;

#endif

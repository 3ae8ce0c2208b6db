/* Weights read into memory of 2 MiB pages before the first step, where mapping them would leave them on 4 KiB pages. */
#ifndef K3_CPU_COPY_H
#define K3_CPU_COPY_H

#include "image.h"

/* `copy[f]` becomes the place of file f's byte 0 for every file that a weight is read from: only the pages that hold
 * weights exist there. Tables of rows by token id are left out (k3_is_row_table): a token needs one row of them. Each
 * block that has come counts at `progress`. Returns 0, or -1 with one line in `why`. */
int k3_copy_weights(const K3Image *image, const char **copy, uint32_t n_threads, uint32_t *progress, char *why, size_t why_bytes);

/* Whether a tensor is read by EMBED_BF16, a row a token. */
int k3_is_row_table(const K3Image *image, uint32_t handle);

#endif

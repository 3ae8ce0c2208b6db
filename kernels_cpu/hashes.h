/* A hash of what every slice of every instruction wrote, step by step, and some results as they are. Off unless asked for.
 *
 * The driver says in a table what a slice writes of which result and which numbers its columns have over all ranks, so
 * nothing here knows an op. Hashes of a step go to a descriptor as one K3HashStep and a word a cell, in the table's order.
 * A descriptor that takes no more ends the trace, not the run. k3tool/trace/recorder.py writes the table and reads the rest. */
#ifndef K3_CPU_HASHES_H
#define K3_CPU_HASHES_H

#include "image.h"

#define K3_HASH_MAGIC 0x3148334bu /* "K3H1" */

/* Which rows a slice has written: all tokens' (COLUMNS), from head_from on (HEAD), those of its units (TOKENS), the same
 * where the result is a paged cache (CACHE); or all tokens', but only pages that a token sees (PAGES, a page a run). */
enum K3HashRows { K3_HASH_COLUMNS = 0, K3_HASH_HEAD, K3_HASH_TOKENS, K3_HASH_CACHE, K3_HASH_PAGES, K3_N_HASH_ROWS };

typedef struct K3HashCell {
    uint32_t handle, rows;        /* of the result; K3HashRows */
    uint64_t base;                /* words before the first token's row */
    uint32_t row_words;           /* from a token's row to the next one's */
    uint32_t col0, n_cols;        /* of a run, on this rank */
    uint32_t n_runs, run_words;   /* in a row; from one to the next */
    uint32_t key0, key_run;       /* number of the first column over all ranks; from a run to the next */
    uint32_t kept0;               /* of the first run's first column in a kept row; K3_NO_INDEX: not kept */
} K3HashCell;

/* The table's file: this, then for each phase u32[n_entries + 1] first cells of entries, then for each K3HashCell[]. */
typedef struct K3HashHeader {
    uint32_t magic, n_entries[K3_N_PHASES], n_cells[K3_N_PHASES];
    uint32_t first_kept, n_kept, kept_words; /* positions whose values are kept, and words of one of them */
    uint32_t error, reserved;                /* errno that ended the trace: the rank's answer */
} K3HashHeader;

typedef struct K3HashStep { /* before a step's hashes */
    uint32_t phase, n_tokens, position, head_from, n_cells, reserved[3];
} K3HashStep;

typedef struct K3Hashes {
    K3HashHeader *header;                        /* 0: no hashes */
    const uint32_t *first_cell[K3_N_PHASES];     /* [n_entries + 1] */
    const K3HashCell *cells[K3_N_PHASES];
    uint64_t *sums;                              /* [cells of the step's phase] */
    uint32_t *kept;                              /* [n_kept][kept_words], or 0 */
    int fd;                                      /* -1: the trace has ended */
} K3Hashes;

/* Map the table and check it against the image; `kept` is a descriptor of [n_kept][kept_words] words, or -1.
 * Returns 0, or -1 with one line in `why`. */
int k3_hashes_open(K3Hashes *hashes, const K3Image *image, int table, int fd, int kept, char *why, size_t why_bytes);

K3_STATIC_ASSERT(sizeof(K3HashCell) == 48, "written by recorder.py");
K3_STATIC_ASSERT(sizeof(K3HashHeader) == 40, "written by recorder.py");
K3_STATIC_ASSERT(sizeof(K3HashStep) == 32, "read by recorder.py");

#endif

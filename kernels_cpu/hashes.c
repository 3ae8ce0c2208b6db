#include "hashes.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "interp.h"

/* ---- opening --------------------------------------------------------------------------------------- */

static int inside(const K3Image *image, const K3HashHeader *h, const K3HashCell *c, uint32_t max_tokens) {
    if (c->handle >= image->n_tensors || c->rows >= K3_N_HASH_ROWS || c->n_cols == 0 || c->n_runs == 0) return 0;
    const K3TensorRow *t = &image->tensors[c->handle];
    if (t->place != K3_PLACE_ARENA && t->place != K3_PLACE_PEER && t->place != K3_PLACE_PRIVATE) return 0;
    const uint64_t words = t->bytes / 4, row = (uint64_t)(c->n_runs - 1u) * c->run_words + c->col0 + c->n_cols;
    const uint64_t rows = c->rows == K3_HASH_CACHE ? words / (c->row_words ? c->row_words : 1u) : max_tokens;
    if (row > c->row_words || rows == 0 || c->base > words || c->row_words > (words - c->base) / rows) return 0;
    return c->kept0 == K3_NO_INDEX || (uint64_t)c->kept0 + row - c->col0 <= h->kept_words;
}

static int place_phase(K3Hashes *s, const K3Image *image, uint32_t phase) {
    const K3Program *p = &image->program[phase];
    const uint32_t n = s->header->n_cells[phase], *first = s->first_cell[phase];
    if (s->header->n_entries[phase] != p->n_entries || first[p->n_entries] != n || (p->n_entries > 0 && first[0] != 0)) return -1;
    for (uint32_t i = 0; i < p->n_entries; i++)
        if (first[i] > first[i + 1]) return -1;
    for (uint32_t i = 0; i < n; i++)
        if (!inside(image, s->header, &s->cells[phase][i], p->row.max_tokens)) return -1;
    return 0;
}

/* Returns 0 where all parts lie in the table's bytes and name what the image has. */
static int place(K3Hashes *s, const K3Image *image, uint64_t bytes) {
    const K3HashHeader *h = s->header;
    const char *at = (const char *)(h + 1);
    uint64_t need = sizeof *h;
    if (bytes < need || h->magic != K3_HASH_MAGIC) return -1;
    for (uint32_t p = 0; p < K3_N_PHASES; p++) need += 4ull * (h->n_entries[p] + 1ull) + sizeof(K3HashCell) * (uint64_t)h->n_cells[p];
    if (need + 8u < bytes || bytes < need) return -1; /* cells begin on eight bytes */
    for (uint32_t p = 0; p < K3_N_PHASES; p++) {
        s->first_cell[p] = (const uint32_t *)(const void *)at;
        at += 4ull * (h->n_entries[p] + 1ull);
    }
    at += (uint64_t)(at - (const char *)h) % 8u;
    for (uint32_t p = 0; p < K3_N_PHASES; p++) {
        s->cells[p] = (const K3HashCell *)(const void *)at;
        at += sizeof(K3HashCell) * (uint64_t)h->n_cells[p];
    }
    if ((uint64_t)(at - (const char *)h) != bytes) return -1;
    for (uint32_t p = 0; p < K3_N_PHASES; p++)
        if (place_phase(s, image, p) != 0) return -1;
    return 0;
}

static void *map(int fd, uint64_t bytes, int protection) {
    void *base = mmap(NULL, (size_t)bytes, protection, MAP_SHARED, fd, 0);
    return base == MAP_FAILED ? NULL : base;
}

int k3_hashes_open(K3Hashes *s, const K3Image *image, int table, int fd, int kept, char *why, size_t why_bytes) {
    struct stat st;
    memset(s, 0, sizeof *s);
    s->fd = fd;
    snprintf(why, why_bytes, "a table of hashes that is not of this image");
    if (fstat(table, &st) != 0 || (s->header = map(table, (uint64_t)st.st_size, PROT_READ | PROT_WRITE)) == NULL) return -1;
    if (place(s, image, (uint64_t)st.st_size) != 0) return -1;
    const uint32_t *n = s->header->n_cells;
    s->sums = calloc((n[0] > n[1] ? n[0] : n[1]) + 1u, sizeof *s->sums);
    if (s->sums == NULL) return -1;
    const uint64_t bytes = 4ull * s->header->n_kept * s->header->kept_words;
    if (bytes == 0) return 0;
    if (kept < 0 || fstat(kept, &st) != 0 || (uint64_t)st.st_size != bytes) return -1;
    return (s->kept = map(kept, bytes, PROT_READ | PROT_WRITE)) == NULL ? -1 : 0;
}

/* ---- a step ---------------------------------------------------------------------------------------- */

void k3_hashes_begin(K3Team *team) {
    K3Hashes *s = &team->hashes;
    memset(s->sums, 0, s->header->n_cells[team->phase] * sizeof *s->sums);
}

/* One sequence, whose tokens follow each other: what the numbers of rows are taken from. */
static int is_one_run(const K3Step *step) {
    for (uint32_t t = 1; t < step->n_tokens; t++)
        if (step->slot[t] != step->slot[0] || step->position[t] != step->position[0] + t) return 0;
    return 1;
}

void k3_hashes_end(K3Team *team) {
    K3Hashes *s = &team->hashes;
    const K3HashStep head = {.phase = team->phase, .n_tokens = team->step.n_tokens, .position = team->step.position[0],
                             .head_from = team->step.head_from, .n_cells = s->header->n_cells[team->phase]};
    const struct iovec parts[2] = {{(void *)(uintptr_t)&head, sizeof head}, {s->sums, head.n_cells * sizeof *s->sums}};
    const ssize_t want = (ssize_t)(parts[0].iov_len + parts[1].iov_len);
    if (s->fd < 0) return;
    const ssize_t got = is_one_run(&team->step) ? writev(s->fd, parts, 2) : (errno = ENOTSUP, -1);
    if (got == want) return;
    s->header->error = (uint32_t)(got < 0 ? errno : ENOSPC); /* what was written of the step the reader drops */
    s->fd = -1;
}

/* Where a token's row begins: of a cache, in the page that its position is on. */
static const uint32_t *row_of(const K3Team *team, const K3HashCell *c, uint32_t token) {
    const uint32_t *base = (const uint32_t *)team->memory->tensor[c->handle] + c->base;
    const K3Step *s = &team->step;
    if (c->rows != K3_HASH_CACHE) return base + (uint64_t)token * c->row_words;
    const uint32_t page = s->page_table[(uint64_t)s->slot[token] * s->max_pages + s->position[token] / K3_PAGE_TOKENS];
    return base + ((uint64_t)page * K3_PAGE_TOKENS + s->position[token] % K3_PAGE_TOKENS) * c->row_words;
}

static uint64_t hash_row(const K3Team *team, const K3HashCell *c, const K3Entry *e, uint32_t token) {
    const K3Hashes *s = &team->hashes;
    const uint32_t position = team->step.position[token], kept = position - s->header->first_kept;
    const uint32_t *row = row_of(team, c, token) + c->col0;
    uint64_t sum = 0;
    for (uint32_t r = 0; r < c->n_runs; r++) {
        if (c->rows == K3_HASH_PAGES && (uint64_t)(e->unit0 + r) * K3_PAGE_TOKENS > position) break;
        const uint32_t *words = row + (uint64_t)r * c->run_words;
        const uint64_t key = ((uint64_t)position << 32) + c->key0 + (uint64_t)r * c->key_run;
        sum += team->bodies->digest(words, c->n_cols, key);
        if (s->kept != NULL && c->kept0 != K3_NO_INDEX && position >= s->header->first_kept && kept < s->header->n_kept)
            memcpy(s->kept + (uint64_t)kept * s->header->kept_words + c->kept0 + (uint64_t)r * c->run_words, words, (size_t)c->n_cols * 4);
    }
    return sum;
}

void k3_hash_entry(const K3Team *team, const K3Entry *e) {
    const K3Hashes *s = &team->hashes;
    const uint32_t entry = (uint32_t)(e - team->image->program[team->phase].entries);
    const uint32_t last = s->first_cell[team->phase][entry + 1];
    for (uint32_t i = s->first_cell[team->phase][entry]; i < last; i++) {
        const K3HashCell *c = &s->cells[team->phase][i];
        const int by_token = c->rows == K3_HASH_TOKENS || c->rows == K3_HASH_CACHE;
        const uint32_t t0 = c->rows == K3_HASH_HEAD ? team->step.head_from : by_token ? e->unit0 : 0u;
        for (uint32_t t = t0; t < team->step.n_tokens && (!by_token || t < e->unit1); t++) s->sums[i] += hash_row(team, c, e, t);
    }
}

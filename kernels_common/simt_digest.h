/* The digest of what an instruction wrote, on a GPU: the same sum as kernels_cpu/observe.c, each lane its part. */
#ifndef K3_SIMT_DIGEST_H
#define K3_SIMT_DIGEST_H

#include "simt_block.h"

/* This lane's part. */
K3_FN uint64_t k3_digest_words(const uint32_t *words, uint32_t n, uint64_t key) {
    uint64_t sum = 0u;
    K3_FOR(i, 0u, n) { sum += k3_mix(words[i] ^ k3_mix(key + i)); }
    return sum;
}

K3_FN uint64_t k3_digest_rows(const K3Block *b, const K3Launch *l, const K3OpRow &op) {
    const K3Inst *inst = &b->inst;
    const uint32_t handle = inst->handle[op.output_slot];
    const uint32_t *out = (const uint32_t *)l->tensor[handle];
    const int is_head = handle == l->output_handle || handle == l->logits_handle; /* other rows are not written */
    const int by_columns = op.unit_kind == K3_UNIT_COLUMNS;
    const uint32_t period = inst->n_units * inst->unit_cols; /* columns of one expert's part, else all */
    const uint32_t step = by_columns && period > 0u && period < inst->width ? period : inst->width;
    uint32_t row0 = is_head ? b->step.head_from : 0u, row1 = b->step.n_tokens, col0 = 0u, n_cols = inst->width;
    uint64_t sum = 0u;
    if (op.unit_kind == K3_UNIT_TOKEN) {
        row0 = b->entry.unit0 > row0 ? b->entry.unit0 : row0;
        row1 = b->entry.unit1 < row1 ? b->entry.unit1 : row1;
    } else if (by_columns) {
        col0 = b->entry.unit0 * inst->unit_cols;
        n_cols = (b->entry.unit1 - b->entry.unit0) * inst->unit_cols;
        if (col0 + n_cols > step) n_cols = step - col0;
    }
    for (uint32_t t = row0; t < row1; t++) {
        for (uint32_t col = col0; col < inst->width; col += step) {
            const uint64_t at = (uint64_t)t * inst->width + col;
            sum += k3_digest_words(out + at, n_cols, ((uint64_t)b->entry.inst << 32) + at);
        }
    }
    return sum;
}

K3_FN uint64_t k3_digest_cache(const K3Block *b, const K3Launch *l, const K3OpRow &op) {
    const uint32_t *cache = (const uint32_t *)l->tensor[b->inst.handle[op.output_slot]];
    const uint32_t width = b->inst.width;
    uint64_t sum = 0u;
    for (uint32_t t = b->entry.unit0; t < b->entry.unit1 && t < b->step.n_tokens; t++) {
        const uint32_t position = b->step.position[t];
        const uint32_t page = b->step.page_table[(uint64_t)b->step.slot[t] * b->step.max_pages + position / K3_PAGE_TOKENS];
        const uint64_t row = (uint64_t)page * K3_PAGE_TOKENS + position % K3_PAGE_TOKENS;
        sum += k3_digest_words(cache + row * width, width, ((uint64_t)b->entry.inst << 32) + (uint64_t)t * width);
    }
    return sum;
}

K3_FN uint64_t k3_digest_group(const K3Block *b, const K3Launch *l, const K3OpRow &op) {
    const K3Entry *e = &b->entry;
    uint64_t sum = 0u;
    uint32_t first = 0u;
    for (uint32_t i = 0; i < op.n_outputs; i++) {
        const uint32_t handle = b->inst.handle[op.output_slot] + i, cols = l->results[handle].row_elems;
        const uint32_t *out = (const uint32_t *)l->tensor[handle];
        const uint32_t units = op.unit_kind == K3_UNIT_MEMBER ? 1u : cols;
        const uint32_t lo = e->unit0 > first ? e->unit0 : first, hi = e->unit1 < first + units ? e->unit1 : first + units;
        if (l->results[handle].replicated != 0u && lo < hi) {
            const uint32_t col = units == cols ? lo - first : 0u, n = units == cols ? hi - lo : cols;
            for (uint32_t t = 0; t < b->step.n_tokens; t++) {
                const uint64_t at = (uint64_t)t * cols + col;
                sum += k3_digest_words(out + at, n, ((uint64_t)e->inst << 32) + ((uint64_t)i << 24) + at);
            }
        }
        first += units;
    }
    return sum;
}

K3_FN uint64_t k3_digest(const K3Block *b, const K3Launch *l) {
    const K3OpRow op = l->ops[b->inst.op];
    if (op.digest_mode == K3_DIGEST_ROWS) return k3_digest_rows(b, l, op);
    if (op.digest_mode == K3_DIGEST_CACHE) return k3_digest_cache(b, l, op);
    return op.digest_mode == K3_DIGEST_GROUP ? k3_digest_group(b, l, op) : 0u;
}

#endif

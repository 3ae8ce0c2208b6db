/* What the interpreter looks at beside the ops: digests of results, and experts before their first use.
 * Neither changes a number of the model. */
#include "interp.h"

/* ---- digest ---------------------------------------------------------------------------------------- */

static uint64_t digest_rows(const K3Team *team, const K3Inst *inst, const K3Entry *e, uint32_t first_row) {
    const K3OpRow *op = &team->image->ops[inst->op];
    const uint32_t *out = team->memory->tensor[inst->handle[op->output_slot]];
    const uint64_t key = (uint64_t)e->inst << 32;
    const uint32_t period = inst->n_units * inst->unit_cols; /* columns of one expert's part, else all */
    const int by_columns = op->unit_kind == K3_UNIT_COLUMNS;
    const uint32_t step = by_columns && period > 0 && period < inst->width ? period : inst->width;
    uint32_t row0 = first_row, row1 = team->step.n_tokens, col0 = 0, n_cols = inst->width;
    uint64_t sum = 0;
    if (op->unit_kind == K3_UNIT_TOKEN) {
        row0 = e->unit0 > row0 ? e->unit0 : row0;
        row1 = e->unit1 < row1 ? e->unit1 : row1;
    } else if (by_columns) {
        col0 = e->unit0 * inst->unit_cols;
        n_cols = (e->unit1 - e->unit0) * inst->unit_cols;
        if (col0 + n_cols > step) n_cols = step - col0;
    }
    for (uint32_t t = row0; t < row1; t++) {
        for (uint32_t col = col0; col < inst->width; col += step) {
            const uint64_t at = (uint64_t)t * inst->width + col;
            sum += team->bodies->digest(out + at, n_cols, key + at);
        }
    }
    return sum;
}

/* A token's row of a paged cache. */
static uint64_t digest_cache(const K3Team *team, const K3Inst *inst, const K3Entry *e) {
    const K3Step *s = &team->step;
    const uint32_t *cache = team->memory->tensor[inst->handle[team->image->ops[inst->op].output_slot]];
    uint64_t sum = 0;
    for (uint32_t t = e->unit0; t < e->unit1 && t < s->n_tokens; t++) {
        const uint32_t position = s->position[t];
        const uint32_t page = s->page_table[(uint64_t)s->slot[t] * s->max_pages + position / K3_PAGE_TOKENS];
        const uint64_t row = (uint64_t)page * K3_PAGE_TOKENS + position % K3_PAGE_TOKENS;
        sum += team->bodies->digest(cache + row * inst->width, inst->width, ((uint64_t)e->inst << 32) + (uint64_t)t * inst->width);
    }
    return sum;
}

/* A group's results: each a buffer of its own, some of them a rank's own and so left out. Units count rows
 * through all members, or are the members themselves. */
static uint64_t digest_group(const K3Team *team, const K3Inst *inst, const K3Entry *e) {
    const K3OpRow *op = &team->image->ops[inst->op];
    uint64_t sum = 0;
    uint32_t first = 0;
    for (uint32_t i = 0; i < op->n_outputs; i++) {
        const uint32_t handle = inst->handle[op->output_slot] + i;
        const K3TensorRow *row = &team->image->tensors[handle];
        const uint32_t *out = team->memory->tensor[handle];
        const uint32_t cols = row->row_elems, units = op->unit_kind == K3_UNIT_MEMBER ? 1u : cols;
        const uint32_t lo = e->unit0 > first ? e->unit0 : first, hi = e->unit1 < first + units ? e->unit1 : first + units;
        if (row->replicated != 0 && lo < hi) {
            const uint32_t col = units == cols ? lo - first : 0, n = units == cols ? hi - lo : cols;
            for (uint32_t t = 0; t < team->step.n_tokens; t++) {
                const uint64_t at = (uint64_t)t * cols + col;
                sum += team->bodies->digest(out + at, n, ((uint64_t)e->inst << 32) + ((uint64_t)i << 24) + at);
            }
        }
        first += units;
    }
    return sum;
}

uint64_t k3_result_digest(const K3Team *team, const K3Inst *inst, const K3Entry *e) {
    const K3OpRow *op = &team->image->ops[inst->op];
    if (op->digest_mode == K3_DIGEST_CACHE) return digest_cache(team, inst, e);
    if (op->digest_mode == K3_DIGEST_GROUP) return digest_group(team, inst, e);
    if (op->digest_mode != K3_DIGEST_ROWS) return 0;
    const uint32_t out = inst->handle[op->output_slot];
    const K3PhaseRow *row = &team->image->program[team->phase].row;
    const int is_head = out == row->output_handle || out == row->logits_handle; /* other rows are not written */
    return digest_rows(team, inst, e, is_head ? team->step.head_from : 0);
}

/* ---- experts --------------------------------------------------------------------------------------- */

#define SCALE_PARTS 64u /* bits of K3Memory.admitted */

/* An entry's units are rows of an expert, and so are its scales. Checking all of them in every slice would read a new
 * expert's from memory as often as there are workers; a slice's own are in the cache that it has just read them into. */
typedef struct Parts {
    uint32_t first, last; /* half-open: 64ths of the scales, which begin wherever they do */
    uint64_t bits;
} Parts;

static Parts parts_of(const K3Inst *inst, const K3Entry *e) {
    Parts p = {0, SCALE_PARTS, ~(uint64_t)0};
    if (inst->n_units == 0 || e->unit1 > inst->n_units || e->unit0 >= e->unit1) return p;
    p.first = (uint32_t)((uint64_t)e->unit0 * SCALE_PARTS / inst->n_units);
    p.last = (uint32_t)(((uint64_t)e->unit1 * SCALE_PARTS + inst->n_units - 1u) / inst->n_units);
    p.bits = (~(uint64_t)0 << p.first) & (~(uint64_t)0 >> (SCALE_PARTS - p.last));
    return p;
}

/* Numerics rule 4: a scale of 253 or more is refused when its row is first read, before anybody sees what came of it. An
 * expert that is not in memory is not used at all. */
static uint32_t admit_expert(const K3Memory *m, const K3TensorRow *t, uint32_t expert, const Parts *parts) {
    const uint32_t row = t->expert0 + expert;
    if (k3_is_coming(&m->experts[row])) return K3_PENDING;
    if (m->experts[row].packed == NULL) return K3_FAULT_ABSENT;
    if ((__atomic_load_n(&m->admitted[row], __ATOMIC_RELAXED) & parts->bits) == parts->bits) return K3_FAULT_NONE;
    const uint8_t *scale = m->experts[row].scale;
    uint8_t largest = 0;
    for (uint64_t i = t->scale_bytes * parts->first / SCALE_PARTS; i < t->scale_bytes * parts->last / SCALE_PARTS; i++)
        largest = scale[i] > largest ? scale[i] : largest;
    if (largest >= 253) return K3_FAULT_SCALE;
    __atomic_fetch_or(&m->admitted[row], parts->bits, __ATOMIC_RELAXED);
    return K3_FAULT_NONE;
}

/* route: top_k ids of every token, then as many weights, which are not looked at. */
uint32_t k3_admit_experts(const K3Team *team, const K3Inst *inst, const K3Entry *e, const uint32_t *route, uint32_t top_k, uint32_t *detail) {
    const Parts parts = parts_of(inst, e);
    for (uint32_t k = 0; k < K3_N_HANDLES; k++) {
        if (inst->handle[k] == 0xffff) continue;
        const K3TensorRow *t = &team->image->tensors[inst->handle[k]];
        if (t->place != K3_PLACE_EXPERTS && t->place != K3_PLACE_SLOTS) continue;
        for (uint32_t n = 0; n < team->step.n_tokens * top_k; n++) {
            const uint32_t expert = route[(uint64_t)(n / top_k) * 2 * top_k + n % top_k];
            *detail = expert;
            if (expert >= t->n_experts) return K3_FAULT_RANGE;
            const uint32_t fault = admit_expert(team->memory, t, expert, &parts);
            if (fault != K3_FAULT_NONE) return fault;
        }
    }
    return K3_FAULT_NONE;
}

/* The experts of a route that the instruction reads from a tensor. */
uint32_t k3_admit_route(const K3Team *team, const K3Inst *inst, const K3Entry *e, uint32_t route_slot, uint32_t *detail) {
    const uint16_t handle = inst->handle[route_slot];
    return k3_admit_experts(team, inst, e, team->memory->tensor[handle], team->image->tensors[handle].row_elems / 2, detail);
}

/* Mapping an image and checking every number in it. What can be wrong is a cut or damaged file or a fault in
 * the writer; neither may become a wild read. Op parameters (K, top_k and so on) are the plan's business:
 * the checksum says that they are what was written, `verify plan` says that they are right. */
#include "image.h"

#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct Check {
    K3Image *image;
    const char *base;
    uint64_t bytes;
    char *why;
    size_t why_bytes;
} Check;

static int refuse(Check *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(c->why, c->why_bytes, format, args);
    va_end(args);
    return -1;
}

static const uint32_t ELEM_BYTES[K3_N_SECTION_KINDS] = {
    [K3_SECTION_PHASE] = sizeof(K3PhaseRow), [K3_SECTION_INST] = sizeof(K3Inst),
    [K3_SECTION_ENTRY] = sizeof(K3Entry),    [K3_SECTION_QUEUE] = 4,
    [K3_SECTION_WAIT] = sizeof(K3Wait),      [K3_SECTION_SIGNAL] = 4,
    [K3_SECTION_EXPECT] = 4,                 [K3_SECTION_OP] = sizeof(K3OpRow),
    [K3_SECTION_TENSOR] = sizeof(K3TensorRow), [K3_SECTION_EXPERT] = sizeof(K3ExpertRow),
    [K3_SECTION_FILE] = sizeof(K3FileRow),   [K3_SECTION_TEXT] = 1,
    [K3_SECTION_PROMPT] = 4,                 [K3_SECTION_STOP] = 4,
};

static uint64_t checksum(const char *base, uint64_t bytes) {
    const uint64_t *words = (const uint64_t *)(const void *)base;
    const uint64_t skip = offsetof(K3ImageHeader, checksum) / 8;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < bytes / 8; i++) sum += k3_mix((i == skip ? 0 : words[i]) ^ k3_mix(i));
    return sum;
}

static int check_header(Check *c) {
    const K3ImageHeader *h = c->image->header;
    if (memcmp(h->magic, K3_IMAGE_MAGIC, 8) != 0) return refuse(c, "not an image");
    if (h->version != K3_IMAGE_VERSION) return refuse(c, "image version %u, need %u", h->version, K3_IMAGE_VERSION);
    if (h->file_bytes != c->bytes || c->bytes % 8 != 0)
        return refuse(c, "%llu bytes, the header says %llu", (unsigned long long)c->bytes, (unsigned long long)h->file_bytes);
    if (checksum(c->base, c->bytes) != h->checksum) return refuse(c, "checksum differs: damaged");
    if (memcmp(h->isa_hash, K3_ISA_HASH, 64) != 0)
        return refuse(c, "isa_hash %.12s.., this interpreter has %.12s..", h->isa_hash, K3_ISA_HASH);
    if (h->n_ranks == 0 || h->n_ranks > 64 || h->rank >= h->n_ranks) return refuse(c, "rank %u of %u", h->rank, h->n_ranks);
    if (h->n_workgroups == 0 || h->n_slots == 0 || h->max_pages == 0)
        return refuse(c, "an empty count in the header");
    if (h->max_context > h->max_pages * (uint64_t)K3_PAGE_TOKENS) return refuse(c, "context above its pages");
    if (h->first_phase >= K3_N_PHASES) return refuse(c, "first phase %u", h->first_phase);
    if ((uint64_t)h->n_load_queues + h->n_fetch_queues >= h->n_workgroups || (h->n_load_queues == 0) != (h->n_fetch_queues == 0) ||
        h->n_load_queues > K3_MOST_IO_QUEUES || h->n_fetch_queues > K3_MOST_IO_QUEUES)
        return refuse(c, "%u and %u I/O queues of %u workgroups", h->n_load_queues, h->n_fetch_queues, h->n_workgroups);
    if (h->slot_bytes % K3_IO_PAGE != 0 || (h->slot_bytes > 0 && h->n_expert_slots > (UINT64_MAX >> 1) / h->slot_bytes))
        return refuse(c, "%u expert slots of %llu bytes", h->n_expert_slots, (unsigned long long)h->slot_bytes);
    if (h->peer_bytes % K3_LINE != 0) return refuse(c, "peer bytes off a line");
    return 0;
}

/* Put one section where it belongs; offsets and lengths are inside the file afterwards. */
static int place_section(Check *c, const K3SectionRow *s) {
    K3Image *m = c->image;
    K3Program *p = &m->program[s->phase < K3_N_PHASES ? s->phase : 0];
    if (s->kind == 0 || s->kind >= K3_N_SECTION_KINDS || s->phase >= K3_N_PHASES)
        return refuse(c, "section kind %u of phase %u", s->kind, s->phase);
    const uint64_t elem = ELEM_BYTES[s->kind];
    if (s->elem_bytes != elem || s->offset % 64 != 0 || s->count > UINT32_MAX || s->offset > c->bytes ||
        s->count * elem > c->bytes - s->offset)
        return refuse(c, "section %u of phase %u leaves the file", s->kind, s->phase);
    const void *data = c->base + s->offset;
    const uint32_t n = (uint32_t)s->count;
    switch ((enum K3SectionKind)s->kind) {
    case K3_SECTION_PHASE:
        if (n != 1) return refuse(c, "phase rows: %u", n);
        p->row = *(const K3PhaseRow *)data;
        break;
    case K3_SECTION_INST: p->insts = data; p->n_insts = n; break;
    case K3_SECTION_ENTRY: p->entries = data; p->n_entries = n; break;
    case K3_SECTION_QUEUE:
        if (n != m->header->n_workgroups + 1) return refuse(c, "queue offsets: %u", n);
        p->queue = data;
        break;
    case K3_SECTION_WAIT: p->waits = data; p->n_waits = n; break;
    case K3_SECTION_SIGNAL: p->signals = data; p->n_signals = n; break;
    case K3_SECTION_EXPECT:
        p->expect = data;
        if (n != (uint64_t)p->row.n_counters + p->row.n_gates) return refuse(c, "expected counts: %u", n);
        break;
    case K3_SECTION_OP:
        if (n != K3_N_OPCODES) return refuse(c, "op rows: %u", n);
        m->ops = data;
        break;
    case K3_SECTION_TENSOR: m->tensors = data; m->n_tensors = n; break;
    case K3_SECTION_EXPERT: m->experts = data; m->n_experts = n; break;
    case K3_SECTION_FILE: m->files = data; m->n_files = n; break;
    case K3_SECTION_TEXT: m->text = data; m->text_bytes = s->count; break;
    case K3_SECTION_PROMPT: m->prompt = data; m->n_prompt = n; break;
    case K3_SECTION_STOP: m->stop = data; m->n_stop = n; break;
    case K3_N_SECTION_KINDS: break;
    }
    return 0;
}

static int check_counter(const K3PhaseRow *row, uint32_t id) {
    return (id & K3_SYSTEM) != 0 ? (id & ~K3_SYSTEM) < row->n_gates : id < row->n_counters;
}

static int check_entries(Check *c, uint32_t phase) {
    const K3Program *p = &c->image->program[phase];
    for (uint32_t i = 0; i < p->n_entries; i++) {
        const K3Entry *e = &p->entries[i];
        if (e->inst >= p->n_insts) return refuse(c, "phase %u entry %u: instruction %u of %u", phase, i, e->inst, p->n_insts);
        if (e->unit0 >= e->unit1 || e->unit1 > p->insts[e->inst].n_units)
            return refuse(c, "phase %u entry %u: units %u:%u of %u", phase, i, e->unit0, e->unit1, p->insts[e->inst].n_units);
        if (e->wait_ofs > p->n_waits || e->n_waits > p->n_waits - e->wait_ofs)
            return refuse(c, "phase %u entry %u: waits leave the list", phase, i);
        if (e->signal_ofs > p->n_signals || e->n_signals > p->n_signals - e->signal_ofs)
            return refuse(c, "phase %u entry %u: signals leave the list", phase, i);
    }
    for (uint32_t i = 0; i < p->n_waits; i++)
        if (!check_counter(&p->row, p->waits[i].counter)) return refuse(c, "phase %u wait %u: counter %#x", phase, i, p->waits[i].counter);
    for (uint32_t i = 0; i < p->n_signals; i++)
        if (!check_counter(&p->row, p->signals[i])) return refuse(c, "phase %u signal %u: counter %#x", phase, i, p->signals[i]);
    return 0;
}

static int check_program(Check *c, uint32_t phase) {
    const K3Image *m = c->image;
    const K3Program *p = &m->program[phase];
    const K3PhaseRow *row = &p->row;
    if (p->n_entries == 0) return 0;
    if (p->insts == NULL || p->queue == NULL || p->expect == NULL) return refuse(c, "phase %u: a section is missing", phase);
    if ((p->waits == NULL && p->n_waits > 0) || (p->signals == NULL && p->n_signals > 0)) return refuse(c, "phase %u: no lists", phase);
    if (row->max_tokens == 0 || row->n_counters > m->header->max_counters || row->n_gates > m->header->max_gates)
        return refuse(c, "phase %u: counts above the header's", phase);
    if (p->queue[0] != 0 || p->queue[m->header->n_workgroups] != p->n_entries) return refuse(c, "phase %u: queues do not cover the entries", phase);
    for (uint32_t w = 0; w < m->header->n_workgroups; w++)
        if (p->queue[w] > p->queue[w + 1]) return refuse(c, "phase %u: queue %u runs backwards", phase, w);
    for (uint32_t i = 0; i < p->n_insts; i++)
        for (uint32_t k = 0; k < K3_N_HANDLES; k++)
            if (p->insts[i].handle[k] != 0xffff && p->insts[i].handle[k] >= m->n_tensors)
                return refuse(c, "phase %u instruction %u: handle %u of %u", phase, i, p->insts[i].handle[k], m->n_tensors);
    for (uint32_t i = 0; i < p->n_insts; i++) { /* a group's results have neighbouring handles */
        const K3OpRow *op = p->insts[i].op < K3_N_OPCODES ? &m->ops[p->insts[i].op] : NULL;
        if (op == NULL || op->n_outputs < 2) continue;
        if (op->output_slot >= K3_N_HANDLES) return refuse(c, "phase %u instruction %u: result slot %u", phase, i, op->output_slot);
        const uint32_t last = p->insts[i].handle[op->output_slot] + op->n_outputs - 1u;
        if (last >= m->n_tensors) return refuse(c, "phase %u instruction %u: result handle %u of %u", phase, i, last, m->n_tensors);
    }
    if (row->output_handle >= m->n_tensors || row->logits_handle >= m->n_tensors) return refuse(c, "phase %u: no output", phase);
    const uint64_t out = m->tensors[row->output_handle].bytes, logits = m->tensors[row->logits_handle].bytes;
    if (out < (uint64_t)row->max_tokens * K3_CANDIDATE_WORDS * 4 || logits < (uint64_t)row->max_tokens * row->logits_cols * 4 ||
        m->tensors[row->output_handle].place != K3_PLACE_PRIVATE || m->tensors[row->logits_handle].place != K3_PLACE_PRIVATE)
        return refuse(c, "phase %u: output or logits too small", phase);
    return check_entries(c, phase);
}

static int inside(uint64_t offset, uint64_t bytes, uint64_t total) { return offset <= total && bytes <= total - offset; }

/* A weight that is read into memory of its own: in its file, and its pages in that memory. */
static int check_homed(const K3Image *m, const K3TensorRow *t, uint64_t total) {
    return t->file < m->n_files && inside(t->offset, t->bytes, m->files[t->file].bytes) && t->elem_bytes > 0 &&
           t->offset % t->elem_bytes == 0 && t->home % K3_IO_PAGE == 0 && t->bytes < total + 1u &&
           inside(t->home, k3_io_up(t->offset % K3_IO_PAGE + t->bytes), total);
}

static int check_tensors(Check *c) {
    const K3Image *m = c->image;
    const K3ImageHeader *h = m->header;
    for (uint32_t i = 0; i < m->n_files; i++) {
        const uint64_t at = m->files[i].path_offset;
        if (at >= m->text_bytes || memchr(m->text + at, 0, m->text_bytes - at) == NULL) return refuse(c, "file %u: no path", i);
        const K3FileRow *f = &m->files[i];
        const int has_copy = f->copy != K3_NO_INDEX;
        if (f->device >= K3_MOST_DEVICES || (has_copy && (f->copy <= i || f->copy >= m->n_files || m->files[f->copy].bytes != f->bytes)))
            return refuse(c, "file %u: device %u, copy %u of %u", i, f->device, f->copy, m->n_files);
    }
    for (uint32_t i = 0; i < m->n_tensors; i++) {
        const K3TensorRow *t = &m->tensors[i];
        int ok = 0;
        if (t->place == K3_PLACE_FILE) ok = t->file < m->n_files && inside(t->offset, t->bytes, m->files[t->file].bytes) && t->elem_bytes > 0;
        else if (t->place == K3_PLACE_ARENA) ok = inside(t->offset, t->bytes, h->arena_bytes) && t->offset % 64 == 0;
        else if (t->place == K3_PLACE_PEER) ok = inside(t->offset, t->bytes, h->peer_bytes) && t->offset % 64 == 0;
        else if (t->place == K3_PLACE_PINNED) ok = check_homed(m, t, h->pinned_bytes);
        else if (t->place == K3_PLACE_RING) ok = check_homed(m, t, h->ring_bytes);
        else if (t->place == K3_PLACE_PRIVATE) ok = inside(t->offset, t->bytes, h->private_bytes) && t->offset % 64 == 0;
        else if (t->place == K3_PLACE_EXPERTS || t->place == K3_PLACE_SLOTS) ok = t->n_experts > 0 && inside(t->expert0, t->n_experts, m->n_experts);
        if (!ok) return refuse(c, "tensor %u: place %u, outside its memory", i, t->place);
        if (t->place != K3_PLACE_EXPERTS && t->place != K3_PLACE_SLOTS) continue;
        for (uint32_t e = 0; e < t->n_experts; e++) {
            const K3ExpertRow *x = &m->experts[t->expert0 + e];
            if (x->packed_file >= m->n_files || x->scale_file >= m->n_files ||
                !inside(x->packed_offset, t->packed_bytes, m->files[x->packed_file].bytes) ||
                !inside(x->scale_offset, t->scale_bytes, m->files[x->scale_file].bytes))
                return refuse(c, "tensor %u expert %u: outside its file", i, e);
        }
    }
    return 0;
}

/* The request that the driver makes steps of, where the image carries one. */
static int check_request(Check *c) {
    const K3Image *m = c->image;
    const K3ImageHeader *h = m->header;
    if (m->n_prompt == 0 && h->n_gen == 0) return 0;
    if (m->n_prompt == 0 || h->n_gen == 0 || h->chunk == 0) return refuse(c, "an empty count in the request");
    if ((uint64_t)m->n_prompt + h->n_gen - 1 > h->max_context) return refuse(c, "prompt and tokens above the context %u", h->max_context);
    if (m->program[h->first_phase].n_entries == 0) return refuse(c, "no program reads the prompt");
    if (h->n_gen > 1 && m->program[0].n_entries == 0) return refuse(c, "no decode program");
    if (h->chunk > m->program[h->first_phase].row.max_tokens) return refuse(c, "chunk %u above the program's %u", h->chunk, m->program[h->first_phase].row.max_tokens);
    for (uint32_t i = 0; i < m->n_prompt; i++)
        if (m->prompt[i] >= h->vocab) return refuse(c, "prompt id %u of %u", m->prompt[i], h->vocab);
    return 0;
}

static int check_image(Check *c) {
    const K3ImageHeader *h = c->image->header;
    if (check_header(c) != 0) return -1;
    const uint64_t table = (uint64_t)h->n_sections * sizeof(K3SectionRow);
    if (table > c->bytes - sizeof *h) return refuse(c, "section table leaves the file");
    const K3SectionRow *rows = (const K3SectionRow *)(const void *)(h + 1);
    for (uint32_t i = 0; i < h->n_sections; i++)
        if (place_section(c, &rows[i]) != 0) return -1;
    if (c->image->ops == NULL || c->image->tensors == NULL) return refuse(c, "a section is missing");
    if (check_tensors(c) != 0) return -1;
    for (uint32_t phase = 0; phase < K3_N_PHASES; phase++)
        if (check_program(c, phase) != 0) return -1;
    return check_request(c);
}

int k3_image_open(K3Image *image, const char *path, char *why, size_t why_bytes) {
    Check c = {image, NULL, 0, why, why_bytes};
    struct stat st;
    memset(image, 0, sizeof *image);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        if (fd >= 0) close(fd);
        return refuse(&c, "%s", strerror(errno));
    }
    c.bytes = (uint64_t)st.st_size;
    if (c.bytes < sizeof(K3ImageHeader)) {
        close(fd);
        return refuse(&c, "%llu bytes: too short for an image", (unsigned long long)c.bytes);
    }
    void *base = mmap(NULL, (size_t)c.bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (base == MAP_FAILED) return refuse(&c, "%s", strerror(errno));
    c.base = base;
    image->header = base;
    return check_image(&c);
}

/* Runs kernels_common/simt_interp.h once over a small program and prints what its block does to the protocol's words.
 *
 * `record VENDOR flat`: a queue of its own, three instructions: a counter, a gate at two ranks with the next step's bank cleared
 * before it, and who waits for that. `record VENDOR domains`: a window of a domain in which two blocks meet at every instruction;
 * the other block's part has been done, or not yet. */
#include "simt_interp.h"

enum { N_INSTS = 8, N_COUNTERS = 2, N_GATES = 2, N_RANKS = 2, LINE_WORDS = K3_LINE / 4, OTHER_BANK = 7 };

/* [bank][index] of one line each; gates [rank][bank][index]. */
static uint32_t counters[2][N_COUNTERS][LINE_WORDS], gates[N_RANKS][2][N_GATES][LINE_WORDS], cursors[2][2][LINE_WORDS],
    rendezvous[2][2 * N_INSTS][LINE_WORDS];
static K3Control control;
static uint32_t abort_word;

struct Name {
    const char *text;
    uint32_t bank, index, *word;
};
static Name names[256];
static uint32_t n_names;
static bool was_set[256];

static void name(const char *text, uint32_t bank, uint32_t index, uint32_t *word) { names[n_names++] = {text, bank, index, word}; }

static void name_all() {
    static const char *const of_rank[N_RANKS] = {"gate", "peer_gate"};
    for (uint32_t bank = 0; bank < 2u; bank++) {
        for (uint32_t i = 0; i < N_COUNTERS; i++) name("counter", bank, i, counters[bank][i]);
        for (uint32_t r = 0; r < N_RANKS; r++)
            for (uint32_t i = 0; i < N_GATES; i++) name(of_rank[r], bank, i, gates[r][bank][i]);
        for (uint32_t i = 0; i < 2u; i++) name("cursor", bank, i, cursors[bank][i]);
        for (uint32_t i = 0; i < 2u * N_INSTS; i += 2u) {
            name("arrived", bank, i / 2u, &rendezvous[bank][i][K3_ARRIVED]);
            name("elected", bank, i / 2u, &rendezvous[bank][i][K3_ELECTED]);
            name("open", bank, i / 2u, &rendezvous[bank][i][K3_OPEN]);
        }
    }
    name("departed", 0u, 0u, &control.departed);
}

static void print_name(const Name &found) { printf(" %s%s%u", found.bank ? "other_" : "", found.text, found.index); }

/* What has been cleared since the line before. */
static void look_for_stores() {
    for (uint32_t i = 0; i < n_names; i++) {
        if (was_set[i] && *names[i].word == 0u) {
            printf("zero");
            print_name(names[i]);
            printf(" 0\n");
        }
        was_set[i] = *names[i].word != 0u;
    }
}

static void record_scope(const char *word, const uint32_t *about, uint32_t n, uint32_t scope) {
    look_for_stores();
    printf("%s", word);
    for (uint32_t i = 0; i < n_names; i++)
        if (names[i].word == about) print_name(names[i]);
    if (about != NULL) printf(" %u", n);
    puts(scope == K3_SYSTEM_SCOPE ? " system" : scope == K3_DEVICE_SCOPE ? " device" : "");
}

static void record(const char *word, const uint32_t *about, uint32_t n) { record_scope(word, about, n, 2u); }

/* ---- programs -------------------------------------------------------------------------------------- */

static K3Inst insts[N_INSTS];
static K3Entry entries[N_INSTS];
static K3Wait waits[N_INSTS];
static uint32_t signals[N_INSTS], order[N_INSTS], arrivals[2 * N_INSTS], windows[2][2], expect[N_COUNTERS + N_GATES];
static uint32_t n_entries, n_waits, n_signals;

struct Counted {
    uint32_t id, threshold; /* threshold 0: none */
};

static K3Entry *entry(Counted first, Counted second, uint32_t signal, uint16_t flags = 0) {
    K3Entry *e = &entries[n_entries];
    order[n_entries] = e->inst = n_entries;
    n_entries++;
    e->unit1 = 1u, e->flags = flags, e->wait_ofs = n_waits, e->signal_ofs = n_signals;
    const Counted both[] = {first, second};
    for (const Counted &one : both)
        if (one.threshold != 0u) waits[n_waits++] = {one.id, one.threshold}, e->n_waits++;
    if (signal != K3_NO_INDEX) signals[n_signals++] = signal, e->n_signals++;
    return e;
}

static const Counted NONE = {0u, 0u};
static const uint32_t NOTHING = K3_NO_INDEX, GATE = K3_SYSTEM;

static void flat() {
    entry(NONE, NONE, 0u);
    entry({0u, 1u}, NONE, GATE, K3_ENTRY_REARM);
    entry({0u, 1u}, {GATE, 1u}, NOTHING);
    expect[0] = expect[N_COUNTERS] = 1u;
}

static void domains() {
    uint32_t(*word)[LINE_WORDS] = rendezvous[0];
    entry(NONE, NONE, 1u); /* the first of two to arrive */
    entry(NONE, NONE, 0u); /* the last */
    word[2][K3_ARRIVED] = 1u;
    entry({0u, 2u}, NONE, NOTHING); /* elected */
    entry({0u, 2u}, NONE, NOTHING); /* behind the elected one */
    word[6][K3_ELECTED] = word[6][K3_OPEN] = 1u;
    entry({0u, 2u}, NONE, GATE);  /* a gate: alone, though two are of the domain */
    entry({GATE, 1u}, NONE, NOTHING); /* the same of who waits for one */
    entry({0u, 2u}, NONE, NOTHING); /* alone in its domain */
    for (uint32_t i = 0; i < n_entries; i++) arrivals[2u * i] = 2u;
    arrivals[2u * (n_entries - 1u)] = 1u;
    expect[0] = 2u, expect[N_COUNTERS] = 1u;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const bool is_flat = strcmp(argv[2], "flat") == 0;
    records_hip = strcmp(argv[1], "hip") == 0;
    is_flat ? flat() : domains();
    static K3Launch l;
    static K3Step step;
    static K3Block block;
    static void *tensor[1];
    static float scratch[64];
    tensor[0] = scratch;
    windows[0][1] = n_entries;
    l.insts = insts, l.entries = entries, l.order = is_flat ? 0 : order, l.windows = windows[0], l.waits = waits, l.signals = signals;
    l.expect = expect, l.arrivals = arrivals, l.tensor = tensor, l.step = &step, l.scratch = scratch, l.control = &control;
    l.counters = (char *)counters, l.gates = (char *)gates, l.cursors = (char *)cursors, l.rendezvous = (char *)rendezvous;
    l.abort_word = &abort_word, l.peer_stride = sizeof gates[0], l.n_segments = 1u, l.n_windows = is_flat ? 1u : 2u;
    l.n_domains = is_flat ? 1u : 2u, l.n_blocks = 1u, l.n_counters = l.max_counters = N_COUNTERS;
    l.n_gates = l.max_gates = N_GATES, l.max_cursors = 2u, l.max_rendezvous = 2u * N_INSTS, l.n_ranks = N_RANKS;
    /* The other bank has what the step before left in it. */
    memset(counters[1], OTHER_BANK, sizeof counters[1]);
    memset(gates[0][1], OTHER_BANK, sizeof gates[0][1]);
    memset(cursors[1], OTHER_BANK, sizeof cursors[1]);
    memset(rendezvous[1], OTHER_BANK, sizeof rendezvous[1]);
    name_all();
    look_for_stores();
    k3_interpret(&block, &l);
    look_for_stores();
    printf("end %u\n", control.fault.code);
    return 0;
}

/* What every interpreter, its host and Python share beside the records of k3.h: where an op's result lies, how
 * results are digested, what a fault report says. Layouts are part of the ABI. */
#ifndef K3_PROTOCOL_H
#define K3_PROTOCOL_H

#include "k3.h"

#define K3_NO_INDEX 0xffffffffu
#define K3_NO_SLOT 0xffu
#define K3_LINE 64u /* one counter a cache line */

typedef struct K3FaultReport {
    uint32_t code, phase, inst, opcode, workgroup, worker, counter, got, expected, detail;
} K3FaultReport;

/* What the interpreter itself must know of an op: where its result is, for digests and expert admission. */
enum K3DigestMode { K3_DIGEST_NONE = 0, K3_DIGEST_ROWS = 1, K3_DIGEST_CACHE = 2, K3_DIGEST_GROUP = 3 };
enum K3UnitKind { K3_UNIT_COLUMNS = 0, K3_UNIT_TOKEN = 1, K3_UNIT_STEP = 2, K3_UNIT_MEMBER = 3 };
typedef struct K3OpRow {
    uint8_t output_slot, digest_mode, unit_kind;
    uint8_t route_slot; /* slot of the route it reads, K3_NO_SLOT, or where it makes one: see K3_ROUTE_IN_SCRATCH */
    uint8_t n_outputs;  /* results of a group have neighbouring handles from output_slot's on */
    uint8_t reserved[3];
} K3OpRow;

/* The op chooses experts itself and leaves the route at the start of its scratch; the low bits are the parameter that
 * says how many a token. */
#define K3_ROUTE_IN_SCRATCH 0x80u

/* A digest is an order-free sum over 4-byte words of k3_mix(word ^ k3_mix(key + index)), so slices add up in any order. */
K3_INLINE uint64_t k3_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

K3_STATIC_ASSERT(sizeof(K3FaultReport) == 40, "read by records.py");
K3_STATIC_ASSERT(sizeof(K3OpRow) == 8, "written by image.py");

#endif

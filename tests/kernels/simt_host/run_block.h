/* Run a callable on every lane of an emulated block. */
#ifndef K3_HOST_RUN_BLOCK_H
#define K3_HOST_RUN_BLOCK_H

#include "dialect.h"

template <class Body>
static void run_block(uint32_t order, Body body) {
    k3_host_run((K3HostOrder)order, [](void *b) { (*(Body *)b)(); }, &body);
}

#endif

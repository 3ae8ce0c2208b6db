/* The one body of the recorded programs. */
K3_FN void k3_op_nop(K3Ctx *, const K3Inst *, uint32_t, uint32_t) { record("body", NULL, 0u); }

/* y_i = attn_part(blocks; res_norm_i, res_proj_i) for eight sites that mix the same finished blocks.
 *
 * Layout: attn_part.h; the sites' weights alternate in one run of handles, their results are another; width is that of
 * all eight. Unit: member, a site for every token. Reads all; writes every y. Scratch: K + n_blocks. Fault:
 * NONFINITE, detail = token. */
#ifndef K3_OP_ATTN_PARTS_8_H
#define K3_OP_ATTN_PARTS_8_H

#include "attn_part.h"

K3_FN void k3_op_attn_parts_8(K3Ctx *c, const K3Inst *inst, uint32_t u0, uint32_t u1) {
    const uint32_t width = inst->unit_cols;
    K3Mix m;
    uint32_t i, t;
    for (i = u0; i < u1; i++) {
        float *y = k3_out(c, inst, K3_ATTN_PARTS_8_Y0 + (i << K3_RUN_SHIFT));
        if (!k3_mix_begin(c, &m, k3_in(c, inst, K3_ATTN_PARTS_8_BLOCKS),
                          k3_bf16(c, inst, K3_ATTN_PARTS_8_RES_NORM0 + (2u * i << K3_RUN_SHIFT)),
                          k3_bf16(c, inst, K3_ATTN_PARTS_8_RES_PROJ0 + (2u * i << K3_RUN_SHIFT)),
                          inst->param[K3_ATTN_PARTS_8_N_BLOCKS], width - K3_PART_EXTRA,
                          k3_f32_param(inst, K3_ATTN_PARTS_8_EPS), 0))
            return;
        for (t = 0; t < c->step->n_tokens; t++) {
            k3_part_row(c, &m, y + (uint64_t)t * width, t);
            K3_SYNC(c); /* the next token overwrites the scores, the next site f */
        }
    }
}

#endif

/* Generated from k3tool/isa/table.py by genheader.py. Do not edit: run `make gen`. */
#ifndef K3_ISA_H
#define K3_ISA_H
#define K3_ISA_VERSION 1
#define K3_N_HANDLES 12
#define K3_N_PARAMS 6
#define K3_PAGE_TOKENS 256
#define K3_CANDIDATE_WORDS 4
#define K3_ISA_HASH "86919c58a1df3ea7cf36b0eb41f4b35827e0d3815b484a4c356213b48e041703"

/* nothing */
#define K3_OP_NOP 0
#define K3_NOP_Y 0 /* handle: out */

/* y[t] = table[token_id[t]]: a move */
#define K3_OP_EMBED_BF16 16
#define K3_EMBED_BF16_TABLE 0 /* handle: weight */
#define K3_EMBED_BF16_Y 1 /* handle: out */
#define K3_EMBED_BF16_VOCAB 0 /* param: u32, rows */

/* y[t,r] = rule3(w[r], x[t]); head_only: tokens from head_from on */
#define K3_OP_GEMV_BF16 17
#define K3_GEMV_BF16_X 0 /* handle: in */
#define K3_GEMV_BF16_W 1 /* handle: weight */
#define K3_GEMV_BF16_Y 2 /* handle: out */
#define K3_GEMV_BF16_K 0 /* param: u32, elements */
#define K3_GEMV_BF16_HEAD_ONLY 1 /* param: u32, flag */

/* y[t,r] = tree(rule3 of each of this rank's n_blocks blocks of row r) */
#define K3_OP_GEMV_BF16_BLOCKS 18
#define K3_GEMV_BF16_BLOCKS_X 0 /* handle: in */
#define K3_GEMV_BF16_BLOCKS_W 1 /* handle: weight */
#define K3_GEMV_BF16_BLOCKS_Y 2 /* handle: out */
#define K3_GEMV_BF16_BLOCKS_K 0 /* param: u32, elements */
#define K3_GEMV_BF16_BLOCKS_N_BLOCKS 1 /* param: u32, blocks */

/* y[t,r] = rule3(w[r], rmsnorm(x[t]; norm, eps)) */
#define K3_OP_NORM_GEMV_BF16 19
#define K3_NORM_GEMV_BF16_X 0 /* handle: in */
#define K3_NORM_GEMV_BF16_NORM 1 /* handle: weight */
#define K3_NORM_GEMV_BF16_W 2 /* handle: weight */
#define K3_NORM_GEMV_BF16_Y 3 /* handle: out */
#define K3_NORM_GEMV_BF16_K 0 /* param: u32, elements */
#define K3_NORM_GEMV_BF16_EPS 1 /* param: f32, 1 */
#define K3_NORM_GEMV_BF16_HEAD_ONLY 2 /* param: u32, flag */

/* y[t,r] = situ(rule3(gate[r], x[t]), rule3(up[r], x[t])) */
#define K3_OP_GLU_BF16 20
#define K3_GLU_BF16_X 0 /* handle: in */
#define K3_GLU_BF16_GATE 1 /* handle: weight */
#define K3_GLU_BF16_UP 2 /* handle: weight */
#define K3_GLU_BF16_Y 3 /* handle: out */
#define K3_GLU_BF16_K 0 /* param: u32, elements */
#define K3_GLU_BF16_BETA 1 /* param: f32, 1 */
#define K3_GLU_BF16_LINEAR_BETA 2 /* param: f32, 1 */

/* y = (x * (1 / sqrt(ss / width + eps))) * norm */
#define K3_OP_RMSNORM 32
#define K3_RMSNORM_X 0 /* handle: in */
#define K3_RMSNORM_NORM 1 /* handle: weight */
#define K3_RMSNORM_Y 2 /* handle: out */
#define K3_RMSNORM_EPS 0 /* param: f32, 1 */

/* y = softmax-weighted mix of n_blocks finished blocks and the prefix (numerics, AttnRes) */
#define K3_OP_ATTN_RES 33
#define K3_ATTN_RES_PREFIX 0 /* handle: in */
#define K3_ATTN_RES_BLOCKS 1 /* handle: in */
#define K3_ATTN_RES_RES_NORM 2 /* handle: weight */
#define K3_ATTN_RES_RES_PROJ 3 /* handle: weight */
#define K3_ATTN_RES_Y 4 /* handle: out */
#define K3_ATTN_RES_N_BLOCKS 0 /* param: u32, blocks */
#define K3_ATTN_RES_EPS 1 /* param: f32, 1 */

/* y = rmsnorm(attn_res(prefix, blocks); norm, norm_eps) */
#define K3_OP_ATTN_RES_NORM 34
#define K3_ATTN_RES_NORM_PREFIX 0 /* handle: in */
#define K3_ATTN_RES_NORM_BLOCKS 1 /* handle: in */
#define K3_ATTN_RES_NORM_RES_NORM 2 /* handle: weight */
#define K3_ATTN_RES_NORM_RES_PROJ 3 /* handle: weight */
#define K3_ATTN_RES_NORM_NORM 4 /* handle: weight */
#define K3_ATTN_RES_NORM_Y 5 /* handle: out */
#define K3_ATTN_RES_NORM_N_BLOCKS 0 /* param: u32, blocks */
#define K3_ATTN_RES_NORM_EPS 1 /* param: f32, 1 */
#define K3_ATTN_RES_NORM_NORM_EPS 2 /* param: f32, 1 */

/* blocks[index] = prefix: a move */
#define K3_OP_BLOCK_PUSH 35
#define K3_BLOCK_PUSH_PREFIX 0 /* handle: in */
#define K3_BLOCK_PUSH_BLOCKS 1 /* handle: inout */
#define K3_BLOCK_PUSH_INDEX 0 /* param: u32, blocks */

/* y = a + b */
#define K3_OP_ADD 36
#define K3_ADD_A 0 /* handle: in */
#define K3_ADD_B 1 /* handle: in */
#define K3_ADD_Y 2 /* handle: out */

/* y = a * b */
#define K3_OP_MUL 37
#define K3_MUL_A 0 /* handle: in */
#define K3_MUL_B 1 /* handle: in */
#define K3_MUL_Y 2 /* handle: out */

/* y = 1 / (1 + exp(-x)) */
#define K3_OP_SIGMOID 38
#define K3_SIGMOID_X 0 /* handle: in */
#define K3_SIGMOID_Y 1 /* handle: out */

/* y = x * sigmoid(x) */
#define K3_OP_SILU 39
#define K3_SILU_X 0 /* handle: in */
#define K3_SILU_Y 1 /* handle: out */

/* y = beta * tanh(x / beta) */
#define K3_OP_SOFTCAP 40
#define K3_SOFTCAP_X 0 /* handle: in */
#define K3_SOFTCAP_Y 1 /* handle: out */
#define K3_SOFTCAP_BETA 0 /* param: f32, 1 */

/* y = (softcap(gate; beta) * sigmoid(gate)) * softcap(up; linear_beta) */
#define K3_OP_SITU 41
#define K3_SITU_GATE 0 /* handle: in */
#define K3_SITU_UP 1 /* handle: in */
#define K3_SITU_Y 2 /* handle: out */
#define K3_SITU_BETA 0 /* param: f32, 1 */
#define K3_SITU_LINEAR_BETA 1 /* param: f32, 1 */

/* y = x * (1 / sqrt(sum x^2 + eps)) per head of unit_cols */
#define K3_OP_L2NORM 42
#define K3_L2NORM_X 0 /* handle: in */
#define K3_L2NORM_Y 1 /* handle: out */
#define K3_L2NORM_EPS 0 /* param: f32, 1 */

/* y = x * factor */
#define K3_OP_SCALE 43
#define K3_SCALE_X 0 /* handle: in */
#define K3_SCALE_Y 1 /* handle: out */
#define K3_SCALE_FACTOR 0 /* param: f32, 1 */

/* y = (x * (1 / sqrt(ss / unit_cols + eps))) * norm per head */
#define K3_OP_HEAD_RMSNORM 44
#define K3_HEAD_RMSNORM_X 0 /* handle: in */
#define K3_HEAD_RMSNORM_NORM 1 /* handle: weight */
#define K3_HEAD_RMSNORM_Y 2 /* handle: out */
#define K3_HEAD_RMSNORM_EPS 0 /* param: f32, 1 */

/* y[t] = w0 x[t-3], then fma w1 x[t-2], w2 x[t-1], w3 x[t]; taps keep the last three x per slot */
#define K3_OP_SHORT_CONV 48
#define K3_SHORT_CONV_X 0 /* handle: in */
#define K3_SHORT_CONV_CONV 1 /* handle: weight */
#define K3_SHORT_CONV_TAPS 2 /* handle: state */
#define K3_SHORT_CONV_Y 3 /* handle: out */

/* y = silu(short_conv(x)) */
#define K3_OP_CONV_SILU 49
#define K3_CONV_SILU_X 0 /* handle: in */
#define K3_CONV_SILU_CONV 1 /* handle: weight */
#define K3_CONV_SILU_TAPS 2 /* handle: state */
#define K3_CONV_SILU_Y 3 /* handle: out */

/* y = exp(lower_bound * sigmoid(exp(a_log[h]) * (f + dt_bias))) */
#define K3_OP_KDA_DECAY 50
#define K3_KDA_DECAY_F 0 /* handle: in */
#define K3_KDA_DECAY_A_LOG 1 /* handle: weight */
#define K3_KDA_DECAY_DT_BIAS 2 /* handle: weight */
#define K3_KDA_DECAY_Y 3 /* handle: out */
#define K3_KDA_DECAY_LOWER_BOUND 0 /* param: f32, 1 */

/* S = decay_i S; u = v - k.S; S = fma(k, beta u, S); y = q.S, in time order */
#define K3_OP_KDA_STEP 51
#define K3_KDA_STEP_Q 0 /* handle: in */
#define K3_KDA_STEP_K 1 /* handle: in */
#define K3_KDA_STEP_V 2 /* handle: in */
#define K3_KDA_STEP_DECAY 3 /* handle: in */
#define K3_KDA_STEP_BETA 4 /* handle: in */
#define K3_KDA_STEP_S 5 /* handle: state */
#define K3_KDA_STEP_Y 6 /* handle: out */

/* kda_step(scale(l2norm(q)), l2norm(k), v, kda_decay(f), sigmoid(b)) */
#define K3_OP_KDA_CORE 52
#define K3_KDA_CORE_Q 0 /* handle: in */
#define K3_KDA_CORE_K 1 /* handle: in */
#define K3_KDA_CORE_V 2 /* handle: in */
#define K3_KDA_CORE_F 3 /* handle: in */
#define K3_KDA_CORE_B 4 /* handle: in */
#define K3_KDA_CORE_A_LOG 5 /* handle: weight */
#define K3_KDA_CORE_DT_BIAS 6 /* handle: weight */
#define K3_KDA_CORE_S 7 /* handle: state */
#define K3_KDA_CORE_Y 8 /* handle: out */
#define K3_KDA_CORE_L2_EPS 0 /* param: f32, 1 */
#define K3_KDA_CORE_Q_SCALE 1 /* param: f32, 1 */
#define K3_KDA_CORE_LOWER_BOUND 2 /* param: f32, 1 */

/* y = head_rmsnorm(o; norm, eps) * sigmoid(gate) */
#define K3_OP_KDA_GATED_NORM 53
#define K3_KDA_GATED_NORM_O 0 /* handle: in */
#define K3_KDA_GATED_NORM_NORM 1 /* handle: weight */
#define K3_KDA_GATED_NORM_GATE 2 /* handle: in */
#define K3_KDA_GATED_NORM_Y 3 /* handle: out */
#define K3_KDA_GATED_NORM_EPS 0 /* param: f32, 1 */

/* y[h] = [rule3 over nope of W_UK[h]^T q_nope | q_rope] */
#define K3_OP_MLA_QLAT 56
#define K3_MLA_QLAT_Q 0 /* handle: in */
#define K3_MLA_QLAT_KV_B 1 /* handle: weight */
#define K3_MLA_QLAT_Y 2 /* handle: out */
#define K3_MLA_QLAT_NOPE 0 /* param: u32, elements */
#define K3_MLA_QLAT_ROPE 1 /* param: u32, elements */
#define K3_MLA_QLAT_LATENT 2 /* param: u32, elements */
#define K3_MLA_QLAT_V 3 /* param: u32, elements */

/* cache[slot, position] = [rmsnorm(latent; norm, eps) | shared key] */
#define K3_OP_MLA_CACHE 57
#define K3_MLA_CACHE_X 0 /* handle: in */
#define K3_MLA_CACHE_NORM 1 /* handle: weight */
#define K3_MLA_CACHE_CACHE 2 /* handle: state */
#define K3_MLA_CACHE_LATENT 0 /* param: u32, elements */
#define K3_MLA_CACHE_ROPE 1 /* param: u32, elements */
#define K3_MLA_CACHE_EPS 2 /* param: f32, 1 */

/* y[h] = softmax(q.cache * scale) over positions <= own, by pages, times latent */
#define K3_OP_MLA_ATTEND 58
#define K3_MLA_ATTEND_Q 0 /* handle: in */
#define K3_MLA_ATTEND_CACHE 1 /* handle: state */
#define K3_MLA_ATTEND_Y 2 /* handle: out */
#define K3_MLA_ATTEND_LATENT 0 /* param: u32, elements */
#define K3_MLA_ATTEND_ROPE 1 /* param: u32, elements */
#define K3_MLA_ATTEND_SCALE 2 /* param: f32, 1 */
#define K3_MLA_ATTEND_PAGE_TOKENS 3 /* param: u32, tokens */

/* y[t,h*v+i] = rule3(W_UV[h][i], ctx[t,h]) */
#define K3_OP_MLA_UV 59
#define K3_MLA_UV_CTX 0 /* handle: in */
#define K3_MLA_UV_KV_B 1 /* handle: weight */
#define K3_MLA_UV_Y 2 /* handle: out */
#define K3_MLA_UV_NOPE 0 /* param: u32, elements */
#define K3_MLA_UV_V 1 /* param: u32, elements */
#define K3_MLA_UV_LATENT 2 /* param: u32, elements */

/* y = o * sigmoid(gate) */
#define K3_OP_MLA_OUT_GATE 60
#define K3_MLA_OUT_GATE_O 0 /* handle: in */
#define K3_MLA_OUT_GATE_GATE 1 /* handle: in */
#define K3_MLA_OUT_GATE_Y 2 /* handle: out */

/* y = mla_uv(ctx) * sigmoid(gate) */
#define K3_OP_MLA_UV_GATE 61
#define K3_MLA_UV_GATE_CTX 0 /* handle: in */
#define K3_MLA_UV_GATE_KV_B 1 /* handle: weight */
#define K3_MLA_UV_GATE_GATE 2 /* handle: in */
#define K3_MLA_UV_GATE_Y 3 /* handle: out */
#define K3_MLA_UV_GATE_NOPE 0 /* param: u32, elements */
#define K3_MLA_UV_GATE_V 1 /* param: u32, elements */
#define K3_MLA_UV_GATE_LATENT 2 /* param: u32, elements */

/* top_k of sigmoid + bias, ids ascending; w = s / (sum s + 1e-20) * scale */
#define K3_OP_ROUTER_TOPK 64
#define K3_ROUTER_TOPK_LOGITS 0 /* handle: in */
#define K3_ROUTER_TOPK_BIAS 1 /* handle: weight */
#define K3_ROUTER_TOPK_Y 2 /* handle: out */
#define K3_ROUTER_TOPK_N_EXPERTS 0 /* param: u32, experts */
#define K3_ROUTER_TOPK_TOP_K 1 /* param: u32, experts */
#define K3_ROUTER_TOPK_SCALE 2 /* param: f32, 1 */

/* y[t,s,r] = rule3(w[expert s][r], z[t]) */
#define K3_OP_MOE_UP_MXFP4 65
#define K3_MOE_UP_MXFP4_Z 0 /* handle: in */
#define K3_MOE_UP_MXFP4_ROUTE 1 /* handle: in */
#define K3_MOE_UP_MXFP4_W 2 /* handle: weight */
#define K3_MOE_UP_MXFP4_Y 3 /* handle: out */
#define K3_MOE_UP_MXFP4_K 0 /* param: u32, elements */
#define K3_MOE_UP_MXFP4_TOP_K 1 /* param: u32, experts */

/* y[t,s,r] = situ(rule3(w1[expert s][r], z[t]), rule3(w3[expert s][r], z[t])) */
#define K3_OP_MOE_GLU_MXFP4 66
#define K3_MOE_GLU_MXFP4_Z 0 /* handle: in */
#define K3_MOE_GLU_MXFP4_ROUTE 1 /* handle: in */
#define K3_MOE_GLU_MXFP4_W1 2 /* handle: weight */
#define K3_MOE_GLU_MXFP4_W3 3 /* handle: weight */
#define K3_MOE_GLU_MXFP4_Y 4 /* handle: out */
#define K3_MOE_GLU_MXFP4_K 0 /* param: u32, elements */
#define K3_MOE_GLU_MXFP4_TOP_K 1 /* param: u32, experts */
#define K3_MOE_GLU_MXFP4_BETA 2 /* param: f32, 1 */
#define K3_MOE_GLU_MXFP4_LINEAR_BETA 3 /* param: f32, 1 */

/* y[t,r] = tree over blocks of sum over experts ascending of w_e * rule3(block of w2[e][r], x[t,s]) */
#define K3_OP_MOE_DOWN_MXFP4 67
#define K3_MOE_DOWN_MXFP4_X 0 /* handle: in */
#define K3_MOE_DOWN_MXFP4_ROUTE 1 /* handle: in */
#define K3_MOE_DOWN_MXFP4_W2 2 /* handle: weight */
#define K3_MOE_DOWN_MXFP4_Y 3 /* handle: out */
#define K3_MOE_DOWN_MXFP4_K 0 /* param: u32, elements */
#define K3_MOE_DOWN_MXFP4_TOP_K 1 /* param: u32, experts */
#define K3_MOE_DOWN_MXFP4_N_BLOCKS 2 /* param: u32, blocks */

/* y[t] = (best, lowest index, second best) of this rank's logits */
#define K3_OP_ARGMAX 72
#define K3_ARGMAX_LOGITS 0 /* handle: in */
#define K3_ARGMAX_Y 1 /* handle: out */
#define K3_ARGMAX_VOCAB_BASE 0 /* param: u32_per_rank, rows */
#define K3_ARGMAX_VOCAB 1 /* param: u32, rows */

/* y[t] = (best, lowest index, second best) over all ranks */
#define K3_OP_ARGMAX_FOLD 73
#define K3_ARGMAX_FOLD_X 0 /* handle: peer */
#define K3_ARGMAX_FOLD_Y 1 /* handle: out */

/* y = tree of the ranks' x */
#define K3_OP_ALL_REDUCE 80
#define K3_ALL_REDUCE_X 0 /* handle: peer */
#define K3_ALL_REDUCE_Y 1 /* handle: out */

/* y = residual + all_reduce(x) */
#define K3_OP_ALL_REDUCE_ADD 81
#define K3_ALL_REDUCE_ADD_RESIDUAL 0 /* handle: in */
#define K3_ALL_REDUCE_ADD_X 1 /* handle: peer */
#define K3_ALL_REDUCE_ADD_Y 2 /* handle: out */

/* y = the ranks' x side by side */
#define K3_OP_ALL_GATHER 82
#define K3_ALL_GATHER_X 0 /* handle: peer */
#define K3_ALL_GATHER_Y 1 /* handle: out */
#define K3_ALL_GATHER_SHARD_COLS 0 /* param: u32, columns */

/* y = all_gather(up) + all_reduce(x) */
#define K3_OP_REDUCE_GATHER 83
#define K3_REDUCE_GATHER_UP 0 /* handle: peer */
#define K3_REDUCE_GATHER_X 1 /* handle: peer */
#define K3_REDUCE_GATHER_Y 2 /* handle: out */
#define K3_REDUCE_GATHER_SHARD_COLS 0 /* param: u32, columns */

/* y = residual + (all_gather(up) + all_reduce(x)) */
#define K3_OP_REDUCE_GATHER_ADD 84
#define K3_REDUCE_GATHER_ADD_RESIDUAL 0 /* handle: in */
#define K3_REDUCE_GATHER_ADD_UP 1 /* handle: peer */
#define K3_REDUCE_GATHER_ADD_X 2 /* handle: peer */
#define K3_REDUCE_GATHER_ADD_Y 3 /* handle: out */
#define K3_REDUCE_GATHER_ADD_SHARD_COLS 0 /* param: u32, columns */

/* X(NAME, name): every op that a target serves in a phase. */
#define K3_OPS_CPU_DECODE(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(RMSNORM, rmsnorm) \
  X(ATTN_RES, attn_res) \
  X(ATTN_RES_NORM, attn_res_norm) \
  X(BLOCK_PUSH, block_push) \
  X(ADD, add) \
  X(MUL, mul) \
  X(SIGMOID, sigmoid) \
  X(SILU, silu) \
  X(SOFTCAP, softcap) \
  X(SITU, situ) \
  X(L2NORM, l2norm) \
  X(SCALE, scale) \
  X(HEAD_RMSNORM, head_rmsnorm) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add)
#define K3_OPS_CPU_PREFILL(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(RMSNORM, rmsnorm) \
  X(ATTN_RES, attn_res) \
  X(ATTN_RES_NORM, attn_res_norm) \
  X(BLOCK_PUSH, block_push) \
  X(ADD, add) \
  X(MUL, mul) \
  X(SIGMOID, sigmoid) \
  X(SILU, silu) \
  X(SOFTCAP, softcap) \
  X(SITU, situ) \
  X(L2NORM, l2norm) \
  X(SCALE, scale) \
  X(HEAD_RMSNORM, head_rmsnorm) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add)
#define K3_OPS_CUDA_DECODE(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(RMSNORM, rmsnorm) \
  X(ATTN_RES, attn_res) \
  X(ATTN_RES_NORM, attn_res_norm) \
  X(BLOCK_PUSH, block_push) \
  X(ADD, add) \
  X(MUL, mul) \
  X(SIGMOID, sigmoid) \
  X(SILU, silu) \
  X(SOFTCAP, softcap) \
  X(SITU, situ) \
  X(L2NORM, l2norm) \
  X(SCALE, scale) \
  X(HEAD_RMSNORM, head_rmsnorm) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add)
#define K3_OPS_CUDA_PREFILL(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(RMSNORM, rmsnorm) \
  X(ATTN_RES, attn_res) \
  X(ATTN_RES_NORM, attn_res_norm) \
  X(BLOCK_PUSH, block_push) \
  X(ADD, add) \
  X(MUL, mul) \
  X(SIGMOID, sigmoid) \
  X(SILU, silu) \
  X(SOFTCAP, softcap) \
  X(SITU, situ) \
  X(L2NORM, l2norm) \
  X(SCALE, scale) \
  X(HEAD_RMSNORM, head_rmsnorm) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add)
#define K3_OPS_HIP_DECODE(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(RMSNORM, rmsnorm) \
  X(ATTN_RES, attn_res) \
  X(ATTN_RES_NORM, attn_res_norm) \
  X(BLOCK_PUSH, block_push) \
  X(ADD, add) \
  X(MUL, mul) \
  X(SIGMOID, sigmoid) \
  X(SILU, silu) \
  X(SOFTCAP, softcap) \
  X(SITU, situ) \
  X(L2NORM, l2norm) \
  X(SCALE, scale) \
  X(HEAD_RMSNORM, head_rmsnorm) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add)
#define K3_OPS_HIP_PREFILL(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(RMSNORM, rmsnorm) \
  X(ATTN_RES, attn_res) \
  X(ATTN_RES_NORM, attn_res_norm) \
  X(BLOCK_PUSH, block_push) \
  X(ADD, add) \
  X(MUL, mul) \
  X(SIGMOID, sigmoid) \
  X(SILU, silu) \
  X(SOFTCAP, softcap) \
  X(SITU, situ) \
  X(L2NORM, l2norm) \
  X(SCALE, scale) \
  X(HEAD_RMSNORM, head_rmsnorm) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add)

#endif

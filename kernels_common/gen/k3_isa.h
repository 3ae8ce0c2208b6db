/* Generated from k3tool/isa/table.py by genheader.py. Do not edit: run `make gen`. */
#ifndef K3_ISA_H
#define K3_ISA_H
#define K3_ISA_VERSION 1
#define K3_N_HANDLES 12
#define K3_N_PARAMS 6
#define K3_PAGE_TOKENS 256
#define K3_CANDIDATE_WORDS 4
#define K3_RUN_SHIFT 8
#define K3_LOAD_BLOCK_BYTES 1048576
#define K3_MOST_IO_QUEUES 64
#define K3_ISA_HASH "a6d67ac0b8d4ac9c04c7463ccb106db1407f6ae3964b3cc6330fd27cb0386404"

/* nothing */
#define K3_OP_NOP 0
#define K3_NOP_Y 0 /* handle: out */

/* w's bytes, from its file to its place in the ring of weights */
#define K3_OP_LOAD 1
#define K3_LOAD_W 0 /* handle: load */

/* the experts of router_topk(scores), from their files to slots of the expert cache */
#define K3_OP_EXPERT_FETCH 2
#define K3_EXPERT_FETCH_SCORES 0 /* handle: in */
#define K3_EXPERT_FETCH_BIAS 1 /* handle: weight */
#define K3_EXPERT_FETCH_W1 2 /* handle: load */
#define K3_EXPERT_FETCH_W3 3 /* handle: load */
#define K3_EXPERT_FETCH_W2 4 /* handle: load */
#define K3_EXPERT_FETCH_TOP_K 0 /* param: u32, experts */
#define K3_EXPERT_FETCH_N_EXPERTS 1 /* param: u32, experts */

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
#define K3_GEMV_BF16_ROUND 16u /* flag */

/* y[t,r] = tree(rule3 of each of this rank's n_blocks blocks of row r) */
#define K3_OP_GEMV_BF16_BLOCKS 18
#define K3_GEMV_BF16_BLOCKS_X 0 /* handle: in */
#define K3_GEMV_BF16_BLOCKS_W 1 /* handle: weight */
#define K3_GEMV_BF16_BLOCKS_Y 2 /* handle: out */
#define K3_GEMV_BF16_BLOCKS_K 0 /* param: u32, elements */
#define K3_GEMV_BF16_BLOCKS_N_BLOCKS 1 /* param: u32, blocks */
#define K3_GEMV_BF16_BLOCKS_X_BF16 16u /* flag */

/* y[t,r] = rule3(w[r], rmsnorm(x[t]; norm, eps)) */
#define K3_OP_NORM_GEMV_BF16 19
#define K3_NORM_GEMV_BF16_X 0 /* handle: in */
#define K3_NORM_GEMV_BF16_NORM 1 /* handle: weight */
#define K3_NORM_GEMV_BF16_W 2 /* handle: weight */
#define K3_NORM_GEMV_BF16_Y 3 /* handle: out */
#define K3_NORM_GEMV_BF16_K 0 /* param: u32, elements */
#define K3_NORM_GEMV_BF16_EPS 1 /* param: f32, 1 */
#define K3_NORM_GEMV_BF16_HEAD_ONLY 2 /* param: u32, flag */
#define K3_NORM_GEMV_BF16_NORM_ROUND 16u /* flag */
#define K3_NORM_GEMV_BF16_ROUND 32u /* flag */

/* y[t,r] = situ(rule3(gate[r], x[t]), rule3(up[r], x[t])) */
#define K3_OP_GLU_BF16 20
#define K3_GLU_BF16_X 0 /* handle: in */
#define K3_GLU_BF16_GATE 1 /* handle: weight */
#define K3_GLU_BF16_UP 2 /* handle: weight */
#define K3_GLU_BF16_Y 3 /* handle: out */
#define K3_GLU_BF16_K 0 /* param: u32, elements */
#define K3_GLU_BF16_BETA 1 /* param: f32, 1 */
#define K3_GLU_BF16_LINEAR_BETA 2 /* param: f32, 1 */
#define K3_GLU_BF16_ROUND 16u /* flag */

/* y_i[t,r] = rule3(w_i[r], rmsnorm(mix of prefix and the block part (numerics, AttnRes); norm, norm_eps)) */
#define K3_OP_MIX_LINEARS_3 21
#define K3_MIX_LINEARS_3_PREFIX 0 /* handle: in */
#define K3_MIX_LINEARS_3_PART 1 /* handle: in */
#define K3_MIX_LINEARS_3_RES_NORM 2 /* handle: weight */
#define K3_MIX_LINEARS_3_RES_PROJ 3 /* handle: weight */
#define K3_MIX_LINEARS_3_NORM 4 /* handle: weight */
#define K3_MIX_LINEARS_3_W0 5 /* handle: weight */
#define K3_MIX_LINEARS_3_W1 261 /* handle: weight */
#define K3_MIX_LINEARS_3_W2 517 /* handle: weight */
#define K3_MIX_LINEARS_3_Y0 6 /* handle: out */
#define K3_MIX_LINEARS_3_Y1 262 /* handle: out */
#define K3_MIX_LINEARS_3_Y2 518 /* handle: out */
#define K3_MIX_LINEARS_3_K 0 /* param: u32, elements */
#define K3_MIX_LINEARS_3_EPS 1 /* param: f32, 1 */
#define K3_MIX_LINEARS_3_NORM_EPS 2 /* param: f32, 1 */
#define K3_MIX_LINEARS_3_ROWS01 3 /* param: u32, rows */
#define K3_MIX_LINEARS_3_ROWS2 4 /* param: u32, rows */
#define K3_MIX_LINEARS_3_ROUND 16u /* flag */

/* y_i[t,r] = rule3(w_i[r], rmsnorm(mix of prefix and the block part (numerics, AttnRes); norm, norm_eps)) */
#define K3_OP_MIX_LINEARS_4 22
#define K3_MIX_LINEARS_4_PREFIX 0 /* handle: in */
#define K3_MIX_LINEARS_4_PART 1 /* handle: in */
#define K3_MIX_LINEARS_4_RES_NORM 2 /* handle: weight */
#define K3_MIX_LINEARS_4_RES_PROJ 3 /* handle: weight */
#define K3_MIX_LINEARS_4_NORM 4 /* handle: weight */
#define K3_MIX_LINEARS_4_W0 5 /* handle: weight */
#define K3_MIX_LINEARS_4_W1 261 /* handle: weight */
#define K3_MIX_LINEARS_4_W2 517 /* handle: weight */
#define K3_MIX_LINEARS_4_W3 773 /* handle: weight */
#define K3_MIX_LINEARS_4_Y0 6 /* handle: out */
#define K3_MIX_LINEARS_4_Y1 262 /* handle: out */
#define K3_MIX_LINEARS_4_Y2 518 /* handle: out */
#define K3_MIX_LINEARS_4_Y3 774 /* handle: out */
#define K3_MIX_LINEARS_4_K 0 /* param: u32, elements */
#define K3_MIX_LINEARS_4_EPS 1 /* param: f32, 1 */
#define K3_MIX_LINEARS_4_NORM_EPS 2 /* param: f32, 1 */
#define K3_MIX_LINEARS_4_ROWS01 3 /* param: u32, rows */
#define K3_MIX_LINEARS_4_ROWS23 4 /* param: u32, rows */
#define K3_MIX_LINEARS_4_ROUND 16u /* flag */
#define K3_MIX_LINEARS_4_HEAD_ROUND 32u /* flag */

/* y_i[t,r] = rule3(w_i[r], rmsnorm(mix of prefix and the block part (numerics, AttnRes); norm, norm_eps)) */
#define K3_OP_MIX_LINEARS_6 23
#define K3_MIX_LINEARS_6_PREFIX 0 /* handle: in */
#define K3_MIX_LINEARS_6_PART 1 /* handle: in */
#define K3_MIX_LINEARS_6_RES_NORM 2 /* handle: weight */
#define K3_MIX_LINEARS_6_RES_PROJ 3 /* handle: weight */
#define K3_MIX_LINEARS_6_NORM 4 /* handle: weight */
#define K3_MIX_LINEARS_6_W0 5 /* handle: weight */
#define K3_MIX_LINEARS_6_W1 261 /* handle: weight */
#define K3_MIX_LINEARS_6_W2 517 /* handle: weight */
#define K3_MIX_LINEARS_6_W3 773 /* handle: weight */
#define K3_MIX_LINEARS_6_W4 1029 /* handle: weight */
#define K3_MIX_LINEARS_6_W5 1285 /* handle: weight */
#define K3_MIX_LINEARS_6_Y0 6 /* handle: out */
#define K3_MIX_LINEARS_6_Y1 262 /* handle: out */
#define K3_MIX_LINEARS_6_Y2 518 /* handle: out */
#define K3_MIX_LINEARS_6_Y3 774 /* handle: out */
#define K3_MIX_LINEARS_6_Y4 1030 /* handle: out */
#define K3_MIX_LINEARS_6_Y5 1286 /* handle: out */
#define K3_MIX_LINEARS_6_K 0 /* param: u32, elements */
#define K3_MIX_LINEARS_6_EPS 1 /* param: f32, 1 */
#define K3_MIX_LINEARS_6_NORM_EPS 2 /* param: f32, 1 */
#define K3_MIX_LINEARS_6_ROWS01 3 /* param: u32, rows */
#define K3_MIX_LINEARS_6_ROWS23 4 /* param: u32, rows */
#define K3_MIX_LINEARS_6_ROWS45 5 /* param: u32, rows */
#define K3_MIX_LINEARS_6_ROUND 16u /* flag */

/* y = gemv_blocks(situ(gate, up); w) */
#define K3_OP_SITU_GEMV_BLOCKS 24
#define K3_SITU_GEMV_BLOCKS_GATE 0 /* handle: in */
#define K3_SITU_GEMV_BLOCKS_UP 1 /* handle: in */
#define K3_SITU_GEMV_BLOCKS_W 2 /* handle: weight */
#define K3_SITU_GEMV_BLOCKS_Y 3 /* handle: out */
#define K3_SITU_GEMV_BLOCKS_K 0 /* param: u32, elements */
#define K3_SITU_GEMV_BLOCKS_N_BLOCKS 1 /* param: u32, blocks */
#define K3_SITU_GEMV_BLOCKS_BETA 2 /* param: f32, 1 */
#define K3_SITU_GEMV_BLOCKS_LINEAR_BETA 3 /* param: f32, 1 */
#define K3_SITU_GEMV_BLOCKS_ROUND 16u /* flag */

/* blocks[index] = table[token_id[t]]: a move */
#define K3_OP_EMBED_PUSH 25
#define K3_EMBED_PUSH_TABLE 0 /* handle: weight */
#define K3_EMBED_PUSH_BLOCKS 1 /* handle: inout */
#define K3_EMBED_PUSH_VOCAB 0 /* param: u32, rows */
#define K3_EMBED_PUSH_INDEX 1 /* param: u32, blocks */

/* y = (x * (1 / sqrt(ss / width + eps))) * norm */
#define K3_OP_RMSNORM 32
#define K3_RMSNORM_X 0 /* handle: in */
#define K3_RMSNORM_NORM 1 /* handle: weight */
#define K3_RMSNORM_Y 2 /* handle: out */
#define K3_RMSNORM_EPS 0 /* param: f32, 1 */
#define K3_RMSNORM_ROUND 16u /* flag */

/* y = softmax-weighted mix of n_blocks finished blocks and the prefix (numerics, AttnRes) */
#define K3_OP_ATTN_RES 33
#define K3_ATTN_RES_PREFIX 0 /* handle: in */
#define K3_ATTN_RES_BLOCKS 1 /* handle: in */
#define K3_ATTN_RES_RES_NORM 2 /* handle: weight */
#define K3_ATTN_RES_RES_PROJ 3 /* handle: weight */
#define K3_ATTN_RES_Y 4 /* handle: out */
#define K3_ATTN_RES_N_BLOCKS 0 /* param: u32, blocks */
#define K3_ATTN_RES_EPS 1 /* param: f32, 1 */
#define K3_ATTN_RES_ROUND 16u /* flag */

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
#define K3_ATTN_RES_NORM_ROUND 16u /* flag */

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
#define K3_ADD_ROUND 16u /* flag */

/* y = a * b */
#define K3_OP_MUL 37
#define K3_MUL_A 0 /* handle: in */
#define K3_MUL_B 1 /* handle: in */
#define K3_MUL_Y 2 /* handle: out */
#define K3_MUL_ROUND 16u /* flag */

/* y = 1 / (1 + exp(-x)) */
#define K3_OP_SIGMOID 38
#define K3_SIGMOID_X 0 /* handle: in */
#define K3_SIGMOID_Y 1 /* handle: out */
#define K3_SIGMOID_ROUND 16u /* flag */

/* y = x * sigmoid(x) */
#define K3_OP_SILU 39
#define K3_SILU_X 0 /* handle: in */
#define K3_SILU_Y 1 /* handle: out */
#define K3_SILU_ROUND 16u /* flag */

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
#define K3_SITU_ROUND 16u /* flag */

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

/* y = [o_B | m_B | s_B | 0 ...]: the finished blocks' part of attn_res (numerics, AttnRes) */
#define K3_OP_ATTN_PART 45
#define K3_ATTN_PART_BLOCKS 0 /* handle: in */
#define K3_ATTN_PART_RES_NORM 1 /* handle: weight */
#define K3_ATTN_PART_RES_PROJ 2 /* handle: weight */
#define K3_ATTN_PART_Y 3 /* handle: out */
#define K3_ATTN_PART_N_BLOCKS 0 /* param: u32, blocks */
#define K3_ATTN_PART_EPS 1 /* param: f32, 1 */

/* y_i = attn_part(blocks; res_norm_i, res_proj_i) */
#define K3_OP_ATTN_PARTS_8 46
#define K3_ATTN_PARTS_8_BLOCKS 0 /* handle: in */
#define K3_ATTN_PARTS_8_RES_NORM0 1 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_PROJ0 257 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_NORM1 513 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_PROJ1 769 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_NORM2 1025 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_PROJ2 1281 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_NORM3 1537 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_PROJ3 1793 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_NORM4 2049 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_PROJ4 2305 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_NORM5 2561 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_PROJ5 2817 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_NORM6 3073 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_PROJ6 3329 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_NORM7 3585 /* handle: weight */
#define K3_ATTN_PARTS_8_RES_PROJ7 3841 /* handle: weight */
#define K3_ATTN_PARTS_8_Y0 2 /* handle: out */
#define K3_ATTN_PARTS_8_Y1 258 /* handle: out */
#define K3_ATTN_PARTS_8_Y2 514 /* handle: out */
#define K3_ATTN_PARTS_8_Y3 770 /* handle: out */
#define K3_ATTN_PARTS_8_Y4 1026 /* handle: out */
#define K3_ATTN_PARTS_8_Y5 1282 /* handle: out */
#define K3_ATTN_PARTS_8_Y6 1538 /* handle: out */
#define K3_ATTN_PARTS_8_Y7 1794 /* handle: out */
#define K3_ATTN_PARTS_8_N_BLOCKS 0 /* param: u32, blocks */
#define K3_ATTN_PARTS_8_EPS 1 /* param: f32, 1 */

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
#define K3_CONV_SILU_ROUND 16u /* flag */

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
#define K3_KDA_STEP_ROUND 16u /* flag */

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
#define K3_KDA_CORE_ROUND 16u /* flag */

/* y = head_rmsnorm(o; norm, eps) * sigmoid(gate) */
#define K3_OP_KDA_GATED_NORM 53
#define K3_KDA_GATED_NORM_O 0 /* handle: in */
#define K3_KDA_GATED_NORM_NORM 1 /* handle: weight */
#define K3_KDA_GATED_NORM_GATE 2 /* handle: in */
#define K3_KDA_GATED_NORM_Y 3 /* handle: out */
#define K3_KDA_GATED_NORM_EPS 0 /* param: f32, 1 */
#define K3_KDA_GATED_NORM_ROUND 16u /* flag */

/* kda_gated_norm(kda_core(conv_silu(q), conv_silu(k), conv_silu(v), gemv(f; f_b), b), gate) */
#define K3_OP_KDA_HEADS 54
#define K3_KDA_HEADS_Q 0 /* handle: in */
#define K3_KDA_HEADS_K 256 /* handle: in */
#define K3_KDA_HEADS_V 512 /* handle: in */
#define K3_KDA_HEADS_F 768 /* handle: in */
#define K3_KDA_HEADS_B 1024 /* handle: in */
#define K3_KDA_HEADS_GATE 1280 /* handle: in */
#define K3_KDA_HEADS_CONV_Q 1 /* handle: weight */
#define K3_KDA_HEADS_CONV_K 257 /* handle: weight */
#define K3_KDA_HEADS_CONV_V 513 /* handle: weight */
#define K3_KDA_HEADS_F_B 769 /* handle: weight */
#define K3_KDA_HEADS_A_LOG 1025 /* handle: weight */
#define K3_KDA_HEADS_DT_BIAS 1281 /* handle: weight */
#define K3_KDA_HEADS_O_NORM 1537 /* handle: weight */
#define K3_KDA_HEADS_TAPS_Q 2 /* handle: state */
#define K3_KDA_HEADS_TAPS_K 258 /* handle: state */
#define K3_KDA_HEADS_TAPS_V 514 /* handle: state */
#define K3_KDA_HEADS_S 770 /* handle: state */
#define K3_KDA_HEADS_Y 3 /* handle: out */
#define K3_KDA_HEADS_L2_EPS 0 /* param: f32, 1 */
#define K3_KDA_HEADS_Q_SCALE 1 /* param: f32, 1 */
#define K3_KDA_HEADS_LOWER_BOUND 2 /* param: f32, 1 */
#define K3_KDA_HEADS_EPS 3 /* param: f32, 1 */
#define K3_KDA_HEADS_RANK 4 /* param: u32, elements */
#define K3_KDA_HEADS_ROUND 16u /* flag */

/* y[h] = [rule3 over nope of W_UK[h]^T q_nope | q_rope] */
#define K3_OP_MLA_QLAT 56
#define K3_MLA_QLAT_Q 0 /* handle: in */
#define K3_MLA_QLAT_KV_B 1 /* handle: weight */
#define K3_MLA_QLAT_Y 2 /* handle: out */
#define K3_MLA_QLAT_NOPE 0 /* param: u32, elements */
#define K3_MLA_QLAT_ROPE 1 /* param: u32, elements */
#define K3_MLA_QLAT_LATENT 2 /* param: u32, elements */
#define K3_MLA_QLAT_V 3 /* param: u32, elements */
#define K3_MLA_QLAT_ROUND 16u /* flag */

/* cache[slot, position] = [rmsnorm(latent; norm, eps) | shared key] */
#define K3_OP_MLA_CACHE 57
#define K3_MLA_CACHE_X 0 /* handle: in */
#define K3_MLA_CACHE_NORM 1 /* handle: weight */
#define K3_MLA_CACHE_CACHE 2 /* handle: state */
#define K3_MLA_CACHE_LATENT 0 /* param: u32, elements */
#define K3_MLA_CACHE_ROPE 1 /* param: u32, elements */
#define K3_MLA_CACHE_EPS 2 /* param: f32, 1 */
#define K3_MLA_CACHE_ROUND 16u /* flag */

/* y[h] = softmax(q.cache * scale) over positions <= own, by pages, times latent */
#define K3_OP_MLA_ATTEND 58
#define K3_MLA_ATTEND_Q 0 /* handle: in */
#define K3_MLA_ATTEND_CACHE 1 /* handle: state */
#define K3_MLA_ATTEND_Y 2 /* handle: out */
#define K3_MLA_ATTEND_LATENT 0 /* param: u32, elements */
#define K3_MLA_ATTEND_ROPE 1 /* param: u32, elements */
#define K3_MLA_ATTEND_SCALE 2 /* param: f32, 1 */
#define K3_MLA_ATTEND_PAGE_TOKENS 3 /* param: u32, tokens */
#define K3_MLA_ATTEND_PAGES 4 /* param: u32, pages */
#define K3_MLA_ATTEND_ROUND 16u /* flag */

/* y[t,h*v+i] = rule3(W_UV[h][i], ctx[t,h]) */
#define K3_OP_MLA_UV 59
#define K3_MLA_UV_CTX 0 /* handle: in */
#define K3_MLA_UV_KV_B 1 /* handle: weight */
#define K3_MLA_UV_Y 2 /* handle: out */
#define K3_MLA_UV_NOPE 0 /* param: u32, elements */
#define K3_MLA_UV_V 1 /* param: u32, elements */
#define K3_MLA_UV_LATENT 2 /* param: u32, elements */
#define K3_MLA_UV_ROUND 16u /* flag */

/* y = o * sigmoid(gate) */
#define K3_OP_MLA_OUT_GATE 60
#define K3_MLA_OUT_GATE_O 0 /* handle: in */
#define K3_MLA_OUT_GATE_GATE 1 /* handle: in */
#define K3_MLA_OUT_GATE_Y 2 /* handle: out */
#define K3_MLA_OUT_GATE_ROUND 16u /* flag */

/* y = mla_uv(ctx) * sigmoid(gate) */
#define K3_OP_MLA_UV_GATE 61
#define K3_MLA_UV_GATE_CTX 0 /* handle: in */
#define K3_MLA_UV_GATE_KV_B 1 /* handle: weight */
#define K3_MLA_UV_GATE_GATE 2 /* handle: in */
#define K3_MLA_UV_GATE_Y 3 /* handle: out */
#define K3_MLA_UV_GATE_NOPE 0 /* param: u32, elements */
#define K3_MLA_UV_GATE_V 1 /* param: u32, elements */
#define K3_MLA_UV_GATE_LATENT 2 /* param: u32, elements */
#define K3_MLA_UV_GATE_ROUND 16u /* flag */

/* mla_uv_gate(mla_attend(mla_qlat(q), cache), gate) */
#define K3_OP_MLA_HEADS 62
#define K3_MLA_HEADS_Q 0 /* handle: in */
#define K3_MLA_HEADS_KV_B 1 /* handle: weight */
#define K3_MLA_HEADS_CACHE 2 /* handle: state */
#define K3_MLA_HEADS_GATE 3 /* handle: in */
#define K3_MLA_HEADS_Y 4 /* handle: out */
#define K3_MLA_HEADS_NOPE 0 /* param: u32, elements */
#define K3_MLA_HEADS_ROPE 1 /* param: u32, elements */
#define K3_MLA_HEADS_LATENT 2 /* param: u32, elements */
#define K3_MLA_HEADS_V 3 /* param: u32, elements */
#define K3_MLA_HEADS_SCALE 4 /* param: f32, 1 */
#define K3_MLA_HEADS_PAGE_TOKENS 5 /* param: u32, tokens */
#define K3_MLA_HEADS_ROUND 16u /* flag */

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
#define K3_MOE_UP_MXFP4_ROUND 16u /* flag */

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
#define K3_MOE_GLU_MXFP4_ROUND 16u /* flag */

/* y[t,r] = tree over blocks of sum over experts ascending of w_e * rule3(block of w2[e][r], x[t,s]) */
#define K3_OP_MOE_DOWN_MXFP4 67
#define K3_MOE_DOWN_MXFP4_X 0 /* handle: in */
#define K3_MOE_DOWN_MXFP4_ROUTE 1 /* handle: in */
#define K3_MOE_DOWN_MXFP4_W2 2 /* handle: weight */
#define K3_MOE_DOWN_MXFP4_Y 3 /* handle: out */
#define K3_MOE_DOWN_MXFP4_K 0 /* param: u32, elements */
#define K3_MOE_DOWN_MXFP4_TOP_K 1 /* param: u32, experts */
#define K3_MOE_DOWN_MXFP4_N_BLOCKS 2 /* param: u32, blocks */
#define K3_MOE_DOWN_MXFP4_X_BF16 16u /* flag */

/* y = moe_glu(z, router_topk(scores)) */
#define K3_OP_MOE_GLU_TOPK 68
#define K3_MOE_GLU_TOPK_Z 0 /* handle: in */
#define K3_MOE_GLU_TOPK_SCORES 1 /* handle: in */
#define K3_MOE_GLU_TOPK_BIAS 2 /* handle: weight */
#define K3_MOE_GLU_TOPK_W1 3 /* handle: weight */
#define K3_MOE_GLU_TOPK_W3 4 /* handle: weight */
#define K3_MOE_GLU_TOPK_Y 5 /* handle: out */
#define K3_MOE_GLU_TOPK_K 0 /* param: u32, elements */
#define K3_MOE_GLU_TOPK_TOP_K 1 /* param: u32, experts */
#define K3_MOE_GLU_TOPK_BETA 2 /* param: f32, 1 */
#define K3_MOE_GLU_TOPK_LINEAR_BETA 3 /* param: f32, 1 */
#define K3_MOE_GLU_TOPK_N_EXPERTS 4 /* param: u32, experts */
#define K3_MOE_GLU_TOPK_ROUND 16u /* flag */

/* y = moe_down(x, router_topk(scores)) */
#define K3_OP_MOE_DOWN_TOPK 69
#define K3_MOE_DOWN_TOPK_X 0 /* handle: in */
#define K3_MOE_DOWN_TOPK_SCORES 1 /* handle: in */
#define K3_MOE_DOWN_TOPK_BIAS 2 /* handle: weight */
#define K3_MOE_DOWN_TOPK_W2 3 /* handle: weight */
#define K3_MOE_DOWN_TOPK_Y 4 /* handle: out */
#define K3_MOE_DOWN_TOPK_K 0 /* param: u32, elements */
#define K3_MOE_DOWN_TOPK_TOP_K 1 /* param: u32, experts */
#define K3_MOE_DOWN_TOPK_N_BLOCKS 2 /* param: u32, blocks */
#define K3_MOE_DOWN_TOPK_SCALE 3 /* param: f32, 1 */
#define K3_MOE_DOWN_TOPK_N_EXPERTS 4 /* param: u32, experts */
#define K3_MOE_DOWN_TOPK_X_BF16 16u /* flag */

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
#define K3_ALL_REDUCE_ROUND 16u /* flag */

/* y = residual + all_reduce(x) */
#define K3_OP_ALL_REDUCE_ADD 81
#define K3_ALL_REDUCE_ADD_RESIDUAL 0 /* handle: in */
#define K3_ALL_REDUCE_ADD_X 1 /* handle: peer */
#define K3_ALL_REDUCE_ADD_Y 2 /* handle: out */
#define K3_ALL_REDUCE_ADD_ROUND 16u /* flag */

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
#define K3_REDUCE_GATHER_ROUND 16u /* flag */

/* y = residual + (all_gather(up) + all_reduce(x)) */
#define K3_OP_REDUCE_GATHER_ADD 84
#define K3_REDUCE_GATHER_ADD_RESIDUAL 0 /* handle: in */
#define K3_REDUCE_GATHER_ADD_UP 1 /* handle: peer */
#define K3_REDUCE_GATHER_ADD_X 2 /* handle: peer */
#define K3_REDUCE_GATHER_ADD_Y 3 /* handle: out */
#define K3_REDUCE_GATHER_ADD_SHARD_COLS 0 /* param: u32, columns */
#define K3_REDUCE_GATHER_ADD_ROUND 16u /* flag */

/* mla_qlat(norm_gemv(x; norm, w, eps)) */
#define K3_OP_MLA_QUERY 88
#define K3_MLA_QUERY_X 0 /* handle: in */
#define K3_MLA_QUERY_NORM 1 /* handle: weight */
#define K3_MLA_QUERY_W 2 /* handle: weight */
#define K3_MLA_QUERY_KV_B 3 /* handle: weight */
#define K3_MLA_QUERY_Y 4 /* handle: out */
#define K3_MLA_QUERY_K 0 /* param: u32, elements */
#define K3_MLA_QUERY_EPS 1 /* param: f32, 1 */
#define K3_MLA_QUERY_NOPE 2 /* param: u32, elements */
#define K3_MLA_QUERY_ROPE 3 /* param: u32, elements */
#define K3_MLA_QUERY_LATENT 4 /* param: u32, elements */
#define K3_MLA_QUERY_V 5 /* param: u32, elements */
#define K3_MLA_QUERY_NORM_ROUND 16u /* flag */
#define K3_MLA_QUERY_ROUND 32u /* flag */

/* y[page][h] = [sum of e l | max | sum of e | 0 ...] over a page of mla_attend, e = exp(q.cache * scale - max) */
#define K3_OP_MLA_PAGES 89
#define K3_MLA_PAGES_Q 0 /* handle: in */
#define K3_MLA_PAGES_CACHE 1 /* handle: state */
#define K3_MLA_PAGES_Y 2 /* handle: out */
#define K3_MLA_PAGES_LATENT 0 /* param: u32, elements */
#define K3_MLA_PAGES_ROPE 1 /* param: u32, elements */
#define K3_MLA_PAGES_SCALE 2 /* param: f32, 1 */
#define K3_MLA_PAGES_PAGE_TOKENS 3 /* param: u32, tokens */
#define K3_MLA_PAGES_PAGES 4 /* param: u32, pages */

/* mla_uv_gate(parts of a softmax merged page by page, gate) */
#define K3_OP_MLA_MERGE 90
#define K3_MLA_MERGE_PARTS 0 /* handle: in */
#define K3_MLA_MERGE_KV_B 1 /* handle: weight */
#define K3_MLA_MERGE_GATE 2 /* handle: in */
#define K3_MLA_MERGE_Y 3 /* handle: out */
#define K3_MLA_MERGE_NOPE 0 /* param: u32, elements */
#define K3_MLA_MERGE_V 1 /* param: u32, elements */
#define K3_MLA_MERGE_LATENT 2 /* param: u32, elements */
#define K3_MLA_MERGE_PAGE_TOKENS 3 /* param: u32, tokens */
#define K3_MLA_MERGE_PAGES 4 /* param: u32, pages */
#define K3_MLA_MERGE_ROUND 16u /* flag */

/* X(NAME, name): every op that a target serves in a phase. */
#define K3_OPS_CPU_DECODE(X) \
  X(NOP, nop) \
  X(LOAD, load) \
  X(EXPERT_FETCH, expert_fetch) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(MIX_LINEARS_3, mix_linears_3) \
  X(MIX_LINEARS_4, mix_linears_4) \
  X(MIX_LINEARS_6, mix_linears_6) \
  X(SITU_GEMV_BLOCKS, situ_gemv_blocks) \
  X(EMBED_PUSH, embed_push) \
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
  X(ATTN_PART, attn_part) \
  X(ATTN_PARTS_8, attn_parts_8) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(KDA_HEADS, kda_heads) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(MLA_HEADS, mla_heads) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(MOE_GLU_TOPK, moe_glu_topk) \
  X(MOE_DOWN_TOPK, moe_down_topk) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add) \
  X(MLA_QUERY, mla_query) \
  X(MLA_PAGES, mla_pages) \
  X(MLA_MERGE, mla_merge)
#define K3_OPS_CPU_PREFILL(X) \
  X(NOP, nop) \
  X(LOAD, load) \
  X(EXPERT_FETCH, expert_fetch) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(MIX_LINEARS_3, mix_linears_3) \
  X(MIX_LINEARS_4, mix_linears_4) \
  X(MIX_LINEARS_6, mix_linears_6) \
  X(SITU_GEMV_BLOCKS, situ_gemv_blocks) \
  X(EMBED_PUSH, embed_push) \
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
  X(ATTN_PART, attn_part) \
  X(ATTN_PARTS_8, attn_parts_8) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(KDA_HEADS, kda_heads) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(MLA_HEADS, mla_heads) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(MOE_GLU_TOPK, moe_glu_topk) \
  X(MOE_DOWN_TOPK, moe_down_topk) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add) \
  X(MLA_QUERY, mla_query) \
  X(MLA_PAGES, mla_pages) \
  X(MLA_MERGE, mla_merge)
#define K3_OPS_CUDA_DECODE(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(MIX_LINEARS_3, mix_linears_3) \
  X(MIX_LINEARS_4, mix_linears_4) \
  X(MIX_LINEARS_6, mix_linears_6) \
  X(SITU_GEMV_BLOCKS, situ_gemv_blocks) \
  X(EMBED_PUSH, embed_push) \
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
  X(ATTN_PART, attn_part) \
  X(ATTN_PARTS_8, attn_parts_8) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(KDA_HEADS, kda_heads) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(MLA_HEADS, mla_heads) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(MOE_GLU_TOPK, moe_glu_topk) \
  X(MOE_DOWN_TOPK, moe_down_topk) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add) \
  X(MLA_QUERY, mla_query) \
  X(MLA_PAGES, mla_pages) \
  X(MLA_MERGE, mla_merge)
#define K3_OPS_CUDA_PREFILL(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(MIX_LINEARS_3, mix_linears_3) \
  X(MIX_LINEARS_4, mix_linears_4) \
  X(MIX_LINEARS_6, mix_linears_6) \
  X(SITU_GEMV_BLOCKS, situ_gemv_blocks) \
  X(EMBED_PUSH, embed_push) \
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
  X(ATTN_PART, attn_part) \
  X(ATTN_PARTS_8, attn_parts_8) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(KDA_HEADS, kda_heads) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(MLA_HEADS, mla_heads) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(MOE_GLU_TOPK, moe_glu_topk) \
  X(MOE_DOWN_TOPK, moe_down_topk) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add) \
  X(MLA_QUERY, mla_query) \
  X(MLA_PAGES, mla_pages) \
  X(MLA_MERGE, mla_merge)
#define K3_OPS_HIP_DECODE(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(MIX_LINEARS_3, mix_linears_3) \
  X(MIX_LINEARS_4, mix_linears_4) \
  X(MIX_LINEARS_6, mix_linears_6) \
  X(SITU_GEMV_BLOCKS, situ_gemv_blocks) \
  X(EMBED_PUSH, embed_push) \
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
  X(ATTN_PART, attn_part) \
  X(ATTN_PARTS_8, attn_parts_8) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(KDA_HEADS, kda_heads) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(MLA_HEADS, mla_heads) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(MOE_GLU_TOPK, moe_glu_topk) \
  X(MOE_DOWN_TOPK, moe_down_topk) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add) \
  X(MLA_QUERY, mla_query) \
  X(MLA_PAGES, mla_pages) \
  X(MLA_MERGE, mla_merge)
#define K3_OPS_HIP_PREFILL(X) \
  X(NOP, nop) \
  X(EMBED_BF16, embed_bf16) \
  X(GEMV_BF16, gemv_bf16) \
  X(GEMV_BF16_BLOCKS, gemv_bf16_blocks) \
  X(NORM_GEMV_BF16, norm_gemv_bf16) \
  X(GLU_BF16, glu_bf16) \
  X(MIX_LINEARS_3, mix_linears_3) \
  X(MIX_LINEARS_4, mix_linears_4) \
  X(MIX_LINEARS_6, mix_linears_6) \
  X(SITU_GEMV_BLOCKS, situ_gemv_blocks) \
  X(EMBED_PUSH, embed_push) \
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
  X(ATTN_PART, attn_part) \
  X(ATTN_PARTS_8, attn_parts_8) \
  X(SHORT_CONV, short_conv) \
  X(CONV_SILU, conv_silu) \
  X(KDA_DECAY, kda_decay) \
  X(KDA_STEP, kda_step) \
  X(KDA_CORE, kda_core) \
  X(KDA_GATED_NORM, kda_gated_norm) \
  X(KDA_HEADS, kda_heads) \
  X(MLA_QLAT, mla_qlat) \
  X(MLA_CACHE, mla_cache) \
  X(MLA_ATTEND, mla_attend) \
  X(MLA_UV, mla_uv) \
  X(MLA_OUT_GATE, mla_out_gate) \
  X(MLA_UV_GATE, mla_uv_gate) \
  X(MLA_HEADS, mla_heads) \
  X(ROUTER_TOPK, router_topk) \
  X(MOE_UP_MXFP4, moe_up_mxfp4) \
  X(MOE_GLU_MXFP4, moe_glu_mxfp4) \
  X(MOE_DOWN_MXFP4, moe_down_mxfp4) \
  X(MOE_GLU_TOPK, moe_glu_topk) \
  X(MOE_DOWN_TOPK, moe_down_topk) \
  X(ARGMAX, argmax) \
  X(ARGMAX_FOLD, argmax_fold) \
  X(ALL_REDUCE, all_reduce) \
  X(ALL_REDUCE_ADD, all_reduce_add) \
  X(ALL_GATHER, all_gather) \
  X(REDUCE_GATHER, reduce_gather) \
  X(REDUCE_GATHER_ADD, reduce_gather_add) \
  X(MLA_QUERY, mla_query) \
  X(MLA_PAGES, mla_pages) \
  X(MLA_MERGE, mla_merge)

#endif

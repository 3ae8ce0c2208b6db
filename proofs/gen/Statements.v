(* Generated from k3tool/compiler/rules.py by k3tool.compiler.statements. *)
From Coq Require Import List Arith.
From K3 Require Import Arith Lists Semantics.

Section Statements.
  Context {A : Arith} {St : Step}.

  (* dequant-up-fuse *)
  Definition stmt_dequant_up_fuse : Prop :=
    forall (K_0 E_0 R_0 E_1 R_1 K_1 K_2 E_2 R_2 : nat) (k : nat) (round : nat) (z : Mat) (route : Route) (w : Quant),
    0 < k ->
    sized n_tokens K_0 z ->
    routed n_tokens (2*k)%nat route ->
    quantised E_1 R_1 K_1 w ->
    E_1 = E_0 ->
    R_1 = R_0 ->
    K_1 = K_0 ->
    sized n_tokens K_2 z ->
    quantised E_2 R_2 K_2 w ->
    (sem_MOE_UP z route (sem_DEQUANT_MXFP4 w) k round) =
    (sem_MOE_UP_MXFP4 z route w k round).

  (* dequant-down-fuse *)
  Definition stmt_dequant_down_fuse : Prop :=
    forall (K_0 E_0 R_0 E_1 R_1 K_1 K_2 E_2 R_2 : nat) (k : nat) (x_bf16 : nat) (x : Mat) (route : Route) (w2 : Quant),
    0 < k ->
    sized n_tokens (k*K_0)%nat x ->
    routed n_tokens (2*k)%nat route ->
    quantised E_1 R_1 K_1 w2 ->
    E_1 = E_0 ->
    R_1 = R_0 ->
    K_1 = K_0 ->
    sized n_tokens (k*K_2)%nat x ->
    quantised E_2 R_2 K_2 w2 ->
    (sem_MOE_DOWN x route (sem_DEQUANT_MXFP4 w2) k x_bf16) =
    (sem_MOE_DOWN_MXFP4 x route w2 k x_bf16).

  (* expert-combine-fuse *)
  Definition stmt_expert_combine_fuse : Prop :=
    forall (R_0 S_1 E_1 R_1 W_2 K_3 E_3 R_3 : nat) (k : nat) (round : nat) (x_bf16 : nat) (x : Mat) (route : Route) (w2 : Stack),
    0 < k ->
    0 < ranks ->
    sized n_tokens (k*ranks*S_1)%nat x ->
    routed n_tokens (2*k)%nat route ->
    sized3 E_1 R_1 (ranks*S_1)%nat w2 ->
    (k*R_1)%nat = (k*R_0)%nat ->
    sized n_tokens (k*K_3)%nat x ->
    sized3 E_3 R_3 K_3 w2 ->
    R_3 = W_2 ->
    (sem_MOE_COMBINE (sem_MOE_DOWN_EACH x route w2 k x_bf16) route k round) =
    (sem_ALL_REDUCE (sem_MOE_DOWN x route w2 k x_bf16) round).

  (* down-reduce-fuse *)
  Definition stmt_down_reduce_fuse : Prop :=
    forall (S_0 R_0 W_1 K_2 R_2 : nat) (x_bf16 : nat) (round : nat) (x : Mat) (w : Mat),
    0 < ranks ->
    sized n_tokens (ranks*S_0)%nat x ->
    sized R_0 (ranks*S_0)%nat w ->
    sized n_tokens K_2 x ->
    sized R_2 K_2 w ->
    R_2 = W_1 ->
    (sem_GEMV_REDUCED x w x_bf16 round) =
    (sem_ALL_REDUCE (sem_GEMV_BF16_BLOCKS x w x_bf16) round).

  (* argmax-fold-fuse *)
  Definition stmt_argmax_fold_fuse : Prop :=
    forall (V_0 S_1 V_3 : nat) (logits : Stack),
    Forall (sized n_tokens S_1) logits ->
    (ranks*S_1)%nat = V_0 ->
    ordered ->
    Forall (sized n_tokens V_3) logits ->
    (sem_ARGMAX_ALL (sem_ALL_GATHER logits)) =
    (sem_ARGMAX_FOLD (sem_ARGMAX logits)).

  (* embed-block-fuse *)
  Definition stmt_embed_block_fuse : Prop :=
    forall (W_0 V_1 W_1 V_2 W_2 : nat) (index : nat) (table : Mat) (blocks : Stack),
    sized V_1 W_1 table ->
    W_1 = W_0 ->
    Forall (sized n_tokens W_0) blocks ->
    sized V_2 W_2 table ->
    Forall (sized n_tokens W_2) blocks ->
    (sem_BLOCK_PUSH (sem_EMBED_BF16 table) blocks index) =
    (sem_EMBED_PUSH table blocks index).

  (* norm-linear-fuse *)
  Definition stmt_norm_linear_fuse : Prop :=
    forall (K_0 W_1 R_0 K_2 R_2 : nat) (head : nat) (round : nat) (eps : F) (norm_round : nat) (x : Mat) (norm : Vec) (w : Mat),
    sized n_tokens W_1 x ->
    length norm = W_1 ->
    W_1 = K_0 ->
    sized R_0 K_0 w ->
    sized n_tokens K_2 x ->
    length norm = K_2 ->
    sized R_2 K_2 w ->
    (sem_GEMV_BF16 (sem_RMSNORM x norm eps norm_round) w head round) =
    (sem_NORM_GEMV_BF16 x norm w eps head norm_round round).

  (* attnres-norm-fuse *)
  Definition stmt_attnres_norm_fuse : Prop :=
    forall (W_0 W_1 W_2 : nat) (norm_eps : F) (round : nat) (n : nat) (eps : F) (prefix : Mat) (blocks : Stack) (res_norm : Vec) (res_proj : Vec) (norm : Vec),
    sized n_tokens W_1 prefix ->
    Forall (sized n_tokens W_1) blocks ->
    length res_norm = W_1 ->
    length res_proj = W_1 ->
    W_1 = W_0 ->
    length norm = W_0 ->
    sized n_tokens W_2 prefix ->
    Forall (sized n_tokens W_2) blocks ->
    length res_norm = W_2 ->
    length res_proj = W_2 ->
    length norm = W_2 ->
    (sem_RMSNORM (sem_ATTN_RES prefix blocks res_norm res_proj n eps round) norm norm_eps round) =
    (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round).

  (* situ-fuse *)
  Definition stmt_situ_fuse : Prop :=
    forall (W_0 W_1 W_2 W_3 W_4 W_5 : nat) (round : nat) (beta : F) (gate : Mat) (linear : F) (up : Mat),
    sized n_tokens W_2 gate ->
    W_2 = W_1 ->
    sized n_tokens W_3 gate ->
    W_3 = W_1 ->
    W_1 = W_0 ->
    sized n_tokens W_4 up ->
    W_4 = W_0 ->
    sized n_tokens W_5 gate ->
    sized n_tokens W_5 up ->
    (sem_MUL (sem_MUL (sem_SOFTCAP gate beta) (sem_SIGMOID gate 0) 0) (sem_SOFTCAP up linear) round) =
    (sem_SITU gate up beta linear round).

  (* glu-situ-fuse *)
  Definition stmt_glu_situ_fuse : Prop :=
    forall (W_0 K_1 R_1 K_2 R_2 K_3 R_3 : nat) (beta : F) (linear : F) (round : nat) (x : Mat) (gate : Mat) (up : Mat),
    sized n_tokens K_1 x ->
    sized R_1 K_1 gate ->
    R_1 = W_0 ->
    sized n_tokens K_2 x ->
    sized R_2 K_2 up ->
    R_2 = W_0 ->
    sized n_tokens K_3 x ->
    sized R_3 K_3 gate ->
    sized R_3 K_3 up ->
    (sem_SITU (sem_GEMV_BF16 x gate 0 round) (sem_GEMV_BF16 x up 0 round) beta linear round) =
    (sem_GLU_BF16 x gate up beta linear round).

  (* moe-situ-fuse *)
  Definition stmt_moe_situ_fuse : Prop :=
    forall (W_0 K_1 E_1 R_1 K_2 E_2 R_2 K_3 E_3 R_3 : nat) (beta : F) (linear : F) (round : nat) (k : nat) (z : Mat) (route : Route) (w1 : Quant) (w3 : Quant),
    0 < k ->
    sized n_tokens K_1 z ->
    routed n_tokens (2*k)%nat route ->
    quantised E_1 R_1 K_1 w1 ->
    (k*R_1)%nat = W_0 ->
    sized n_tokens K_2 z ->
    quantised E_2 R_2 K_2 w3 ->
    (k*R_2)%nat = W_0 ->
    sized n_tokens K_3 z ->
    quantised E_3 R_3 K_3 w1 ->
    quantised E_3 R_3 K_3 w3 ->
    (sem_SITU (sem_MOE_UP_MXFP4 z route w1 k round) (sem_MOE_UP_MXFP4 z route w3 k round) beta linear round) =
    (sem_MOE_GLU_MXFP4 z route w1 w3 k beta linear round).

  (* conv-silu-fuse *)
  Definition stmt_conv_silu_fuse : Prop :=
    forall (W_0 C_1 C_2 : nat) (round : nat) (x : Mat) (kernel : Mat) (taps : Mat),
    sized n_tokens C_1 x ->
    sized C_1 4 kernel ->
    sized 3 C_1 taps ->
    C_1 = W_0 ->
    sized n_tokens C_2 x ->
    sized C_2 4 kernel ->
    sized 3 C_2 taps ->
    (sem_SILU (sem_SHORT_CONV x kernel taps) round) =
    (sem_CONV_SILU x kernel taps round) /\
    (next_SHORT_CONV_taps x kernel taps) =
    (next_CONV_SILU_taps x kernel taps round).

  (* kda-core-fuse *)
  Definition stmt_kda_core_fuse : Prop :=
    forall (H_0 W_1 H_2 H_3 H_4 W_5 H_6 : nat) (round : nat) (d : nat) (scale : F) (eps : F) (q : Mat) (k : Mat) (v : Mat) (bound : F) (f : Mat) (a_log : Vec) (dt_bias : Vec) (b : Mat) (s : Stack),
    0 < d ->
    sized n_tokens (H_2*d)%nat q ->
    (H_2*d)%nat = W_1 ->
    W_1 = (H_0*d)%nat ->
    sized n_tokens (H_3*d)%nat k ->
    (H_3*d)%nat = (H_0*d)%nat ->
    sized n_tokens (H_0*d)%nat v ->
    sized n_tokens (H_4*d)%nat f ->
    length a_log = H_4 ->
    length dt_bias = (H_4*d)%nat ->
    (H_4*d)%nat = (H_0*d)%nat ->
    sized n_tokens W_5 b ->
    W_5 = H_0 ->
    sized3 H_0 d d s ->
    sized n_tokens (H_6*d)%nat q ->
    sized n_tokens (H_6*d)%nat k ->
    sized n_tokens (H_6*d)%nat v ->
    sized n_tokens (H_6*d)%nat f ->
    sized n_tokens H_6 b ->
    length a_log = H_6 ->
    length dt_bias = (H_6*d)%nat ->
    sized3 H_6 d d s ->
    (sem_KDA_STEP (sem_SCALE (sem_L2NORM q eps d) scale) (sem_L2NORM k eps d) v (sem_KDA_DECAY f a_log dt_bias bound d) (sem_SIGMOID b 0) s round d) =
    (sem_KDA_CORE q k v f b a_log dt_bias s eps scale bound round d) /\
    (next_KDA_STEP_s (sem_SCALE (sem_L2NORM q eps d) scale) (sem_L2NORM k eps d) v (sem_KDA_DECAY f a_log dt_bias bound d) (sem_SIGMOID b 0) s round d) =
    (next_KDA_CORE_s q k v f b a_log dt_bias s eps scale bound round d).

  (* kda-gated-norm-fuse *)
  Definition stmt_kda_gated_norm_fuse : Prop :=
    forall (W_0 H_1 D_1 W_2 H_3 D_3 : nat) (round : nat) (eps : F) (o : Mat) (norm : Vec) (gate : Mat),
    sized n_tokens (H_1*D_1)%nat o ->
    length norm = D_1 ->
    (H_1*D_1)%nat = W_0 ->
    sized n_tokens W_2 gate ->
    W_2 = W_0 ->
    sized n_tokens (H_3*D_3)%nat o ->
    length norm = D_3 ->
    sized n_tokens (H_3*D_3)%nat gate ->
    (sem_MUL (sem_HEAD_RMSNORM o norm eps) (sem_SIGMOID gate 0) round) =
    (sem_KDA_GATED_NORM o norm gate eps round).

  (* mla-out-gate-fuse *)
  Definition stmt_mla_out_gate_fuse : Prop :=
    forall (W_0 H_1 W_2 W_3 : nat) (round : nat) (nope : nat) (v : nat) (latent : nat) (o_round : nat) (ctx : Mat) (kv_b : Mat) (gate : Mat),
    0 < nope ->
    0 < v ->
    0 < latent ->
    sized n_tokens (H_1*latent)%nat ctx ->
    sized (H_1*(nope+v))%nat latent kv_b ->
    (H_1*v)%nat = W_0 ->
    sized n_tokens W_2 gate ->
    W_2 = W_0 ->
    sized n_tokens W_3 gate ->
    (sem_MUL (sem_MLA_UV ctx kv_b nope v latent o_round) (sem_SIGMOID gate round) round) =
    (sem_MLA_OUT_GATE (sem_MLA_UV ctx kv_b nope v latent o_round) gate round).

  (* mla-uv-gate-fuse *)
  Definition stmt_mla_uv_gate_fuse : Prop :=
    forall (W_0 H_1 H_2 : nat) (round : nat) (nope : nat) (v : nat) (latent : nat) (ctx : Mat) (kv_b : Mat) (gate : Mat),
    0 < nope ->
    0 < v ->
    0 < latent ->
    sized n_tokens (H_1*latent)%nat ctx ->
    sized (H_1*(nope+v))%nat latent kv_b ->
    (H_1*v)%nat = W_0 ->
    sized n_tokens W_0 gate ->
    sized n_tokens (H_2*latent)%nat ctx ->
    sized (H_2*(nope+v))%nat latent kv_b ->
    sized n_tokens (H_2*v)%nat gate ->
    (sem_MLA_OUT_GATE (sem_MLA_UV ctx kv_b nope v latent round) gate round) =
    (sem_MLA_UV_GATE ctx kv_b gate nope v latent round).

  (* reduce-residual-fuse *)
  Definition stmt_reduce_residual_fuse : Prop :=
    forall (W_0 W_1 W_2 : nat) (round : nat) (residual : Mat) (x : Stack),
    sized n_tokens W_0 residual ->
    Forall (sized n_tokens W_1) x ->
    W_1 = W_0 ->
    sized n_tokens W_2 residual ->
    Forall (sized n_tokens W_2) x ->
    (sem_ADD residual (sem_ALL_REDUCE x round) round) =
    (sem_ALL_REDUCE_ADD residual x round).

  (* reduce-gather-fuse *)
  Definition stmt_reduce_gather_fuse : Prop :=
    forall (W_0 S_1 W_2 S_3 : nat) (round : nat) (up : Stack) (x : Stack),
    Forall (sized n_tokens S_1) up ->
    (ranks*S_1)%nat = W_0 ->
    Forall (sized n_tokens W_2) x ->
    W_2 = W_0 ->
    Forall (sized n_tokens S_3) up ->
    Forall (sized n_tokens (ranks*S_3)%nat) x ->
    (sem_ADD (sem_ALL_GATHER up) (sem_ALL_REDUCE x round) round) =
    (sem_REDUCE_GATHER up x round).

  (* gather-residual-fuse *)
  Definition stmt_gather_residual_fuse : Prop :=
    forall (W_0 S_1 S_2 : nat) (round : nat) (residual : Mat) (up : Stack) (x : Stack),
    sized n_tokens W_0 residual ->
    Forall (sized n_tokens S_1) up ->
    Forall (sized n_tokens (ranks*S_1)%nat) x ->
    (ranks*S_1)%nat = W_0 ->
    sized n_tokens (ranks*S_2)%nat residual ->
    Forall (sized n_tokens S_2) up ->
    Forall (sized n_tokens (ranks*S_2)%nat) x ->
    (sem_ADD residual (sem_REDUCE_GATHER up x round) round) =
    (sem_REDUCE_GATHER_ADD residual up x round).

  (* kda-heads-fuse *)
  Definition stmt_kda_heads_fuse : Prop :=
    forall (H_0 D_0 H_1 C_2 C_3 C_4 K_5 R_5 H_6 rank_6 C_6 : nat) (eps : F) (round : nat) (l2_eps : F) (scale : F) (bound : F) (d : nat) (q : Mat) (conv_q : Mat) (taps_q : Mat) (k : Mat) (conv_k : Mat) (taps_k : Mat) (v : Mat) (conv_v : Mat) (taps_v : Mat) (f : Mat) (f_b : Mat) (b : Mat) (a_log : Vec) (dt_bias : Vec) (s : Stack) (o_norm : Vec) (gate : Mat),
    0 < d ->
    sized n_tokens C_2 q ->
    sized C_2 4 conv_q ->
    sized 3 C_2 taps_q ->
    C_2 = (H_1*d)%nat ->
    sized n_tokens C_3 k ->
    sized C_3 4 conv_k ->
    sized 3 C_3 taps_k ->
    C_3 = (H_1*d)%nat ->
    sized n_tokens C_4 v ->
    sized C_4 4 conv_v ->
    sized 3 C_4 taps_v ->
    C_4 = (H_1*d)%nat ->
    sized n_tokens K_5 f ->
    sized R_5 K_5 f_b ->
    R_5 = (H_1*d)%nat ->
    sized n_tokens H_1 b ->
    length a_log = H_1 ->
    length dt_bias = (H_1*d)%nat ->
    sized3 H_1 d d s ->
    (H_1*d)%nat = (H_0*D_0)%nat ->
    length o_norm = D_0 ->
    sized n_tokens (H_0*D_0)%nat gate ->
    sized n_tokens (H_6*d)%nat q ->
    sized n_tokens (H_6*d)%nat k ->
    sized n_tokens (H_6*d)%nat v ->
    sized n_tokens rank_6 f ->
    sized n_tokens H_6 b ->
    sized n_tokens (H_6*d)%nat gate ->
    sized (H_6*d)%nat 4 conv_q ->
    sized (H_6*d)%nat 4 conv_k ->
    sized (H_6*d)%nat 4 conv_v ->
    sized (H_6*d)%nat rank_6 f_b ->
    length a_log = H_6 ->
    length dt_bias = (H_6*d)%nat ->
    length o_norm = d ->
    sized 3 C_6 taps_q ->
    sized 3 C_6 taps_k ->
    sized 3 C_6 taps_v ->
    sized3 H_6 d d s ->
    (sem_KDA_GATED_NORM (sem_KDA_CORE (sem_CONV_SILU q conv_q taps_q round) (sem_CONV_SILU k conv_k taps_k round) (sem_CONV_SILU v conv_v taps_v round) (sem_GEMV_BF16 f f_b 0 round) b a_log dt_bias s l2_eps scale bound round d) o_norm gate eps round) =
    (sem_KDA_HEADS q k v f b gate conv_q conv_k conv_v f_b a_log dt_bias o_norm taps_q taps_k taps_v s l2_eps scale bound eps round d) /\
    (next_KDA_CORE_s (sem_CONV_SILU q conv_q taps_q round) (sem_CONV_SILU k conv_k taps_k round) (sem_CONV_SILU v conv_v taps_v round) (sem_GEMV_BF16 f f_b 0 round) b a_log dt_bias s l2_eps scale bound round d) =
    (next_KDA_HEADS_s q k v f b gate conv_q conv_k conv_v f_b a_log dt_bias o_norm taps_q taps_k taps_v s l2_eps scale bound eps round d) /\
    (next_CONV_SILU_taps q conv_q taps_q round) =
    (next_KDA_HEADS_taps_q q k v f b gate conv_q conv_k conv_v f_b a_log dt_bias o_norm taps_q taps_k taps_v s l2_eps scale bound eps round d) /\
    (next_CONV_SILU_taps k conv_k taps_k round) =
    (next_KDA_HEADS_taps_k q k v f b gate conv_q conv_k conv_v f_b a_log dt_bias o_norm taps_q taps_k taps_v s l2_eps scale bound eps round d) /\
    (next_CONV_SILU_taps v conv_v taps_v round) =
    (next_KDA_HEADS_taps_v q k v f b gate conv_q conv_k conv_v f_b a_log dt_bias o_norm taps_q taps_k taps_v s l2_eps scale bound eps round d).

  (* mla-heads-fuse *)
  Definition stmt_mla_heads_fuse : Prop :=
    forall (H_0 H_1 H_2 H_3 : nat) (nope : nat) (v : nat) (latent : nat) (round : nat) (rope : nat) (scale : F) (pages : nat) (q : Mat) (kv_b : Mat) (cache : Mat) (gate : Mat),
    0 < nope ->
    0 < v ->
    0 < latent ->
    0 < rope ->
    sized n_tokens (H_2*(nope+rope))%nat q ->
    sized (H_2*(nope+v))%nat latent kv_b ->
    (H_2*(latent+rope))%nat = (H_1*(latent+rope))%nat ->
    wide (latent+rope)%nat cache ->
    (H_1*latent)%nat = (H_0*latent)%nat ->
    sized (H_0*(nope+v))%nat latent kv_b ->
    sized n_tokens (H_0*v)%nat gate ->
    sized n_tokens (H_3*(nope+rope))%nat q ->
    sized (H_3*(nope+v))%nat latent kv_b ->
    sized n_tokens (H_3*v)%nat gate ->
    (sem_MLA_UV_GATE (sem_MLA_ATTEND (sem_MLA_QLAT q kv_b nope rope latent v round) cache latent rope scale pages round) kv_b gate nope v latent round) =
    (sem_MLA_HEADS q kv_b cache gate nope rope latent v scale round).

  (* mla-pages-split *)
  Definition stmt_mla_pages_split : Prop :=
    forall (H_0 H_1 H_2 K_3 R_3 H_4 H_5 K_6 H_6 : nat) (nope : nat) (v : nat) (latent : nat) (round : nat) (rope : nat) (scale : F) (pages : nat) (eps : F) (norm_round : nat) (x : Mat) (norm : Vec) (w : Mat) (kv_b : Mat) (cache : Mat) (gate : Mat),
    0 < nope ->
    0 < v ->
    0 < latent ->
    0 < rope ->
    sized n_tokens K_3 x ->
    length norm = K_3 ->
    sized R_3 K_3 w ->
    R_3 = (H_2*(nope+rope))%nat ->
    sized (H_2*(nope+v))%nat latent kv_b ->
    (H_2*(latent+rope))%nat = (H_1*(latent+rope))%nat ->
    wide (latent+rope)%nat cache ->
    (H_1*latent)%nat = (H_0*latent)%nat ->
    sized (H_0*(nope+v))%nat latent kv_b ->
    sized n_tokens (H_0*v)%nat gate ->
    0 < pages ->
    sized n_tokens K_6 x ->
    length norm = K_6 ->
    sized (H_6*(nope+rope))%nat K_6 w ->
    sized (H_6*(nope+v))%nat latent kv_b ->
    (H_6*(latent+rope))%nat = (H_5*(latent+rope))%nat ->
    (pages*H_5*(latent+16))%nat = (pages*H_4*(latent+16))%nat ->
    sized (H_4*(nope+v))%nat latent kv_b ->
    sized n_tokens (H_4*v)%nat gate ->
    (sem_MLA_UV_GATE (sem_MLA_ATTEND (sem_MLA_QLAT (sem_NORM_GEMV_BF16 x norm w eps 0 norm_round round) kv_b nope rope latent v round) cache latent rope scale pages round) kv_b gate nope v latent round) =
    (sem_MLA_MERGE (sem_MLA_PAGES (sem_MLA_QUERY x norm w kv_b eps nope rope latent v norm_round round) cache latent rope scale pages) kv_b gate nope v latent pages round).

  (* situ-down-fuse *)
  Definition stmt_situ_down_fuse : Prop :=
    forall (K_0 W_1 R_0 K_2 R_2 : nat) (round : nat) (beta : F) (linear : F) (gate : Mat) (up : Mat) (w : Mat),
    sized n_tokens W_1 gate ->
    sized n_tokens W_1 up ->
    W_1 = K_0 ->
    sized R_0 K_0 w ->
    sized n_tokens K_2 gate ->
    sized n_tokens K_2 up ->
    sized R_2 K_2 w ->
    (sem_GEMV_BF16_BLOCKS (sem_SITU gate up beta linear round) w round) =
    (sem_SITU_GEMV_BLOCKS gate up w beta linear round).

  (* topk-glu-fuse *)
  Definition stmt_topk_glu_fuse : Prop :=
    forall (K_0 E_1 E_0 R_0 K_2 E_2 R_2 : nat) (k : nat) (beta : F) (linear : F) (round : nat) (z : Mat) (scale : F) (scores : Mat) (bias : Vec) (w1 : Quant) (w3 : Quant),
    0 < k ->
    sized n_tokens K_0 z ->
    sized n_tokens E_1 scores ->
    length bias = E_1 ->
    quantised E_0 R_0 K_0 w1 ->
    quantised E_0 R_0 K_0 w3 ->
    sized n_tokens K_2 z ->
    sized n_tokens E_2 scores ->
    length bias = E_2 ->
    quantised E_2 R_2 K_2 w1 ->
    quantised E_2 R_2 K_2 w3 ->
    (sem_MOE_GLU_MXFP4 z (sem_ROUTER_TOPK scores bias k scale) w1 w3 k beta linear round) =
    (sem_MOE_GLU_TOPK z scores bias w1 w3 k beta linear round).

  (* topk-down-fuse *)
  Definition stmt_topk_down_fuse : Prop :=
    forall (K_0 E_1 E_0 R_0 K_2 E_2 R_2 : nat) (k : nat) (x_bf16 : nat) (x : Mat) (scale : F) (scores : Mat) (bias : Vec) (w2 : Quant),
    0 < k ->
    sized n_tokens (k*K_0)%nat x ->
    sized n_tokens E_1 scores ->
    length bias = E_1 ->
    quantised E_0 R_0 K_0 w2 ->
    sized n_tokens (k*K_2)%nat x ->
    sized n_tokens E_2 scores ->
    length bias = E_2 ->
    quantised E_2 R_2 K_2 w2 ->
    (sem_MOE_DOWN_MXFP4 x (sem_ROUTER_TOPK scores bias k scale) w2 k x_bf16) =
    (sem_MOE_DOWN_TOPK x scores bias w2 k scale x_bf16).

  (* kda-in-fuse *)
  Definition stmt_kda_in_fuse : Prop :=
    forall (K_0 W_1 R_0 K_3 W_4 R0_3 R1_3 R2_3 R3_3 R4_3 R5_3 K_5 R_5 K_7 R_7 K_9 R_9 K_11 R_11 K_13 R_13 : nat) (round : nat) (n : nat) (eps : F) (norm_eps : F) (prefix : Mat) (blocks : Stack) (res_norm : Vec) (res_proj : Vec) (norm : Vec) (w_q : Mat) (w_k : Mat) (w_v : Mat) (w_f : Mat) (w_b : Mat) (w_gate : Mat),
    sized n_tokens W_1 prefix ->
    Forall (sized n_tokens W_1) blocks ->
    length res_norm = W_1 ->
    length res_proj = W_1 ->
    length norm = W_1 ->
    W_1 = K_0 ->
    sized R_0 K_0 w_q ->
    sized n_tokens K_3 prefix ->
    Forall (sized n_tokens W_4) blocks ->
    length res_norm = W_4 ->
    length res_proj = W_4 ->
    (W_4+16)%nat = (K_3+16)%nat ->
    length res_norm = K_3 ->
    length res_proj = K_3 ->
    length norm = K_3 ->
    sized R0_3 K_3 w_q ->
    sized R1_3 K_3 w_k ->
    sized R2_3 K_3 w_v ->
    sized R3_3 K_3 w_f ->
    sized R4_3 K_3 w_b ->
    sized R5_3 K_3 w_gate ->
    W_1 = K_5 ->
    sized R_5 K_5 w_k ->
    W_1 = K_7 ->
    sized R_7 K_7 w_v ->
    W_1 = K_9 ->
    sized R_9 K_9 w_f ->
    W_1 = K_11 ->
    sized R_11 K_11 w_b ->
    W_1 = K_13 ->
    sized R_13 K_13 w_gate ->
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_q 0 round) =
    (sem_PART (sem_MIX_LINEARS_6 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_k w_v w_f w_b w_gate eps norm_eps round) 0) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_k 0 round) =
    (sem_PART (sem_MIX_LINEARS_6 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_k w_v w_f w_b w_gate eps norm_eps round) 1) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_v 0 round) =
    (sem_PART (sem_MIX_LINEARS_6 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_k w_v w_f w_b w_gate eps norm_eps round) 2) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_f 0 round) =
    (sem_PART (sem_MIX_LINEARS_6 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_k w_v w_f w_b w_gate eps norm_eps round) 3) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_b 0 round) =
    (sem_PART (sem_MIX_LINEARS_6 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_k w_v w_f w_b w_gate eps norm_eps round) 4) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_gate 0 round) =
    (sem_PART (sem_MIX_LINEARS_6 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_k w_v w_f w_b w_gate eps norm_eps round) 5).

  (* mla-in-fuse *)
  Definition stmt_mla_in_fuse : Prop :=
    forall (K_0 W_1 R_0 K_3 W_4 R0_3 R1_3 R2_3 K_5 R_5 K_7 R_7 : nat) (round : nat) (n : nat) (eps : F) (norm_eps : F) (prefix : Mat) (blocks : Stack) (res_norm : Vec) (res_proj : Vec) (norm : Vec) (w_q : Mat) (w_kv : Mat) (w_gate : Mat),
    sized n_tokens W_1 prefix ->
    Forall (sized n_tokens W_1) blocks ->
    length res_norm = W_1 ->
    length res_proj = W_1 ->
    length norm = W_1 ->
    W_1 = K_0 ->
    sized R_0 K_0 w_q ->
    sized n_tokens K_3 prefix ->
    Forall (sized n_tokens W_4) blocks ->
    length res_norm = W_4 ->
    length res_proj = W_4 ->
    (W_4+16)%nat = (K_3+16)%nat ->
    length res_norm = K_3 ->
    length res_proj = K_3 ->
    length norm = K_3 ->
    sized R0_3 K_3 w_q ->
    sized R1_3 K_3 w_kv ->
    sized R2_3 K_3 w_gate ->
    W_1 = K_5 ->
    sized R_5 K_5 w_kv ->
    W_1 = K_7 ->
    sized R_7 K_7 w_gate ->
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_q 0 round) =
    (sem_PART (sem_MIX_LINEARS_3 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_kv w_gate eps norm_eps round) 0) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_kv 0 round) =
    (sem_PART (sem_MIX_LINEARS_3 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_kv w_gate eps norm_eps round) 1) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_gate 0 round) =
    (sem_PART (sem_MIX_LINEARS_3 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_q w_kv w_gate eps norm_eps round) 2).

  (* moe-in-fuse *)
  Definition stmt_moe_in_fuse : Prop :=
    forall (K_0 W_1 R_0 K_3 W_4 R0_3 R1_3 R2_3 R3_3 K_5 R_5 K_7 R_7 K_9 R_9 : nat) (head_round : nat) (n : nat) (eps : F) (norm_eps : F) (round : nat) (prefix : Mat) (blocks : Stack) (res_norm : Vec) (res_proj : Vec) (norm : Vec) (w_scores : Mat) (w_z : Mat) (w_gate : Mat) (w_up : Mat),
    sized n_tokens W_1 prefix ->
    Forall (sized n_tokens W_1) blocks ->
    length res_norm = W_1 ->
    length res_proj = W_1 ->
    length norm = W_1 ->
    W_1 = K_0 ->
    sized R_0 K_0 w_scores ->
    sized n_tokens K_3 prefix ->
    Forall (sized n_tokens W_4) blocks ->
    length res_norm = W_4 ->
    length res_proj = W_4 ->
    (W_4+16)%nat = (K_3+16)%nat ->
    length res_norm = K_3 ->
    length res_proj = K_3 ->
    length norm = K_3 ->
    sized R0_3 K_3 w_scores ->
    sized R1_3 K_3 w_z ->
    sized R2_3 K_3 w_gate ->
    sized R3_3 K_3 w_up ->
    W_1 = K_5 ->
    sized R_5 K_5 w_z ->
    W_1 = K_7 ->
    sized R_7 K_7 w_gate ->
    W_1 = K_9 ->
    sized R_9 K_9 w_up ->
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_scores 0 head_round) =
    (sem_PART (sem_MIX_LINEARS_4 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_scores w_z w_gate w_up eps norm_eps round head_round) 0) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_z 0 round) =
    (sem_PART (sem_MIX_LINEARS_4 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_scores w_z w_gate w_up eps norm_eps round head_round) 1) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_gate 0 round) =
    (sem_PART (sem_MIX_LINEARS_4 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_scores w_z w_gate w_up eps norm_eps round head_round) 2) /\
    (sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps round) w_up 0 round) =
    (sem_PART (sem_MIX_LINEARS_4 prefix (sem_ATTN_PART blocks res_norm res_proj n eps) res_norm res_proj norm w_scores w_z w_gate w_up eps norm_eps round head_round) 3).
End Statements.

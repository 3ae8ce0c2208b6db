(* The meaning of every op that a rule mentions, one definition per row of the op table.

   Fused ops are written as their bodies compute them, in one pass over a row or a head, and not as
   the composition that a rule says they equal: that equation is what is proved.

   A value is the logical one: ranks, slices, pages and buffers are not here. A row-parallel result
   ("partial" in the op table) is the list of the ranks' terms. `next_OP_operand` is what an op
   leaves in a state operand. Arguments: operands in the op table's order, then attributes. *)
From Coq Require Import List Arith.
From K3 Require Import Arith Lists.
Import ListNotations.

Section Semantics.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  (* -- sums ----------------------------------------------------------------------------------- *)

  Definition total (l : Vec) : F := fold_right fadd f0 l.
  Definition dot (w x : Vec) : F := total (zipw fmul w x).
  Definition matvec (rd : nat) (w : Mat) (x : Vec) : Vec := map (fun row => rnd rd (dot row x)) w.
  Fixpoint vadd (a b : Vec) : Vec :=
    match a, b with x :: a', y :: b' => x + y :: vadd a' b' | [], _ => b | _, [] => a end.
  (* sum of rows, and of k_i * rows_i; w wide if there are none *)
  Definition vsum (w : nat) (rows : Mat) : Vec := fold_right vadd (repeat f0 w) rows.
  Definition mix (w : nat) (ks : Vec) (rows : Mat) : Vec :=
    vsum w (zipw (fun k row => map (fmul k) row) ks rows).
  Definition vmax (l : Vec) : F := match l with [] => f0 | x :: l' => fold_left fmax l' x end.
  Definition squares (x : Vec) : F := total (map (fun v => v * v) x).
  Definition mean_inv (eps : F) (x : Vec) : F :=
    f1 / fsqrt (squares x / of_nat (length x) + eps).

  (* -- the embedding -------------------------------------------------------------------------- *)

  Definition sem_EMBED_BF16 (table : Mat) : Mat :=
    map (fun t => nth (token_id t) table []) (seq 0 n_tokens).
  (* What lies at an index of the stack is replaced, or added behind the last. *)
  Definition sem_BLOCK_PUSH (prefix : Mat) (blocks : Stack) (index : nat) : Stack :=
    firstn index blocks ++ prefix :: skipn (S index) blocks.
  Definition sem_EMBED_PUSH (table : Mat) (blocks : Stack) (index : nat) : Stack :=
    firstn index blocks
      ++ mapi (fun t _ => nth (token_id t) table []) (repeat tt n_tokens) :: skipn (S index) blocks.

  (* -- dense products ------------------------------------------------------------------------- *)

  (* Head-only linears compute the tokens from head_from on; the other rows are absent. *)
  Definition live (head t : nat) : bool := orb (Nat.eqb head 0) (Nat.leb head_from t).
  Definition sem_GEMV_BF16 (x w : Mat) (head rd : nat) : Mat :=
    mapi (fun t row => if live head t then matvec rd w row else []) x.

  (* Rank r's part of a row. *)
  Definition share {B : Type} (r : nat) (l : list B) : list B :=
    firstn (length l / ranks) (skipn (r * (length l / ranks)) l).
  (* A term of a sum does not round. x_bf16 says what x is; nothing is computed with it. *)
  Definition sem_GEMV_BF16_BLOCKS (x w : Mat) (x_bf16 : nat) : Stack :=
    map (fun r => map (fun row => map (fun wr => dot (share r wr) (share r row)) w) x) (seq 0 ranks).
  Definition sem_GEMV_REDUCED (x w : Mat) (x_bf16 rd : nat) : Mat := map (matvec rd w) x.
  Definition sem_SITU_GEMV_BLOCKS (g u w : Mat) (beta linear : F) (rd : nat) : Stack :=
    map (fun r => zipw (fun gr ur => map (fun wr =>
      total (zip3 (fun c a b => c * rnd rd (situ beta linear a b)) (share r wr) (share r gr) (share r ur))) w)
      g u) (seq 0 ranks).

  (* A norm rounds twice: the value, and again after its weight. *)
  Definition rms (rd : nat) (eps : F) (w x : Vec) : Vec :=
    let inv := mean_inv eps x in zipw (fun v g => rnd rd (rnd rd (v * inv) * g)) x w.
  Definition sem_RMSNORM (x : Mat) (norm : Vec) (eps : F) (rd : nat) : Mat := map (rms rd eps norm) x.

  Definition normed_dot (norm_rd rd : nat) (eps : F) (norm x row : Vec) : F :=
    let inv := mean_inv eps x in
    rnd rd (total (zip3 (fun w v g => w * rnd norm_rd (rnd norm_rd (v * inv) * g)) row x norm)).
  Definition sem_NORM_GEMV_BF16 (x : Mat) (norm : Vec) (w : Mat) (eps : F) (head norm_rd rd : nat)
      : Mat :=
    mapi (fun t r => if live head t then map (normed_dot norm_rd rd eps norm r) w else []) x.

  (* A linear that rounds, twice, and the unit that rounds. *)
  Definition glu (rd : nat) (beta linear : F) (g u row : Vec) : F :=
    rnd rd (situ beta linear (rnd rd (dot g row)) (rnd rd (dot u row))).
  Definition sem_GLU_BF16 (x gate up : Mat) (beta linear : F) (rd : nat) : Mat :=
    map (fun r => zipw (fun g u => glu rd beta linear g u r) gate up) x.

  (* -- elementwise ---------------------------------------------------------------------------- *)

  Definition sem_ADD (a b : Mat) (rd : nat) : Mat := zipw (zipw (fun x y => rnd rd (x + y))) a b.
  Definition sem_MUL (a b : Mat) (rd : nat) : Mat := zipw (zipw (fun x y => rnd rd (x * y))) a b.
  Definition sem_SIGMOID (x : Mat) (rd : nat) : Mat := map (map (fun v => rnd rd (sigmoid v))) x.
  Definition sem_SILU (x : Mat) (rd : nat) : Mat := map (map (fun v => rnd rd (silu v))) x.
  Definition sem_SCALE (x : Mat) (factor : F) : Mat := map (map (fun v => v * factor)) x.
  Definition sem_SOFTCAP (x : Mat) (beta : F) : Mat := map (map (softcap beta)) x.
  Definition sem_SITU (gate up : Mat) (beta linear : F) (rd : nat) : Mat :=
    zipw (zipw (fun g u =>
      rnd rd (beta * ftanh (g / beta) * sigmoid g * (linear * ftanh (u / linear))))) gate up.

  (* -- per head ------------------------------------------------------------------------------- *)

  Definition l2 (eps : F) (x : Vec) : Vec :=
    let inv := f1 / fsqrt (squares x + eps) in map (fun v => v * inv) x.
  Definition by_head {B : Type} (d : nat) (f : Vec -> list B) (row : Vec) : list B :=
    concat (map f (chunks d row)).
  Definition sem_L2NORM (x : Mat) (eps : F) (d : nat) : Mat := map (by_head d (l2 eps)) x.
  Definition sem_HEAD_RMSNORM (x : Mat) (norm : Vec) (eps : F) : Mat :=
    map (by_head (length norm) (rms 0 eps norm)) x.
  Definition gated_norm (rd : nat) (norm : Vec) (eps : F) (o gate : Vec) : Vec :=
    let inv := mean_inv eps o in zip3 (fun v w g => rnd rd (v * inv * w * sigmoid g)) o norm gate.
  Definition sem_KDA_GATED_NORM (o : Mat) (norm : Vec) (gate : Mat) (eps : F) (rd : nat) : Mat :=
    zipw (fun r g =>
      concat (zipw (gated_norm rd norm eps) (chunks (length norm) r) (chunks (length norm) g))) o gate.

  (* -- residual mixing ------------------------------------------------------------------------ *)

  (* score = (sum of v * (res_norm * res_proj)) / rms(v) *)
  Definition score (res_norm res_proj : Vec) (eps : F) (v : Vec) : F :=
    dot v (zipw fmul res_norm res_proj) * mean_inv eps v.
  Definition block_rows (blocks : Stack) (n t : nat) : Mat :=
    map (fun b => nth t b []) (firstn n blocks).
  Definition weights (scores : Vec) : Vec := map (fun s => fexp (s - vmax scores)) scores.
  (* With o, m, s of the finished blocks: both parts weighed against each other. *)
  Definition merge (o : Vec) (m s sp : F) (v : Vec) : Vec :=
    let M := fmax m sp in let a := fexp (m - M) in let b := fexp (sp - M) in
    let r := f1 / (a * s + b) in zipw (fun ov pv => (a * ov + b * pv) * r) o v.
  Definition attn_res (res_norm res_proj : Vec) (eps : F) (rows : Mat) (v : Vec) : Vec :=
    let scores := map (score res_norm res_proj eps) rows in
    merge (mix (length res_norm) (weights scores) rows) (vmax scores) (total (weights scores))
      (score res_norm res_proj eps v) v.
  Definition sem_ATTN_RES (prefix : Mat) (blocks : Stack) (res_norm res_proj : Vec) (n : nat)
      (eps : F) (rd : nat) : Mat :=
    mapi (fun t v => map (rnd rd) (attn_res res_norm res_proj eps (block_rows blocks n t) v)) prefix.
  Definition sem_ATTN_RES_NORM (prefix : Mat) (blocks : Stack) (res_norm res_proj norm : Vec)
      (n : nat) (eps norm_eps : F) (rd : nat) : Mat :=
    mapi (fun t v =>
      let y := map (rnd rd) (attn_res res_norm res_proj eps (block_rows blocks n t) v) in
      let inv := mean_inv norm_eps y in
      zipw (fun u g => rnd rd (rnd rd (u * inv) * g)) y norm) prefix.

  (* The finished blocks' part for a token: [o | m | s | zeros]. *)
  Definition part_row (res_norm res_proj : Vec) (eps : F) (rows : Mat) : Vec :=
    let scores := map (score res_norm res_proj eps) rows in
    mix (length res_norm) (weights scores) rows
      ++ vmax scores :: total (weights scores) :: repeat f0 14.
  Definition sem_ATTN_PART (blocks : Stack) (res_norm res_proj : Vec) (n : nat) (eps : F) : Mat :=
    map (fun t => part_row res_norm res_proj eps (block_rows blocks n t)) (seq 0 n_tokens).

  (* A group of linears of one normed mix: a list of values, one a weight; PART takes one. *)
  Definition mixed_linear (res_norm res_proj norm : Vec) (eps norm_eps : F) (norm_rd rd : nat)
      (w : Mat) (v part : Vec) :=
    let k := length v in
    let y := map (rnd norm_rd) (merge (firstn k part) (nth k part f0) (nth (S k) part f0)
               (score res_norm res_proj eps v) v) in
    let inv := mean_inv norm_eps y in
    map (fun row => rnd rd (total (zip3 (fun a u g =>
      a * rnd norm_rd (rnd norm_rd (u * inv) * g)) row y norm))) w.
  (* The weights of the head do as their own flag says, the others as the norm does. *)
  Definition mix_linears (prefix part : Mat) (res_norm res_proj norm : Vec) (head ws : Stack)
      (eps norm_eps : F) (rd head_rd : nat) : Stack :=
    map (fun w => zipw (mixed_linear res_norm res_proj norm eps norm_eps rd head_rd w) prefix part) head
      ++ map (fun w => zipw (mixed_linear res_norm res_proj norm eps norm_eps rd rd w) prefix part) ws.
  Definition sem_MIX_LINEARS_3 prefix part res_norm res_proj norm w0 w1 w2 eps norm_eps rd :=
    mix_linears prefix part res_norm res_proj norm [] [w0; w1; w2] eps norm_eps rd 0.
  Definition sem_MIX_LINEARS_4 prefix part res_norm res_proj norm w0 w1 w2 w3 :=
    mix_linears prefix part res_norm res_proj norm [w0] [w1; w2; w3].
  Definition sem_MIX_LINEARS_6 prefix part res_norm res_proj norm w0 w1 w2 w3 w4 w5
      eps norm_eps rd :=
    mix_linears prefix part res_norm res_proj norm [] [w0; w1; w2; w3; w4; w5] eps norm_eps rd 0.
  Definition sem_PART (group : Stack) (index : nat) : Mat := nth index group [].

  (* -- short convolution ---------------------------------------------------------------------- *)

  Definition tap (taps : Mat) (i : nat) : Vec := nth i taps [].
  Definition conv4 (kernel : Mat) (a b c x : Vec) : Vec :=
    zipw (fun k p => nth 0 k f0 * fst (fst (fst p)) + nth 1 k f0 * snd (fst (fst p))
                     + nth 2 k f0 * snd (fst p) + nth 3 k f0 * snd p)
      kernel (zipw pair (zipw pair (zipw pair a b) c) x).
  Definition shift (taps : Mat) (x : Vec) : Mat := [tap taps 1; tap taps 2; x].
  Definition conv_step (kernel taps : Mat) (x : Vec) : Mat * Vec :=
    (shift taps x, conv4 kernel (tap taps 0) (tap taps 1) (tap taps 2) x).
  Definition sem_SHORT_CONV (x kernel taps : Mat) : Mat := scan (conv_step kernel) taps x.
  Definition next_SHORT_CONV_taps (x kernel taps : Mat) : Mat := final (conv_step kernel) taps x.
  Definition silu_conv_step (rd : nat) (kernel taps : Mat) (x : Vec) : Mat * Vec :=
    (shift taps x,
     map (fun y => rnd rd (y * sigmoid y)) (conv4 kernel (tap taps 0) (tap taps 1) (tap taps 2) x)).
  Definition sem_CONV_SILU (x kernel taps : Mat) (rd : nat) : Mat := scan (silu_conv_step rd kernel) taps x.
  Definition next_CONV_SILU_taps (x kernel taps : Mat) (rd : nat) : Mat :=
    final (silu_conv_step rd kernel) taps x.

  (* -- Kimi delta attention ------------------------------------------------------------------- *)

  Definition decay (lb a f dt : F) : F := fexp (lb * sigmoid (fexp a * (f + dt))).
  Definition decay_row (lb : F) (d : nat) (a_log dt row : Vec) : Vec :=
    zipw (fun a p => decay lb a (fst p) (snd p)) (flat_map (fun a => repeat a d) a_log)
      (zipw pair row dt).
  Definition sem_KDA_DECAY (f : Mat) (a_log dt : Vec) (lb : F) (d : nat) : Mat :=
    map (decay_row lb d a_log dt) f.

  (* The delta rule of one head: S decays, the value's prediction error goes in, q reads. *)
  Definition delta (rd : nat) (S : Mat) (q k v a : Vec) (b : F) : Mat * Vec :=
    let kept := zipw (fun ai row => map (fmul ai) row) a S in
    let u := map (fmul b) (zipw fsub v (mix (length v) k kept)) in
    let S' := zipw (fun ki row => zipw (fun uj s => ki * uj + s) u row) k kept in
    (S', map (rnd rd) (mix (length v) q S')).
  (* A token of all heads: nested pairs ((((q, k), v), a), b), one a head. *)
  Definition head_of (d : nat) (q k v a b : Vec) :=
    zipw pair (zipw pair (zipw pair (zipw pair (chunks d q) (chunks d k)) (chunks d v)) (chunks d a)) b.
  Definition kda_heads_step (rd : nat) (S : list Mat) (heads : list (Vec * Vec * Vec * Vec * F)) :=
    let done := zipw (fun s h => let '(q, k, v, a, b) := h in delta rd s q k v a b) S heads in
    (map fst done, concat (map snd done)).
  Definition tokens5 (q k v a b : Mat) :=
    zipw pair (zipw pair (zipw pair (zipw pair q k) v) a) b.
  Definition kda_token (rd d : nat) (S : list Mat) (token : Vec * Vec * Vec * Vec * Vec) :=
    let '(q, k, v, a, b) := token in kda_heads_step rd S (head_of d q k v a b).
  Definition sem_KDA_STEP (q k v a b : Mat) (s : Stack) (rd d : nat) : Mat :=
    scan (kda_token rd d) s (tokens5 q k v a b).
  Definition next_KDA_STEP_s (q k v a b : Mat) (s : Stack) (rd d : nat) : Stack :=
    final (kda_token rd d) s (tokens5 q k v a b).

  (* A head of the fused core: norms, scale, decay and write strength on the way in. *)
  Definition core_head (rd : nat) (l2_eps q_scale lb : F) (S : Mat)
      (h : Vec * Vec * Vec * Vec * F * F * Vec) : Mat * Vec :=
    let '(q, k, v, f, b, al, dt) := h in
    let qi := f1 / fsqrt (squares q + l2_eps) in
    let ki := f1 / fsqrt (squares k + l2_eps) in
    delta rd S (map (fun x => x * qi * q_scale) q) (map (fun x => x * ki) k) v
      (zipw (fun x y => decay lb al x y) f dt) (sigmoid b).
  Definition core_token (rd : nat) (l2_eps q_scale lb : F) (d : nat) (a_log dt : Vec) (S : list Mat)
      (token : Vec * Vec * Vec * Vec * Vec) : list Mat * Vec :=
    let '(q, k, v, f, b) := token in
    let heads := zipw pair (zipw pair (head_of d q k v f b) a_log) (chunks d dt) in
    let done := zipw (core_head rd l2_eps q_scale lb) S heads in
    (map fst done, concat (map snd done)).
  Definition sem_KDA_CORE (q k v f b : Mat) (a_log dt : Vec) (s : Stack)
      (l2_eps q_scale lb : F) (rd d : nat) : Mat :=
    scan (core_token rd l2_eps q_scale lb d a_log dt) s (tokens5 q k v f b).
  Definition next_KDA_CORE_s (q k v f b : Mat) (a_log dt : Vec) (s : Stack)
      (l2_eps q_scale lb : F) (rd d : nat) : Stack :=
    final (core_token rd l2_eps q_scale lb d a_log dt) s (tokens5 q k v f b).

  (* All of a layer's heads behind its linears, a token at a time: three convolutions, the decay's
     second linear, the core and the gated norm of each head. *)
  Definition heads_state : Type := (Mat * Mat * Mat * list Mat).
  Definition kda_all_step (cq ck cv f_b : Mat) (a_log dt o_norm : Vec) (l2_eps q_scale lb eps : F)
      (rd d : nat) (state : heads_state) (token : Vec * Vec * Vec * Vec * Vec * Vec)
      : heads_state * Vec :=
    let '(tq, tk, tv, s) := state in let '(q, k, v, f, b, g) := token in
    let conv kernel taps x := map (fun y => rnd rd (y * sigmoid y))
      (conv4 kernel (tap taps 0) (tap taps 1) (tap taps 2) x) in
    let heads := zipw pair (zipw pair
        (head_of d (conv cq tq q) (conv ck tk k) (conv cv tv v) (map (fun row => rnd rd (dot row f)) f_b) b)
      a_log) (chunks d dt) in
    let done := zipw (core_head rd l2_eps q_scale lb) s heads in
    ((shift tq q, shift tk k, shift tv v, map fst done),
     concat (zipw (gated_norm rd o_norm eps) (map snd done) (chunks d g))).
  Definition tokens6 (q k v f b g : Mat) := zipw pair (tokens5 q k v f b) g.
  Section Heads.
    Variables (q k v f b gate cq ck cv f_b : Mat) (a_log dt o_norm : Vec).
    Variables (taps_q taps_k taps_v : Mat) (s : Stack) (l2_eps q_scale lb eps : F) (rd d : nat).
    Let step := kda_all_step cq ck cv f_b a_log dt o_norm l2_eps q_scale lb eps rd d.
    Let start : heads_state := (taps_q, taps_k, taps_v, s).
    Let last : heads_state := final step start (tokens6 q k v f b gate).
    Definition sem_KDA_HEADS : Mat := scan step start (tokens6 q k v f b gate).
    Definition next_KDA_HEADS_taps_q : Mat := fst (fst (fst last)).
    Definition next_KDA_HEADS_taps_k : Mat := snd (fst (fst last)).
    Definition next_KDA_HEADS_taps_v : Mat := snd (fst last).
    Definition next_KDA_HEADS_s : Stack := snd last.
  End Heads.

  (* -- latent attention ----------------------------------------------------------------------- *)

  (* One head: the query's own part through the key half of kv_b, then its shared part as it is. *)
  Definition query (rd nope latent : nat) (q : Vec) (w : Mat) : Vec :=
    map (rnd rd) (mix latent (firstn nope q) (firstn nope w)) ++ skipn nope q.
  Definition sem_MLA_QLAT (q kv_b : Mat) (nope rope latent v rd : nat) : Mat :=
    map (fun row => concat (zipw (query rd nope latent)
      (chunks (nope + rope) row) (chunks (nope + v) kv_b))) q.
  (* The cache has a row a position, this step's tokens last: a token sees up to its own. *)
  Definition seen (cache : Mat) (t : nat) : Mat := firstn (length cache - n_tokens + t + 1) cache.
  (* What a page gives by itself, [sums of latents | maximum | sum | zeros], and how pages merge: left to
     right, relative to the larger maximum. As bodies compute it; that it is the softmax over all of the
     context is proved once (Splits.v). *)
  Definition page_part (latent : nat) (scale : F) (rows : Mat) (q : Vec) : Vec :=
    let scores := map (fun c => dot q c * scale) rows in
    mix latent (weights scores) (map (firstn latent) rows)
      ++ vmax scores :: total (weights scores) :: repeat f0 14.
  Definition merge_parts (latent : nat) (x y : Vec) : Vec :=
    let m := fmax (nth latent x f0) (nth latent y f0) in
    let a := fexp (nth latent x f0 - m) in let b := fexp (nth latent y f0 - m) in
    zipw (fun u v => a * u + b * v) (firstn latent x) (firstn latent y)
      ++ [m; a * nth (S latent) x f0 + b * nth (S latent) y f0].
  Definition merged (rd latent : nat) (parts : list Vec) : Vec :=
    let whole := match parts with [] => repeat f0 latent | x :: l => fold_left (merge_parts latent) l x end in
    map (fun o => rnd rd (o / nth (S latent) whole f0)) (firstn latent whole).
  Definition attend (rd latent : nat) (scale : F) (rows : Mat) (q : Vec) : Vec :=
    merged rd latent (map (fun page => page_part latent scale page q) (chunks page_tokens rows)).
  (* pages is the room for them: how many there are follows from the cache *)
  Definition sem_MLA_ATTEND (q cache : Mat) (latent rope : nat) (scale : F) (pages rd : nat) : Mat :=
    mapi (fun t row => concat (map (attend rd latent scale (seen cache t)) (chunks (latent + rope) row))) q.
  Definition sem_MLA_PAGES (q cache : Mat) (latent rope : nat) (scale : F) (pages : nat) : Mat :=
    mapi (fun t row => concat (map (fun page =>
        concat (map (page_part latent scale page) (chunks (latent + rope) row)))
      (chunks page_tokens (seen cache t)))) q.
  Definition sem_MLA_HEADS (q kv_b cache gate : Mat) (nope rope latent v : nat) (scale : F)
      (rd : nat) : Mat :=
    mapi (fun t qg => concat (zipw (fun qw gh =>
        let ctx := attend rd latent scale (seen cache t) (query rd nope latent (fst qw) (snd qw)) in
        zipw (fun wr s => rnd rd (rnd rd (dot wr ctx) * rnd rd (sigmoid s))) (skipn nope (snd qw)) gh)
      (zipw pair (chunks (nope + rope) (fst qg)) (chunks (nope + v) kv_b)) (chunks v (snd qg))))
      (zipw pair q gate).
  Definition sem_MLA_UV (ctx kv_b : Mat) (nope v latent rd : nat) : Mat :=
    map (fun row => concat (zipw (fun c w => matvec rd (skipn nope w) c)
      (chunks latent row) (chunks (nope + v) kv_b))) ctx.
  Definition sem_MLA_OUT_GATE (o gate : Mat) (rd : nat) : Mat :=
    zipw (zipw (fun a g => rnd rd (a * rnd rd (sigmoid g)))) o gate.
  Definition sem_MLA_UV_GATE (ctx kv_b gate : Mat) (nope v latent rd : nat) : Mat :=
    zipw (fun row g => concat (zipw (fun cw gh =>
        zipw (fun wr s => rnd rd (rnd rd (dot wr (fst cw)) * rnd rd (sigmoid s))) (skipn nope (snd cw)) gh)
      (zipw pair (chunks latent row) (chunks (nope + v) kv_b)) (chunks v g))) ctx gate.

  (* A row has a run a page, in it a run a head. *)
  Definition sem_MLA_MERGE (parts kv_b gate : Mat) (nope v latent pages rd : nat) : Mat :=
    zipw (fun row g =>
      let heads := chunks (nope + v) kv_b in
      let runs := map (chunks (latent + 16)) (chunks (length heads * (latent + 16)) row) in
      concat (zipw (fun hw gh =>
          let ctx := merged rd latent (map (fun run => nth (fst hw) run []) runs) in
          zipw (fun wr s => rnd rd (rnd rd (dot wr ctx) * rnd rd (sigmoid s))) (skipn nope (snd hw)) gh)
        (zipw pair (seq 0 (length heads)) heads) (chunks v g))) parts gate.
  Definition sem_MLA_QUERY (x : Mat) (norm : Vec) (w kv_b : Mat) (eps : F)
      (nope rope latent v norm_rd rd : nat) : Mat :=
    map (fun row => concat (zipw (query rd nope latent)
      (chunks (nope + rope) (map (normed_dot norm_rd rd eps norm row) w)) (chunks (nope + v) kv_b))) x.

  (* -- mixture of experts --------------------------------------------------------------------- *)

  (* Expert j goes before i: a higher score, or the same and a lower number. *)
  Definition beats (adjusted : Vec) (j i : nat) : bool :=
    let a := nth j adjusted f0 in let b := nth i adjusted f0 in
    if fleb a b then andb (fleb b a) (Nat.ltb j i) else true.
  Definition chosen (k : nat) (scores bias : Vec) : list nat :=
    let adjusted := zipw (fun s b => sigmoid s + b) scores bias in
    let all := seq 0 (length adjusted) in
    filter (fun i => Nat.ltb (length (filter (fun j => beats adjusted j i) all)) k) all.
  Definition route_weight (scale : F) (scores : Vec) (ids : list nat) (i : nat) : F :=
    sigmoid (nth i scores f0) / (total (map (fun j => sigmoid (nth j scores f0)) ids) + ftiny) * scale.
  Definition sem_ROUTER_TOPK (scores : Mat) (bias : Vec) (k : nat) (scale : F) : Route :=
    map (fun s => map (fun i => (i, route_weight scale s (chosen k s bias) i)) (chosen k s bias)) scores.

  (* A stored matrix in numbers, and its product: a block at a time, with the block's scale. *)
  Definition numbers (row : list (F * Vec)) : Vec :=
    concat (map (fun b => map (fmul (fst b)) (snd b)) row).
  Definition sem_DEQUANT_MXFP4 (w : Quant) : Stack := map (map numbers) w.
  Fixpoint qdot (row : list (F * Vec)) (x : Vec) : F :=
    match row with
    | [] => f0
    | (scale, block) :: row' =>
        let n := length block in
        total (zipw (fun c v => scale * c * v) block (firstn n x)) + qdot row' (skipn n x)
    end.
  Definition qmatvec (rd : nat) (w : list (list (F * Vec))) (x : Vec) : Vec :=
    map (fun row => rnd rd (qdot row x)) w.
  Definition qglu (rd : nat) (beta linear : F) (g u : list (F * Vec)) (row : Vec) : F :=
    rnd rd (situ beta linear (rnd rd (qdot g row)) (rnd rd (qdot u row))).

  Definition sem_MOE_UP (z : Mat) (route : Route) (w : Stack) (top_k rd : nat) : Mat :=
    zipw (fun row r => concat (map (fun e => matvec rd (nth (fst e) w []) row) r)) z route.
  Definition sem_MOE_UP_MXFP4 (z : Mat) (route : Route) (w : Quant) (top_k rd : nat) : Mat :=
    zipw (fun row r => concat (map (fun e => qmatvec rd (nth (fst e) w []) row) r)) z route.
  Definition sem_MOE_GLU_MXFP4 (z : Mat) (route : Route) (w1 w3 : Quant) (top_k : nat)
      (beta linear : F) (rd : nat) : Mat :=
    zipw (fun row r => concat (map (fun e =>
      zipw (fun g u => qglu rd beta linear g u row) (nth (fst e) w1 []) (nth (fst e) w3 []))
      r)) z route.

  Definition sem_MOE_GLU_TOPK (z scores : Mat) (bias : Vec) (w1 w3 : Quant) (top_k : nat)
      (beta linear : F) (rd : nat) : Mat :=
    zipw (fun row s => concat (map (fun e =>
      zipw (fun g u => qglu rd beta linear g u row) (nth e w1 []) (nth e w3 []))
      (chosen top_k s bias))) z scores.

  (* x has top_k runs, one an expert; a rank holds its share of each run and of w2's columns. *)
  Definition expert (r : nat) (w2 : Quant) (id : nat) (weight : F) (x : Vec) : Vec :=
    map (fun wr => weight * dot (share r (numbers wr)) (share r x)) (nth id w2 []).
  Definition sem_MOE_DOWN (x : Mat) (route : Route) (w2 : Stack) (top_k x_bf16 : nat) : Stack :=
    map (fun r => zipw (fun row rt => vsum 0 (zipw (fun slot e =>
        map (fun wr => snd e * dot (share r wr) (share r slot)) (nth (fst e) w2 []))
      (chunks (length row / top_k) row) rt)) x route) (seq 0 ranks).
  (* The whole products, and what the route's weights make of them. *)
  Definition sem_MOE_DOWN_EACH (x : Mat) (route : Route) (w2 : Stack) (top_k x_bf16 : nat) : Slots :=
    zipw (fun row rt => zipw (fun slot e => map (fun wr => dot wr slot) (nth (fst e) w2 []))
      (chunks (length row / top_k) row) rt) x route.
  Definition sem_MOE_COMBINE (y : Slots) (route : Route) (top_k rd : nat) : Mat :=
    zipw (fun slots rt =>
      map (rnd rd) (vsum 0 (zipw (fun slot e => map (fun v => snd e * v) slot) slots rt))) y route.
  Definition sem_MOE_DOWN_MXFP4 (x : Mat) (route : Route) (w2 : Quant) (top_k x_bf16 : nat) : Stack :=
    map (fun r => zipw (fun row rt => vsum 0 (zipw (fun slot e => expert r w2 (fst e) (snd e) slot)
      (chunks (length row / top_k) row) rt)) x route) (seq 0 ranks).
  Definition sem_MOE_DOWN_TOPK (x scores : Mat) (bias : Vec) (w2 : Quant) (top_k : nat) (scale : F)
      (x_bf16 : nat) : Stack :=
    map (fun r => zipw (fun row s =>
      let ids := chosen top_k s bias in
      let sum := total (map (fun j => sigmoid (nth j s f0)) ids) + ftiny in
      vsum 0 (zipw (fun slot i => expert r w2 i (sigmoid (nth i s f0) / sum * scale) slot)
        (chunks (length row / top_k) row) ids)) x scores) (seq 0 ranks).

  (* -- collectives: a value is the list of the ranks' terms or shards --------------------------- *)

  Definition sum_ranks (terms : Stack) : Mat :=
    match terms with [] => [] | x :: l => fold_left (zipw (zipw fadd)) l x end.
  Definition join_ranks (shards : Stack) : Mat :=
    match shards with [] => [] | x :: l => fold_left (zipw (@app F)) l x end.
  Definition sem_ALL_REDUCE (x : Stack) (rd : nat) : Mat := map (map (rnd rd)) (sum_ranks x).
  Definition sem_ALL_GATHER : Stack -> Mat := join_ranks.
  Definition sem_ALL_REDUCE_ADD (residual : Mat) (x : Stack) (rd : nat) : Mat :=
    zipw (zipw (fun r v => rnd rd (r + rnd rd v))) residual (sum_ranks x).
  Definition sem_REDUCE_GATHER (up x : Stack) (rd : nat) : Mat :=
    zipw (zipw (fun u v => rnd rd (u + rnd rd v))) (join_ranks up) (sum_ranks x).
  Definition sem_REDUCE_GATHER_ADD (residual : Mat) (up x : Stack) (rd : nat) : Mat :=
    zipw (fun r p =>
        zipw (fun v q => rnd rd (v + rnd rd (fst q + rnd rd (snd q)))) r (zipw pair (fst p) (snd p)))
      residual (zipw pair (join_ranks up) (sum_ranks x)).

  (* -- the choice of a token: [best, its index, second best, 0] ---------------------------------- *)

  Definition candidate_step (c : F * F * F) (p : nat * F) : F * F * F :=
    let '(best, index, second) := c in let '(i, v) := p in
    if above v best then (v, of_nat i, best)
    else if above v second then (best, index, v) else c.
  Definition candidate (base : nat) (row : Vec) : F * F * F :=
    fold_left candidate_step (combine (seq base (length row)) row) (flow, of_nat base, flow).
  Definition words (c : F * F * F) : Vec := [fst (fst c); snd (fst c); snd c; f0].
  Definition sem_ARGMAX_ALL (logits : Mat) : Mat := map (fun row => words (candidate 0 row)) logits.
  (* Each rank's own; ranks have equal shares of the vocabulary, in their order. *)
  Definition sem_ARGMAX (logits : Stack) : Stack :=
    mapi (fun r shard => map (fun row => words (candidate (r * length row) row)) shard) logits.
  (* Of equal bests the lower rank's, whose index is the lower; the second best is the loser or the
     winner's own. *)
  Definition merge_candidates (a b : Vec) : Vec :=
    let wins := above (nth 0 b f0) (nth 0 a f0) in
    let win := if wins then b else a in let lose := if wins then a else b in
    [nth 0 win f0; nth 1 win f0;
     if above (nth 0 lose f0) (nth 2 win f0) then nth 0 lose f0 else nth 2 win f0; f0].
  Definition sem_ARGMAX_FOLD (x : Stack) : Mat :=
    match x with [] => [] | x :: l => fold_left (zipw merge_candidates) l x end.

  (* -- sizes: what the compiler has checked of every graph it makes ----------------------------- *)

  Definition wide (w : nat) (x : Mat) : Prop := Forall (fun row => length row = w) x.
  Definition sized (n w : nat) (x : Mat) : Prop := length x = n /\ wide w x.
  Definition sized3 (e n w : nat) (x : Stack) : Prop := length x = e /\ Forall (sized n w) x.
  Definition quantised (e n w : nat) (x : Quant) : Prop :=
    length x = e /\ Forall (fun m => sized n w (map numbers m)) x.
  Definition slotted (n w : nat) (x : Slots) : Prop :=
    length x = n /\ Forall (fun rows => length (concat rows) = w) x.
  (* A route row has two words an expert. *)
  Definition routed (n w : nat) (x : Route) : Prop :=
    length x = n /\ Forall (fun row => (2 * length row)%nat = w) x.
End Semantics.

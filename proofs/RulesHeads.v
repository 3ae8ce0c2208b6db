(* The rules of heads: Kimi delta attention and latent attention. *)
From Coq Require Import List Arith Lia.
From K3 Require Import Arith Lists Semantics Rules RulesMix.
From K3.gen Require Import Statements.
Import ListNotations.

(* Zips of the same lists, whatever the nesting. *)
Ltac zips := repeat match goal with |- context [chunks ?d ?l] => generalize (chunks d l); intro end;
  unfold head_of, tokens5, tokens6.

Section Heads.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  Lemma rms_length : forall rd eps w x, length x <= length w -> length (rms rd eps w x) = length x.
  Proof. intros. unfold rms. rewrite zipw_length. lia. Qed.

  Lemma l2_length : forall eps x, length (l2 eps x) = length x.
  Proof. intros. unfold l2. apply map_length. Qed.

  (* -- runs of which only the last may be short -------------------------------------------------- *)

  Fixpoint runs (d : nat) (ls : list Vec) : Prop :=
    match ls with
    | [] => True
    | [c] => 0 < length c <= d
    | c :: ls' => length c = d /\ runs d ls'
    end.

  Lemma runs_tail : forall d c ls, 0 < d -> runs d (c :: ls) -> runs d ls /\ 0 < length c <= d.
  Proof. intros d c ls Hd. destruct ls; simpl; intros; [tauto|]. destruct H. split; [auto|lia]. Qed.

  Lemma runs_chunks : forall d l, 0 < d -> runs d (chunks d l).
  Proof.
    intros d l Hd. induction l as [|l Hl IH] using (@runs_ind _ d Hd).
    - now rewrite chunks_nil.
    - rewrite chunks_cons by auto. destruct (le_lt_dec (length l) d).
      + rewrite (@skipn_all2 _ d l), chunks_nil by lia. simpl. rewrite firstn_all2 by lia.
        destruct l; simpl in *; [congruence|lia].
      + destruct (chunks d (skipn d l)) as [|c cs] eqn:E.
        * simpl. rewrite firstn_length. lia.
        * split; auto. rewrite firstn_length. lia.
  Qed.

  Lemma chunks_concat : forall d ls, 0 < d -> runs d ls -> chunks d (concat ls) = ls.
  Proof.
    intros d ls Hd. induction ls as [|c ls IH]; intros H. - apply chunks_nil.
    - destruct ls as [|c' ls].
      + simpl in *. rewrite app_nil_r, chunks_cons; auto.
        * rewrite firstn_all2, skipn_all2, chunks_nil by lia. reflexivity.
        * destruct c; simpl in *; [lia|congruence].
      + destruct H as [L H]. change (concat (c :: c' :: ls)) with (c ++ concat (c' :: ls)).
        rewrite chunks_cons; auto.
        * rewrite firstn_app, skipn_app, L, Nat.sub_diag, firstn_O, app_nil_r.
          rewrite firstn_all2, skipn_all2 by lia. simpl. f_equal. now apply IH.
        * destruct c; simpl in *; [lia|congruence].
  Qed.

  (* Zipped with anything, lengths kept: fewer runs, but runs. *)
  Lemma runs_zipw : forall (X : Type) (f : X -> Vec -> Vec) d xs ls, 0 < d ->
    (forall x c, length (f x c) = length c) -> runs d ls -> runs d (zipw f xs ls).
  Proof.
    intros X f d xs ls Hd Hf. revert xs. induction ls as [|c ls IH]; intros xs H.
    - now rewrite zipw_nil_r.
    - destruct xs as [|x xs]; simpl; auto. destruct (runs_tail _ _ _ Hd H) as [T L].
      specialize (IH xs T). destruct ls as [|c' ls].
      + rewrite zipw_nil_r. simpl. now rewrite Hf.
      + destruct xs as [|x' xs]; [simpl; now rewrite Hf|].
        destruct H as [E _]. simpl in *. split; [now rewrite Hf|auto].
  Qed.

  (* -- per head of KDA ---------------------------------------------------------------------------- *)

  Lemma delta_length : forall rd S q k v a b, length (snd (delta rd S q k v a b)) = length v.
  Proof.
    intros. unfold delta. simpl. rewrite map_length. apply mix_length.
    set (u := map (fmul b) _). assert (length u <= length v).
    { unfold u. rewrite map_length, zipw_length. lia. }
    clearbody u. generalize (zipw (fun ai row => map (fmul ai) row) a S). intros rows.
    revert k. induction rows; intros k; [now rewrite zipw_nil_r|].
    destruct k; simpl; constructor; auto. rewrite zipw_length. lia.
  Qed.
End Heads.

Theorem kda_gated_norm_fuse : forall (A : Arith) (St : Step), stmt_kda_gated_norm_fuse.
Proof.
  unfold stmt_kda_gated_norm_fuse, sem_MUL, sem_HEAD_RMSNORM, sem_SIGMOID, sem_KDA_GATED_NORM. intros.
  rewrite zipw_map_l, zipw_map_r. apply zipw_ext. intros r g. unfold by_head.
  rewrite zipw_concat_chunks by (intros; now apply rms_length). f_equal.
  rewrite chunks_map, zipw_map_r. apply zipw_ext. intros c s. rewrite zipw_map_r.
  unfold rms, gated_norm, zip3. generalize (mean_inv eps c). intros inv.
  clear. revert norm s. induction c; intros norm s; destruct norm, s; simpl; f_equal; auto.
Qed.

Theorem mla_out_gate_fuse : forall (A : Arith) (St : Step), stmt_mla_out_gate_fuse.
Proof.
  unfold stmt_mla_out_gate_fuse, sem_MUL, sem_SIGMOID, sem_MLA_OUT_GATE. intros.
  rewrite zipw_map_r. apply zipw_ext. intros o g. apply zipw_map_r.
Qed.

Section Values.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  (* Heads' values of v channels each, gated channel by channel. *)
  Lemma zipw_heads : forall (X : Type) (f : F -> F -> F) (h : X -> Vec) v xs g, 0 < v ->
    Forall (fun x => length (h x) = v) xs ->
    zipw f (concat (map h xs)) g = concat (zipw (fun x gh => zipw f (h x) gh) xs (chunks v g)).
  Proof.
    intros X f h v xs g Hv H. revert g. induction H; intros g; simpl; auto.
    destruct g as [|y g]. { rewrite zipw_nil_r, chunks_nil. reflexivity. }
    rewrite chunks_cons by (auto; congruence). cbn [zipw concat]. rewrite zipw_app, H, IHForall.
    reflexivity.
  Qed.

  Lemma zipw_pair : forall (X Y Z : Type) (f : X -> Y -> Z) a b,
    zipw f a b = map (fun p => f (fst p) (snd p)) (zipw pair a b).
  Proof. intros. now rewrite map_zipw. Qed.

  Lemma Forall_zipw_r : forall (X Y : Type) (P : Y -> Prop) (a : list X) b, Forall P b ->
    Forall (fun p => P (snd p)) (zipw pair a b).
  Proof. intros X Y P a b H. revert a. induction H; destruct a; simpl; constructor; auto. Qed.

  Lemma Forall_zipw_l : forall (X Y : Type) (P : X -> Prop) a (b : list Y), Forall P a ->
    Forall (fun p => P (fst p)) (zipw pair a b).
  Proof. intros X Y P a b H. revert b. induction H; destruct b; simpl; constructor; auto. Qed.

  Lemma uv_gate : forall rd h nope v latent kv_b row g, 0 < v -> length kv_b = (h * (nope + v))%nat ->
    zipw (fun a s => rnd rd (a * rnd rd (sigmoid s)))
      (concat (zipw (fun c w => matvec rd (skipn nope w) c) (chunks latent row) (chunks (nope + v) kv_b))) g
    = concat (zipw (fun cw gh =>
        zipw (fun wr s => rnd rd (rnd rd (dot wr (fst cw)) * rnd rd (sigmoid s)))
          (skipn nope (snd cw)) gh)
      (zipw pair (chunks latent row) (chunks (nope + v) kv_b)) (chunks v g)).
  Proof.
    intros rd h nope v latent kv_b row g Hv L.
    rewrite (zipw_pair _ _ _ (fun c w => matvec rd (skipn nope w) c)).
    assert (L' : Forall (fun p : Vec * Mat => length (matvec rd (skipn nope (snd p)) (fst p)) = v)
      (zipw pair (chunks latent row) (chunks (nope + v) kv_b))).
    { destruct (@chunks_full _ (nope + v)%nat h kv_b) as [_ Full]; [lia|exact L|].
      apply (Forall_zipw_r _ _ (fun w => length w = (nope + v)%nat) (chunks latent row)) in Full.
      eapply Forall_impl; [|exact Full]. cbv beta. intros p E.
      unfold matvec. rewrite map_length, skipn_length. lia. }
    rewrite (zipw_heads _ _ _ v) by auto.
    f_equal. apply zipw_ext. intros [c w] gh. unfold matvec. simpl. now rewrite zipw_map_l.
  Qed.
End Values.

Theorem mla_uv_gate_fuse : forall (A : Arith) (St : Step), stmt_mla_uv_gate_fuse.
Proof.
  unfold stmt_mla_uv_gate_fuse, sem_MLA_OUT_GATE, sem_MLA_UV, sem_MLA_UV_GATE. intros.
  rewrite zipw_map_l. apply zipw_ext. intros row g.
  match goal with H : sized (?h * (nope + v)) _ kv_b |- _ => apply uv_gate with h; [auto|exact (proj1 H)] end.
Qed.

Section Core.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  Lemma chunks_repeat : forall (X Y : Type) (g : X -> Y) d l, 0 < d ->
    chunks d (flat_map (fun a => repeat (g a) d) l) = map (fun a => repeat (g a) d) l.
  Proof.
    intros X Y g d l Hd. rewrite flat_map_concat_map. apply chunks_of_runs; auto.
    apply Forall_forall. intros c H. apply in_map_iff in H. destruct H as [a [<- _]].
    apply repeat_length.
  Qed.

  Lemma chunks_le : forall (X : Type) d (l : list X), Forall (fun c => length c <= d) (chunks d l).
  Proof. intros. apply Forall_forall. intros c H. exact (chunks_length_le _ _ _ H). Qed.

  Lemma zipw_repeat : forall (X Y Z : Type) (f : X -> Y -> Z) a l d, length l <= d ->
    zipw f (repeat a d) l = map (f a) l.
  Proof. induction l; destruct d; simpl; intros; auto; try lia. f_equal. apply IHl. lia. Qed.

  (* One head: what happens to its five inputs on the way in. *)
  Lemma head_is_core : forall rd l2_eps q_scale lb d S q k v f b al dt, length f <= d ->
    delta rd S (map (fun x => x * q_scale) (l2 l2_eps q)) (l2 l2_eps k) v
      (zipw (fun a p => decay lb a (fst p) (snd p)) (repeat al d) (zipw pair f dt)) (sigmoid b)
    = core_head rd l2_eps q_scale lb S (q, k, v, f, b, al, dt).
  Proof.
    intros. unfold core_head, l2. rewrite map_map. rewrite zipw_repeat.
    - now rewrite map_zipw.
    - rewrite zipw_length. lia.
  Qed.

  Lemma heads_are_core : forall rd l2_eps q_scale lb d S Q K V Fs b al DT,
    Forall (fun c : Vec => length c <= d) Fs ->
    zipw (fun s h => let '(q, k, v, a, b) := h in delta rd s q k v a b) S
      (zipw pair (zipw pair (zipw pair (zipw pair
          (map (map (fun x => x * q_scale)) (map (l2 l2_eps) Q)) (map (l2 l2_eps) K)) V)
        (zipw (zipw (fun a p => decay lb a (fst p) (snd p))) (map (fun a => repeat a d) al)
          (zipw (zipw pair) Fs DT))) (map sigmoid b))
    = zipw (core_head rd l2_eps q_scale lb) S
        (zipw pair (zipw pair (zipw pair (zipw pair (zipw pair (zipw pair Q K) V) Fs) b) al) DT).
  Proof.
    induction S as [|s S IH]; intros Q K V Fs b al DT H; auto.
    destruct Q as [|q Q], K as [|k K], V as [|v V], Fs as [|f Fs], b as [|b0 b], al as [|a al],
      DT as [|dt DT]; simpl; auto.
    inversion H; subst. f_equal; auto. now apply head_is_core.
  Qed.

  Lemma token_is_core : forall rd eps q_scale lb d a_log dt S q k v f b, 0 < d ->
    kda_token rd d S (map (fun x => x * q_scale) (by_head d (l2 eps) q), by_head d (l2 eps) k, v,
      decay_row lb d a_log dt f, map sigmoid b)
    = core_token rd eps q_scale lb d a_log dt S (q, k, v, f, b).
  Proof.
    intros. unfold kda_token, core_token, kda_heads_step, head_of, by_head, decay_row.
    rewrite chunks_map, !chunks_concat_map by (intros; apply l2_length).
    rewrite !chunks_zipw, chunks_repeat, heads_are_core by (auto; apply chunks_le). reflexivity.
  Qed.

  Lemma tokens_are_core : forall eps q_scale lb d a_log dt q k v f b, 0 < d ->
    tokens5 (map (map (fun x => x * q_scale)) (map (by_head d (l2 eps)) q))
      (map (by_head d (l2 eps)) k) v (map (decay_row lb d a_log dt) f) (map (map sigmoid) b)
    = map (fun t => let '(q, k, v, f, b) := t in
        (map (fun x => x * q_scale) (by_head d (l2 eps) q), by_head d (l2 eps) k, v,
         decay_row lb d a_log dt f, map sigmoid b)) (tokens5 q k v f b).
  Proof.
    intros. unfold tokens5.
    revert k v f b. induction q as [|q0 q IH]; intros k v f b; auto.
    destruct k, v, f, b; simpl; auto. f_equal. apply IH.
  Qed.
End Core.

Theorem kda_core_fuse : forall (A : Arith) (St : Step), stmt_kda_core_fuse.
Proof.
  unfold stmt_kda_core_fuse, sem_KDA_STEP, sem_KDA_CORE, next_KDA_STEP_s, next_KDA_CORE_s,
    sem_SCALE, sem_L2NORM, sem_KDA_DECAY, sem_SIGMOID. intros.
  change (map (map (fun v => rnd 0 (sigmoid v))) b) with (map (map sigmoid) b).
  rewrite tokens_are_core, scan_map, final_map by auto. split.
  - apply scan_ext. intros S [[[[q0 k0] v0] f0] b0]. now apply token_is_core.
  - apply final_ext. intros S [[[[q0 k0] v0] f0] b0]. now apply token_is_core.
Qed.

Section AllHeads.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  Lemma core_length : forall rd l2_eps q_scale lb S q k v f b al dt,
    length (snd (core_head rd l2_eps q_scale lb S (q, k, v, f, b, al, dt))) = length v.
  Proof. intros. unfold core_head. apply delta_length. Qed.

  (* The heads' outputs are runs, so cutting the row again gives the heads. *)
  Lemma core_runs : forall rd l2_eps q_scale lb d S Q K V Fs b al DT, 0 < d -> runs d V ->
    runs d (map snd (zipw (core_head rd l2_eps q_scale lb) S
      (zipw pair (zipw pair (zipw pair (zipw pair (zipw pair (zipw pair Q K) V) Fs) b) al) DT))).
  Proof.
    intros. 
    set (X := zipw pair S (zipw pair Q (zipw pair K (zipw pair Fs (zipw pair b (zipw pair al DT)))))).
    set (g := fun (x : Mat * (Vec * (Vec * (Vec * (F * (F * Vec)))))) (v : Vec) =>
      let '(s, (q, (k, (f, (b, (a, dt)))))) := x in
      snd (core_head rd l2_eps q_scale lb s (q, k, v, f, b, a, dt))).
    replace (map snd _) with (zipw g X V).
    - apply runs_zipw; auto. intros [s [q [k [f [b0 [a dt]]]]]] c. apply core_length.
    - unfold X, g. clear. revert Q K V Fs b al DT.
      induction S as [|s S IH]; intros; auto.
      destruct Q, K, V, Fs, b, al, DT; simpl; auto. f_equal. apply IH.
  Qed.

  (* A token through all of it: convolutions, second linear of the decay, core, gated norm. *)
  Definition pieces (st : heads_state) := let '(tq, tk, tv, s) := st in (tq, tk, tv, s).

  Lemma kda_heads_run : forall rd cq ck cv f_b a_log dt o_norm l2_eps q_scale lb eps d, 0 < d ->
    length o_norm = d -> forall q k v f b gate tq tk tv s, length q <= length gate ->
    zipw (fun r g => concat (zipw (gated_norm rd o_norm eps) (chunks d r) (chunks d g)))
      (scan (core_token rd l2_eps q_scale lb d a_log dt) s
        (tokens5 (scan (silu_conv_step rd cq) tq q) (scan (silu_conv_step rd ck) tk k)
          (scan (silu_conv_step rd cv) tv v) (map (matvec rd f_b) f) b)) gate
    = scan (kda_all_step cq ck cv f_b a_log dt o_norm l2_eps q_scale lb eps rd d) (tq, tk, tv, s)
        (tokens6 q k v f b gate)
    /\ final (core_token rd l2_eps q_scale lb d a_log dt) s
        (tokens5 (scan (silu_conv_step rd cq) tq q) (scan (silu_conv_step rd ck) tk k)
          (scan (silu_conv_step rd cv) tv v) (map (matvec rd f_b) f) b)
      = snd (final (kda_all_step cq ck cv f_b a_log dt o_norm l2_eps q_scale lb eps rd d) (tq, tk, tv, s)
        (tokens6 q k v f b gate)).
  Proof.
    intros rd cq ck cv f_b a_log dt o_norm l2_eps q_scale lb eps d Hd Ho.
    unfold tokens6, tokens5.
    induction q as [|q0 q IH]; intros k v f b gate tq tk tv s L; [split; reflexivity|].
    destruct gate as [|g0 gate]; [simpl in L; lia|].
    destruct k as [|k0 k], v as [|v0 v], f as [|f0' f], b as [|b0 b]; try (split; reflexivity).
    simpl in L. apply le_S_n in L. cbn [scan map zipw final].
    specialize (IH k v f b gate (shift tq q0) (shift tk k0) (shift tv v0)
      (fst (core_token rd l2_eps q_scale lb d a_log dt s
        (snd (silu_conv_step rd cq tq q0), snd (silu_conv_step rd ck tk k0), snd (silu_conv_step rd cv tv v0),
         matvec rd f_b f0', b0))) L).
    destruct IH as [IH1 IH2]. split.
    - f_equal.
      + cbn. f_equal. f_equal. apply chunks_concat; auto. apply core_runs; auto. now apply runs_chunks.
      + exact IH1.
    - exact IH2.
  Qed.

  Lemma final_taps : forall rd cq ck cv f_b a_log dt o_norm l2_eps q_scale lb eps d,
    forall q k v f b gate n tq tk tv s, length q = n -> length k = n -> length v = n ->
    length f = n -> length b = n -> length gate = n ->
    let last := final (kda_all_step cq ck cv f_b a_log dt o_norm l2_eps q_scale lb eps rd d)
      (tq, tk, tv, s) (tokens6 q k v f b gate) in
    final (silu_conv_step rd cq) tq q = fst (fst (fst last))
    /\ final (silu_conv_step rd ck) tk k = snd (fst (fst last))
    /\ final (silu_conv_step rd cv) tv v = snd (fst last).
  Proof.
    intros rd cq ck cv f_b a_log dt o_norm l2_eps q_scale lb eps d. unfold tokens6, tokens5.
    induction q as [|q0 q IH]; intros k v f b gate n tq tk tv s H1 H2 H3 H4 H5 H6; simpl in H1.
    - subst. destruct k, v; try discriminate. repeat split; reflexivity.
    - destruct n; [discriminate|]. destruct k, v, f, b, gate; try discriminate. simpl in *.
      apply (IH k v f b gate n); lia.
  Qed.
End AllHeads.

Theorem kda_heads_fuse : forall (A : Arith) (St : Step), stmt_kda_heads_fuse.
Proof.
  unfold stmt_kda_heads_fuse, sem_KDA_GATED_NORM, sem_KDA_CORE, sem_CONV_SILU, sem_GEMV_BF16,
    sem_KDA_HEADS, next_KDA_HEADS_taps_q, next_KDA_HEADS_taps_k, next_KDA_HEADS_taps_v,
    next_KDA_HEADS_s, next_KDA_CORE_s, next_CONV_SILU_taps. intros.
  cbn [live Nat.eqb orb]. rewrite mapi_const.
  unfold sized in *.
  match goal with H : length o_norm = d |- _ => rewrite H end.
  assert (T : length q = n_tokens /\ length k = n_tokens /\ length v = n_tokens /\
    length f = n_tokens /\ length b = n_tokens /\ length gate = n_tokens) by tauto.
  destruct T as [Tq [Tk [Tv [Tf [Tb Tg]]]]].
  edestruct kda_heads_run as [R1 R2]; [| | |rewrite R1, R2]; auto; try lia.
  split; [reflexivity|]. split; [reflexivity|].
  apply (final_taps round conv_q conv_k conv_v f_b a_log dt_bias o_norm l2_eps scale bound eps d
    q k v f b gate n_tokens taps_q taps_k taps_v s); auto.
Qed.

Section Latent.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  Lemma zipw_mapi_l : forall (X X' Y Z : Type) (f : X' -> Y -> Z) (g : nat -> X -> X') a b i,
    zipw f (mapi_from i g a) b = mapi_from i (fun t p => f (g t (fst p)) (snd p)) (zipw pair a b).
  Proof. induction a; destruct b; simpl; intros; f_equal; auto. Qed.

  Lemma Forall_firstn_skipn : forall (X : Type) (P : X -> Prop) n l, Forall P l ->
    Forall P (firstn n l) /\ Forall P (skipn n l).
  Proof. intros X P n l H. rewrite <- (firstn_skipn n l) in H. now apply Forall_app. Qed.

  Lemma chunks_Forall : forall (X : Type) (P : X -> Prop) d l, Forall P l ->
    Forall (Forall P) (chunks d l).
  Proof.
    intros X P d l. destruct (Nat.eq_0_gt_0_cases d) as [->|Hd]; [constructor|].
    induction l as [|l Hl IH] using (@runs_ind _ d Hd); intros H. - rewrite chunks_nil. constructor.
    - rewrite chunks_cons by auto. destruct (Forall_firstn_skipn _ P d l H). constructor; auto.
  Qed.

  Lemma query_length : forall rd nope rope latent q w, length q = (nope + rope)%nat ->
    Forall (fun row : Vec => length row = latent) w ->
    length (query rd nope latent q w) = (latent + rope)%nat.
  Proof.
    intros. unfold query. rewrite app_length, skipn_length, map_length, mix_length; [lia|].
    destruct (Forall_firstn_skipn _ _ nope w H0) as [H1 _].
    eapply Forall_impl; [|exact H1]. cbv beta. intros. lia.
  Qed.

  Lemma queries_length : forall rd nope rope latent Q W,
    Forall (fun q : Vec => length q = (nope + rope)%nat) Q ->
    Forall (Forall (fun row : Vec => length row = latent)) W ->
    Forall (fun c => length c = (latent + rope)%nat) (zipw (query rd nope latent) Q W).
  Proof.
    intros rd nope rope latent Q W H. revert W. induction H; intros W H'; [constructor|].
    destruct H'; simpl; constructor; auto. now apply query_length.
  Qed.

  Lemma part_long : forall latent scale rows q, latent <= length (page_part latent scale rows q).
  Proof.
    intros. unfold page_part. rewrite app_length, mix_length; [lia|].
    apply Forall_forall. intros r H. apply in_map_iff in H. destruct H as [c [<- _]].
    rewrite firstn_length. lia.
  Qed.

  Lemma merge_long : forall latent x y, latent <= length x -> latent <= length y ->
    latent <= length (merge_parts latent x y).
  Proof. intros. unfold merge_parts. rewrite app_length, zipw_length, !firstn_length. lia. Qed.

  Lemma merged_length : forall rd latent parts, Forall (fun p => latent <= length p) parts ->
    length (merged rd latent parts) = latent.
  Proof.
    intros rd latent parts H. unfold merged. rewrite map_length, firstn_length. apply Nat.min_l.
    destruct H as [|x l Hx Hl]; [rewrite repeat_length; lia|].
    revert x Hx. induction Hl as [|y l Hy Hl IH]; intros x Hx; simpl; auto.
    apply IH. now apply merge_long.
  Qed.

  Lemma attend_length : forall rd latent scale rows q, length (attend rd latent scale rows q) = latent.
  Proof.
    intros. unfold attend. apply merged_length. apply Forall_forall. intros p H.
    apply in_map_iff in H. destruct H as [page [<- _]]. apply part_long.
  Qed.

  Lemma latent_heads : forall rd nope latent scale rows Q W G,
    zipw (fun cw gh => zipw (fun wr s => rnd rd (rnd rd (dot wr (fst cw)) * rnd rd (sigmoid s)))
        (skipn nope (snd cw)) gh)
      (zipw pair (map (attend rd latent scale rows) (zipw (query rd nope latent) Q W)) W) G
    = zipw (fun qw gh =>
        let ctx := attend rd latent scale rows (query rd nope latent (fst qw) (snd qw)) in
        zipw (fun wr s => rnd rd (rnd rd (dot wr ctx) * rnd rd (sigmoid s))) (skipn nope (snd qw)) gh)
      (zipw pair Q W) G.
  Proof. induction Q; destruct W, G; simpl; f_equal; auto. Qed.
End Latent.

Theorem mla_heads_fuse : forall (A : Arith) (St : Step), stmt_mla_heads_fuse.
Proof.
  unfold stmt_mla_heads_fuse, sem_MLA_UV_GATE, sem_MLA_ATTEND, sem_MLA_QLAT, sem_MLA_HEADS. intros.
  rewrite mapi_map. unfold mapi. rewrite zipw_mapi_l.
  match goal with H : sized n_tokens (?h * (nope + rope)) q |- _ =>
    destruct H as [_ Wq]; apply (mapi_from_Forall _ _ (fun p => length (fst p) = (h * (nope + rope))%nat)) end.
  { exact (Forall_zipw_l _ _ (fun row => length row = _) _ _ Wq). }
  match goal with H : sized _ latent kv_b |- _ => destruct H as [_ Wkv] end.
  intros t [row g] E. cbn [fst snd] in *.
  apply (chunks_Forall _ _ (nope + v)) in Wkv.
  destruct (@chunks_full _ (nope + rope)%nat _ row ltac:(lia) E) as [_ Full].
  pose proof (queries_length round nope rope latent _ _ Full Wkv) as L.
  rewrite (@chunks_of_runs _ (latent + rope)%nat _ ltac:(lia) L).
  rewrite chunks_of_runs; [now rewrite latent_heads|auto|].
  apply Forall_forall. intros c H'. apply in_map_iff in H'. destruct H' as [c' [<- _]].
  apply attend_length.
Qed.

(* The rules of linears that share a normed mix of residuals. *)
From Coq Require Import List Arith Lia.
From K3 Require Import Arith Lists Semantics Rules.
From K3.gen Require Import Statements.
Import ListNotations.

Section Mix.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  Lemma vadd_length : forall a b, length (vadd a b) = max (length a) (length b).
  Proof. induction a; destruct b; simpl; auto. Qed.

  Lemma vsum_length : forall w rows, Forall (fun row => length row <= w) rows ->
    length (vsum w rows) = w.
  Proof.
    induction 1; simpl. - apply repeat_length. - unfold vsum in *. rewrite vadd_length. lia.
  Qed.

  Lemma mix_length : forall w ks rows, Forall (fun row => length row <= w) rows ->
    length (mix w ks rows) = w.
  Proof.
    intros w ks rows H. unfold mix. apply vsum_length. revert ks.
    induction H; destruct ks; simpl; constructor; auto. now rewrite map_length.
  Qed.

  Lemma block_rows_width : forall blocks n t w, Forall (sized n_tokens w) blocks ->
    Forall (fun row => length row <= w) (block_rows blocks n t).
  Proof.
    intros blocks n t w H. unfold block_rows. revert n.
    induction H; destruct n; simpl; constructor; auto.
    destruct H as [_ H]. destruct (lt_dec t (length x)).
    - apply Nat.eq_le_incl. exact (Forall_at _ _ _ _ [] H l0).
    - rewrite nth_overflow by (now apply Nat.nlt_ge). simpl. lia.
  Qed.

  Lemma zipw_seq : forall (X Y Z : Type) (f : X -> Y -> Z) (g : nat -> Y) l i,
    zipw f l (map g (seq i (length l))) = mapi_from i (fun t x => f x (g t)) l.
  Proof. induction l; simpl; intros; f_equal; auto. Qed.

  Lemma mapi_from_Forall : forall (X Y : Type) (P : X -> Prop) (f g : nat -> X -> Y) l i,
    Forall P l -> (forall t x, P x -> f t x = g t x) -> mapi_from i f l = mapi_from i g l.
  Proof. intros X Y P f g l i H E. revert i. induction H; simpl; intros; f_equal; auto. Qed.

  Lemma nth_middle : forall (a b : Vec) k, length a = k -> nth k (a ++ b) f0 = nth 0 b f0.
  Proof. intros. rewrite app_nth2 by lia. f_equal. lia. Qed.

  Lemma nth_middle_S : forall (a b : Vec) k, length a = k -> nth (S k) (a ++ b) f0 = nth 1 b f0.
  Proof. intros. rewrite app_nth2 by lia. f_equal. lia. Qed.

  (* One member of a group: a linear behind norm and mix, with the blocks' part made beforehand. *)
  Lemma mixed_linear_is_linear : forall prefix blocks res_norm res_proj norm n eps norm_eps nr rd w k,
    sized n_tokens k prefix -> Forall (sized n_tokens k) blocks -> length res_norm = k ->
    sem_GEMV_BF16 (sem_ATTN_RES_NORM prefix blocks res_norm res_proj norm n eps norm_eps nr) w 0 rd
    = zipw (mixed_linear res_norm res_proj norm eps norm_eps nr rd w) prefix
        (sem_ATTN_PART blocks res_norm res_proj n eps).
  Proof.
    intros prefix blocks res_norm res_proj norm n eps norm_eps nr rd w k [Hn Hw] Hb Hr.
    unfold sem_GEMV_BF16, sem_ATTN_RES_NORM, sem_ATTN_PART. rewrite mapi_mapi, <- Hn, zipw_seq.
    unfold mapi. apply (mapi_from_Forall _ _ (fun row => length row = k)); auto.
    intros t v Hv. simpl. unfold mixed_linear, part_row, attn_res, matvec.
    set (rows := block_rows blocks n t). set (scores := map (score res_norm res_proj eps) rows).
    assert (L : length (mix (length res_norm) (weights scores) rows) = length v).
    { rewrite mix_length. - congruence. - rewrite Hr. now apply block_rows_width. }
    rewrite firstn_app, L, Nat.sub_diag, firstn_O, app_nil_r, firstn_all2 by lia.
    rewrite nth_middle, nth_middle_S by auto. simpl. apply map_ext. intros row. f_equal. apply dot_zip.
  Qed.
End Mix.

Ltac group := intros; unfold sem_PART, mix_linears; cbn [map nth app];
  repeat split; (eapply mixed_linear_is_linear; subst; eauto).

Theorem kda_in_fuse : forall (A : Arith) (St : Step), stmt_kda_in_fuse.
Proof. unfold stmt_kda_in_fuse, sem_MIX_LINEARS_6. group. Qed.

Theorem mla_in_fuse : forall (A : Arith) (St : Step), stmt_mla_in_fuse.
Proof. unfold stmt_mla_in_fuse, sem_MIX_LINEARS_3. group. Qed.

Theorem moe_in_fuse : forall (A : Arith) (St : Step), stmt_moe_in_fuse.
Proof. unfold stmt_moe_in_fuse, sem_MIX_LINEARS_4. group. Qed.

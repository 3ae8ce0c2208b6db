(* The rules of norms, dense products, elementwise ops, experts and collectives. *)
From Coq Require Import List Arith Lia.
From K3 Require Import Arith Lists Semantics.
From K3.gen Require Import Statements.
Import ListNotations.

Section Lemmas.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  Lemma zipw_maps : forall (X Y Z : Type) (f : Y -> Z -> F) (g : X -> Y) (h : X -> Z) l,
    zipw f (map g l) (map h l) = map (fun x => f (g x) (h x)) l.
  Proof. intros. now rewrite zipw_map_l, zipw_map_r, zipw_same. Qed.

  (* A row's product with a norm is one pass over row, value and norm. *)
  Lemma dot_zip : forall (f : F -> F -> F) w x y,
    dot w (zipw f x y) = total (zip3 (fun a b c => a * f b c) w x y).
  Proof.
    intros. unfold dot. f_equal. unfold zip3.
    revert x y. induction w; destruct x, y; simpl; f_equal; auto.
  Qed.

  Lemma share_zipw : forall (f : F -> F -> F) r a b, length a = length b ->
    share r (zipw f a b) = zipw f (share r a) (share r b).
  Proof.
    intros. unfold share. rewrite skipn_zipw, firstn_zipw, !zipw_length, H, Nat.min_id. reflexivity.
  Qed.

  Lemma Forall_at : forall (X : Type) (P : X -> Prop) l n d, Forall P l -> n < length l ->
    P (nth n l d).
  Proof. intros X P l n d H L. exact (proj1 (Forall_forall P l) H _ (nth_In _ _ L)). Qed.

  Lemma zipw_concat_maps : forall (X : Type) (f : F -> F -> F) (g h : X -> Vec) l,
    (forall x, length (g x) = length (h x)) ->
    zipw f (concat (map g l)) (concat (map h l)) = concat (map (fun x => zipw f (g x) (h x)) l).
  Proof.
    induction l; simpl; intros; auto. now rewrite zipw_app_eq, IHl.
  Qed.
End Lemmas.

Theorem norm_linear_fuse : forall (A : Arith) (St : Step), stmt_norm_linear_fuse.
Proof.
  unfold stmt_norm_linear_fuse, sem_GEMV_BF16, sem_RMSNORM, sem_NORM_GEMV_BF16. intros.
  rewrite mapi_map. apply mapi_ext. intros. destruct (live head i); auto.
  unfold matvec. apply map_ext. intros row. unfold rms, normed_dot. f_equal. apply dot_zip.
Qed.

Theorem attnres_norm_fuse : forall (A : Arith) (St : Step), stmt_attnres_norm_fuse.
Proof.
  unfold stmt_attnres_norm_fuse, sem_RMSNORM, sem_ATTN_RES, sem_ATTN_RES_NORM. intros.
  now rewrite map_mapi.
Qed.

Theorem situ_fuse : forall (A : Arith) (St : Step), stmt_situ_fuse.
Proof.
  unfold stmt_situ_fuse, sem_MUL, sem_SOFTCAP, sem_SIGMOID, sem_SITU. intros.
  rewrite !zipw_map_r, !zipw_map_l, zipw_same, zipw_map_l. apply zipw_ext. intros g u.
  rewrite !zipw_map_r, !zipw_map_l, zipw_same, zipw_map_l. reflexivity.
Qed.

Theorem glu_situ_fuse : forall (A : Arith) (St : Step), stmt_glu_situ_fuse.
Proof.
  unfold stmt_glu_situ_fuse, sem_SITU, sem_GEMV_BF16, sem_GLU_BF16, glu. intros.
  rewrite zipw_mapi, <- mapi_const. apply mapi_ext. intros. simpl. unfold matvec.
  now rewrite zipw_map_l, zipw_map_r.
Qed.

Theorem moe_situ_fuse : forall (A : Arith) (St : Step), stmt_moe_situ_fuse.
Proof.
  unfold stmt_moe_situ_fuse, sem_SITU, sem_MOE_UP_MXFP4, sem_MOE_GLU_MXFP4. intros.
  assert (L : forall e, length (nth e w1 []) = length (nth e w3 [])).
  { intros e. repeat match goal with H : quantised _ _ _ _ |- _ => destruct H as [? ?] end.
    destruct (lt_dec e (length w1)).
    - match goal with
      | H1 : Forall (fun m => sized ?r ?k (map numbers m)) w1,
        H3 : Forall (fun m => sized ?r ?k (map numbers m)) w3 |- _ =>
          assert (S1 : sized r k (map numbers (nth e w1 [])))
            by (exact (Forall_at _ (fun m => sized r k (map numbers m)) _ _ [] H1 l));
          assert (S3 : sized r k (map numbers (nth e w3 [])))
            by (apply (Forall_at _ (fun m => sized r k (map numbers m)) _ _ [] H3); lia)
      end. unfold sized in *. rewrite !map_length in *. lia.
    - rewrite !nth_overflow by lia. reflexivity. }
  clear - L. revert z.
  induction route as [|r route IH]; destruct z as [|row z]; simpl; auto. rewrite IH. f_equal.
  rewrite zipw_concat_maps.
  - f_equal. apply map_ext. intros e. unfold qmatvec. now rewrite zipw_map_l, zipw_map_r.
  - intros e. unfold qmatvec. now rewrite !map_length.
Qed.

Theorem conv_silu_fuse : forall (A : Arith) (St : Step), stmt_conv_silu_fuse.
Proof.
  unfold stmt_conv_silu_fuse, sem_SILU, sem_SHORT_CONV, sem_CONV_SILU. intros. split.
  - rewrite map_scan. apply scan_ext. reflexivity.
  - unfold next_SHORT_CONV_taps, next_CONV_SILU_taps. clear. revert taps.
    induction x; simpl; intros; auto.
Qed.

Theorem reduce_residual_fuse : forall (A : Arith) (St : Step), stmt_reduce_residual_fuse.
Proof.
  unfold stmt_reduce_residual_fuse, sem_ADD, sem_ALL_REDUCE, sem_ALL_REDUCE_ADD. intros.
  rewrite zipw_map_r. apply zipw_ext. intros r v. now rewrite zipw_map_r.
Qed.

Theorem reduce_gather_fuse : forall (A : Arith) (St : Step), stmt_reduce_gather_fuse.
Proof.
  unfold stmt_reduce_gather_fuse, sem_ADD, sem_ALL_GATHER, sem_ALL_REDUCE, sem_REDUCE_GATHER. intros.
  rewrite zipw_map_r. apply zipw_ext. intros u v. now rewrite zipw_map_r.
Qed.

Theorem gather_residual_fuse : forall (A : Arith) (St : Step), stmt_gather_residual_fuse.
Proof.
  unfold stmt_gather_residual_fuse, sem_ADD, sem_REDUCE_GATHER, sem_REDUCE_GATHER_ADD. intros.
  clear. generalize (join_ranks up), (sum_ranks x). intros a b. revert residual b.
  induction a as [|p a IH]; intros residual b; destruct residual as [|r residual], b as [|q b]; simpl; auto.
  rewrite IH. f_equal. clear. revert p q.
  induction r; intros p q; destruct p, q; simpl; f_equal; auto.
Qed.

Theorem situ_down_fuse : forall (A : Arith) (St : Step), stmt_situ_down_fuse.
Proof.
  unfold stmt_situ_down_fuse, sem_GEMV_BF16_BLOCKS, sem_SITU, sem_SITU_GEMV_BLOCKS. intros.
  apply map_ext. intros r. rewrite map_zipw.
  assert (W : Forall (fun row => length row = K_0) gate /\ Forall (fun row => length row = K_0) up).
  { unfold sized, wide in *. subst. tauto. }
  destruct W as [Wg Wu]. clear - Wg Wu. revert up Wu.
  induction gate as [|g gate IH]; intros up Wu; destruct up as [|u up]; simpl; auto.
  inversion Wg; inversion Wu; subst. rewrite IH by auto. f_equal. apply map_ext. intros wr.
  rewrite share_zipw by congruence. apply dot_zip.
Qed.

Theorem topk_glu_fuse : forall (A : Arith) (St : Step), stmt_topk_glu_fuse.
Proof.
  unfold stmt_topk_glu_fuse, sem_MOE_GLU_MXFP4, sem_ROUTER_TOPK, sem_MOE_GLU_TOPK. intros.
  rewrite zipw_map_r. apply zipw_ext. intros row s. now rewrite map_map.
Qed.

Theorem topk_down_fuse : forall (A : Arith) (St : Step), stmt_topk_down_fuse.
Proof.
  unfold stmt_topk_down_fuse, sem_MOE_DOWN_MXFP4, sem_ROUTER_TOPK, sem_MOE_DOWN_TOPK. intros.
  apply map_ext. intros r. rewrite zipw_map_r. apply zipw_ext. intros row s. now rewrite zipw_map_r.
Qed.

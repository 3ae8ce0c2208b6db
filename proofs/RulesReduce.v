(* The rules that divide a whole product over ranks: a linear's, and the chosen experts' weighted sum. *)
From Coq Require Import List Arith Field Lia.
From K3 Require Import Arith Lists Semantics Rules Splits.
From K3.gen Require Import Statements.
Import ListNotations.

Section Reduced.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.
  Add Field reduced_numbers : field_laws.

  (* -- from the sum of the ranks' values to the sum of the ranks' numbers ------------------------ *)

  Lemma fold_rows : forall (X : Type) (f : nat -> X -> Vec) (g : X -> Vec) (x : list X) l,
    fold_left (zipw (zipw fadd)) (map (fun r => map (f r) x) l) (map g x)
    = map (fun a => fold_left (zipw fadd) (map (fun r => f r a) l) (g a)) x.
  Proof.
    intros X f g x l. revert g. induction l as [|r l IH]; intros g; [reflexivity|].
    cbn [map fold_left]. rewrite zipw_map_l, zipw_map_r, zipw_same. apply IH.
  Qed.

  Lemma zipw_zipw : forall (X Y B C D : Type) (h : B -> C -> D) (f : X -> Y -> B) (g : X -> Y -> C) x y,
    zipw h (zipw f x y) (zipw g x y) = zipw (fun a b => h (f a b) (g a b)) x y.
  Proof. induction x; destruct y; simpl; f_equal; auto. Qed.

  Lemma fold_pairs : forall (X Y : Type) (f : nat -> X -> Y -> Vec) g (x : list X) (y : list Y) l,
    fold_left (zipw (zipw fadd)) (map (fun r => zipw (f r) x y) l) (zipw g x y)
    = zipw (fun a b => fold_left (zipw fadd) (map (fun r => f r a b) l) (g a b)) x y.
  Proof.
    intros X Y f g x y l. revert g. induction l as [|r l IH]; intros g; [reflexivity|].
    cbn [map fold_left]. rewrite zipw_zipw. apply IH.
  Qed.

  Lemma fold_numbers : forall (X : Type) (f : nat -> X -> F) (g : X -> F) (x : list X) l,
    fold_left (zipw fadd) (map (fun r => map (f r) x) l) (map g x)
    = map (fun a => fold_left fadd (map (fun r => f r a) l) (g a)) x.
  Proof.
    intros X f g x l. revert g. induction l as [|r l IH]; intros g; [reflexivity|].
    cbn [map fold_left]. rewrite zipw_map_l, zipw_map_r, zipw_same. apply IH.
  Qed.

  Lemma fold_total : forall l a, fold_left fadd l a = a + total l.
  Proof.
    induction l as [|b l IH]; intros a; unfold total in *; cbn [fold_left fold_right].
    - ring.
    - rewrite IH. ring.
  Qed.

  Lemma total_scaled : forall (X : Type) c (f : X -> F) l,
    total (map (fun r => c * f r) l) = c * total (map f l).
  Proof.
    induction l as [|r l IH]; unfold total in *; cbn [map fold_right]; [ring|]. rewrite IH. ring.
  Qed.

  (* -- a sum over experts of sums over ranks is a sum over ranks of sums over experts ------------- *)

  Lemma add_vadd : forall a b c d, length a = length c -> length b = length d ->
    zipw fadd (vadd a b) (vadd c d) = vadd (zipw fadd a c) (zipw fadd b d).
  Proof.
    induction a as [|x a IH]; destruct c as [|z c]; cbn; intros d L M; try discriminate; [reflexivity|].
    destruct b as [|y b], d as [|w d]; cbn in *; try discriminate; [reflexivity|].
    f_equal; [ring|]. apply IH; congruence.
  Qed.

  Lemma vsum_lengths : forall (X Y : Type) (f g : X -> Y -> Vec) x y,
    (forall a b, length (f a b) = length (g a b)) ->
    length (vsum 0 (zipw f x y)) = length (vsum 0 (zipw g x y)).
  Proof.
    assert (V : forall a b c d : Vec, length a = length c -> length b = length d ->
      length (vadd a b) = length (vadd c d)).
    { induction a as [|p a IH]; destruct c as [|q c]; cbn; intros d L M; try discriminate; auto.
      destruct b, d; cbn in *; try discriminate; auto. }
    unfold vsum. induction x; destruct y; cbn; auto.
  Qed.

  Lemma add_vsum : forall (X Y : Type) (f g : X -> Y -> Vec) x y,
    (forall a b, length (f a b) = length (g a b)) ->
    zipw fadd (vsum 0 (zipw f x y)) (vsum 0 (zipw g x y))
    = vsum 0 (zipw (fun a b => zipw fadd (f a b) (g a b)) x y).
  Proof.
    intros X Y f g x y L. revert y. induction x as [|a x IH]; intros [|b y]; try reflexivity.
    unfold vsum in *. cbn [zipw fold_right]. rewrite add_vadd, IH; auto.
    exact (vsum_lengths _ _ f g x y L).
  Qed.

  Lemma fold_vsum : forall (X Y : Type) (f : nat -> X -> Y -> Vec) x y l g,
    (forall r a b, length (f r a b) = length (g a b)) ->
    fold_left (zipw fadd) (map (fun r => vsum 0 (zipw (f r) x y)) l) (vsum 0 (zipw g x y))
    = vsum 0 (zipw (fun a b => fold_left (zipw fadd) (map (fun r => f r a b) l) (g a b)) x y).
  Proof.
    intros X Y f x y l. induction l as [|r l IH]; intros g L; [reflexivity|].
    cbn [map fold_left]. rewrite add_vsum by (intros; now rewrite L). apply IH.
    intros. rewrite zipw_length, !L. lia.
  Qed.

  (* -- rows --------------------------------------------------------------------------------------- *)

  Lemma sum_over_ranks : forall (f : nat -> F) n,
    fold_left fadd (map f (seq 1 n)) (f 0) = total (map f (seq 0 (S n))).
  Proof. intros. rewrite fold_total. reflexivity. Qed.

  Lemma ranks_terms : forall s (w x : Vec), 0 < ranks ->
    length w = (ranks * s)%nat -> length x = (ranks * s)%nat ->
    total (map (fun r => dot (share r w) (share r x)) (seq 0 ranks)) = dot w x.
  Proof.
    intros s w x R W X. apply row_parallel; auto.
    - congruence.
    - now exists s.
  Qed.

  Lemma zipw_ext_in : forall (X Y Z : Type) (P : X -> Prop) (f g : X -> Y -> Z) x y, Forall P x ->
    (forall a b, P a -> f a b = g a b) -> zipw f x y = zipw g x y.
  Proof.
    intros X Y Z P f g x y H E. revert y. induction H; intros [|b y]; cbn; f_equal; auto.
  Qed.

  Lemma slots_length : forall k s (row : Vec), 0 < k -> length row = (k * s)%nat ->
    Forall (fun slot => length slot = s) (chunks (length row / k) row).
  Proof.
    intros k s row K L. rewrite L, (Nat.mul_comm k s), Nat.div_mul by lia.
    destruct s as [|s]; [constructor|]. apply (chunks_full (d := S s) k row); lia.
  Qed.

  Lemma expert_rows : forall e n k (w : Stack) i, sized3 e n k w -> wide k (nth i w []).
  Proof.
    intros e n k w i [_ H]. destruct (lt_dec i (length w)).
    - exact (proj2 (Forall_at _ _ _ _ [] H l)).
    - rewrite nth_overflow by lia. constructor.
  Qed.
End Reduced.

Theorem down_reduce_fuse : forall (A : Arith) (St : Step), stmt_down_reduce_fuse.
Proof.
  unfold stmt_down_reduce_fuse, sem_GEMV_REDUCED, sem_ALL_REDUCE, sem_GEMV_BF16_BLOCKS, matvec.
  intros A St s n W K R xb rd x w Hr [_ Hx] [_ Hw] _ _ _. unfold wide in Hx, Hw.
  assert (T := fun wr row => ranks_terms s wr row Hr).
  destruct ranks as [|m] eqn:E; [lia|]. cbn [seq map sum_ranks].
  rewrite fold_rows, map_map. apply map_ext_in. intros row I.
  rewrite fold_numbers, map_map. apply map_ext_in. intros wr J. f_equal.
  rewrite Forall_forall in Hx, Hw.
  rewrite (sum_over_ranks (fun r => dot (share r wr) (share r row)) m).
  symmetry. apply T; auto.
Qed.

Theorem expert_combine_fuse : forall (A : Arith) (St : Step), stmt_expert_combine_fuse.
Proof.
  unfold stmt_expert_combine_fuse, sem_MOE_COMBINE, sem_MOE_DOWN_EACH, sem_ALL_REDUCE, sem_MOE_DOWN.
  intros A St R s E R1 W K E3 R3 k rd xb x route w2 Hk Hr [_ Hx] _ Hw _ _ _ _. unfold wide in Hx.
  assert (T := fun wr row => ranks_terms s wr row Hr).
  destruct ranks as [|m] eqn:Er; [lia|]. cbn [seq map sum_ranks].
  rewrite fold_pairs, map_zipw.
  transitivity (zipw (fun row rt => map (rnd rd) (vsum 0 (zipw (fun slot e =>
      map (fun wr => snd e * dot wr slot)%k3 (nth (fst e) w2 []))
    (chunks (length row / k) row) rt))) x route).
  - clear. revert route. induction x as [|row x IH]; intros [|rt route]; cbn [zipw]; auto.
    f_equal; [|apply IH]. f_equal. f_equal.
    generalize (chunks (length row / k) row). intros l. revert rt.
    induction l as [|slot l IHl]; intros [|e rt]; cbn [zipw]; auto. now rewrite map_map, IHl.
  - apply (zipw_ext_in _ _ _ _ _ _ _ _ Hx). intros row rt L. f_equal.
    rewrite fold_vsum by (intros; now rewrite !map_length). f_equal.
    apply (zipw_ext_in _ _ _ (fun slot => length slot = (S m * s)%nat)).
    + apply slots_length; auto. lia.
    + intros slot e Ls. rewrite fold_numbers. apply map_ext_in. intros wr J.
      rewrite (sum_over_ranks (fun r => snd e * dot (share r wr) (share r slot))%k3 m).
      rewrite total_scaled. f_equal. symmetry. apply T; auto.
      assert (Wd := expert_rows _ _ _ _ (fst e) Hw). unfold wide in Wd.
      rewrite Forall_forall in Wd. auto.
Qed.

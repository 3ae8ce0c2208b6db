(* The rules that make instructions of what only the graph says: expert matrices in numbers, the choice
   over the whole vocabulary; and the embedding as the first block. *)
From Coq Require Import List Arith Field Lia.
From K3 Require Import Arith Lists Semantics Rules Splits.
From K3.gen Require Import Statements.
Import ListNotations.

Section Experts.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.
  Add Field lowered_numbers : field_laws.

  Lemma dot_of_app : forall a b x, dot (a ++ b) x = dot a (firstn (length a) x) + dot b (skipn (length a) x).
  Proof. intros. unfold dot. rewrite zipw_app. apply total_app. Qed.

  (* A row's product, block by block, is the product of its numbers. *)
  Lemma qdot_is_dot : forall row x, qdot row x = dot (numbers row) x.
  Proof.
    induction row as [|[scale block] row IH]; intros x; [reflexivity|].
    unfold numbers in *. cbn [map concat fst snd qdot].
    rewrite dot_of_app, map_length, IH. f_equal. unfold dot. now rewrite zipw_map_l.
  Qed.

  Lemma nth_numbers : forall (w : Quant) e, nth e (map (map numbers) w) [] = map numbers (nth e w []).
  Proof. intros. exact (map_nth (map numbers) w [] e). Qed.
End Experts.

Theorem dequant_up_fuse : forall (A : Arith) (St : Step), stmt_dequant_up_fuse.
Proof.
  unfold stmt_dequant_up_fuse, sem_MOE_UP, sem_DEQUANT_MXFP4, sem_MOE_UP_MXFP4. intros.
  apply zipw_ext. intros row r. f_equal. apply map_ext. intros e.
  rewrite nth_numbers. unfold matvec, qmatvec. rewrite map_map. apply map_ext. intros wr.
  now rewrite qdot_is_dot.
Qed.

Theorem dequant_down_fuse : forall (A : Arith) (St : Step), stmt_dequant_down_fuse.
Proof.
  unfold stmt_dequant_down_fuse, sem_MOE_DOWN, sem_DEQUANT_MXFP4, sem_MOE_DOWN_MXFP4, expert. intros.
  apply map_ext. intros r. apply zipw_ext. intros row rt. f_equal. apply zipw_ext. intros slot e.
  now rewrite nth_numbers, map_map.
Qed.

Theorem embed_block_fuse : forall (A : Arith) (St : Step), stmt_embed_block_fuse.
Proof.
  unfold stmt_embed_block_fuse, sem_BLOCK_PUSH, sem_EMBED_BF16, sem_EMBED_PUSH, mapi. intros.
  f_equal. f_equal. clear. generalize n_tokens, 0. intros n.
  induction n; simpl; intros; f_equal; auto.
Qed.

Section Choice.
  Context {A : Arith} {St : Step}.
  Hypothesis laws : ordered.

  Let total_order : forall a b, fleb a b = true \/ fleb b a = true := proj1 laws.
  Let trans : forall a b c, fleb a b = true -> fleb b c = true -> fleb a c = true := proj1 (proj2 laws).
  Let antisym : forall a b, fleb a b = true -> fleb b a = true -> a = b := proj1 (proj2 (proj2 laws)).
  Let least : forall a, fleb flow a = true := proj2 (proj2 (proj2 laws)).

  Definition merge3 (a b : F * F * F) : F * F * F :=
    let '(b1, i1, s1) := a in let '(b2, i2, s2) := b in
    if above b2 b1 then (b2, i2, if above b1 s2 then b1 else s2)
    else (b1, i1, if above b2 s1 then b2 else s1).

  Lemma merge_words : forall a b, merge_candidates (words a) (words b) = words (merge3 a b).
  Proof.
    intros [[b1 i1] s1] [[b2 i2] s2]. unfold merge_candidates, words, merge3. cbn.
    destruct (above b2 b1); reflexivity.
  Qed.

  Definition valid (c : F * F * F) : Prop := fleb (snd c) (fst (fst c)) = true.

  Lemma other_way : forall a b, fleb a b = false -> fleb b a = true.
  Proof. intros a b H. destruct (total_order a b); congruence. Qed.

  (* Along a chain of at most n steps; by contradiction; equal where each is below the other. *)
  Ltac chain n := match goal with |- fleb ?a ?b = true =>
    first [ assumption
          | match n with S ?m => match goal with
            | H : fleb a ?c = true |- _ => apply (trans a c b H); chain m end end ] end.
  Ltac order :=
    repeat match goal with
    | H : fleb ?a ?b = false |- _ => lazymatch goal with
        | _ : fleb b a = true |- _ => fail | _ => pose proof (other_way _ _ H) end
    end;
    first
      [ exfalso; match goal with
        | H : fleb ?a ?b = false |- _ =>
            assert (fleb a b = true) by chain 4; congruence end
      | repeat f_equal; apply antisym; chain 4 ].

  Lemma merge_step : forall c d p, valid c -> valid d ->
    merge3 c (candidate_step d p) = candidate_step (merge3 c d) p.
  Proof.
    intros [[b1 i1] s1] [[b2 i2] s2] [i v] Hc Hd. unfold valid in *. cbn in Hc, Hd.
    unfold candidate_step, merge3, above.
    repeat (match goal with |- context [if negb (fleb ?a ?b) then _ else _] =>
      is_var a; is_var b; destruct (fleb a b) eqn:?; cbn [negb] end); try reflexivity; try discriminate; order.
  Qed.

  Lemma step_valid : forall c p, valid c -> valid (candidate_step c p).
  Proof.
    intros [[b j] s] [i v] H. unfold valid, candidate_step, above in *. cbn in H.
    destruct (fleb v b) eqn:E1; cbn; [destruct (fleb v s) eqn:E2; cbn; auto|]. now apply other_way.
  Qed.

  Lemma steps_valid : forall l c, valid c -> valid (fold_left candidate_step l c).
  Proof. induction l; simpl; auto. intros. apply IHl. now apply step_valid. Qed.

  Lemma start_valid : forall j, valid (flow, j, flow).
  Proof. intros. apply least. Qed.

  Lemma merge_start : forall c j, valid c -> merge3 c (flow, j, flow) = c.
  Proof.
    intros [[b i] s] j H. unfold merge3, above. rewrite !least. reflexivity.
  Qed.

  (* What a run of logits does to a candidate is what merging the run's own candidate does. *)
  Lemma merge_steps : forall l c j, valid c ->
    merge3 c (fold_left candidate_step l (flow, j, flow)) = fold_left candidate_step l c.
  Proof.
    intros l c j Hc. induction l as [|p l IH] using rev_ind; [now apply merge_start|].
    rewrite !fold_left_app. cbn [fold_left]. rewrite merge_step, IH; auto.
    apply steps_valid, start_valid.
  Qed.

  Lemma combine_seq_app : forall (a b : Vec) i, combine (seq i (length (a ++ b))) (a ++ b)
    = combine (seq i (length a)) a ++ combine (seq (i + length a) (length b)) b.
  Proof.
    induction a; intros b i; cbn [app length seq combine].
    - now rewrite Nat.add_0_r.
    - now rewrite IHa, Nat.add_succ_r.
  Qed.

  Lemma merge_rows : forall a b,
    merge_candidates (words (candidate 0 a)) (words (candidate (length a) b)) = words (candidate 0 (a ++ b)).
  Proof.
    intros. rewrite merge_words. f_equal. unfold candidate at 2. rewrite merge_steps.
    - unfold candidate. now rewrite combine_seq_app, fold_left_app.
    - apply steps_valid, start_valid.
  Qed.

  Lemma fold_ranks : forall s l r x, sized n_tokens (r * s) x -> Forall (sized n_tokens s) l ->
    fold_left (zipw merge_candidates)
      (mapi_from r (fun r shard => map (fun row => words (candidate (r * length row) row)) shard) l)
      (map (fun row => words (candidate 0 row)) x)
    = map (fun row => words (candidate 0 row)) (fold_left (zipw (@app F)) l x).
  Proof.
    intros s l. induction l as [|y l IH]; intros r x Hx Hl; [reflexivity|].
    inversion Hl as [|? ? Hy Hl']; subst. cbn [mapi_from fold_left].
    assert (E : zipw merge_candidates (map (fun row => words (candidate 0 row)) x)
        (map (fun row => words (candidate (r * length row) row)) y)
      = map (fun row => words (candidate 0 row)) (zipw (@app F) x y)).
    { destruct Hx as [_ Wx], Hy as [_ Wy]. clear IH Hl Hl'. unfold wide in *. revert y Wy.
      induction Wx as [|a x Ha Wx IH]; intros y Wy; [reflexivity|].
      destruct Wy as [|b y Hb Wy]; [reflexivity|]. cbn [map zipw]. rewrite IH by auto. f_equal.
      rewrite Hb, <- Ha. apply merge_rows. }
    rewrite E. apply IH; auto. destruct Hx as [Nx Wx], Hy as [Ny Wy]. split.
    - rewrite zipw_length. lia.
    - clear - Wx Wy. unfold wide in *. revert y Wy.
      induction Wx as [|a x Ha Wx IH]; intros y Wy; [constructor|].
      destruct Wy as [|b y Hb Wy]; [constructor|]. cbn [zipw]. constructor; auto.
      rewrite app_length. lia.
  Qed.
End Choice.

Theorem argmax_fold_fuse : forall (A : Arith) (St : Step), stmt_argmax_fold_fuse.
Proof.
  unfold stmt_argmax_fold_fuse, sem_ARGMAX_ALL, sem_ALL_GATHER, join_ranks, sem_ARGMAX_FOLD, sem_ARGMAX.
  intros A St V S V' logits Hl _ laws _. destruct logits as [|x l]; [reflexivity|].
  inversion Hl; subst. unfold mapi. cbn [mapi_from]. symmetry.
  rewrite <- (fold_ranks laws S l 1 x) by (auto; now rewrite Nat.mul_1_l). reflexivity.
Qed.

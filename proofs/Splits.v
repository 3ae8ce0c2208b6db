(* Proved once, of no rule: how products split over ranks and blocks, how a softmax merges from
   pages, and that absorbed latent attention is expanded latent attention. *)
From Coq Require Import List Arith Lia Field.
From K3 Require Import Arith Lists Semantics RulesMix.
Import ListNotations.

(* -- trees of blocks ------------------------------------------------------------------------------ *)

(* The sum of 2^n terms by halving: ((b0+b1)+(b2+b3))+((b4+b5)+(b6+b7)) for n = 3. *)
Fixpoint tree {A : Arith} (n : nat) (l : Vec) : F :=
  match n with
  | O => hd f0 l
  | S m => fadd (tree m (firstn (2 ^ m) l)) (tree m (skipn (2 ^ m) l))
  end.

(* The tree of the ranks' subtrees is the tree, as an expression: no law of arithmetic is used, so
   this holds of rounded sums too. 2^a ranks with 2^b blocks each. *)
Theorem tree_of_subtrees : forall (A : Arith) a b (l : Vec), length l = (2 ^ a * 2 ^ b)%nat ->
  tree (a + b) l = tree a (map (tree b) (chunks (2 ^ b) l)).
Proof.
  intros A a b. assert (Hb : 0 < 2 ^ b) by (apply Nat.neq_0_lt_0, Nat.pow_nonzero; lia).
  induction a as [|a IH]; intros l L.
  - simpl in *. destruct l as [|x l]; [simpl in L; lia|].
    rewrite chunks_cons by (auto; congruence). simpl.
    rewrite firstn_all2 by (simpl in *; lia). reflexivity.
  - change (S a + b) with (S (a + b)). cbn [tree]. rewrite Nat.pow_add_r.
    simpl in L. rewrite !IH by (rewrite ?firstn_length, ?skipn_length; lia).
    rewrite chunks_firstn, chunks_skipn by auto.
    now rewrite firstn_map, skipn_map.
Qed.

Section Splits.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.
  Add Field numbers : field_laws.

  Lemma total_app : forall a b, total (a ++ b) = total a + total b.
  Proof. induction a; simpl; intros. - ring. - unfold total in *. simpl. rewrite IHa. ring. Qed.

  Lemma tree_is_total : forall n l, length l = (2 ^ n)%nat -> tree n l = total l.
  Proof.
    induction n; intros l L; simpl in *.
    - destruct l as [|x [|y l]]; simpl in L; try lia. simpl. unfold total. simpl. ring.
    - rewrite !IHn by (rewrite ?firstn_length, ?skipn_length; lia).
      now rewrite <- total_app, firstn_skipn.
  Qed.

  Lemma dot_split : forall n w x,
    dot w x = dot (firstn n w) (firstn n x) + dot (skipn n w) (skipn n x).
  Proof.
    intros. unfold dot. rewrite <- total_app, <- firstn_zipw, <- skipn_zipw. now rewrite firstn_skipn.
  Qed.

  Lemma dot_runs : forall n k w x, length w = (k * n)%nat -> length x = (k * n)%nat ->
    dot w x = total (map (fun r => dot (firstn n (skipn (r * n) w)) (firstn n (skipn (r * n) x))) (seq 0 k)).
  Proof.
    intros n k. induction k; intros w x Hw Hx.
    - destruct w; [reflexivity|discriminate].
    - rewrite (dot_split n). cbn [seq map]. unfold total at 1. cbn [fold_right Nat.mul skipn]. f_equal.
      rewrite IHk by (rewrite skipn_length; simpl in *; lia).
      rewrite <- seq_shift, map_map. unfold total. f_equal. apply map_ext. intros r.
      rewrite !skipn_skipn. replace (S r * n)%nat with (r * n + n)%nat by lia. reflexivity.
  Qed.
End Splits.

(* A row-parallel product, summed over the ranks, is the product. *)
Theorem row_parallel : forall (A : Arith) (St : Step) (w x : Vec), 0 < ranks ->
  length w = length x -> (exists n, length x = (ranks * n)%nat) ->
  total (map (fun r => dot (share r w) (share r x)) (seq 0 ranks)) = dot w x.
Proof.
  intros A St w x Hr L [n Hn]. symmetry. unfold share. rewrite L, Hn.
  rewrite (Nat.mul_comm ranks n), Nat.div_mul by lia. apply dot_runs; lia.
Qed.

(* A column-parallel product: the ranks' rows one after the other are the product's rows. *)
Theorem column_parallel : forall (A : Arith) (ws : Stack) (x : Vec),
  matvec 0 (concat ws) x = concat (map (fun w => matvec 0 w x) ws).
Proof. intros. unfold matvec. induction ws; simpl; auto. now rewrite map_app, IHws. Qed.

(* Eight blocks, each by itself, added by the tree, are the product: row-parallel axes, norm squares. *)
Theorem tree_of_blocks : forall (A : Arith) (w x : Vec) n,
  length w = (8 * n)%nat -> length x = (8 * n)%nat ->
  tree 3 (map (fun r => dot (firstn n (skipn (r * n) w)) (firstn n (skipn (r * n) x))) (seq 0 8))
  = dot w x.
Proof. intros. rewrite tree_is_total by reflexivity. symmetry. now apply dot_runs. Qed.

(* -- softmax from pages --------------------------------------------------------------------------- *)

Section Softmax.
  Context {A : Arith}.
  Local Open Scope k3.
  Add Field numbers2 : field_laws.
  Hypothesis exp_add : forall a b, fexp (a + b) = fexp a * fexp b.
  Hypothesis exp_0 : fexp f0 = f1.

  (* Scores with one channel of their values, weighed relative to any m. *)
  Definition weigh (m : F) (l : list (F * F)) : F := total (map (fun p => fexp (fst p - m) * snd p) l).
  Definition count (m : F) (l : list (F * F)) : F := total (map (fun p => fexp (fst p - m)) l).

  (* (m, s, o) of what came before with a page's: rescaled to a common M, whatever M is. *)
  Definition merge_pages (M : F) (a b : F * F * F) : F * F * F :=
    let '(m, s, o) := a in let '(mp, sp, op) := b in
    (M, fexp (m - M) * s + fexp (mp - M) * sp, fexp (m - M) * o + fexp (mp - M) * op).
  Definition page (m : F) (l : list (F * F)) : F * F * F := (m, count m l, weigh m l).

  Lemma exp_nonzero : forall a, fexp a <> f0.
  Proof.
    intros a E. assert (H : fexp (a + fopp a) = f1). { replace (a + fopp a) with f0 by ring. auto. }
    rewrite exp_add, E in H. apply (F_1_neq_0 field_laws). rewrite <- H. ring.
  Qed.

  Lemma weigh_from : forall m M l, weigh M l = fexp (m - M) * weigh m l.
  Proof.
    intros. unfold weigh, total. induction l; simpl. - ring.
    - rewrite IHl. replace (fst a - M) with ((fst a - m) + (m - M)) by ring. rewrite exp_add. ring.
  Qed.

  Lemma count_from : forall m M l, count M l = fexp (m - M) * count m l.
  Proof.
    intros. unfold count, total. induction l; simpl. - ring.
    - rewrite IHl. replace (fst a - M) with ((fst a - m) + (m - M)) by ring. rewrite exp_add. ring.
  Qed.

  Lemma merge_is_page : forall M m l mp lp,
    merge_pages M (page m l) (page mp lp) = page M (l ++ lp).
  Proof.
    intros. unfold merge_pages, page. f_equal; [f_equal|].
    - rewrite <- !count_from. unfold count. rewrite map_app. symmetry. apply total_app.
    - rewrite <- !weigh_from. unfold weigh. rewrite map_app. symmetry. apply total_app.
  Qed.

  Lemma last_cons : forall (X : Type) (l : list X) x d, last (x :: l) d = last l x.
  Proof.
    induction l as [|y l IH]; intros x d; auto.
    change (last (x :: y :: l) d) with (last (y :: l) d). now rewrite !IH.
  Qed.

  (* Left to right over any number of pages, with any choice of page maxima and running maxima. *)
  Lemma pages_are_one : forall rest m0 first,
    fold_left (fun acc p => merge_pages (snd p) acc (page (fst (fst p)) (snd (fst p)))) rest
      (page m0 first)
    = page (last (map snd rest) m0) (first ++ concat (map (fun p => snd (fst p)) rest)).
  Proof.
    induction rest as [|[[mp lp] M] rest IH]; intros m0 first.
    - simpl. now rewrite app_nil_r.
    - cbn [fold_left map concat fst snd]. rewrite merge_is_page, IH, <- app_assoc, last_cons.
      reflexivity.
  Qed.

  Lemma ratio : forall m M l, count m l <> f0 -> weigh M l / count M l = weigh m l / count m l.
  Proof.
    intros. rewrite (weigh_from m M), (count_from m M). field. split; auto. apply exp_nonzero.
  Qed.
End Softmax.

(* Softmax by pages is softmax: the same ratio as over the whole context relative to any m. *)
Theorem paged_softmax : forall (A : Arith),
  (forall a b, fexp (fadd a b) = fmul (fexp a) (fexp b)) -> fexp f0 = f1 ->
  forall (m0 : F) (first : list (F * F)) (rest : list (F * list (F * F) * F)) (m : F),
  let whole := first ++ concat (map (fun p => snd (fst p)) rest) in
  count m whole <> f0 ->
  let '(_, s, o) := fold_left
    (fun acc p => merge_pages (snd p) acc (page (fst (fst p)) (snd (fst p)))) rest (page m0 first) in
  fdiv o s = fdiv (weigh m whole) (count m whole).
Proof.
  intros A exp_add exp_0 m0 first rest m whole H. rewrite pages_are_one by auto.
  unfold page. now apply ratio.
Qed.

(* AttnRes' form, blocks first and the prefix merged in, is the softmax over blocks and prefix. *)
Theorem attn_res_is_softmax : forall (A : Arith),
  (forall a b, fexp (fadd a b) = fmul (fexp a) (fexp b)) -> fexp f0 = f1 ->
  forall (blocks : list (F * F)) (mB M sp v m : F),
  let whole := blocks ++ [(sp, v)] in count m whole <> f0 ->
  let a := fexp (fsub mB M) in let b := fexp (fsub sp M) in
  fmul (fadd (fmul a (weigh mB blocks)) (fmul b v))
    (fdiv f1 (fadd (fmul a (count mB blocks)) b))
  = fdiv (weigh m whole) (count m whole).
Proof.
  intros A exp_add exp_0 blocks mB M sp v m whole H a b.
  rewrite <- (ratio exp_add exp_0 m M whole H). unfold whole, a, b.
  rewrite <- (weigh_from exp_add mB M), <- (count_from exp_add mB M).
  assert (W : weigh M (blocks ++ [(sp, v)]) = fadd (weigh M blocks) (fmul (fexp (fsub sp M)) v)).
  { unfold weigh. rewrite map_app, total_app. simpl. f_equal. unfold total. simpl.
    rewrite (ARadd_comm (Rth_ARth (Eqsth F) (Eq_ext fadd fmul fopp) (F_R field_laws))).
    apply (ARadd_0_l (Rth_ARth (Eqsth F) (Eq_ext fadd fmul fopp) (F_R field_laws))). }
  assert (C : count M (blocks ++ [(sp, v)]) = fadd (count M blocks) (fexp (fsub sp M))).
  { unfold count. rewrite map_app, total_app. simpl. f_equal. unfold total. simpl.
    rewrite (ARadd_comm (Rth_ARth (Eqsth F) (Eq_ext fadd fmul fopp) (F_R field_laws))).
    apply (ARadd_0_l (Rth_ARth (Eqsth F) (Eq_ext fadd fmul fopp) (F_R field_laws))). }
  rewrite W, C. rewrite (Fdiv_def field_laws f1), (Fdiv_def field_laws).
  f_equal. apply (ARmul_1_l (Rth_ARth (Eqsth F) (Eq_ext fadd fmul fopp) (F_R field_laws))).
Qed.

(* -- latent attention ----------------------------------------------------------------------------- *)

Section Absorbed.
  Context {A : Arith}.
  Local Open Scope k3.
  Add Field numbers3 : field_laws.

  Lemma dot_vadd : forall a b c : Vec, length a = length b -> dot (vadd a b) c = dot a c + dot b c.
  Proof.
    unfold dot, total. induction a; destruct b, c; simpl; intros; try discriminate; try ring.
    rewrite IHa by lia. ring.
  Qed.

  Lemma dot_vadd_r : forall c a b : Vec, length a = length b -> dot c (vadd a b) = dot c a + dot c b.
  Proof.
    unfold dot, total. induction c as [|x c IH]; intros [|y a] [|z b]; simpl; intros;
      try discriminate; try ring. rewrite IH by lia. ring.
  Qed.

  Lemma dot_scaled : forall k (a c : Vec), dot (map (fmul k) a) c = k * dot a c.
  Proof. unfold dot, total. induction a; destruct c; simpl; try ring. rewrite IHa. ring. Qed.

  Lemma dot_scaled_r : forall k (c a : Vec), dot c (map (fmul k) a) = k * dot c a.
  Proof.
    intros k c. unfold dot, total. induction c as [|x c IH]; intros [|y b]; simpl; try ring.
    rewrite IH. ring.
  Qed.

  Lemma dot_zeros : forall n (c : Vec), dot (repeat f0 n) c = f0.
  Proof. unfold dot, total. induction n; destruct c; simpl; auto. rewrite IHn. ring. Qed.

  Lemma dot_zeros_r : forall n (c : Vec), dot c (repeat f0 n) = f0.
  Proof. unfold dot, total. induction n; destruct c; simpl; auto. rewrite IHn. ring. Qed.

  Lemma mix_full : forall w ks rows, wide w rows -> length (mix w ks rows) = w.
  Proof. intros. apply mix_length. eapply Forall_impl; [|exact H]. cbv beta. intros. lia. Qed.

  Lemma dot_mix : forall w ks rows (c : Vec), wide w rows ->
    dot (mix w ks rows) c = dot ks (matvec 0 rows c).
  Proof.
    intros w ks rows c H. revert ks. induction H; intros ks.
    - unfold mix. rewrite zipw_nil_r. simpl. rewrite dot_zeros. unfold dot. now rewrite zipw_nil_r.
    - destruct ks as [|k ks]; [apply dot_zeros|].
      change (mix w (k :: ks) (x :: l)) with (vadd (map (fmul k) x) (mix w ks l)).
      rewrite dot_vadd by (rewrite map_length, mix_full; auto). rewrite dot_scaled, IHForall. reflexivity.
  Qed.

  Lemma dot_mix_r : forall w ks rows (c : Vec), wide w rows ->
    dot c (mix w ks rows) = dot ks (map (dot c) rows).
  Proof.
    intros w ks rows c H. revert ks. induction H; intros ks.
    - unfold mix. rewrite zipw_nil_r. simpl. rewrite dot_zeros_r. unfold dot. now rewrite zipw_nil_r.
    - destruct ks as [|k ks]; [apply dot_zeros_r|].
      change (mix w (k :: ks) (x :: l)) with (vadd (map (fmul k) x) (mix w ks l)).
      rewrite dot_vadd_r by (rewrite map_length, mix_full; auto).
      rewrite dot_scaled_r, IHForall. reflexivity.
  Qed.

  Lemma dot_app : forall a b c d : Vec, length a = length c -> dot (a ++ b) (c ++ d) = dot a c + dot b d.
  Proof. intros. unfold dot. rewrite zipw_app_eq by auto. apply total_app. Qed.
End Absorbed.

(* The score of a cached row [latent c | shared key]: the query taken through the key half of kv_b
   meets the latent as the query itself meets the expanded key. *)
Theorem absorbed_scores : forall (A : Arith) nope latent (q : Vec) (w : Mat) (c shared : Vec),
  wide latent w -> length c = latent -> nope <= length q -> nope <= length w ->
  dot (query 0 nope latent q w) (c ++ shared)
  = dot (firstn nope q ++ skipn nope q) (matvec 0 (firstn nope w) c ++ shared).
Proof.
  intros A nope latent q w c shared H L Hq Hw.
  assert (W : wide latent (firstn nope w)).
  { unfold wide in *. rewrite <- (firstn_skipn nope w) in H. apply Forall_app in H. tauto. }
  unfold query. rewrite (map_ext (rnd 0) (fun x => x)), map_id by reflexivity. rewrite dot_app by (rewrite mix_full; auto).
  rewrite dot_app by (unfold matvec; rewrite map_length, !firstn_length; lia). now rewrite dot_mix.
Qed.

(* Values: the value half of kv_b of the mixed latents is the mix of the expanded values. *)
Theorem absorbed_values : forall (A : Arith) latent (w : Mat) (e : Vec) (cs : Mat),
  wide latent cs -> matvec 0 w (mix latent e cs) = mix (length w) e (map (matvec 0 w) cs).
Proof.
  intros A latent w e cs H.
  assert (Zeros : matvec 0 w (repeat f0 latent) = repeat f0 (length w)).
  { unfold matvec. induction w as [|r w IH]; cbn [map length repeat]; auto.
    now rewrite dot_zeros_r, IH. }
  revert e. induction H as [|x l Hx Hl IH]; intros e.
  - unfold mix. rewrite zipw_nil_r. simpl map. rewrite zipw_nil_r. exact Zeros.
  - destruct e as [|k e]; [exact Zeros|].
    change (mix latent (k :: e) (x :: l)) with (vadd (map (fmul k) x) (mix latent e l)).
    cbn [map]. change (mix (length w) (k :: e) (matvec 0 w x :: map (matvec 0 w) l))
      with (vadd (map (fmul k) (matvec 0 w x)) (mix (length w) e (map (matvec 0 w) l))).
    rewrite <- IH. assert (L : length (map (fmul k) x) = length (mix latent e l)).
    { rewrite map_length, mix_full; auto. }
    clear - L. unfold matvec. induction w as [|r w IHw]; cbn [map vadd]; auto.
    now rewrite dot_vadd_r, dot_scaled_r, IHw by auto.
Qed.

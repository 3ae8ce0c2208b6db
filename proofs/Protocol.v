(* The counter protocol: streams that the checks accept cannot lock up, whatever the interleaving,
   and nothing starts before what it waits for has finished.

   A program is all entries of all ranks, numbered in the one global order; `queue` is the worker (of
   a rank) that executes an entry, in that order. An entry starts when everything before it in its
   queue has finished and every counter it waits for has reached its threshold; it signals when it
   finishes. Who goes next is up to the machine: any step that is possible may happen.

   Not modelled: how a counter is kept in memory (fences, scopes), and the two banks between steps. *)
From Coq Require Import List Arith Lia.
Import ListNotations.

Record program := {
  size : nat;
  queue : nat -> nat;
  waits : nat -> list (nat * nat); (* counters and thresholds *)
  signals : nat -> list nat (* counters *)
}.

Section Protocol.
  Variable P : program.

  Definition arrivals (c e : nat) : nat := count_occ Nat.eq_dec (signals P e) c.
  Definition value (c : nat) (finished : list nat) : nat := list_sum (map (arrivals c) finished).
  Definition producers (c : nat) : nat := value c (seq 0 (size P)).

  (* What checks D and F establish of a stream. *)
  Definition well_formed : Prop :=
    forall e, e < size P -> forall c k, In (c, k) (waits P e) ->
      k = producers c /\ forall p, p < size P -> In c (signals P p) -> p < e.

  (* Entries that have started, and that have finished. *)
  Definition state : Type := (list nat * list nat).

  Definition ready (st : state) (e : nat) : Prop :=
    e < size P /\ ~ In e (fst st)
    /\ (forall e', e' < e -> queue P e' = queue P e -> In e' (snd st))
    /\ (forall c k, In (c, k) (waits P e) -> k <= value c (snd st)).

  Inductive step : state -> state -> Prop :=
  | start : forall s f e, ready (s, f) e -> step (s, f) (e :: s, f)
  | finish : forall s f e, In e s -> ~ In e f -> step (s, f) (s, e :: f).

  Inductive reachable : state -> Prop :=
  | nothing : reachable ([], [])
  | more : forall st st', reachable st -> step st st' -> reachable st'.

  Definition finished (st : state) : Prop := forall e, e < size P -> In e (snd st).

  Lemma invariant : forall st, reachable st ->
    NoDup (snd st) /\ incl (snd st) (fst st) /\ (forall e, In e (fst st) -> e < size P).
  Proof.
    induction 1 as [|[s f] st' _ [N [I L]] S]; simpl in *.
    - repeat split; [constructor|intros x []|intros x []].
    - inversion S; subst; simpl.
      + split; [auto|split]. * intros x H. right. auto.
        * intros x [<-|H]; [match goal with R : ready _ _ |- _ => exact (proj1 R) end|auto].
      + split; [constructor; auto|split; auto]. intros x [<-|H]; auto.
  Qed.

  (* A counter is at its threshold only if all its producers have finished. *)
  Lemma value_app : forall c a b, value c (a ++ b) = value c a + value c b.
  Proof. intros. unfold value. rewrite map_app, list_sum_app. reflexivity. Qed.

  Lemma value_split : forall c f x g, value c (f ++ x :: g) = arrivals c x + value c (f ++ g).
  Proof. intros. rewrite !value_app. simpl. unfold value at 2. simpl. fold (value c g). lia. Qed.

  Lemma value_le : forall c f all, NoDup f -> incl f all -> value c f <= value c all.
  Proof.
    induction f as [|x f IH]; intros all N I; [unfold value; simpl; lia|].
    inversion N; subst. destruct (in_split x all (I x (or_introl eq_refl))) as [a [b ->]].
    rewrite value_split. change (value c (x :: f)) with (arrivals c x + value c f).
    apply Nat.add_le_mono_l, IH; auto. intros y Hy. specialize (I y (or_intror Hy)).
    apply in_app_or in I. apply in_or_app. destruct I as [|[->|]]; auto. contradiction.
  Qed.

  Lemma value_missing : forall c f all p, NoDup f -> incl f all -> In p all -> ~ In p f ->
    value c f + arrivals c p <= value c all.
  Proof.
    intros c f all p N I Hp Hn.
    assert (L : value c (p :: f) <= value c all).
    { apply value_le; [now constructor|]. intros y [<-|H]; auto. }
    change (value c (p :: f)) with (arrivals c p + value c f) in L. lia.
  Qed.

  Lemma all_producers : forall c f p, NoDup f -> (forall e, In e f -> e < size P) ->
    producers c <= value c f -> p < size P -> In c (signals P p) -> In p f.
  Proof.
    intros c f p N L H Hp Hs. destruct (in_dec Nat.eq_dec p f) as [|Hn]; auto. exfalso.
    assert (I : incl f (seq 0 (size P))).
    { intros y Hy. apply in_seq. specialize (L y Hy). lia. }
    pose proof (value_missing c f (seq 0 (size P)) p N I ltac:(apply in_seq; lia) Hn) as V.
    apply (count_occ_In Nat.eq_dec) in Hs. unfold producers, arrivals in *. lia.
  Qed.

  Lemma value_reached : forall c f, (forall p, p < size P -> In c (signals P p) -> In p f) ->
    producers c <= value c f.
  Proof.
    intros c f H. unfold producers.
    set (g := filter (fun p => if in_dec Nat.eq_dec c (signals P p) then true else false)
      (seq 0 (size P))).
    replace (value c (seq 0 (size P))) with (value c g).
    - apply value_le. + apply NoDup_filter, seq_NoDup.
      + intros y Hy. apply filter_In in Hy. destruct Hy as [Hy Hc]. apply in_seq in Hy.
        destruct (in_dec Nat.eq_dec c (signals P y)); [|discriminate]. apply H; [lia|auto].
    - unfold g. clear. induction (seq 0 (size P)) as [|x l IH]; auto. simpl.
      destruct (in_dec Nat.eq_dec c (signals P x)) as [i|n].
      + change (arrivals c x + value c (filter (fun p => if in_dec Nat.eq_dec c (signals P p)
          then true else false) l) = arrivals c x + value c l). lia.
      + change (value c (x :: l)) with (arrivals c x + value c l).
        apply (count_occ_not_In Nat.eq_dec) in n. unfold arrivals. rewrite n. exact IH.
  Qed.

  Lemma least : forall (f : list nat) n, (exists e, e < n /\ ~ In e f) ->
    exists e, e < n /\ ~ In e f /\ forall e', e' < e -> In e' f.
  Proof.
    intros f n. induction n as [|n IH]; intros [e [L N]]; [lia|].
    destruct (in_dec Nat.eq_dec e f) as [|_]; [contradiction|].
    destruct (Nat.eq_dec e n) as [->|Ne].
    - destruct (Exists_dec (fun x => ~ In x f) (seq 0 n)) as [H|H].
      { intros x. destruct (in_dec Nat.eq_dec x f); [right; tauto|left; auto]. }
      + apply Exists_exists in H. destruct H as [x [Hx Hn]]. apply in_seq in Hx.
        destruct IH as [y [Ly Hy]]; [exists x; split; [lia|auto]|]. exists y. split; [lia|auto].
      + exists n. split; [lia|split; auto]. intros e' L'.
        destruct (in_dec Nat.eq_dec e' f); auto. exfalso. apply H, Exists_exists.
        exists e'. split; auto. apply in_seq. lia.
    - destruct IH as [y [Ly Hy]]; [exists e; split; [lia|auto]|]. exists y. split; [lia|auto].
  Qed.
End Protocol.

Theorem no_deadlock : forall P st, well_formed P -> reachable P st -> ~ finished P st ->
  exists st', step P st st'.
Proof.
  intros P [s f] W R N. destruct (invariant P _ R) as [ND [I L]]. simpl in *.
  assert (E : exists e, e < size P /\ ~ In e f).
  { destruct (Exists_dec (fun x => ~ In x f) (seq 0 (size P))) as [H|H].
    { intros x. destruct (in_dec Nat.eq_dec x f); [right; tauto|left; auto]. }
    - apply Exists_exists in H. destruct H as [x [Hx Hn]]. apply in_seq in Hx.
      exists x. split; [lia|auto].
    - exfalso. apply N. intros e He. simpl. destruct (in_dec Nat.eq_dec e f); auto. exfalso.
      apply H, Exists_exists. exists e. split; auto. apply in_seq. lia. }
  destruct (least f (size P) E) as [e [Le [Ne Before]]].
  destruct (in_dec Nat.eq_dec e s) as [Hs|Hs].
  - exists (s, e :: f). now apply finish.
  - exists (e :: s, f). apply start. repeat split; auto; simpl.
    intros c k Hw. destruct (W e Le c k Hw) as [-> Hp]. apply value_reached.
    intros p Lp Sp. apply Before. now apply Hp.
Qed.

Theorem waits_are_over : forall P s f e, well_formed P -> reachable P (s, f) ->
  step P (s, f) (e :: s, f) -> forall c k p, In (c, k) (waits P e) ->
  p < size P -> In c (signals P p) -> In p f.
Proof.
  intros P s f e W R S c k p Hw Lp Sp.
  destruct (invariant P _ R) as [ND [I L]]. simpl in *.
  assert (Rd : ready P (s, f) e).
  { inversion S; subst; auto. exfalso.
    match goal with H : s = e :: s |- _ => revert H | H : _ :: f = f |- _ => revert H end.
    clear. intros H. apply (f_equal (@length nat)) in H. simpl in H. lia. }
  destruct Rd as [Le [_ [_ T]]]. specialize (T c k Hw). simpl in T.
  destruct (W e Le c k Hw) as [-> _].
  apply (all_producers P c f p); auto.
Qed.

(* Nobody arrives twice or from elsewhere: when all is done, every counter is at its threshold. *)
Theorem final_counts : forall P st, well_formed P -> reachable P st -> finished P st ->
  forall c, value P c (snd st) = producers P c.
Proof.
  intros P [s f] W R D c. destruct (invariant P _ R) as [ND [I L]]. simpl in *.
  apply Nat.le_antisymm.
  - apply value_le; auto. intros y Hy. apply in_seq. specialize (L y (I y Hy)). lia.
  - apply value_le; [apply seq_NoDup|]. intros y Hy. apply in_seq in Hy. apply D. lia.
Qed.

(* What has to come first: a producer of a counter waited for, or an earlier entry of the queue; and
   what has to come before that. *)
Inductive before (P : program) : nat -> nat -> Prop :=
| by_counter : forall p e c k, In (c, k) (waits P e) -> p < size P -> In c (signals P p) ->
    before P p e
| by_queue : forall p e, p < e -> queue P p = queue P e -> before P p e
| by_both : forall p m e, before P p m -> before P m e -> before P p e.

Theorem dependencies_are_ordered : forall P s f, well_formed P -> reachable P (s, f) ->
  forall p e, before P p e -> In e s -> In p f.
Proof.
  intros P s f W R.
  assert (Direct : forall st, reachable P st -> forall e, In e (fst st) ->
    (forall c k p, In (c, k) (waits P e) -> p < size P -> In c (signals P p) -> In p (snd st))
    /\ (forall p, p < e -> queue P p = queue P e -> In p (snd st))).
  { clear s f R. induction 1 as [|[s f] st' R IH S]; [intros e []|]. intros e He.
    pose proof (waits_are_over P s f) as Over.
    inversion S; subst; simpl in *.
    - destruct He as [<-|He]; [|exact (IH e He)].
      match goal with H : ready _ _ _ |- _ => pose proof H as [_ [_ [Q _]]] end. split; auto.
      intros c k p Hw Lp Sp. eapply Over; eauto.
    - destruct (IH e He) as [Hc Hq]. split; intros; right; eauto. }
  intros p e B. induction B; intros He.
  - destruct (Direct _ R e He) as [Hc _]. simpl in Hc. eauto.
  - destruct (Direct _ R e He) as [_ Hq]. simpl in Hq. auto.
  - apply IHB1. destruct (invariant P _ R) as [_ [I _]]. simpl in I. auto.
Qed.

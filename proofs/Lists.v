(* Lists of any length: zips, runs of equal length, scans; and what they commute with. *)
From Coq Require Import List Arith Lia.
Import ListNotations.
Set Implicit Arguments.

Section Zips.
  Variables A B C D E : Type.

  Fixpoint zipw (f : A -> B -> C) (a : list A) (b : list B) : list C :=
    match a, b with x :: a', y :: b' => f x y :: zipw f a' b' | _, _ => [] end.
End Zips.

Definition zip3 {A B C D : Type} (f : A -> B -> C -> D) (a : list A) (b : list B) (c : list C) :=
  zipw (fun p z => f (fst p) (snd p) z) (zipw pair a b) c.

(* The index runs with the list. *)
Fixpoint mapi_from {A B : Type} (i : nat) (f : nat -> A -> B) (l : list A) : list B :=
  match l with [] => [] | x :: l' => f i x :: mapi_from (S i) f l' end.
Definition mapi {A B : Type} (f : nat -> A -> B) (l : list A) : list B := mapi_from 0 f l.

(* Runs of d neighbours; the last may be shorter. No runs of nothing. *)
Fixpoint chunks_fuel {A : Type} (fuel d : nat) (l : list A) : list (list A) :=
  match fuel, l with
  | S fuel', _ :: _ => firstn d l :: chunks_fuel fuel' d (skipn d l)
  | _, _ => []
  end.
Definition chunks {A : Type} (d : nat) (l : list A) : list (list A) :=
  match d with O => [] | _ => chunks_fuel (length l) d l end.

(* A machine with a state, over a sequence: what it says, and what it ends in. *)
Fixpoint scan {S X Y : Type} (step : S -> X -> S * Y) (s : S) (xs : list X) : list Y :=
  match xs with [] => [] | x :: xs' => snd (step s x) :: scan step (fst (step s x)) xs' end.
Fixpoint final {S X Y : Type} (step : S -> X -> S * Y) (s : S) (xs : list X) : S :=
  match xs with [] => s | x :: xs' => final step (fst (step s x)) xs' end.

(* -- zips ------------------------------------------------------------------------------------- *)

Lemma zipw_map_l : forall (A A' B C : Type) (f : A' -> B -> C) (g : A -> A') a b,
  zipw f (map g a) b = zipw (fun x y => f (g x) y) a b.
Proof. induction a; destruct b; simpl; f_equal; auto. Qed.

Lemma zipw_map_r : forall (A B B' C : Type) (f : A -> B' -> C) (g : B -> B') a b,
  zipw f a (map g b) = zipw (fun x y => f x (g y)) a b.
Proof. induction a; destruct b; simpl; f_equal; auto. Qed.

Lemma map_zipw : forall (A B C D : Type) (g : C -> D) (f : A -> B -> C) a b,
  map g (zipw f a b) = zipw (fun x y => g (f x y)) a b.
Proof. induction a; destruct b; simpl; f_equal; auto. Qed.

Lemma zipw_same : forall (A C : Type) (f : A -> A -> C) a, zipw f a a = map (fun x => f x x) a.
Proof. induction a; simpl; f_equal; auto. Qed.

Lemma zipw_ext : forall (A B C : Type) (f g : A -> B -> C) a b,
  (forall x y, f x y = g x y) -> zipw f a b = zipw g a b.
Proof. induction a; destruct b; simpl; intros; f_equal; auto. Qed.

Lemma zipw_length : forall (A B C : Type) (f : A -> B -> C) a b,
  length (zipw f a b) = min (length a) (length b).
Proof. induction a; destruct b; simpl; auto. Qed.

Lemma zipw_nil_r : forall (A B C : Type) (f : A -> B -> C) a, zipw f a [] = [].
Proof. destruct a; reflexivity. Qed.

Lemma zipw_app : forall (A B C : Type) (f : A -> B -> C) a a' b,
  zipw f (a ++ a') b = zipw f a (firstn (length a) b) ++ zipw f a' (skipn (length a) b).
Proof.
  induction a; intros; simpl. - destruct b; reflexivity.
  - destruct b; simpl. + now rewrite zipw_nil_r. + now rewrite IHa.
Qed.

Lemma zipw_app_eq : forall (A B C : Type) (f : A -> B -> C) a b a' b', length a = length b ->
  zipw f (a ++ a') (b ++ b') = zipw f a b ++ zipw f a' b'.
Proof. induction a; destruct b; simpl; intros; try discriminate; auto. now rewrite IHa by lia. Qed.

Lemma firstn_zipw : forall (A B C : Type) (f : A -> B -> C) n a b,
  firstn n (zipw f a b) = zipw f (firstn n a) (firstn n b).
Proof. induction n; destruct a, b; simpl; f_equal; auto. Qed.

Lemma skipn_zipw : forall (A B C : Type) (f : A -> B -> C) n a b,
  skipn n (zipw f a b) = zipw f (skipn n a) (skipn n b).
Proof. induction n; destruct a, b; simpl; auto; now rewrite zipw_nil_r. Qed.

Lemma zipw_firstn_r : forall (A B C : Type) (f : A -> B -> C) a b n, length a <= n ->
  zipw f a (firstn n b) = zipw f a b.
Proof. induction a; destruct b, n; simpl; intros; auto; try lia. f_equal. apply IHa. lia. Qed.

Lemma zipw_concat : forall (A B C : Type) (f : A -> B -> C) la lb, 
  Forall2 (fun x y => length x = length y) la lb ->
  zipw f (concat la) (concat lb) = concat (zipw (zipw f) la lb).
Proof. induction 1; simpl; auto. now rewrite zipw_app_eq, IHForall2. Qed.

(* -- with an index ---------------------------------------------------------------------------- *)

Lemma mapi_from_ext : forall (A B : Type) (f g : nat -> A -> B) l i,
  (forall j x, f j x = g j x) -> mapi_from i f l = mapi_from i g l.
Proof. induction l; simpl; intros; f_equal; auto. Qed.

Lemma mapi_map : forall (A B C : Type) (f : nat -> B -> C) (g : A -> B) l,
  mapi f (map g l) = mapi (fun i x => f i (g x)) l.
Proof. intros. unfold mapi. generalize 0. induction l; simpl; intros; f_equal; auto. Qed.

Lemma map_mapi : forall (A B C : Type) (f : B -> C) (g : nat -> A -> B) l,
  map f (mapi g l) = mapi (fun i x => f (g i x)) l.
Proof. intros. unfold mapi. generalize 0. induction l; simpl; intros; f_equal; auto. Qed.

Lemma mapi_mapi : forall (A B C : Type) (f : nat -> B -> C) (g : nat -> A -> B) l,
  mapi f (mapi g l) = mapi (fun i x => f i (g i x)) l.
Proof. intros. unfold mapi. generalize 0. induction l; simpl; intros; f_equal; auto. Qed.

Lemma zipw_mapi : forall (A B C D : Type) (f : B -> C -> D) (g : nat -> A -> B) (h : nat -> A -> C) l,
  zipw f (mapi g l) (mapi h l) = mapi (fun i x => f (g i x) (h i x)) l.
Proof. intros. unfold mapi. generalize 0. induction l; simpl; intros; f_equal; auto. Qed.

Lemma mapi_const : forall (A B : Type) (f : A -> B) l, mapi (fun _ x => f x) l = map f l.
Proof. intros. unfold mapi. generalize 0. induction l; simpl; intros; f_equal; auto. Qed.

Lemma mapi_ext : forall (A B : Type) (f g : nat -> A -> B) l,
  (forall i x, f i x = g i x) -> mapi f l = mapi g l.
Proof. intros. unfold mapi. now apply mapi_from_ext. Qed.

(* -- runs ------------------------------------------------------------------------------------- *)

Lemma chunks_fuel_more : forall (A : Type) d fuel fuel' (l : list A), 0 < d ->
  length l <= fuel -> length l <= fuel' -> chunks_fuel fuel d l = chunks_fuel fuel' d l.
Proof.
  induction fuel; destruct l, fuel'; simpl; intros; auto; try lia.
  f_equal. apply IHfuel; auto; rewrite skipn_length; cbn [length]; lia.
Qed.

Lemma chunks_nil : forall (A : Type) d, chunks d (@nil A) = [].
Proof. destruct d; reflexivity. Qed.

Lemma chunks_cons : forall (A : Type) d (l : list A), 0 < d -> l <> [] ->
  chunks d l = firstn d l :: chunks d (skipn d l).
Proof.
  intros A d l Hd Hl. destruct d; [lia|]. destruct l; [congruence|].
  unfold chunks. simpl length. cbn [chunks_fuel]. f_equal.
  apply chunks_fuel_more; rewrite ?skipn_length; cbn [length]; lia.
Qed.

(* Well-founded: a list is empty or a run and the rest. *)
Lemma runs_ind : forall (A : Type) d, 0 < d -> forall P : list A -> Prop, P [] ->
  (forall l, l <> [] -> P (skipn d l) -> P l) -> forall l, P l.
Proof.
  intros A d Hd P H0 Hs l. remember (length l) as n eqn:E. assert (Hn : length l <= n) by lia.
  clear E. revert l Hn. induction n; intros l Hn.
  - destruct l; [auto|simpl in Hn; lia].
  - destruct l; [auto|]. apply Hs; [congruence|]. apply IHn. rewrite skipn_length. cbn [length] in *. lia.
Qed.

Lemma concat_chunks : forall (A : Type) d (l : list A), 0 < d -> concat (chunks d l) = l.
Proof.
  intros A d l Hd. induction l using (@runs_ind A d Hd); auto. - now rewrite chunks_nil.
  - rewrite chunks_cons by auto. simpl. now rewrite IHl, firstn_skipn.
Qed.

Lemma chunks_zipw : forall (A B C : Type) (f : A -> B -> C) d a b,
  chunks d (zipw f a b) = zipw (zipw f) (chunks d a) (chunks d b).
Proof.
  intros A B C f d a. destruct (Nat.eq_0_gt_0_cases d) as [->|Hd]; [reflexivity|].
  induction a as [|a Ha IH] using (@runs_ind A d Hd); intros.
  - now rewrite !chunks_nil.
  - destruct b as [|y b]. + now rewrite zipw_nil_r, !chunks_nil, zipw_nil_r.
    + rewrite (chunks_cons (l := a)), (chunks_cons (l := y :: b)) by (auto; try lia; congruence).
      rewrite chunks_cons; try lia.
      2: { destruct a; simpl; congruence. }
      simpl zipw at 2. rewrite firstn_zipw, skipn_zipw, IH. reflexivity.
Qed.

Lemma chunks_map : forall (A B : Type) (f : A -> B) d l, chunks d (map f l) = map (map f) (chunks d l).
Proof.
  intros. destruct (Nat.eq_0_gt_0_cases d) as [->|Hd]; [reflexivity|].
  induction l as [|l Hl IH] using (@runs_ind A d Hd). - simpl. now rewrite !chunks_nil.
  - rewrite (chunks_cons (l := l)), chunks_cons by (try lia; auto; destruct l; simpl; congruence).
    simpl. now rewrite firstn_map, skipn_map, IH.
Qed.

(* Cutting a row of runs again gives the runs, if a function kept their lengths. *)
Lemma chunks_concat_map : forall (A B : Type) (f : list A -> list B) d l,
  (forall c, length c <= d -> length (f c) = length c) ->
  chunks d (concat (map f (chunks d l))) = map f (chunks d l).
Proof.
  intros A B f d l Hf. destruct (Nat.eq_0_gt_0_cases d) as [->|Hd]; [reflexivity|].
  induction l as [|l Hl IH] using (@runs_ind A d Hd). - rewrite chunks_nil. apply chunks_nil.
  - rewrite (chunks_cons (l := l)) by (auto; lia). simpl.
    set (tail := concat (map f (chunks d (skipn d l)))) in *.
    assert (L : length (f (firstn d l)) = min d (length l)).
    { rewrite Hf; rewrite firstn_length; lia. }
    assert (N : f (firstn d l) ++ tail <> []).
    { intro E. apply app_eq_nil in E. destruct E as [E _]. rewrite E in L. destruct l; simpl in L; [congruence|lia]. }
    rewrite chunks_cons by (auto; lia).
    destruct (le_lt_dec d (length l)).
    + rewrite firstn_app, skipn_app, L, Nat.min_l by lia. rewrite Nat.sub_diag. simpl.
      rewrite app_nil_r, firstn_all2, skipn_all2 by lia. simpl. now rewrite IH.
    + assert (T : tail = []). { unfold tail. rewrite skipn_all2 by lia. now rewrite chunks_nil. }
      rewrite T, app_nil_r. rewrite firstn_all2, skipn_all2 by lia. rewrite (@skipn_all2 _ d l) by lia.
      now rewrite !chunks_nil.
Qed.

(* Elementwise with a row of runs: run by run. *)
Lemma zipw_concat_chunks : forall (A B C D : Type) (f : B -> C -> D) (g : list A -> list B) d a b,
  (forall c, length c <= d -> length (g c) = length c) ->
  zipw f (concat (map g (chunks d a))) b
    = concat (zipw (fun x y => zipw f (g x) y) (chunks d a) (chunks d b)).
Proof.
  intros A B C D f g d a. destruct (Nat.eq_0_gt_0_cases d) as [->|Hd]; [reflexivity|].
  induction a as [|a Ha IH] using (@runs_ind A d Hd); intros b Hg.
  - now rewrite chunks_nil.
  - rewrite (chunks_cons (l := a)) by (auto; lia). destruct b as [|y b].
    { rewrite !zipw_nil_r, chunks_nil. now rewrite zipw_nil_r. }
    rewrite (chunks_cons (l := y :: b)) by (try lia; congruence).
    simpl. rewrite zipw_app.
    assert (L : length (g (firstn d a)) = min d (length a)).
    { rewrite Hg; rewrite firstn_length; lia. }
    destruct (le_lt_dec d (length a)).
    + rewrite L, Nat.min_l by lia. now rewrite IH by auto.
    + rewrite (@skipn_all2 _ d a) by lia. rewrite chunks_nil. simpl. rewrite app_nil_r, app_nil_r.
      rewrite zipw_firstn_r by lia. symmetry. apply zipw_firstn_r. lia.
Qed.

Lemma chunks_length_le : forall (A : Type) d (l c : list A), In c (chunks d l) -> length c <= d.
Proof.
  intros A d l c. destruct (Nat.eq_0_gt_0_cases d) as [->|Hd]; [simpl; tauto|].
  induction l as [|l Hl IH] using (@runs_ind A d Hd). - rewrite chunks_nil. simpl. tauto.
  - rewrite chunks_cons by (auto; lia). simpl. intros [<-|H]; auto. rewrite firstn_length. lia.
Qed.

Lemma skipn_skipn : forall (A : Type) n m (l : list A), skipn n (skipn m l) = skipn (n + m) l.
Proof.
  intros A n m. induction m; intros l; simpl. - now rewrite Nat.add_0_r.
  - destruct l; [now rewrite !skipn_nil|]. rewrite Nat.add_succ_r. simpl. apply IHm.
Qed.

Lemma chunks_skipn : forall (A : Type) d m (l : list A), 0 < d ->
  chunks d (skipn (m * d) l) = skipn m (chunks d l).
Proof.
  intros A d m. induction m; intros l Hd; auto.
  destruct l as [|x l]; [rewrite skipn_nil, chunks_nil; reflexivity|].
  rewrite (@chunks_cons _ d (x :: l)) by (auto; congruence). cbn [skipn]. rewrite <- IHm by auto.
  f_equal. rewrite skipn_skipn. f_equal. simpl. lia.
Qed.

Lemma chunks_firstn : forall (A : Type) d m (l : list A), 0 < d ->
  chunks d (firstn (m * d) l) = firstn m (chunks d l).
Proof.
  intros A d m. induction m; intros l Hd; [apply chunks_nil|].
  destruct l as [|x l]; [rewrite firstn_nil, chunks_nil; reflexivity|].
  rewrite (@chunks_cons _ d (x :: l)) by (auto; congruence). cbn [firstn]. rewrite <- IHm by auto.
  rewrite chunks_cons; auto.
  - rewrite firstn_firstn, Nat.min_l by (simpl; lia). f_equal. f_equal.
    rewrite firstn_skipn_comm. f_equal.
  - destruct d; [lia|]. simpl. congruence.
Qed.

(* Rows that are whole runs: as many as there are, each full. *)
Lemma chunks_full : forall (A : Type) d h (l : list A), 0 < d -> length l = (h * d)%nat ->
  length (chunks d l) = h /\ Forall (fun c => length c = d) (chunks d l).
Proof.
  intros A d h. induction h; intros l Hd Hl.
  - destruct l; [|simpl in Hl; lia]. rewrite chunks_nil. split; auto.
  - rewrite chunks_cons; [|lia|destruct l; simpl in *; [lia|congruence]].
    destruct (IHh (skipn d l)) as [H1 H2]; auto. { rewrite skipn_length. simpl in Hl. lia. }
    split; simpl. + now rewrite H1. + constructor; auto. rewrite firstn_length. simpl in Hl. lia.
Qed.

Lemma chunks_of_runs : forall (A : Type) d (ls : list (list A)), 0 < d ->
  Forall (fun c => length c = d) ls -> chunks d (concat ls) = ls.
Proof.
  induction 2; simpl. - apply chunks_nil.
  - rewrite chunks_cons; auto. 2: { destruct x; simpl in *; [lia|congruence]. }
    rewrite firstn_app, skipn_app, H0, Nat.sub_diag. simpl.
    rewrite app_nil_r, firstn_all2, skipn_all2 by lia. simpl. now rewrite IHForall.
Qed.

(* -- scans ------------------------------------------------------------------------------------ *)

Lemma scan_map : forall (S X X' Y : Type) (step : S -> X' -> S * Y) (g : X -> X') xs s,
  scan step s (map g xs) = scan (fun s x => step s (g x)) s xs.
Proof. induction xs; simpl; intros; f_equal; auto. Qed.

Lemma final_map : forall (S X X' Y : Type) (step : S -> X' -> S * Y) (g : X -> X') xs s,
  final step s (map g xs) = final (fun s x => step s (g x)) s xs.
Proof. induction xs; simpl; intros; auto. Qed.

Lemma map_scan : forall (S X Y Z : Type) (step : S -> X -> S * Y) (g : Y -> Z) xs s,
  map g (scan step s xs) = scan (fun s x => (fst (step s x), g (snd (step s x)))) s xs.
Proof. induction xs; simpl; intros; f_equal; auto. Qed.

Lemma final_snd : forall (S X Y Z : Type) (step : S -> X -> S * Y) (g : S -> X -> Z) xs s,
  final (fun s x => (fst (step s x), g s x)) s xs = final step s xs.
Proof. induction xs; simpl; intros; auto. Qed.

Lemma scan_ext : forall (S X Y : Type) (f g : S -> X -> S * Y) xs s,
  (forall s x, f s x = g s x) -> scan f s xs = scan g s xs.
Proof. induction xs; simpl; intros; auto. rewrite H. f_equal. auto. Qed.

Lemma final_ext : forall (S X Y : Type) (f g : S -> X -> S * Y) xs s,
  (forall s x, f s x = g s x) -> final f s xs = final g s xs.
Proof. induction xs; simpl; intros; auto. rewrite H. auto. Qed.

(* Two machines side by side are one machine; so are two machines in a row. *)
Lemma zipw_scan : forall (S S' X X' Y Y' Z : Type) (f : S -> X -> S * Y) (g : S' -> X' -> S' * Y')
  (h : Y -> Y' -> Z) xs xs' s s',
  zipw h (scan f s xs) (scan g s' xs')
    = scan (fun ss xx => ((fst (f (fst ss) (fst xx)), fst (g (snd ss) (snd xx))),
                          h (snd (f (fst ss) (fst xx))) (snd (g (snd ss) (snd xx)))))
        (s, s') (zipw pair xs xs').
Proof. induction xs; destruct xs'; simpl; intros; f_equal; auto. Qed.

Lemma scan_scan : forall (S S' X Y Z : Type) (f : S -> X -> S * Y) (g : S' -> Y -> S' * Z) xs s s',
  scan g s' (scan f s xs)
    = scan (fun ss x => ((fst (f (fst ss) x), fst (g (snd ss) (snd (f (fst ss) x)))),
                         snd (g (snd ss) (snd (f (fst ss) x))))) (s, s') xs.
Proof. induction xs; simpl; intros; f_equal; auto. Qed.

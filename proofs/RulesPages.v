(* The rules that divide latent attention by pages of its context instead of by heads. *)
From Coq Require Import List Arith Lia.
From K3 Require Import Arith Lists Semantics Rules RulesMix RulesHeads.
From K3.gen Require Import Statements.
Import ListNotations.

Section Pages.
  Context {A : Arith} {St : Step}.
  Local Open Scope k3.

  (* A run a head in every page: head i takes the i-th of each. *)
  Lemma heads_of_pages : forall (X Y Z : Type) (d : Y) (f : X -> Z -> Y) (g : list Y -> Vec) (P : list X) Q,
    map (fun i => g (map (fun run => nth i run d) (map (fun page => map (f page) Q) P))) (seq 0 (length Q))
    = map (fun q => g (map (fun page => f page q) P)) Q.
  Proof.
    induction Q as [|q Q IH]; cbn [length seq map]; auto. f_equal.
    - rewrite map_map. reflexivity.
    - rewrite <- seq_shift, map_map, <- IH. apply map_ext. intros i. rewrite !map_map. reflexivity.
  Qed.

  Lemma part_length : forall latent scale rows q, length (page_part latent scale rows q) = (latent + 16)%nat.
  Proof.
    intros. unfold page_part. rewrite app_length, mix_length; [reflexivity|].
    apply Forall_forall. intros r H. apply in_map_iff in H. destruct H as [c [<- _]].
    rewrite firstn_length. lia.
  Qed.

  Lemma parts_length : forall latent scale page Q,
    length (concat (map (page_part latent scale page) Q)) = (length Q * (latent + 16))%nat.
  Proof. induction Q; simpl; auto. rewrite app_length, part_length, IHQ. lia. Qed.

  (* Cutting the row of all pages again gives each page's runs. *)
  Lemma runs_of_pages : forall latent scale P Q n, length Q = n -> 0 < n ->
    map (chunks (latent + 16)) (chunks (n * (latent + 16))
      (concat (map (fun page => concat (map (page_part latent scale page) Q)) P)))
    = map (fun page => map (page_part latent scale page) Q) P.
  Proof.
    intros latent scale P Q n <- Hn. rewrite chunks_of_runs.
    - rewrite map_map. apply map_ext. intros page. apply chunks_of_runs; [lia|].
      apply Forall_forall. intros c H. apply in_map_iff in H. destruct H as [q [<- _]].
      apply part_length.
    - apply Nat.mul_pos_pos; lia.
    - apply Forall_forall. intros c H. apply in_map_iff in H. destruct H as [page [<- _]].
      apply parts_length.
  Qed.

  Lemma numbered : forall (X Y Z : Type) (f : nat -> X) (g : X * Y -> Vec -> Z) (ns : list nat) W G,
    zipw g (zipw pair (map f ns) W) G
    = zipw (fun p gh => g (f (fst p), snd p) gh) (zipw pair ns W) G.
  Proof. induction ns; destruct W, G; simpl; f_equal; auto. Qed.
End Pages.

Section Split.
  Context {A : Arith} {St : Step}.

  Lemma queries : forall x norm w kv_b eps nope rope latent v norm_rd rd,
    sem_MLA_QLAT (sem_NORM_GEMV_BF16 x norm w eps 0 norm_rd rd) kv_b nope rope latent v rd
    = sem_MLA_QUERY x norm w kv_b eps nope rope latent v norm_rd rd.
  Proof.
    intros. unfold sem_MLA_QLAT, sem_NORM_GEMV_BF16, sem_MLA_QUERY.
    cbn [live Nat.eqb orb]. rewrite mapi_const. now rewrite map_map.
  Qed.

  (* Queries are as wide as the heads of both weights make them. *)
  Lemma query_wide : forall x norm w kv_b eps nope rope latent v norm_rd rd h,
    0 < nope -> 0 < v -> length w = (h * (nope + rope))%nat -> sized (h * (nope + v)) latent kv_b ->
    wide (h * (latent + rope)) (sem_MLA_QUERY x norm w kv_b eps nope rope latent v norm_rd rd).
  Proof.
    intros x norm w kv_b eps nope rope latent v norm_rd rd h Hn Hv Lw [Lkv Wkv].
    unfold sem_MLA_QUERY, wide. apply Forall_forall. intros row H.
    apply in_map_iff in H. destruct H as [r [<- _]].
    set (q := map (normed_dot norm_rd rd eps norm r) w).
    assert (Lq : length q = (h * (nope + rope))%nat) by (unfold q; now rewrite map_length).
    destruct (@chunks_full _ (nope + rope)%nat h q ltac:(lia) Lq) as [Nq Fq].
    destruct (@chunks_full _ (nope + v)%nat h kv_b ltac:(lia) Lkv) as [Nw _].
    apply (chunks_Forall _ _ (nope + v)) in Wkv.
    pose proof (queries_length rd nope rope latent _ _ Fq Wkv) as L.
    assert (N : length (zipw (query rd nope latent) (chunks (nope + rope) q) (chunks (nope + v) kv_b)) = h)
      by (rewrite zipw_length; lia).
    clear - L N. revert h N. induction L as [|c l Hc Hl IH]; intros h N; simpl in N; subst; auto.
    simpl. rewrite app_length, Hc, (IH (length l) eq_refl). reflexivity.
  Qed.

  Lemma by_pages : forall q cache kv_b gate nope v latent rope scale pages rd h,
    0 < nope -> 0 < v -> 0 < latent -> wide (h * (latent + rope)) q -> length kv_b = (h * (nope + v))%nat ->
    sem_MLA_UV_GATE (sem_MLA_ATTEND q cache latent rope scale pages rd) kv_b gate nope v latent rd
    = sem_MLA_MERGE (sem_MLA_PAGES q cache latent rope scale pages) kv_b gate nope v latent pages rd.
  Proof.
    intros q cache kv_b gate nope v latent rope scale pages rd h Hn Hv Hl Wq Lkv.
    unfold sem_MLA_UV_GATE, sem_MLA_ATTEND, sem_MLA_MERGE, sem_MLA_PAGES, mapi. rewrite !zipw_mapi_l.
    apply (mapi_from_Forall _ _ (fun p => length (fst p) = (h * (latent + rope))%nat)).
    { exact (Forall_zipw_l _ _ (fun row => length row = _) _ _ Wq). }
    intros t [row g] E. cbn [fst snd] in *.
    destruct (@chunks_full _ (latent + rope)%nat h row ltac:(lia) E) as [Lq _].
    destruct (@chunks_full _ (nope + v)%nat h kv_b ltac:(lia) Lkv) as [Lw _].
    set (Q := chunks (latent + rope) row) in *. set (W := chunks (nope + v) kv_b) in *.
    rewrite chunks_of_runs; [|auto|].
    2: { apply Forall_forall. intros c H'. apply in_map_iff in H'. destruct H' as [c' [<- _]].
         apply attend_length. }
    destruct W as [|w W]; [now rewrite zipw_nil_r|].
    rewrite Lw, runs_of_pages by (auto; simpl in *; lia). rewrite <- Lq. unfold attend.
    rewrite <- (heads_of_pages _ _ _ [] (page_part latent scale) (merged rd latent)), numbered.
    reflexivity.
  Qed.
End Split.

Theorem mla_pages_split : forall (A : Arith) (St : Step), stmt_mla_pages_split.
Proof.
  unfold stmt_mla_pages_split. intros. rewrite queries.
  match goal with H : sized (?h * (nope + v)) latent kv_b, H' : sized ?r _ w, H'' : ?r = (?h * (nope + rope))%nat |- _ =>
    apply by_pages with h; auto; [|exact (proj1 H)]; apply query_wide; auto; rewrite <- H''; exact (proj1 H') end.
Qed.

(* The numbers that ops compute with: any field, with functions that nothing is assumed about.

   Sums and products do not round here. What is proved is that two ways of computing are the same
   function; that they have the same bits is what the arithmetic contract's tests are for. The points
   where mode bf16 rounds are part of that function: `fround` is any function, so a rewrite that moved a
   sum, a product or a norm across such a point has no proof. *)
From Coq Require Import List Arith Field.
Import ListNotations.

Class Arith := {
  F : Type;
  f0 : F; f1 : F;
  fadd : F -> F -> F; fmul : F -> F -> F; fsub : F -> F -> F; fopp : F -> F;
  fdiv : F -> F -> F; finv : F -> F;
  field_laws : field_theory f0 f1 fadd fmul fsub fopp fdiv finv (@eq F);
  fexp : F -> F; ftanh : F -> F; fsqrt : F -> F;
  fround : F -> F; (* to bf16, in mode bf16 *)
  fleb : F -> F -> bool; (* order, for maxima and choices: nothing is assumed about it, but `ordered` *)
  flow : F; (* what the choice of a token starts from: below every number *)
  ftiny : F (* the router's 1e-20 *)
}.

(* What a run decides: tokens in the step, from which of them on a head-only linear computes, the number
   of ranks that a row-parallel sum is spread over, the positions of a page of latent cache, and the
   tokens' ids. *)
Class Step :=
  { n_tokens : nat; head_from : nat; ranks : nat; page_tokens : nat; token_id : nat -> nat }.

Notation Vec := (list F).
Notation Mat := (list (list F)). (* rows; an activation is one row a token *)
Notation Stack := (list (list (list F))). (* of experts, ranks, blocks, or the values of a group *)
Notation Slots := (list (list (list F))). (* of a token, a row for each of its experts *)
(* Expert matrices as stored: a row is blocks of elements, each under one scale. *)
Notation Quant := (list (list (list (F * list F)))).
Notation Route := (list (list (nat * F))). (* a token's experts, ascending, with weights *)

Declare Scope k3.
Delimit Scope k3 with k3.
Notation "a + b" := (fadd a b) : k3.
Notation "a * b" := (fmul a b) : k3.
Notation "a - b" := (fsub a b) : k3.
Notation "a / b" := (fdiv a b) : k3.

Section Functions.
  Context {A : Arith}.
  Local Open Scope k3.

  Fixpoint of_nat (n : nat) : F := match n with O => f0 | S m => f1 + of_nat m end.
  (* A rounding point: the op's flag says whether it rounds. *)
  Definition rnd (flag : nat) (x : F) : F := if Nat.eqb flag 0 then x else fround x.
  Definition sigmoid (x : F) : F := f1 / (f1 + fexp (fopp x)).
  Definition silu (x : F) : F := x * sigmoid x.
  Definition softcap (beta x : F) : F := beta * ftanh (x / beta).
  Definition situ (beta linear g u : F) : F := softcap beta g * sigmoid g * softcap linear u.
  Definition fmax (a b : F) : F := if fleb a b then b else a.
  Definition above (a b : F) : bool := negb (fleb a b).
  (* A total order above flow: a premise of the rules whose ops say so, and of nothing else. *)
  Definition ordered : Prop :=
    (forall a b, fleb a b = true \/ fleb b a = true) /\
    (forall a b c, fleb a b = true -> fleb b c = true -> fleb a c = true) /\
    (forall a b, fleb a b = true -> fleb b a = true -> a = b) /\
    (forall a, fleb flow a = true).
End Functions.

"""The gate in front of rules: what is proved fires, what is missing, stale or false does not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3tool.compiler import prove, statements, theorems
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.patterns import make_rule
from k3tool.compiler.plan import Plan
from k3tool.compiler.rules import RULES, rules_without
from k3tool.compiler.statements import PROOFS, STATEMENTS, sizes, statement, statements_file
from k3tool.compiler.theorems import prove_fired, read_stamp, require_theorems, theorem_hash
from k3tool.errors import ArtifactError, UnsoundError
from k3tool.isa.table import Op
from k3tool.model.config import K3Config
from tests.proofs.wrong_rules import WRONG_RULES

COQ = pytest.mark.skipif(shutil.which("coqc") is None, reason="NOT RUN: coqc is not installed")
OPTIONS = {"tp": 1, "target": "cpu", "workgroups": 8, "chunk": 16, "batch": 1, "ctx": 256}
RULE = {rule.name: rule for rule in RULES}


@pytest.fixture(scope="module")
def config(oracle: Callable[[str], Path]) -> K3Config:
    return K3Config.load(oracle("tiny13") / "config.json")


@pytest.fixture(scope="module")
def plan(config: K3Config) -> Plan:
    return compile_plan(config, **OPTIONS)


# -- statements ------------------------------------------------------------------------------------


def test_the_statements_in_the_tree_are_those_of_the_rows() -> None:
    assert STATEMENTS.read_text() == statements_file()
    assert statements.main(["--check"]) == 0


def test_a_changed_row_changes_the_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "Statements.v"
    old.write_text(statements_file(RULES[1:]))
    monkeypatch.setattr(statements, "STATEMENTS", old)
    assert statements.main(["--check"]) == 1
    assert "make gen" in capsys.readouterr().err


def test_a_statement_covers_states_sizes_and_both_sides() -> None:
    text = statement(RULE["kda-core-fuse"])
    assert "(sem_KDA_STEP (sem_SCALE (sem_L2NORM q eps d) scale)" in text
    assert "(sem_KDA_CORE q k v f b a_log dt_bias s eps scale bound round d)" in text
    assert "(next_KDA_CORE_s q k v f b" in text, "what the state becomes is part of it"
    assert "0 < d ->" in text
    assert sizes(RULE["kda-core-fuse"]).sorts["s"] == "Stack"


def test_where_is_no_part_of_a_statement() -> None:
    rule = RULE["mla-in-fuse"]
    assert statement(replace(rule, where=())) == statement(rule)
    assert "MLA_CACHE" not in statement(rule)


@pytest.mark.parametrize("word", ["axiom", "admitted", "admit", "parameter", "conjecture"])
def test_no_source_takes_anything_on_trust(word: str) -> None:
    # Coq's own answer (Print Assumptions) is what counts; this says it without Coq.
    for path in theorems.sources():
        assert word not in path.read_text().lower().replace("no axiom", "").split(), path.name


# -- the stamp -------------------------------------------------------------------------------------


def test_every_rule_is_proved() -> None:
    assert len(RULES) >= 19
    assert set(require_theorems(RULES, read_stamp())) == set(RULE)


def test_the_claims_that_no_rule_needs_are_stamped_too() -> None:
    assert {
        "row_parallel", "column_parallel", "tree_of_blocks", "tree_of_subtrees", "paged_softmax",
        "attn_res_is_softmax", "absorbed_scores", "absorbed_values", "no_deadlock",
        "waits_are_over", "dependencies_are_ordered", "final_counts",
    } <= set(read_stamp())  # fmt: skip


def test_a_rule_without_theorem_is_refused_by_name(config: K3Config) -> None:
    stamp = {name: value for name, value in read_stamp().items() if name != "situ_fuse"}
    with pytest.raises(ArtifactError, match="rule situ-fuse: got no proved theorem situ_fuse"):
        compile_plan(config, **OPTIONS, stamp=stamp)
    plan = compile_plan(config, **OPTIONS, stamp=stamp, without=("situ-fuse",))
    assert "situ-fuse" not in plan.params["theorems"]


def test_only_a_rule_that_a_plan_can_do_without_is_said_to_be_left_out() -> None:
    seen = set()
    for rule in RULES:
        with pytest.raises(ArtifactError) as caught:
            require_theorems([rule], {})
        hint = str(caught.value.hint)
        assert "make prove" in hint
        said = hint.partition("--without ")[2]
        assert said == ("" if rule.is_lowering else rule.name)
        if said:
            assert rule not in rules_without((said,))
        seen.add(rule.is_lowering)
    assert seen == {True, False}


def test_a_theorem_of_another_statement_is_stale() -> None:
    rule = RULE["conv-silu-fuse"]
    right = "(CONV_SILU x kernel taps :round round)"
    left = "(SHORT_CONV x kernel taps) :round round"
    same = make_rule(rule.name, (f"(SILU {left})", right))
    assert theorem_hash(same) == theorem_hash(rule), "the control: the same row"
    other = make_rule(rule.name, (f"(SIGMOID {left})", right))
    with pytest.raises(ArtifactError, match=r"conv-silu-fuse.*another statement"):
        require_theorems([other], read_stamp())


def test_a_changed_proof_makes_every_theorem_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    text = theorems._proof_text()
    monkeypatch.setattr(theorems, "_proof_text", lambda: text.replace("fadd", "fmul", 1))
    for rule in RULES:
        with pytest.raises(ArtifactError, match=rule.name):
            require_theorems([rule], read_stamp())


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "absent"), ("{", "no JSON"), ('{"schema": 0}', "another schema"), ("[]", "another")],
)
def test_a_damaged_stamp_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "proved.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArtifactError, match=words):
        read_stamp(path)


# -- check A ---------------------------------------------------------------------------------------


def test_a_plan_rests_on_theorems_alone(plan: Plan) -> None:
    claim, faults = prove_fired(plan)
    assert not faults
    assert claim.startswith(str(sum(len(x) > 0 for p in plan.phases.values() for x in p.made_by)))
    assert set(plan.params["theorems"]) == {row.rule for row in plan.fired if row.used}


def _phase(plan: Plan, **changes: object) -> Plan:
    phases = dict(plan.phases)
    phases["decode"] = replace(phases["decode"], **changes)
    return replace(plan, phases=phases)


def _fused(plan: Plan, op: Op) -> int:
    return plan.phases["decode"].packets["op"].tolist().index(int(op))


def _made_by(plan: Plan, packet: int, rows: tuple[int, ...]) -> Plan:
    made_by = list(plan.phases["decode"].made_by)
    made_by[packet] = rows
    return _phase(plan, made_by=tuple(made_by))


def test_a_fused_op_without_provenance_is_refused(plan: Plan) -> None:
    packet = _fused(plan, Op.KDA_HEADS)
    _, faults = prove_fired(_made_by(plan, packet, ()))
    assert faults == [f"decode packet {packet} KDA_HEADS: a fused op that no rule application made"]


def test_provenance_of_another_packet_is_refused(plan: Plan) -> None:
    packets = [i for i, op in enumerate(plan.phases["decode"].packets["op"]) if op == Op.KDA_HEADS]
    other = plan.phases["decode"].made_by[packets[1]]
    _, faults = prove_fired(_made_by(plan, packets[0], other))
    assert len(faults) == 1
    assert f"packet {packets[0]} KDA_HEADS: none of its rule applications makes" in faults[0]


def test_an_application_that_is_not_in_the_plan_is_refused(plan: Plan) -> None:
    packet = _fused(plan, Op.KDA_HEADS)
    _, faults = prove_fired(_made_by(plan, packet, (len(plan.fired),)))
    assert "which this plan does not use" in faults[0]
    rows = plan.phases["decode"].made_by[packet]
    fired = [r._replace(used=False) if i == rows[0] else r for i, r in enumerate(plan.fired)]
    assert any("does not use" in f for f in prove_fired(replace(plan, fired=tuple(fired)))[1])


def test_a_primitive_op_that_claims_a_rule_is_refused(plan: Plan) -> None:
    packet = _fused(plan, Op.EMBED_BF16)
    used = next(i for i, row in enumerate(plan.fired) if row.used)
    _, faults = prove_fired(_made_by(plan, packet, (used,)))
    assert faults[0].startswith(f"decode packet {packet} EMBED_BF16: an op that no rule makes")


def test_an_op_in_place_is_made_of_its_parameters(plan: Plan) -> None:
    packet = _fused(plan, Op.EMBED_PUSH)
    assert not prove_fired(plan)[1], "the control"
    (row,) = plan.phases["decode"].made_by[packet]
    fired = list(plan.fired)
    fired[row] = fired[row]._replace(binding=fired[row].binding.replace("index=0", "index=1"))
    _, faults = prove_fired(replace(plan, fired=tuple(fired)))
    assert f"packet {packet} EMBED_PUSH: none of its rule applications makes" in faults[0]


def test_a_plan_of_other_theorems_is_refused(plan: Plan) -> None:
    changed = {**plan.params["theorems"], "situ-fuse": "0" * 64}
    _, faults = prove_fired(replace(plan, params={**plan.params, "theorems": changed}))
    assert faults == ["rule situ-fuse: the plan rests on another theorem than this build has"]
    gone = {k: v for k, v in read_stamp().items() if k != "situ_fuse"}
    assert prove_fired(plan, gone)[1] == ["rule situ-fuse: no proved theorem situ_fuse"]
    fired = list(plan.fired)
    row = plan.phases["decode"].made_by[_fused(plan, Op.KDA_HEADS)][0]
    fired[row] = fired[row]._replace(rule="made-up")
    _, faults = prove_fired(replace(plan, fired=tuple(fired)))
    assert "rule made-up: not a rule of this build" in faults


# -- Coq -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proofs")
    prove.compile_sources(folder)
    return folder


HEAD = (
    "From Coq Require Import List. From K3 Require Import Arith Lists Semantics Rules RulesMix.\n"
    "From K3.gen Require Import Statements.\n"
)
EXTRA = make_rule("relu-fuse", ("(SILU x)", "(MUL x (SIGMOID x))"))


def _extra(folder: Path, name: str, text: str) -> None:
    prove.compile_file(folder, folder / f"{name}.v", HEAD + text)


@COQ
def test_coq_confirms_the_stamp(compiled: Path) -> None:
    assert prove.confirmed(compiled, RULES) == read_stamp()


@COQ
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Trusted", "Axiom trust : False. "
                  "Theorem {n} : forall A St, @stmt_{n} A St. Proof. destruct trust. Qed."),
        ("Admitted1", "Theorem {n} : forall A St, @stmt_{n} A St. Proof. Admitted."),
    ],
)  # fmt: skip
def test_a_theorem_on_trust_is_none(compiled: Path, name: str, text: str) -> None:
    rule = RULE["situ-fuse"]
    _extra(compiled, name, text.format(n="situ_fuse"))
    with pytest.raises(UnsoundError, match="without assumptions"):
        prove.confirmed(compiled, [rule], (name,))


@COQ
def test_a_theorem_of_something_else_is_none(compiled: Path) -> None:
    _extra(compiled, "Other", "Theorem situ_fuse : 1 = 1. Proof. reflexivity. Qed.")
    with pytest.raises(UnsoundError, match=r"Confirm\.v"):
        prove.confirmed(compiled, [RULE["situ-fuse"]], ("Other",))


REFUTED = """
Section Wrong.
  Context {A : Arith} {St : Step}.
  Add Field wrong_numbers : field_laws.
  Theorem refuted : n_tokens = 1 -> stmt_adds_the_residual_twice -> False.
  Proof.
    intros T H. specialize (H 1 1 (cons (cons f1 nil) nil) (cons (cons (cons f0 nil) nil) nil)).
    unfold sized, wide in H. rewrite T in H. cbn in H.
    assert (E : fadd f1 (fadd f1 f0) = fadd f1 f0).
    { assert (L : cons (cons (fadd f1 (fadd f1 f0)) nil) nil = cons (cons (fadd f1 f0) nil) nil).
      { apply H; repeat constructor. }
      now injection L. }
    apply (F_1_neq_0 field_laws).
    replace f1 with (fsub (fadd f1 (fadd f1 f0)) (fadd f1 f0)) by ring. rewrite E. ring.
  Qed.
End Wrong.
"""


@COQ
def test_a_wrong_statement_is_false_not_just_unproved(compiled: Path) -> None:
    rule = next(rule for rule in WRONG_RULES if rule.name == "adds-the-residual-twice")
    claim = statement(rule).replace(" : Prop", " {A : Arith} {St : Step} : Prop", 1)
    _extra(compiled, "Wrong", f"From Coq Require Import Ring Field.\n{claim}{REFUTED}")


def test_the_stamp_names_what_it_holds(tmp_path: Path) -> None:
    text = prove.stamp_text({"a": "b"})
    assert json.loads(text) == {"schema": theorems.STAMP_SCHEMA, "theorems": {"a": "b"}}
    assert PROOFS.name == "proofs"

"""What an op means is said in Coq and in Python: both say the same, and a slip in one shows."""

import shutil
from pathlib import Path

import pytest

from k3tool.compiler import agreement, prove
from k3tool.compiler.agreement import disagreements, instances, read_record
from k3tool.compiler.semantics import MEANINGS, UPDATES
from k3tool.compiler.statements import PROOFS
from k3tool.errors import ArtifactError, UnsoundError
from k3tool.isa.table import Op
from tests.proofs.meaning_mutants import account, mutants, whole

COQ = pytest.mark.skipif(shutil.which("coqc") is None, reason="NOT RUN: coqc is not installed")


def test_python_computes_what_coq_did() -> None:
    values = read_record()
    assert not list(disagreements(values))
    assert set(values) == {made.name for made in instances()}
    assert len(values) == len(MEANINGS) * len(agreement.DRAWS) >= 180
    states = [len(values[f"{op.name} 0"]) - 1 for op in MEANINGS]
    assert states == [UPDATES.get(op, 0) for op in MEANINGS]


def test_both_accounts_define_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreement.undefined() == []
    text = agreement._definitions()
    monkeypatch.setattr(agreement, "_definitions", lambda: text.replace("sem_SILU", "sem_SYLU"))
    assert agreement.undefined() == ["sem_SILU", "sem_SYLU"]


def test_draws_tell_operands_apart() -> None:
    """No two operands of an instance are one value, or taking one for the other could not show."""
    for made in instances():
        texts = [str(operand) for operand in made.operands if operand]
        assert len(set(texts)) == len(texts), made.name


# Mutants that compute the same: defaults that no run leaves in place, a row's first number compared
# with itself, and lengths that are equal by the sizes.
SAME = [
    "Algebra: 2 -> 3", "Algebra: 1 -> 2", "Algebra: 2 -> 3", "largest_of: 1: -> :",
    "_part: rn -> rp", "_delta: v -> k", "_delta: v -> k", "_kda_heads: q -> k",
    "_page: :latent -> :",
]  # fmt: skip


def test_every_slip_in_python_shows() -> None:
    values = read_record()
    control = account(whole())
    assert set(control.meanings) == set(MEANINGS)
    assert not list(disagreements(values, *control)), "the control"
    tried, unseen = 0, []
    for label, body in mutants():
        tried += 1
        try:
            if next(disagreements(values, *account(body)), None) is None:
                unseen.append(label)
        except NameError:  # a name that this scope has not: it cannot compute anything
            continue
    assert tried >= 200
    assert unseen == SAME


# What is altered in Coq, and the op that has to differ for it.
SLIPS = [
    ("rnd rd (v * inv) * g)", "rnd rd (v * inv) + g)", Op.RMSNORM),
    ("rnd rd (rnd rd (v * inv) * g)", "rnd rd (v * inv * g)", Op.RMSNORM),
    ("(g / beta) * sigmoid g", "(g / beta) * sigmoid u", Op.SITU),
    ("x :: a', y :: b' => x + y", "x :: a', y :: b' => x - y", Op.MLA_QLAT),
    ("length cache - n_tokens + t + 1", "length cache - n_tokens + t + 2", Op.MLA_ATTEND),
    ("nth 0 k f0 * fst (fst (fst p))", "nth 1 k f0 * fst (fst (fst p))", Op.CONV_SILU),
    ("[tap taps 1; tap taps 2; x]", "[tap taps 0; tap taps 2; x]", Op.SHORT_CONV),
    ("if fleb a b then andb (fleb b a) (Nat.ltb j i) else true",
     "if fleb a b then andb (fleb b a) (Nat.ltb i j) else false", Op.ROUTER_TOPK),
    ("rnd rd (snd q)", "rnd rd (fst q)", Op.REDUCE_GATHER_ADD),
    ("rnd rd (v + rnd rd (fst q + rnd rd (snd q)))", "rnd rd (v + rnd rd (fst q + snd q))",
     Op.REDUCE_GATHER_ADD),
    ("Nat.leb head_from t", "Nat.ltb head_from t", Op.GEMV_BF16),
    ("scale * c * v", "c * v", Op.MOE_UP_MXFP4),
    ("qdot row' (skipn n x)", "qdot row' x", Op.MOE_GLU_TOPK),
    ("map (fun v => snd e * v) slot", "slot", Op.MOE_COMBINE),
    ("map (fun wr => dot wr slot)", "map (fun wr => dot wr (rev slot))", Op.MOE_DOWN_EACH),
    ("map (matvec rd w) x", "map (matvec 0 w) x", Op.GEMV_REDUCED),
    ("candidate (r * length row) row", "candidate 0 row", Op.ARGMAX),
    ("let win := if wins then b else a in let lose := if wins then a else b in",
     "let win := if wins then b else a in let lose := win in", Op.ARGMAX_FOLD),
    ("prefix :: skipn (S index) blocks", "prefix :: skipn index blocks", Op.BLOCK_PUSH),
    ("mapi (fun t _ => nth (token_id t) table [])", "mapi (fun t _ => nth t table [])",
     Op.EMBED_PUSH),
]  # fmt: skip


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("definitions")
    for name in agreement.DEFINITIONS:
        prove.compile_file(folder, folder / name, (PROOFS / name).read_text())
    return folder


@COQ
def test_coq_computes_the_record_again(definitions: Path) -> None:
    assert prove.agreed(definitions) == read_record()


def altered(definitions: Path, folder: Path, old: str, new: str) -> Path:
    text = (PROOFS / "Semantics.v").read_text()
    assert old in text
    shutil.copytree(definitions, folder)
    prove.compile_file(folder, folder / "Semantics.v", text.replace(old, new))
    return folder


@COQ
@pytest.mark.parametrize(("old", "new", "op"), SLIPS, ids=[op.name for *_, op in SLIPS])
def test_a_slip_in_coq_shows(definitions: Path, old: str, new: str, op: Op, tmp_path: Path) -> None:
    folder = altered(definitions, tmp_path / "slip", old, new)
    with pytest.raises(UnsoundError, match=rf"got {op.name} \d: another value than Coq's"):
        prove.agreed(folder, [op])


@COQ
def test_another_way_of_writing_a_definition_is_no_slip(definitions: Path, tmp_path: Path) -> None:
    old, new = "rnd rd (v * inv) * g)", "g * rnd rd (inv * v))"
    folder = altered(definitions, tmp_path / "same", old, new)
    assert prove.agreed(folder, [Op.RMSNORM])


# -- the record ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "absent"), ("{", "no record"), ("[]", "no record"), ("{}", "no record"),
     ('{"sources": "0", "values": {}}', "of other definitions")],
)  # fmt: skip
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "meanings.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArtifactError, match=words):
        read_record(path)


def test_a_changed_definition_makes_the_record_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    text = agreement._definitions()
    monkeypatch.setattr(agreement, "_definitions", lambda: text.replace("fadd", "fmul", 1))
    with pytest.raises(ArtifactError, match="of other definitions"):
        read_record()


def test_what_coq_left_out_is_no_agreement() -> None:
    values = read_record()
    gone = {name: value for name, value in values.items() if name != "ADD 1"}
    assert list(disagreements(gone)) == ["ADD 1: Coq computed nothing"]
    with pytest.raises(ArtifactError, match="0 answers"):
        agreement.coq_values("")

"""Which rules have a theorem: a statement and proofs that a checked stamp covers.

A theorem's hash covers the statement that the rule's row gives and the text of every proof source.
`proofs/proved.json` holds the hashes of what Coq has checked; `k3tool.compiler.prove` writes it and
`make proofs` checks it again. Nothing here runs Coq: a rule whose hash is not in the stamp, because
the row, a meaning or a proof has changed since, cannot fire.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from k3tool.compiler.dag import PACKINGS
from k3tool.compiler.extract import inner_name
from k3tool.compiler.patterns import Rule, Term
from k3tool.compiler.plan import Fired, Phase, Plan
from k3tool.compiler.rules import RULES
from k3tool.compiler.statements import PROOFS, STATEMENTS, statement, theorem_name
from k3tool.errors import ArtifactError
from k3tool.isa.table import SPECS, Op
from k3tool.model.operators import record_attrs

STAMP = PROOFS / "proved.json"
STAMP_SCHEMA = 1


def sources() -> list[Path]:
    """Return the Coq files in the order in which they are compiled."""
    words = (PROOFS / "_CoqProject").read_text().split()
    return [PROOFS / word for word in words if word.endswith(".v")]


@cache
def _proof_text() -> str:
    """Return every hand-written source; a rule's own statement is hashed by itself."""
    return "\0".join(path.read_text() for path in sources() if path != STATEMENTS)


def theorem_hash(rule: Rule) -> str:
    """Return the hash of what was or is to be proved of a rule, and by what."""
    return _hash(statement(rule))


def source_hash(theorem: str) -> str:
    """Return the hash of a theorem that no rule needs: its name and the sources."""
    return _hash(theorem)


def _hash(claim: str) -> str:
    return hashlib.sha256(f"{claim}\0{_proof_text()}".encode()).hexdigest()


def read_stamp(path: Path = STAMP) -> dict[str, str]:
    """Return the hashes of proved theorems by name.

    Raises: ArtifactError when the stamp is absent or no stamp.
    """
    hint = "run `make prove` where Coq is installed"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtifactError(str(path), got="absent", need="proofs", hint=hint) from None
    except ValueError:
        raise ArtifactError(str(path), got="no JSON", need="proofs", hint=hint) from None
    if not isinstance(data, dict) or data.get("schema") != STAMP_SCHEMA:
        raise ArtifactError(str(path), got="another schema", need=f"schema {STAMP_SCHEMA}")
    return {str(name): str(value) for name, value in data["theorems"].items()}


def shortcoming(rule: Rule, stamp: Mapping[str, str]) -> str | None:
    """Return why a rule may not fire, None if its theorem is proved."""
    found = stamp.get(theorem_name(rule))
    if found is None:
        return f"no proved theorem {theorem_name(rule)}"
    if found != theorem_hash(rule):
        return f"theorem {theorem_name(rule)} was proved of another statement, or by other proofs"
    return None


def require_theorems(rules: Sequence[Rule], stamp: Mapping[str, str]) -> dict[str, str]:
    """Return the hashes of the rules' theorems by rule name.

    Raises: ArtifactError naming the first rule that has none.
    """
    for rule in rules:
        reason = shortcoming(rule, stamp)
        if reason is not None:
            without = "" if rule.is_lowering else f", or compile with --without {rule.name}"
            raise ArtifactError(
                f"rule {rule.name}",
                got=reason,
                need="a theorem that Coq has checked",
                hint=f"run `make prove`{without}",
            )
    return {rule.name: theorem_hash(rule) for rule in rules}


# -- check A -----------------------------------------------------------------------------------


def prove_fired(plan: Plan, stamp: Mapping[str, str] | None = None) -> tuple[str, list[str]]:
    """Check A: every rewrite that shaped a plan has a theorem, and every fused op a rewrite.

    Returns what was checked and the faults, each naming its rule or packet.
    """
    known = {rule.name: rule for rule in RULES}
    proved = read_stamp() if stamp is None else stamp
    used = {row.rule for row in plan.fired if row.used}
    faults = list(_rule_faults(plan, used, known, proved))
    fused = 0
    for phase in plan.phases.values():
        for index, rows in enumerate(phase.made_by):
            fused += bool(rows)
            faults += _packet_faults(plan, phase, index, rows)
    claim = f"{fused} fused packets by {len(used)} rules, each with a theorem"
    return claim, faults


def _packet_faults(plan: Plan, phase: Phase, index: int, rows: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong with where a packet's op comes from."""
    op = Op(int(phase.packets[index]["op"]))
    where = f"{phase.name} packet {index} {op.name}"
    known = makers().get(PACKINGS.get(op, op), frozenset())
    absent = [row for row in rows if row >= len(plan.fired) or not plan.fired[row].used]
    if absent:
        yield f"{where}: rests on rule application {absent[0]}, which this plan does not use"
    elif known and not rows:
        yield f"{where}: a fused op that no rule application made"
    elif rows and not known:
        yield f"{where}: an op that no rule makes, said to rest on {plan.fired[rows[0]].rule}"
    elif rows:
        mine = [plan.fired[row] for row in rows if plan.fired[row].rule in known]
        here = _results(plan, phase, index)
        if not SPECS[op].outputs:  # written in place: the buffer is all values' that lie in it
            if not any(_is_made(row, op, phase.packets[index]) for row in mine):
                yield f"{where}: none of its rule applications makes such an op of these parameters"
        elif not any(here & _places(row) for row in mine):
            at = ", ".join(sorted(here))
            yield f"{where}: none of its rule applications makes such an op at {at or 'no value'}"


def _results(plan: Plan, phase: Phase, index: int) -> set[str]:
    """Return the names of the values that a packet makes, as the graph has them."""
    packet = phase.packets[index]
    spec = SPECS[Op(int(packet["op"]))]
    names = [plan.tensors[spec.handle(o.name, packet["handles"])].name for o in spec.outputs]
    return {name.removeprefix(f"{phase.name}/") for name in names}


def _is_made(row: Fired, op: Op, packet: Any) -> bool:
    """Return whether an application makes an op of a packet's parameters."""
    bound = dict(word.split("=", 1) for word in row.binding.split())
    want = list(record_attrs(SPECS[op], packet).values())
    return any(
        [int(bound[a]) if isinstance(a, str) else a for a in term.attrs] == want
        for right in _rights(row)
        for term in right.subterms()
        if term.op is op
    )


def _rights(row: Fired) -> list[Term]:
    """Return what an application's rule makes; an unknown rule is named by itself."""
    rules = (rule for rule in RULES if rule.name == row.rule)
    return [right for rule in rules for _, right in rule.equations]


def _places(row: Fired) -> set[str]:
    """Return the values that an application rewrote, and the new ones inside its right sides."""
    roots = row.root.split()
    inner = (term for right in _rights(row) for term in list(right.subterms())[1:])
    return {*roots, *(inner_name(roots[0], term.op) for term in inner)}


@cache
def makers() -> dict[Op, frozenset[str]]:
    """Return for each op that rules make their names."""
    ops = {op for rule in RULES for op in rule.made_ops()}
    return {op: frozenset(rule.name for rule in RULES if op in rule.made_ops()) for op in ops}


def _rule_faults(
    plan: Plan, used: Iterable[str], known: Mapping[str, Rule], proved: Mapping[str, str]
) -> Iterator[str]:
    recorded: Mapping[str, str] = plan.params.get("theorems", {})
    for name in sorted(used):
        if name not in known:
            yield f"rule {name}: not a rule of this build"
            continue
        reason = shortcoming(known[name], proved)
        if reason is not None:
            yield f"rule {name}: {reason}"
        elif recorded.get(name) != theorem_hash(known[name]):
            yield f"rule {name}: the plan rests on another theorem than this build has"

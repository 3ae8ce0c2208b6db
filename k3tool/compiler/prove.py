"""Have Coq check every theorem, and stamp what it checked. Needs `coqc`; nothing else does.

`python -m k3tool.compiler.prove` compiles the proofs in a scratch folder, makes Coq confirm for
each rule that a theorem of its name has exactly the statement the row gives, and that no theorem
rests on an axiom or an admitted step, and compares the outcome with proofs/proved.json. It also has
Coq compute what the ops mean and compares that with proofs/meanings.json and with Python's account
(`agreement`). `--write` writes both files instead.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from k3tool.atomic import atomic_path
from k3tool.compiler import agreement
from k3tool.compiler.patterns import Rule
from k3tool.compiler.rules import RULES
from k3tool.compiler.semantics import MEANINGS
from k3tool.compiler.statements import PROOFS, STATEMENTS, statements_file, theorem_name
from k3tool.compiler.theorems import (
    STAMP,
    STAMP_SCHEMA,
    read_stamp,
    source_hash,
    sources,
    theorem_hash,
)
from k3tool.errors import ArtifactError, K3Error, TargetError, UnsoundError
from k3tool.isa.table import Op

TIMEOUT_S = 600
_CLOSED = "Closed under the global context"
_THEOREM = re.compile(r"^Theorem (\w+)", re.MULTILINE)


def prove(rules: Sequence[Rule] = RULES) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the hashes of all theorems that Coq accepts, by name, and what it computes of ops.

    Raises: TargetError without Coq; ArtifactError for statements that are not the rows';
    UnsoundError naming what Coq does not accept, or what Python means otherwise.
    """
    if STATEMENTS.read_text() != statements_file():
        raise ArtifactError(str(STATEMENTS), got="stale", need="the rows' statements",
                            hint="run `make gen`")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        compile_sources(folder)
        return confirmed(folder, rules), agreed(folder)


def agreed(folder: Path, ops: Iterable[Op] = tuple(MEANINGS)) -> dict[str, Any]:
    """Have Coq compute what ops mean and compare it with Python; return Coq's values.

    Raises: UnsoundError naming the ops that mean two things.
    """
    said = compile_file(folder, folder / "Meanings.v", agreement.coq_text(ops))
    values = agreement.coq_values(said, ops)
    meanings = {op: MEANINGS[op] for op in ops}
    faults = [*agreement.undefined(), *agreement.disagreements(values, meanings)]
    if faults:
        need = "one meaning in Semantics.v and in Python"
        raise UnsoundError("meanings", got="; ".join(faults[:5]), need=need)
    return values


def compile_sources(folder: Path) -> None:
    """Compile the project's proofs in a folder. Raises: as `prove`."""
    if shutil.which("coqc") is None:
        raise TargetError("coqc", got="absent", need="Coq", hint="apt-get install coq")
    for path in sources():
        target = folder / path.relative_to(PROOFS)
        target.parent.mkdir(exist_ok=True)
        compile_file(folder, target, path.read_text())


def compile_file(folder: Path, path: Path, text: str) -> str:
    """Write and compile one file of a folder; return what Coq printed.

    Raises: UnsoundError with Coq's complaint.
    """
    path.write_text(text)
    command = ["coqc", "-q", "-Q", ".", "K3", str(path.relative_to(folder))]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        said = " ".join(done.stderr.split())[:300]
        raise UnsoundError(path.name, got=said, need="proofs that Coq accepts")
    return done.stdout


def confirmed(folder: Path, rules: Sequence[Rule], modules: Sequence[str] = ()) -> dict[str, str]:
    """Have Coq look up each theorem, compare its statement and list what it rests on.

    `modules` are more files of the folder, whose names hide the project's. Returns the theorems'
    hashes by name. Raises: UnsoundError naming what Coq does not accept.
    """
    rule_of = {theorem_name(rule): rule for rule in rules}
    every = [name for path in sources() for name in _THEOREM.findall(path.read_text())]
    others = [name for name in every if name not in {theorem_name(rule) for rule in RULES}]
    imports = [path.relative_to(PROOFS).with_suffix("").parts for path in sources()]
    files = [".".join(parts) for parts in imports] + list(modules)
    lines = [f"From K3 Require Import {file}." for file in files]
    lines += [
        f"Definition has_{name} : forall (A : Arith.Arith) (St : Arith.Step), "
        f"@Statements.stmt_{name} A St := {name}."
        for name in rule_of
    ]
    wanted = [*(f"has_{name}" for name in rule_of), *others]
    lines += [f"Print Assumptions {name}." for name in wanted]
    said = compile_file(folder, folder / "Confirm.v", "\n".join(lines) + "\n")
    answers = [line for line in said.splitlines() if line.strip()]
    if answers != [_CLOSED] * len(wanted):
        odd = next((line for line in answers if line != _CLOSED), f"{len(answers)} answers")
        raise UnsoundError("theorems", got=odd, need=f"{len(wanted)} without assumptions")
    hashes = {name: theorem_hash(rule) for name, rule in rule_of.items()}
    return dict(sorted((hashes | {name: source_hash(name) for name in others}).items()))


def stamp_text(theorems: dict[str, str]) -> str:
    """Return the text of proofs/proved.json."""
    return json.dumps({"schema": STAMP_SCHEMA, "theorems": theorems}, indent=1) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Have Coq check all theorems; compare with the stamp, or with `--write` write it.

    Returns the exit code: what is refused is printed, nothing is raised.
    """
    try:
        theorems, meanings = prove()
        if "--write" in arguments:
            for target, text in (
                (STAMP, stamp_text(theorems)),
                (agreement.RECORD, agreement.record_text(meanings)),
            ):
                with atomic_path(target) as path:
                    path.write_text(text)
        elif agreement.read_record() != meanings:
            raise ArtifactError(str(agreement.RECORD), got="other values than Coq computes now",
                                need="the same", hint="run `make prove`")  # fmt: skip
        elif read_stamp() != theorems:
            raise ArtifactError(str(STAMP), got="other theorems than Coq has checked now",
                                need="the same", hint="run `make prove`")  # fmt: skip
    except K3Error as error:
        print(error.text("proofs"), file=sys.stderr)
        return error.exit_code
    print(f"{len(theorems)} theorems, no axioms, {len(RULES)} of them for rules")
    print(f"{len(MEANINGS)} ops mean the same in Coq and in Python, at {len(meanings)} draws")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

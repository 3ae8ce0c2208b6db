"""Have Coq check every theorem, and stamp what it checked. Needs `coqc`; nothing else does.

`python -m k3tool.compiler.prove` compiles the proofs in a scratch folder, makes Coq confirm for
each rule that a theorem of its name has exactly the statement the row gives, and that no theorem
rests on an axiom or an admitted step, and compares the outcome with proofs/proved.json; `--write`
writes that file instead.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from k3tool.atomic import atomic_path
from k3tool.compiler.rules import RULES, Rule
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

TIMEOUT_S = 600
_CLOSED = "Closed under the global context"
_THEOREM = re.compile(r"^Theorem (\w+)", re.MULTILINE)


def prove(rules: Sequence[Rule] = RULES, files: Sequence[Path] = ()) -> dict[str, str]:
    """Return the hashes of all theorems that Coq accepts, by name.

    `files` are more sources to compile, after those of the project. Raises: TargetError without
    Coq; UnsoundError naming what Coq does not accept.
    """
    if shutil.which("coqc") is None:
        raise TargetError("coqc", got="absent", need="Coq", hint="apt-get install coq")
    if STATEMENTS.read_text() != statements_file():
        raise ArtifactError(str(STATEMENTS), got="stale", need="the rows' statements",
                            hint="run `make gen`")  # fmt: skip
    more = [name for path in sources() for name in _THEOREM.findall(path.read_text())]
    names = {theorem_name(rule) for rule in rules}
    free = [name for name in more if name not in names]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for path in sources():
            target = folder / path.relative_to(PROOFS)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
            _coqc(folder, target)
        for path in files:
            shutil.copy(path, folder / path.name)
            _coqc(folder, folder / path.name)
        _confirm(folder, rules, free, [path.stem for path in files])
    hashes = {theorem_name(rule): theorem_hash(rule) for rule in rules}
    return dict(sorted((hashes | {name: source_hash(name) for name in free}).items()))


def _coqc(folder: Path, path: Path) -> str:
    """Compile one file; return what Coq printed. Raises: UnsoundError with its first complaint."""
    command = ["coqc", "-q", "-Q", ".", "K3", str(path.relative_to(folder))]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        said = " ".join(done.stderr.split())[:300]
        raise UnsoundError(path.name, got=said, need="proofs that Coq accepts")
    return done.stdout


def _confirm(
    folder: Path, rules: Sequence[Rule], free: Sequence[str], modules: Sequence[str]
) -> None:
    """Have Coq look up each theorem, compare its statement and list what it rests on."""
    imports = [path.relative_to(PROOFS).with_suffix("") for path in sources()]
    lines = [f"From K3 Require Import {'.'.join(path.parts)}." for path in imports]
    lines += [f"From K3 Require Import {name}." for name in modules]
    wanted = []
    for rule in rules:
        name = theorem_name(rule)
        lines.append(f"Definition has_{name} : forall (A : Arith.Arith) (St : Arith.Step), "
                     f"@Statements.stmt_{name} A St := {name}.")  # fmt: skip
        wanted.append(f"has_{name}")
    wanted += free
    lines += [f"Print Assumptions {name}." for name in wanted]
    path = folder / "Confirm.v"
    path.write_text("\n".join(lines) + "\n")
    answers = [line for line in _coqc(folder, path).splitlines() if line.strip()]
    if answers != [_CLOSED] * len(wanted):
        odd = next((line for line in answers if line != _CLOSED), f"{len(answers)} answers")
        raise UnsoundError("theorems", got=odd, need=f"{len(wanted)} without assumptions")


def stamp_text(theorems: dict[str, str]) -> str:
    """Return the text of proofs/proved.json."""
    return json.dumps({"schema": STAMP_SCHEMA, "theorems": theorems}, indent=1) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Check or write the stamp; return the exit code."""
    try:
        theorems = prove()
        if "--write" in arguments:
            with atomic_path(STAMP) as path:
                path.write_text(stamp_text(theorems))
        elif read_stamp() != theorems:
            raise ArtifactError(str(STAMP), got="other theorems than Coq has checked now",
                                need="the same", hint="run `make prove`")  # fmt: skip
    except K3Error as error:
        print(error.text("proofs"), file=sys.stderr)
        return error.exit_code
    print(f"{len(theorems)} theorems, no axioms, {len(RULES)} of them for rules")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

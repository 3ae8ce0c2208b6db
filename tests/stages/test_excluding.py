"""Options that exclude each other: the refusal names what was given, and help says it before."""

import ast
import importlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from stages import refusals
from stages.run.batch import _OF_ONE_RUN
from tests.stages.test_options import COMMANDS

Run = Callable[..., Any]
REPO = Path(__file__).resolve().parents[2]
# A line with both, the one that is refused, and the one beside it.
EXCLUDING = [
    ("run CKPT --ids 1 --quiet --json", "--quiet", "--json"),
    ("run CKPT --ids 1 --quiet --verbose", "--quiet", "--verbose"),
    ("run CKPT --ids 1 --prompt a", "--prompt", "--ids"),
    ("run CKPT --ids 1 --prompt-file a", "--prompt-file", "--ids"),
    ("run CKPT --prompt b --prompt-file a", "--prompt-file", "--prompt"),
    ("run CKPT --ids 1 --chat", "--chat", "--ids"),
    ("run CKPT --ids 1 --memory 1GB --preset laptop", "--preset", "--memory"),
    ("run CKPT --ids 1 --plan a --isa b", "--plan", "--isa"),
    ("run CKPT --ids 1 --memory 1GB --isa b", "--memory", "--isa"),
    ("run CKPT --ids 1 --memory 1GB --plan b", "--memory", "--plan"),
    ("run CKPT --ids 1 --preset laptop --plan b", "--preset", "--plan"),
    ("run CKPT --ids 1 --preset laptop --target cuda:sm_90a", "--preset", "--target cuda:sm_90a"),
    ("run CKPT --ids 1 --threads 2 --target cuda:sm_90a", "--threads", "--target cuda:sm_90a"),
    ("serve CKPT --memory 1GB --preset laptop", "--preset", "--memory"),
    ("serve CKPT --memory 1GB --isa b", "--memory", "--isa"),
    ("inspect CKPT --markdown --json", "--markdown", "--json"),
    ("inspect CKPT --tensor a --markdown", "--markdown", "--tensor"),
    ("inspect CKPT --tensor a --layers 1", "--layers", "--tensor"),
    ("inspect CKPT --tensor a --values", "--values", "--tensor"),
    ("inspect CKPT --tensor a --fingerprint b", "--fingerprint", "--tensor"),
    ("inspect CKPT --tensor a --against b", "--against", "--tensor"),
    ("inspect CKPT --tensor a --jobs 1", "--jobs", "--tensor"),
    ("inspect CKPT --tensor a -o b", "-o", "--tensor"),
    ("inspect CKPT --tensor a -v", "--verbose", "--tensor"),
    ("shard CKPT --check a --tp 1", "--tp", "--check"),
    ("shard CKPT --check a -o b", "-o", "--check"),
    ("shard CKPT --check a --keep-vision", "--keep-vision", "--check"),
    ("shard CKPT --check a --mpi", "--mpi", "--check"),
    ("shard CKPT --check a --dry-run", "--dry-run", "--check"),
    ("shard CKPT --check a --force", "--force", "--check"),
    ("shard CKPT --tp 1 -o b --dry-run --mpi", "--mpi", "--dry-run"),
    ("shard CKPT --tp 1 -o b --dry-run --jobs 1", "--jobs", "--dry-run"),
    ("compile-plan CKPT --tp 1 -o b --explain --json", "--explain", "--json"),
    ("compile-plan CKPT --tp 1 -o b --memory 1GB --phase decode", "--memory", "--phase decode"),
    (
        "compile-plan CKPT --tp 1 -o b --memory 1GB --target hip:gfx950",
        "--memory",
        "--target hip:gfx950",
    ),
    ("sample a --layout released --preset tiny", "--preset", "--layout released"),
    ("disasm a --assemble b -o c --phase decode", "--phase", "--assemble"),
    ("disasm a --assemble b -o c --rank 1", "--rank", "--assemble"),
    ("disasm a --assemble b -o c --range 1:2", "--range", "--assemble"),
    ("disasm a --assemble b -o c --workgroup 1", "--workgroup", "--assemble"),
    ("verify blocks CKPT --ids 1,2,3 --tokens 2", "--tokens", "--ids"),
]
# Options that mean something beside another alone.
INCOMPLETE = [
    ("run CKPT --ids 1 --slots 2", "--slots", "--batch"),
    ("run CKPT --ids 1 --seed 2", "--seed", "--temperature"),
    ("run CKPT --ids 1 --top-k 2", "--top-k", "--temperature"),
    ("run CKPT --ids 1 --top-p 0.5", "--top-p", "--temperature"),
    ("run CKPT --prompt a --system b", "--system", "--chat"),
    ("run CKPT --prompt a --thinking low", "--thinking", "--chat"),
    ("run CKPT --prompt a --history b", "--history", "--chat"),
    ("run CKPT --ids 1 --trace-at 0", "--trace-at", "--trace-hashes"),
    ("run CKPT --ids 1 --storage-rate 2", "--storage-rate", "--plan-only"),
    ("run CKPT --ids 1 --memory-rate 2", "--memory-rate", "--plan-only"),
    ("inspect CKPT --fingerprint a", "--fingerprint", "--values"),
    ("inspect CKPT --against a", "--against", "--values"),
    ("inspect CKPT --jobs 1", "--jobs", "--values"),
    ("sample a --data b", "--data", "--layout released"),
    ("sample a --fill-layers 1", "--fill-layers", "--layout released"),
    ("sample a --shuffle-experts", "--shuffle-experts", "--layout released"),
    ("disasm a --assemble b", "--assemble", "-o"),
    ("disasm a -o b", "-o", "--assemble"),
    ("doctor --tp 2", "--tp", "SOURCE"),
    ("bench inspect --values --layers 1", "--layers", "CHECKPOINT"),
    ("bench inspect CKPT --layers 1", "--layers", "--values"),
    ("bench inspect --jobs 1", "--jobs", "--values"),
    ("bench inspect --cold", "--cold", "--values"),
]
EVERY = [*EXCLUDING, *INCOMPLETE]


@pytest.fixture
def refused(k3tool: Run, oracle: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that gives what is said of a line; CKPT is a checkpoint."""
    monkeypatch.chdir(tmp_path)

    def ask(line: str) -> Any:
        done = k3tool(*(oracle("tiny13") if w == "CKPT" else w for w in shlex.split(line)))
        assert (done.code, done.out) == (2, ""), done
        assert list(tmp_path.iterdir()) == []
        return done.err

    return ask


@pytest.mark.parametrize(("line", "first", "other"), EXCLUDING)
def test_two_that_exclude_each_other_are_named(
    refused: Run, line: str, first: str, other: str
) -> None:
    said, hint = refused(line).splitlines()
    assert said.startswith(f"k3tool {command_of(line)}: {first}: got also {other}, need one of the")
    assert hint == f"  hint: leave out {first} or {other}"


@pytest.mark.parametrize(("line", "first", "other"), INCOMPLETE)
def test_one_that_means_nothing_alone_names_the_other(
    refused: Run, line: str, first: str, other: str
) -> None:
    said, hint = refused(line).splitlines()
    assert said.startswith(f"k3tool {command_of(line)}: {first}: got no {other}, need both")
    assert hint == f"  hint: give {other}, or leave out {first}"


def command_of(line: str) -> str:
    """Return the words of a line that name its command."""
    words = line.split()
    return " ".join(words[: 2 if words[0] in ("verify", "bench") else 1])


def helps(command: str) -> dict[str, str]:
    """Return the help of each option of a command, by the name that messages give it."""
    (found,) = (named.command for named in COMMANDS if named.words == tuple(command.split()))
    named = {
        refusals.name_of(one): one.help or ""
        for one in found.params
        if isinstance(one, click.Option)
    }
    return named | {"SOURCE": found.help or "", "CHECKPOINT": found.help or ""}


def is_told(command: str, first: str, other: str) -> bool:
    """Return whether the help of one of two options says of the other."""
    texts = helps(command)
    first, other = first.split()[0], other.split()[0]
    beside = texts[other].replace("--json, and no other option", "")
    return (
        other in texts[first] or first in texts[other] or beside != texts[other]
    )  # the last: of all but what it lists


@pytest.mark.parametrize(("line", "first", "other"), EVERY)
def test_help_says_it_before(line: str, first: str, other: str) -> None:
    if first == "--tp":
        return  # of doctor: SOURCE is what has degrees
    assert is_told(command_of(line), first, other)


def test_a_help_that_does_not_say_it_would_be_seen() -> None:
    assert is_told("run", "--quiet", "--json")
    assert not is_told("run", "--quiet", "--gen")
    assert not is_told("inspect", "--markdown", "--values")


def test_all_that_a_batch_refuses_is_in_its_help() -> None:
    said = helps("run")["--batch"].partition("Not with")[2]
    run = next(named.command for named in COMMANDS if named.words == ("run",))
    names = {refusals.name_of(one) for one in run.params if one.name in _OF_ONE_RUN}
    assert len(names) == len(_OF_ONE_RUN)
    assert names == {word.strip("., ") for word in said.split() if word.startswith("-")}


# -- the tables above are whole ------------------------------------------------------------------


def pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs that a module refuses by name, as it writes them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        values = [each.value for each in node.args if isinstance(each, ast.Constant)]
        is_literal = all(isinstance(each, ast.Constant) for each in node.args[:2])
        if name in ("excluded", "incomplete") and is_literal:
            yield str(values[0]), str(values[1])
        if name == "refuse_beside":
            beside = next(each.value for each in node.keywords if each.arg == "beside")
            for each in node.args:
                if isinstance(each, ast.Starred) and isinstance(each.value, ast.Name):
                    values += getattr(module_of(path), each.value.id)
            if isinstance(beside, ast.Constant):
                yield from ((option(path, v), option(path, beside.value)) for v in values)


def module_of(path: Path) -> Any:
    return importlib.import_module(".".join(path.relative_to(REPO).with_suffix("").parts))


def option(path: Path, parameter: object) -> str:
    """Return an option's name by its parameter's, in the command of a module."""
    module = module_of(path)
    return next(refusals.name_of(one) for one in module.command.params if one.name == parameter)


def test_every_pair_that_is_refused_was_tried() -> None:
    found = {
        pair
        for path in [*(REPO / "stages").rglob("*.py"), REPO / "k3tool/runtime/options.py"]
        if path.name not in ("options.py", "__init__.py") or "runtime" in str(path)
        for pair in pairs(path)
    }
    tried = {(first, other) for _, first, other in EVERY}
    # Tried where what they concern is made: two traces, a kept conversation.
    elsewhere = {("--values", "second TRACE"), ("--thinking", "--load-state")}
    assert len(found) > 20
    assert found - tried == elsewhere

"""A file of another kind, at every argument that takes one: one form, and a next step."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
MADE = {
    "plan": "k3tool compile-plan SHARDS -o plan.h5",
    "isa": "k3tool emit-isa plan.h5 -o isa.h5",
    "trace": "k3tool run CKPT --ids 1,2,3 --trace-hashes trace.h5",
    "tokens": "k3tool run CKPT --ids 1,2,3 -o tokens.h5",
}
# A command and the kinds that it reads: `tokens.h5` or `plan.h5` is of another.
KINDS = {
    "verify plan {tokens}": ("plan", "isa"),
    "verify coverage {plan}": ("isa",),
    "verify ranks {plan}": ("tokens",),
    "verify trace {tokens}": ("trace",),
    "bench chain {isa}": ("plan",),
    "bench simulate {plan}": ("isa",),
    "disasm {tokens}": ("isa", "plan"),
    "emit-isa {isa} -o x.h5": ("plan",),
}
# Whatever else is wrong with a file or a choice, and a part of the next step.
STEPS = {
    "verify plan {words}": "k3tool shard, compile-plan,|one is made by: k3tool compile-plan",
    "verify coverage {words}": "one is made by: k3tool emit-isa",
    "verify ranks {words}": "docs/verify.md",
    "verify ranks {tokens} {tokens}": "name the file of another run",
    "verify ranks {tokens}": "give a second record",
    "verify trace {trace}": "give a second trace",
    "verify trace {trace} {trace} {trace}": "two at a time",
    "verify logits {plan} {plan}": "name the file of another run",
    "verify logits {plan} {words}": "docs/verify.md",
    "verify blocks": "k3tool sample",
    "verify blocks {plan}": "name the folder",
    "bench cache {plan}": "--expert-trace FILE",
    "bench cache {ckpt}": "check the path",
    "bench report {plan} {words} -o x.html": "k3tool bench report --help",
    "bench report {json} -o x.html": "k3tool bench report --help",
    "bench io {empty}": "name a checkpoint",
    "bench io nowhere": "name a checkpoint",
    "bench roofline nowhere": "name the folder that config.json",
    "bench roofline {empty}": "name the folder that config.json",
    "bench roofline {plan}": "name a config.json",
    "bench roofline {ckpt} --device H100 --baseline {words}": "k3tool bench roofline ... --json >",
    "bench roofline {ckpt} --device H100 --baseline {json}": "measure that again",
    "bench decode {ckpt} --context 5000": "give less --context",
    "bench decode {ckpt} --versus {words}": "make build",
    "bench shard --folder nowhere": "check the path",
    "bench shard --size 1000000": "give a smaller --size",
    "bench long {ckpt} --tp 3": "k3tool inspect",
    "bench budgets": "k3tool sample",
    "sample {ckpt}": "name another folder, or remove",
    "disasm {words}": "one is made by",
    "disasm {plan} --rank 1": "one is made by: k3tool emit-isa",
    "disasm {plan} --assemble {isa} -o x.h5": "k3tool disasm",
    "provenance {words}": "artifacts are what",
    "provenance {empty}": "name the artifact itself",
    "serve {ckpt} --port 0 --api-key-file {words}": "put the key alone",
    "serve {ckpt} --host 192.0.2.1": "leave out --host",
    "doctor {plan}": "name a config.json",
    "doctor {empty}": "name the folder",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, oracle: Run) -> dict[str, Path]:
    """Make one file of each kind, and what is none."""
    from stages.cli import run_command

    folder = tmp_path_factory.mktemp("kinds")
    names = ("ckpt", "plan.h5", "isa.h5", "tokens.h5", "trace.h5", "words", "json", "empty")
    found = {name.partition(".")[0]: folder / name for name in names}
    found["ckpt"] = oracle("tiny13")
    ids = ("--ids", "1,2,3", "--gen", "2", "--ignore-eos", "--cache", folder / "cache", "-q")
    for line in (
        ("compile-plan", found["ckpt"], "--tp", 1, "-o", found["plan"]),
        ("emit-isa", found["plan"], "-o", found["isa"]),
        ("run", found["ckpt"], *ids, "-o", found["tokens"], "--trace-hashes", found["trace"]),
    ):
        assert run_command([str(word) for word in line]) == 0
    found["words"].write_text("two words\n")
    found["json"].write_text('{"a": 1}\n')
    found["empty"].mkdir()
    return found


@pytest.fixture
def ask(
    k3tool: Run, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Return a function that gives what is said of a line, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def asked(line: str) -> Any:
        return k3tool(*line.format(**files).split())

    return asked


def command_of(line: str) -> str:
    words = line.split()
    return " ".join(words[: 2 if words[0] in ("verify", "bench") else 1])


@pytest.mark.parametrize("line", KINDS)
def test_another_kind_of_file_is_refused_in_one_form(
    ask: Run, files: dict[str, Path], line: str
) -> None:
    kinds = KINDS[line]
    got = re.findall(r"\{(\w+)\}", line)[0]
    done = ask(line)
    assert done.code == 3
    assert done.err == (
        f"k3tool {command_of(line)}: {files[got]}: kind: got {got}, need {' or '.join(kinds)}\n"
        f"  hint: one is made by: {', or '.join(MADE[kind] for kind in kinds)}\n"
    )


@pytest.mark.parametrize("line", STEPS)
def test_a_refusal_says_what_to_do_next(ask: Run, line: str) -> None:
    done = ask(line)
    assert done.code in (1, 2, 3, 4, 5)
    said, hint = done.err.splitlines()[-2:]
    assert re.fullmatch(rf"k3tool {command_of(line)}: .+: got .+, need .+", said)
    assert hint.startswith("  hint: ")
    assert any(each in hint for each in STEPS[line].split("|"))


# -- what --json prints ---------------------------------------------------------------------------

COUNT = re.compile(r"(^|_)(bytes|tokens|packets|operations|ranks|slots|waits|edges|handoffs)$")
# Bytes a second, and milliseconds by what sets them.
NO_COUNTS = ("device.peak_bytes", "device.read_bytes", "floors_ms.bytes", "floors_ms.operations")


def counts(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield what JSON holds under the name of a count, and of bytes a step."""
    if isinstance(value, dict):
        for name, one in value.items():
            inner = f"{path}.{name}".strip(".")
            is_count = COUNT.search(name) or "bytes_per_step" in inner
            if is_count and isinstance(one, int | float) and inner not in NO_COUNTS:
                yield inner, one
            yield from counts(one, inner)
    elif isinstance(value, list):
        for one in value:
            yield from counts(one, path)


@pytest.mark.parametrize(
    ("line", "at_least"),
    [
        ("bench roofline {ckpt} --device H100 --batch 3 --json", 20),
        ("bench chain {plan} --json", 3),
        ("bench simulate {isa} --seeds 1 --json", 1),
        ("run {ckpt} --memory 200MB --plan-only --storage-rate 3 --memory-rate 9 --json", 8),
        ("inspect {ckpt} --json", 5),
        ("compile-plan {ckpt} --tp 1 -o x.h5 --json", 3),
        ("shard {ckpt} --tp 1 -o x --json", 3),
    ],
)
def test_bytes_and_counts_are_whole_in_json(ask: Run, line: str, at_least: int) -> None:
    done = ask(line)
    assert done.code == 0, done.err
    found = list(counts(json.loads(done.out)))
    assert len(found) >= at_least, found
    assert [(name, one) for name, one in found if type(one) is not int] == []


def test_bytes_of_a_cache_of_experts_are_whole(ask: Run) -> None:
    run = "run {ckpt} --memory 200MB --ids 1,2,3 --gen 3 --ignore-eos -q --expert-trace x.trace"
    assert ask(run).code == 0
    found = list(counts(json.loads(ask("bench cache x.trace --json").out)))
    assert any("bytes_per_step" in name for name, _ in found)
    assert [(name, one) for name, one in found if type(one) is not int] == []


def test_a_count_that_is_no_integer_would_be_seen() -> None:
    assert list(counts({"a": [{"n_bytes": 1.0, "rate": 2.0}]})) == [("a.n_bytes", 1.0)]

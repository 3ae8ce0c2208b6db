"""docs/pipeline.md says of each kind of file what is in it: compared with files made here."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from k3tool.artifact import Artifact, open_artifact
from k3tool.artifact_roots import KINDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pipeline.md").read_text()
HEADING = re.compile(r"^### .*?: kind (?P<kind>\w+), schema (?P<schema>\d+)$", re.MULTILINE)
PLACES = {"PHASE": "(decode|prefill)", "RR": "[0-9]{2}", "-B": "-[0-9]{6}"}
Run = Callable[..., Any]


class Row(NamedTuple):
    """A dataset of the page: a pattern of its name, and its axes."""

    pattern: str
    axes: tuple[str, ...]


class Kind(NamedTuple):
    """A section of the page."""

    schema: int
    words: str
    rows: tuple[Row, ...]


def sections() -> dict[str, Kind]:
    """Return what the page says of each kind."""
    heads = list(HEADING.finditer(PAGE))
    ends = [head.start() for head in heads[1:]] + [len(PAGE)]
    found = {}
    for head, end in zip(heads, ends, strict=True):
        text = PAGE[head.end() : end]
        if "Params: the plan's" in text:
            text += found["plan"].words.partition("Params")[2].partition("|")[0]
        found[head["kind"]] = Kind(int(head["schema"]), text, tuple(rows_of(text)))
    return found


def rows_of(text: str) -> Iterator[Row]:
    """Yield the datasets of a table, braces and lists of names written out."""
    for line in re.findall(r"^\| (`.*?) \|$", text, re.MULTILINE):
        names, axes = line.split(" | ")[:2]
        every = [name for one in re.findall(r"`([^`]+)`", names) for name in expanded(one)]
        each = tuple(axes.split(", "))
        yield from (Row(name, each) for name in every)


def expanded(name: str) -> list[str]:
    """Return a{b,c} as ab, ac, and places in a name as patterns."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    names = ["".join(each) for each in itertools.product(*parts)]
    for place, pattern in PLACES.items():
        names = [one.replace(place, pattern) for one in names]
    return names


@pytest.fixture(scope="module")
def files(
    oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Make a file of each kind that needs no option of another step."""
    from stages.cli import run_command

    folder = tmp_path_factory.mktemp("files")
    ckpt = oracle("tiny_tp8")
    made = {
        "coverage": folder / "coverage.h5", "fingerprint": folder / "fingerprint.h5",
        "shards": folder / "s" / "shards.h5", "rank": folder / "s" / "rank-00-of-02" / "rank.h5",
        "plan": folder / "plan.h5", "isa": folder / "isa.h5", "tokens": folder / "tokens.h5",
        "trace": folder / "trace.h5", "state": folder / "state.h5",
    }  # fmt: skip
    lines: list[list[object]] = [
        ["inspect", ckpt, "-o", made["coverage"]],
        ["inspect", ckpt, "--values", "--fingerprint", made["fingerprint"]],
        ["shard", ckpt, "--tp", 2, "-o", folder / "s"],
        ["compile-plan", folder / "s", "-o", made["plan"]],
        ["emit-isa", made["plan"], "-o", made["isa"]],
        ["run", folder / "s", "--isa", made["isa"], "--ids", "1,2", "--gen", 2, "--ignore-eos",
         "--trace-hashes", made["trace"], "-o", made["tokens"]],
    ]  # fmt: skip
    if "state" in KINDS:
        lines[-1] += ["--save-state", made["state"]]
    for line in lines:
        assert run_command([str(word) for word in line]) == 0, line
    return made


def test_every_kind_has_its_section() -> None:
    assert set(KINDS) <= set(sections())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_a_file(kind: str, files: dict[str, Path]) -> None:
    said = sections()[kind]
    with open_artifact(files[kind], kind) as file:
        assert file.schema == said.schema
        assert faults(file, said) == []


def faults(file: Artifact, said: Kind) -> list[str]:
    """Return what a file has and its section lacks, and the other way round."""
    wrong, seen = [], set()
    for name in file.names():
        rows = [row for row in said.rows if re.fullmatch(row.pattern, name)]
        if not rows:
            wrong.append(f"{name}: not on the page")
            continue
        seen.add(rows[0])
        if file.axes(name) != rows[0].axes:
            wrong.append(f"{name}: axes {file.axes(name)}, on the page {rows[0].axes}")
    wrong += [f"{row.pattern}: not in the file" for row in said.rows if row not in seen]
    stems = {name.rpartition(".")[2] for name in (*file.attrs, *file.params)}
    quoted = set(re.findall(r"`(\w+)`", said.words)) | {"config"}
    wrong += [f"{name}: an attribute not on the page" for name in sorted(stems - quoted)]
    roles = {ref.kind for ref in file.inputs}
    return wrong + [f"input {role}" for role in roles if role not in said.words]


def test_a_page_that_lacks_a_dataset_would_be_seen(files: dict[str, Path]) -> None:
    said = sections()["tokens"]
    with open_artifact(files["tokens"], "tokens") as file:
        less = faults(file, said._replace(rows=said.rows[1:]))
        assert less == ["prompt: not on the page"]
        more = (*said.rows, Row("rank-[0-9]{2}/nothing", ("step",)))
        assert faults(file, said._replace(rows=more)) == [f"{more[-1].pattern}: not in the file"]
        assert faults(file, said._replace(words="")) != []

"""What the tests of resources and of values found, kept for the page."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.damage.case import Case, refused
from tests.faults.damage.edit import INDEX, shard_name
from tests.faults.damage.harness import NOTE, Answer, Verdict


@dataclass(slots=True)
class Record:
    """Answers by kind and command, and verdicts of cases."""

    answers: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)


DAMAGE = Record()
RESOURCES = Record()
VALUES = Record()


def resource_answer(kind: str, command: str, answer: Answer) -> None:
    """Keep one answer: its code, and its first line without paths and sizes."""
    start = f"k3tool {command}: "
    said = [line for line in answer.err.splitlines() if not NOTE.fullmatch(line)]
    lines = sorted(said, key=lambda line: not line.startswith(start))
    line = re.sub(r"/\S*/", "…/", lines[0].removeprefix(start)) if lines else "quiet"
    line = re.sub(r"\b[\d.]+ [KMGT]?B\b", "N", re.sub(r"\b\d{5,}\b", "N", line))
    RESOURCES.answers[kind, command] = answer.code, line


def _locked_downloads(folder: Path) -> None:
    place = folder / ".cache" / "huggingface" / "download"
    place.mkdir(parents=True)
    place.chmod(0)


def _locked_side_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.json").chmod(0)


UNREADABLE: dict[str, Case] = {
    case.id: case
    for case in (
        refused("unreadable", "a shard", lambda f: (f / shard_name(6)).chmod(0), shard_name(6),
                "permission denied", "the right to read"),
        refused("unreadable", "the index", lambda f: (f / INDEX).chmod(0), INDEX,
                "permission denied", "the right to read"),
        refused("unreadable", "the config", lambda f: (f / "config.json").chmod(0), "config.json",
                "permission denied", "the right to read"),
        refused("unreadable", "the folder", lambda f: f.chmod(0), "permission denied",
                "need a checkpoint folder", "the right to read"),
        refused("unreadable", "the folder, which may be listed", lambda f: f.chmod(0o444),
                "permission denied", "need a checkpoint folder", "the right to read"),
        refused("unreadable", "where the hub's client downloads", _locked_downloads,
                ".cache/huggingface/download", "permission denied", "the right to read"),
        refused("unreadable", "a side file", _locked_side_file, "tokenizer.json",
                "permission denied", "the right to read"),
    )
}  # fmt: skip

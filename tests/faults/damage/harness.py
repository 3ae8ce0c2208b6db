"""Ask inspect, shard and run about one checkpoint, and hold each answer against what is expected.

A damaged checkpoint must be refused three times with the same words, and leave nothing behind; a
legal variation must give the healthy one's tokens and logits, from the checkpoint and from shards.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.damage.case import ARTIFACT, Case

IDS, GEN, TP = "5,9,2", 3, 2
# What a person must not be left alone with.
FORBIDDEN = ("Traceback", "Error:", "Errno", "errno", "object at 0x", "None", "<class")
HINT = "\n  hint: "
NOTE = re.compile(r"program (built|reused|given).*, weights .*")
# What one command adds to a next step that is the same for all.
_MORE = re.compile(r" \((k3tool inspect \S.* lists [0-9]+ more|met by [A-Z0-9_]+ on rank \d+)\)$")


class Answer(NamedTuple):
    """What one command gave: exit code, stdout and stderr."""

    code: int
    out: str
    err: str


class Verdict(NamedTuple):
    """A case's exit codes, and the words that all commands said (empty where it is legal)."""

    inspect: int
    shard: int
    run: int
    words: str


Command = Callable[..., Answer]


class Opened:
    """Which paths this process opened, while `on`; an audit hook cannot be removed, so it is one.

    Symbolic links are not resolved: a link inside the folder is the folder's own.
    """

    def __init__(self) -> None:
        """Start listening."""
        self.on = False
        self.paths: list[str] = []
        sys.addaudithook(self._hear)

    def during(self, k3tool: Command) -> Command:
        """Return a command line that is listened to, and nothing else is."""

        def run(*arguments: object) -> Answer:
            self.on = True
            try:
                return k3tool(*arguments)
            finally:
                self.on = False

        return run

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]
            if isinstance(path, (str, bytes)) or hasattr(path, "__fspath__"):
                self.paths.append(os.path.abspath(os.fsdecode(path)))


def fingerprint(folder: Path) -> str:
    """Return a hash of names, kinds and bytes below a folder: what a no-op leaves unchanged."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0")
        if path.is_symlink():
            digest.update(b"link " + os.fsencode(os.readlink(path)))
        elif path.is_file():
            digest.update(b"file " + hashlib.sha256(path.read_bytes()).digest())
        else:
            digest.update(b"other")
    return digest.hexdigest()


def message(stage: str, answer: Answer, folder: Path) -> str:
    """Return a command's one message without the stage and the folder. Fails if it is not one."""
    start = f"k3tool {stage}: "
    lines = answer.err.splitlines()
    n_notes = next((n for n, line in enumerate(lines) if line.startswith(start)), len(lines))
    for note in lines[:n_notes]:  # progress, which may come before a value is met
        assert NOTE.fullmatch(note), answer.err
    lines = lines[n_notes:]
    assert lines, f"{stage} said nothing, exit code {answer.code}\n{answer.err}"
    assert len(lines) <= 2, f"{stage} said more than one message:\n{answer.err}"
    assert len(lines) == 2, f"{stage}: no next step:\n{answer.err}"
    assert lines[1].startswith(HINT.strip("\n")), answer.err
    step = _MORE.sub("", lines[1])
    return relative("\n".join([lines[0].removeprefix(start), step]), folder)


def relative(text: str, folder: Path) -> str:
    """Return a text with the checkpoint's own folder taken out of paths."""
    text = re.sub(rf"{re.escape(str(folder))}(/|: (?!got ))", "", text)
    return text.replace(str(folder), "CKPT")


def check_words(stage: str, text: str, case: Case) -> None:
    """Fail unless a message has the case's words and no other blame."""
    for word in case.words:
        assert word in text, f"{stage} does not say {word!r}: {text}"
    for word in (*case.never, *FORBIDDEN):
        assert not re.search(rf"(?<!\w){re.escape(word)}", text), f"{stage} says {word!r}: {text}"
    assert ": got " in text, text
    assert ", need " in text, text


class Bench:
    """A place for the commands of one case: where they write, and what they compile into."""

    def __init__(self, k3tool: Command, folder: Path, cache: Path) -> None:
        """Take the command line, an empty folder for outputs and a cache that cases share."""
        self.k3tool = k3tool
        self.folder = folder
        self.cache = cache

    def shard(self, path: Path) -> Answer:
        """Shard a checkpoint into the outputs' folder."""
        return self.k3tool("shard", path, "--tp", TP, "-o", self.folder / "shards")

    def run(self, path: Path, *options: object) -> Answer:
        """Generate a few tokens."""
        tokens = self.folder / f"{len(list(self.folder.iterdir()))}.h5"
        return self.k3tool(
            "run", path, "--ids", IDS, "--gen", GEN, "--ignore-eos", "--json",
            "--cache", self.cache, "-o", tokens, *options,
        )  # fmt: skip

    def refusal(self, case: Case, path: Path) -> Verdict:
        """Check that all three commands refuse a checkpoint with the same words."""
        shard, run = self.shard(path), self.run(path)
        left = [entry.name for entry in self.folder.iterdir()]
        assert not left, f"left behind: {left}"
        inspect = self.k3tool("inspect", path)
        codes = (inspect.code, shard.code, run.code)
        assert codes == (ARTIFACT,) * 3, f"{codes}\n{inspect}\n{shard}\n{run}"
        said = message("shard", shard, path)
        assert message("run", run, path) == said
        check_words("shard", said, case)
        report = relative(inspect.out + inspect.err, path)
        assert "Traceback" not in report
        for part in said.split(HINT):
            assert part in report, f"inspect does not say: {part}\n{report}"
        return Verdict(*codes, said.replace(str(path.parent), "…"))

    def tokens(self, path: Path) -> list[Any]:
        """Return ids, best and second logits of a run that must succeed."""
        from k3tool.runtime.tokens import read_tokens

        answer = self.run(path)
        assert answer.code == 0, answer.err
        events = [json.loads(line) for line in answer.out.splitlines()]
        newest = max(self.folder.glob("*.h5"), key=lambda file: file.stat().st_mtime_ns)
        record = read_tokens(newest).ranks[0]
        assert events[-1]["tokens"] == record["id"].tolist()
        return [record[field].tolist() for field in ("id", "best", "second")]

    def acceptance(self, path: Path, healthy: list[Any] | None) -> tuple[Verdict, list[Any]]:
        """Check that all three commands take a checkpoint; `healthy` is what its tokens must be."""
        inspect, shard = self.k3tool("inspect", path), self.shard(path)
        assert inspect.code == 0, inspect
        assert shard.code == 0, shard
        tokens = self.tokens(path)
        assert self.tokens(self.folder / "shards") == tokens
        if healthy is not None:
            assert tokens == healthy, "another model's tokens"
        return Verdict(0, 0, 0, ""), tokens

    def check(self, case: Case, checkpoint: Path, healthy: list[Any]) -> Verdict:
        """Damage a copy, check that something changed, and ask the three commands."""
        before = fingerprint(checkpoint)
        other = case.damage(checkpoint)
        path = other if isinstance(other, Path) else checkpoint
        changed = path != checkpoint or fingerprint(checkpoint) != before
        assert changed, f"{case.id}: the damage changed nothing"
        if case.is_legal:
            return self.acceptance(path, healthy)[0]
        return self.refusal(case, path)

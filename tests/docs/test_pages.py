"""Every command that a page of docs/ shows is run here, in the page's order, in an empty folder.

Blocks marked `console`: a line `$ COMMAND`, with `# exit N` behind it where it has to fail. A page
needs no other page's files. The README has its own test, beside this folder.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
LINE = re.compile(r"^\$ (?P<command>.*?)(?:\s+# exit (?P<exit>\d+))?$", re.MULTILINE)
SHELL = set("|&;<>$()`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")
# Written by tests that run what they show, or with a test of their own beside their command.
ELSEWHERE = {"errors.md", "damage.md", "isa.md", "gpu-compiled.md", "gpu-results.md", "text.md"}


class Command(NamedTuple):
    """One line of a page, and the exit code it must give."""

    text: str
    code: int


def commands_of(text: str) -> list[Command]:
    """Return the commands of a page's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [Command(m["command"], int(m["exit"] or 0)) for b in blocks for m in LINE.finditer(b)]


def pages() -> Iterator[Path]:
    """Yield the pages with commands."""
    for path in sorted(DOCS.glob("*.md")):
        if path.name not in ELSEWHERE and commands_of(path.read_text()):
            yield path


def environment(folder: Path) -> dict[str, str]:
    """Return an environment with this checkout's k3tool on PATH and a cache of its own."""
    program = folder / "bin" / "k3tool"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m stages.cli "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join(
        [str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


def run_page(text: str, folder: Path, k3tool: Callable[..., Any]) -> None:
    """Run a page's commands: k3tool's own in this process, what needs a shell in bash.

    Raises: AssertionError naming the first that does otherwise.
    """
    env, work = environment(folder), folder / "work"
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setenv("XDG_CACHE_HOME", env["XDG_CACHE_HOME"])
        for command in commands_of(text):
            code, out, err = run_line(command.text, env, k3tool)
            said = f"$ {command.text}\n{out}{err}"
            assert code == command.code, f"{code}, not {command.code}: {said}"
            assert "--traceback" in command.text or "Traceback" not in err, said


def run_line(line: str, env: dict[str, str], k3tool: Callable[..., Any]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of one line, in the current folder."""
    if line.startswith("k3tool ") and not set(line) & SHELL:
        done = k3tool(*shlex.split(line)[1:])
        return done.code, done.out, done.err
    shell = subprocess.run(
        ["bash", "-c", line], env=env, capture_output=True, text=True, timeout=120, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return shell.returncode, shell.stdout, shell.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", list(pages()), ids=lambda path: path.name)
def test_every_command_of_a_page_does_what_it_says(
    page: Path, tmp_path: Path, k3tool: Callable[..., Any]
) -> None:
    run_page(page.read_text(), tmp_path, k3tool)


def test_a_page_that_is_wrong_would_be_seen(tmp_path: Path, k3tool: Callable[..., Any]) -> None:
    page = "```console\n$ k3tool isa | head -1\n$ k3tool inspect nowhere    # exit 3\n```\n"
    assert commands_of(page)[1] == ("k3tool inspect nowhere", 3)
    run_page(page, tmp_path, k3tool)
    (tmp_path / "again").mkdir()
    with pytest.raises(AssertionError, match="3, not 0"):
        run_page(page.replace("    # exit 3", ""), tmp_path / "again", k3tool)


@pytest.mark.parametrize("page", [REPO / "README.md", *sorted(DOCS.glob("*.md"))],
                         ids=lambda path: path.name)  # fmt: skip
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert broken == []


def test_every_page_is_in_the_readme() -> None:
    """A page nobody links is a page nobody reads."""
    text = (REPO / "README.md").read_text()
    assert [p.name for p in sorted(DOCS.glob("*.md")) if f"docs/{p.name}" not in text] == []

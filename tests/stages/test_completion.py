"""completion: bash and zsh are typed at as a person types, fish is asked what it would complete.

The k3tool that bash finds is this checkout's.
"""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.cli import COMMANDS

REPO = Path(__file__).resolve().parents[2]
Run = Callable[..., Any]
PROMPT = "k3-prompt>"
SECONDS = 60.0


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """Put a k3tool on a PATH, and return the environment."""
    path = tmp_path / "bin" / "k3tool"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m stages.cli "$@"\n')
    path.chmod(0o755)
    return {**os.environ, "PATH": f"{path.parent}:{os.environ['PATH']}", "PS1": PROMPT}


def ask(program: dict[str, str], shell: str, *words: str) -> list[str]:
    """Return what k3tool answers a shell's script: lines of kind and value."""
    asked = {"_K3TOOL_COMPLETE": f"{shell}_complete", "COMP_WORDS": " ".join(words)}
    asked["COMP_CWORD"] = words[-1] if shell == "fish" else str(len(words) - 1)
    done = subprocess.run(
        ["k3tool"], env=program | asked, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


class Shell:
    """An interactive shell behind a terminal."""

    def __init__(self, words: list[str], env: dict[str, str], folder: Path) -> None:
        """Start it and wait for its prompt."""
        self.shown = ""  # and not asked for yet
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, env)
        self.until(PROMPT)

    def type(self, text: str) -> None:
        """Send keys."""
        os.write(self.terminal, text.encode())

    def until(self, words: str) -> None:
        """Wait until `words` are shown, behind what was waited for before."""
        end = time.monotonic() + SECONDS
        while words not in self.shown:
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the shell did not show {words!r} but {self.shown!r}"
            self.shown += os.read(self.terminal, 4096).decode(errors="replace")
        self.shown = self.shown.partition(words)[2]

    def close(self) -> None:
        """End it."""
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


def test_a_bash_that_is_typed_at(program: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "checkpoint-folder").mkdir()
    bash = Shell(["bash", "--norc", "--noprofile", "-i"], program, tmp_path)
    try:
        bash.type('eval "$(k3tool completion bash)"; echo re""ady\n')
        bash.until("ready")
        bash.until(PROMPT)
        bash.type("k3tool insp\t")
        bash.until("inspect ")
        bash.type("checkp\t")
        bash.until("checkpoint-folder")
        bash.type(" --fing\t")
        bash.until("--fingerprint ")
        bash.type("\x15k3tool run x --leav\t")
        bash.until("--leaves ")
        bash.type("sca\t")
        bash.until("scalar ")
    finally:
        bash.close()


def test_a_zsh_that_is_typed_at(program: dict[str, str], tmp_path: Path) -> None:
    require("zsh")
    (tmp_path / "checkpoint-folder").mkdir()
    zsh = Shell(["zsh", "-f", "-i"], program | {"TERM": "dumb"}, tmp_path)
    try:
        zsh.type("autoload -U compinit; compinit -u; echo re''ady\n")
        zsh.until("ready")
        zsh.type("eval \"$(k3tool completion zsh)\"; echo do''ne\n")
        zsh.until("done")
        zsh.type("k3tool insp\t")
        zsh.until("inspect")
        zsh.type("checkp\t")
        zsh.until("checkpoint-folder")
        zsh.type(" --fing\t")
        zsh.until("--fingerprint")
    finally:
        zsh.close()


def test_a_fish_that_is_asked(program: dict[str, str], tmp_path: Path) -> None:
    require("fish")
    (tmp_path / "checkpoint-folder").mkdir()

    def completed(line: str) -> list[str]:
        """Return what fish would complete: the word, and what is said of it behind a tab."""
        asked = f"k3tool completion fish | source; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "-N", "-c", asked], cwd=tmp_path, env=program, capture_output=True, text=True,
            check=True, timeout=SECONDS,
        )  # fmt: skip
        return done.stdout.splitlines()

    assert sorted(completed("k3tool ")) == sorted(
        f"{name}\t{entry.summary}" for name, entry in COMMANDS.items()
    )  # also those with a comma
    assert completed("k3tool run ckpt --numerics ") == ["bf16", "f32"]
    assert completed("k3tool inspect check") == ["checkpoint-folder/"]
    assert completed("k3tool zzz") == []  # the control


def require(shell: str) -> None:
    """Skip where a shell is not installed."""
    if shutil.which(shell) is None:
        pytest.skip(f"NOT RUN: no {shell} to read its script; that k3tool answers it was tested")


def test_what_is_answered(program: dict[str, str]) -> None:
    assert [line.split(",")[1] for line in ask(program, "bash", "k3tool", "")][:7] == list(
        COMMANDS
    )[:7]
    assert ask(program, "bash", "k3tool", "verify", "ra") == ["plain,ranks"]
    assert ask(program, "bash", "k3tool", "inspect", "x", "--fingerprint", "") == ["file,"]
    assert "plain,--expert-trace" in ask(program, "bash", "k3tool", "run", "--ex")
    assert ask(program, "bash", "k3tool", "run", "--numerics", "b") == ["plain,bf16"]
    assert ask(program, "bash", "k3tool", "zzz") == [""]  # the control


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_ask_in_their_own_form(
    k3tool: Run, program: dict[str, str], shell: str
) -> None:
    script = k3tool("completion", shell).out
    assert f"_K3TOOL_COMPLETE={shell}_complete" in script
    said = "\n".join(ask(program, shell, "k3tool", "insp"))
    assert re.search(r"\binspect\b", said)
    assert COMMANDS["inspect"].summary in said


def test_names_of_commands_cost_no_import(program: dict[str, str]) -> None:
    """At every Tab: click's own way would load NumPy and HDF5 to say which commands there are."""
    code = (
        "import sys; from stages.cli import cli, LazyGroup; import click\n"
        "cli.shell_complete(click.Context(cli), 'r'); print('stages.run' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_another_shell_is_usage(k3tool: Run) -> None:
    done = k3tool("completion", "csh")
    assert (done.code, done.out) == (2, "")
    assert "need one of bash, zsh, fish" in done.err

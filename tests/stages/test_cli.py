"""The command line itself: help, exit codes, one message per error, pipes and interrupts."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from k3tool import errors
from stages import cli
from stages.help import finish

REPO = Path(__file__).resolve().parents[2]
CONTEXT = click.Context(cli.cli)
AVAILABLE = cli.cli.list_commands(CONTEXT)


def test_pipeline_commands_are_there() -> None:
    assert AVAILABLE[:7] == [
        "inspect", "shard", "compile-plan", "emit-isa", "run", "verify", "bench",
    ]  # fmt: skip


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_command_has_help_an_example_and_run(k3tool: Callable, name: str) -> None:
    outcome = k3tool(name, "--help")
    assert outcome.code == 0
    assert "Example:" in outcome.out
    assert f"k3tool {name}" in outcome.out
    module = sys.modules[cli.COMMANDS[name].module]
    assert isinstance(module.command, click.Command)
    if not hasattr(module, "SUBCOMMANDS"):
        assert callable(module.run)
        return
    for subcommand in module.SUBCOMMANDS:  # one file each
        assert callable(sys.modules[subcommand.callback.__module__].run)
        outcome = k3tool(name, subcommand.name, "--help")
        assert outcome.code == 0
        assert f"k3tool {name} {subcommand.name}" in outcome.out


def test_group_help_lists_what_exists(k3tool: Callable) -> None:
    outcome = k3tool("--help")
    assert outcome.code == 0
    for name, entry in cli.COMMANDS.items():
        assert f"  {name} " in outcome.out
        assert entry.summary in outcome.out


def listed(group: click.Group, name: str, columns: int) -> list[str]:
    """Return the lines below Commands of a group's help on a terminal this wide."""
    context = click.Context(group, info_name=name, terminal_width=columns)
    return group.get_help(context).partition("Commands:\n")[2].partition("\n\n")[0].splitlines()


def test_no_summary_is_cut_in_any_list_of_commands() -> None:
    groups: dict[str, click.Group] = {"k3tool": cli.cli}
    for name in AVAILABLE:
        command = cli.cli.get_command(CONTEXT, name)
        if isinstance(command, click.Group):
            groups[name] = command
    assert {"bench", "verify"} <= set(groups)
    for name, group in groups.items():
        at_80, narrow = (listed(group, name, columns) for columns in (80, 40))
        assert len(at_80) == len(group.list_commands(CONTEXT)), at_80  # a line each
        assert not [line for line in at_80 + narrow if line.endswith("...")], name
    for command in groups["bench"].commands.values():  # what a shell's completion shows
        assert not command.get_short_help_str().endswith("..."), command.name


def test_a_summary_that_is_too_long_would_be_seen() -> None:
    group = click.Group("x")
    group.add_command(click.Command("long", help="Say a word " * 20 + "at last. And more."))
    assert listed(group, "x", 80)[0].endswith("...")  # click's own
    finish(group)
    assert len(listed(group, "x", 80)) > 1
    assert listed(group, "x", 80)[-1].endswith("at last.")


def test_a_mistyped_command_names_the_nearest(k3tool: Callable) -> None:
    assert "did you mean inspect?" in k3tool("inpsect", "x").err
    assert "did you mean" not in k3tool("nonsense").err


@pytest.mark.parametrize(
    "arguments",
    [(), ("nonsense",), ("shard",), ("shard", "x", "--tp", "two", "-o", "y"), ("--no",)],
)
def test_usage_is_two(k3tool: Callable, arguments: tuple[str, ...]) -> None:
    outcome = k3tool(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("K3Error", 1),
        ("UsageError", 2),
        ("ArtifactError", 3),
        ("UnsoundError", 4),
        ("TargetError", 5),
    ],
)
def test_error_class_gives_code_and_one_message(
    k3tool: Callable, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    error = getattr(errors, kind)("plan.h5: tp", got=4, need=8, hint="compile again")

    def fail(opts: object, progress: object = None) -> None:
        raise error

    monkeypatch.setattr("stages.shard.run", fail)
    outcome = k3tool("shard", "x", "--tp", 8, "-o", "y")
    assert outcome.code == code
    assert outcome.err == "k3tool shard: plan.h5: tp: got 4, need 8\n  hint: compile again\n"
    assert outcome.out == ""
    traced = k3tool("--traceback", "shard", "x", "--tp", 8, "-o", "y")
    assert traced.code == code  # where it arose is told besides, not instead
    assert traced.err.startswith(outcome.err)
    assert "Traceback" in traced.err
    assert "raise error" in traced.err
    behind = k3tool("shard", "x", "--tp", 8, "-o", "y", "--traceback")  # added to what was typed
    assert (behind.code, behind.err.startswith(outcome.err)) == (code, True)
    assert "raise error" in behind.err


def test_unknown_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(opts: object, progress: object = None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("stages.shard.run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.run_command(["shard", "x", "--tp", "8", "-o", "y"])


@pytest.mark.parametrize("command", ["inspect", "inspect --values", "shard --tp 2 -o s"])
def test_a_thread_that_the_system_does_not_start(
    k3tool: Callable, oracle: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, command: str,
) -> None:  # fmt: skip
    """CPython's RuntimeError of it, wherever it comes from: a pool's thread or one of our own."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    name, *options = command.split()
    done = k3tool(name, oracle("tiny13"), *options)
    assert done.code == 5, done.err
    assert "thread" in done.err
    assert "hint:" in done.err
    assert os.listdir(tmp_path) == []


def test_interrupt_is_130(k3tool: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(opts: object, progress: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stages.shard.run", fail)
    assert k3tool("shard", "x", "--tp", 8, "-o", "y").code == 130


def test_broken_pipe_ends_quietly(oracle: Callable[[str], Path]) -> None:
    """A reader that goes away (`| head -1`) is no error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.cli", "inspect", str(oracle("tiny13")), "--json"],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert err == b""


def test_version(k3tool: Callable) -> None:
    outcome = k3tool("--version")
    assert (outcome.code, outcome.out) == (0, "k3tool, version 0.1.0\n")

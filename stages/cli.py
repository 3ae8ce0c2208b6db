"""The entry point `k3tool`: finds the command, loads its module, turns errors into exit codes.

Nothing heavy is imported here: the help of all commands must not cost NumPy. A stage module is
imported when its command is chosen and offers `command` (click) and `run(options) -> Result`.
"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

try:
    from k3tool.tables import have_text
    from stages.signals import (
        INTERRUPTED,
        Terminated,
        ignore_signals,
        send_dropped_again,
        take_signals,
    )

    send_dropped_again()  # before the modules that take long to load

    import contextlib
    import importlib
    import traceback
    from collections.abc import Sequence
    from typing import NamedTuple

    import click

    from k3tool import __version__
    from k3tool.errors import K3Error, TargetError
    from k3tool.memory import require_start, rooms
    from k3tool.threads import fit_pools, out_of_threads
    from stages.help import EXIT_CODES, TRACEBACK, finish
    from stages.refusals import PROGRAM, Commands, command_of, in_our_form
    from stages.streams import NobodyReads, open_standard_streams, silence_stdout
except KeyboardInterrupt:  # Ctrl-C while modules load is Ctrl-C all the same
    os._exit(130)  # INTERRUPTED, whose own module may not have loaded; a second one cuts nothing

_COMPLETE = "_K3TOOL_COMPLETE"  # set by what `k3tool completion` prints, at every Tab


class Entry(NamedTuple):
    """Where a command lives, and its line in the list of commands."""

    module: str
    summary: str


COMMANDS: dict[str, Entry] = {
    "inspect": Entry("stages.inspect_checkpoint", "Say whether a checkpoint is whole."),
    "shard": Entry("stages.shard", "Split a checkpoint into one folder per rank."),
    "compile-plan": Entry("stages.compile_plan", "Compile the model into a plan."),
    "emit-isa": Entry("stages.emit_isa", "Emit the instruction streams of a plan."),
    "run": Entry("stages.run", "Generate tokens, building what is missing."),
    "verify": Entry("stages.verify", "Compare streams and check plans, weights and handlers."),
    "bench": Entry("stages.bench", "Measure, with the definition beside each number."),
    "serve": Entry("stages.serve", "Serve a model to OpenAI's clients."),
    "disasm": Entry("stages.disasm", "Print a stream as a person reads it."),
    "isa": Entry("stages.isa", "Print the table of ops."),
    "provenance": Entry("stages.provenance", "Print what an artifact was made from."),
    "sample": Entry("stages.sample", "Write a small synthetic checkpoint."),
    "doctor": Entry("stages.doctor", "Say what this machine can do, and what to type next."),
    "completion": Entry("stages.completion", "Print the script by which a shell completes."),
}


class LazyGroup(Commands):
    """A group that knows its commands by name and imports one when it is chosen."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in pipeline order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or None if there is no such one."""
        if cmd_name not in COMMANDS:
            return None
        require_start(cmd_name)
        fit_pools()
        command = importlib.import_module(COMMANDS[cmd_name].module).command
        assert isinstance(command, click.Command)
        finish(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete a command's name from the table: click's own way imports all of them."""
        from click.shell_completion import CompletionItem

        named = [
            CompletionItem(name, help=entry.summary)
            for name, entry in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return named + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, importing none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    name=PROGRAM,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name=PROGRAM)
@click.option(TRACEBACK, is_flag=True, help="Show where in the code an error arose.")
def cli(traceback: bool) -> None:
    """Take a Kimi K3 checkpoint to tokens: inspect, shard, compile-plan, emit-isa, run, verify.

    \b
    Example:
      k3tool inspect CKPT
      k3tool run CKPT --ids 1,2,3 --gen 16 --tp 8
    """


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors a user can meet become one message.

    Unknown exceptions keep their traceback.
    """
    context: click.Context | None = None
    try:
        context = cli.make_context(PROGRAM, list(arguments))
        with context:
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        return _report(in_our_form(error, context), context)
    except K3Error as error:
        return _report(error, context)
    except MemoryError:
        return _report(_out_of_memory(), context)
    except ModuleNotFoundError as error:
        if _is_ours(error):
            raise
        return _report(_no_package(error), context)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except Terminated as stop:
        click.echo("terminated", err=True)
        return stop.exit_code
    except NobodyReads as stop:
        return stop.exit_code
    except OSError as error:
        silence_stdout()
        return _report(_system_error(error), context)
    except BaseException as error:  # a pool in Rust has no Exception for it
        if (refusal := out_of_threads(error)) is None:
            raise
        return _report(refusal, context)
    return 0


def _system_error(error: OSError) -> K3Error:
    """Return the refusal for what the system denies outside a file of ours: a full stdout."""
    place = os.fsdecode(error.filename) if error.filename else "stdout"
    got = (error.strerror or str(error)).lower()
    need, hint = "room and the right to read and write there", "free some, or write elsewhere"
    return K3Error(place, got=got, need=need, hint=hint)


def _out_of_memory() -> TargetError:
    """Return the refusal for an allocation that no step had asked room for."""
    least = min(rooms(), default=None)
    got = (
        "an allocation failed" if least is None else f"{have_text(least[0])} left under {least[1]}"
    )
    return TargetError(
        "memory", got=got, need="more for the next step",
        hint="raise the limit (ulimit -v, the container's), or do less at a time",
    )  # fmt: skip


def _is_ours(error: ModuleNotFoundError) -> bool:
    return (error.name or "").split(".")[0] in ("", "k3tool", "stages")


def _no_package(error: ModuleNotFoundError) -> TargetError:
    """Return the refusal for another Python's environment, the usual reason for a missing package.

    Commands that need an optional one refuse it themselves, by the name of its extra.
    """
    return TargetError(
        f"package {error.name}", got=f"none in {sys.executable}", need="what k3tool depends on",
        hint="run k3tool from the environment it was installed into (. .venv/bin/activate)",
    )  # fmt: skip


def _report(error: K3Error, context: click.Context | None) -> int:
    click.echo(error.text(command_of(context)), err=True)
    if context is not None and context.params.get("traceback"):
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    return error.exit_code


def _complete(instruction: str) -> int:
    """Answer a shell that completes a line; a damaged checkout must not print into that line."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(cli, {}, PROGRAM, _COMPLETE, instruction)
    except (K3Error, ImportError):
        return 1


def main() -> None:
    """Run the command line of this process."""
    try:
        take_signals()
        open_standard_streams()
        asked = os.environ.get(_COMPLETE)
        code = _complete(asked) if asked else run_command(sys.argv[1:])
        ignore_signals()  # within: one that comes before it is caught, and none comes after
    except (KeyboardInterrupt, Terminated) as stop:  # between the commands' own handlers
        ignore_signals()
        code = INTERRUPTED if isinstance(stop, KeyboardInterrupt) else stop.exit_code
    if code > 128:  # 128 and a signal's number
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End without Python's own end: an extension module that a signal found half loaded has been
    seen to crash in it. Every step has undone its own by now.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

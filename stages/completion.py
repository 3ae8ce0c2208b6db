"""`k3tool completion`: print the script by which a shell completes commands, options and paths."""

from dataclasses import dataclass

import click
from click.shell_completion import get_completion_class

from stages.refusals import PROGRAM

VARIABLE = "_K3TOOL_COMPLETE"  # what the script sets when it asks; see stages.cli.main
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Options:
    """Whose script: bash, zsh or fish."""

    shell: str


def run(options: Options) -> str:
    """Return the script, which asks k3tool itself at every Tab."""
    kind = get_completion_class(options.shell)
    assert kind is not None, options.shell
    # Not source(): for bash it starts one to look at its version, and complains on stdout.
    asks = kind(click.get_current_context().find_root().command, {}, PROGRAM, VARIABLE)
    script = asks.source_template % asks.source_vars()
    # click's fish cuts the answer at every comma: a summary ended at its first one.
    return script.replace('string split ","', 'string split --max 1 ","', 1)


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print a completion script for bash (4.4 or newer), zsh or fish.

    Completed are commands, options, the words an option takes, and paths. Each shell reads the
    script from a place of its own, when it starts:

    \b
      bash  ~/.local/share/bash-completion/completions/k3tool
      zsh   a file _k3tool in a folder of $fpath
      fish  ~/.config/fish/completions/k3tool.fish

    \b
    Example:
      k3tool completion bash > ~/.local/share/bash-completion/completions/k3tool
      k3tool completion fish > ~/.config/fish/completions/k3tool.fish
    """
    click.echo(run(Options(shell)))

"""`k3tool isa`: the manual of the instruction set, from the table every part derives from."""

from dataclasses import dataclass

import click

from k3tool.canonical import canonical_json
from k3tool.isa import manual
from stages import options as common


@dataclass(frozen=True, slots=True)
class Options:
    """Markdown for people, JSON for programs."""

    as_json: bool = False


def run(options: Options) -> str:
    """Return the manual's text."""
    if options.as_json:
        return canonical_json(manual.as_data())
    return manual.manual_text().removesuffix("\n")


@click.command("isa")
@common.as_json()
def command(as_json: bool) -> None:
    """Print the table of ops, as Markdown: numbers, operands, parameters, slicing, formula.

    \b
    Example:
      k3tool isa
      k3tool isa --json
    """
    click.echo(run(Options(as_json)))

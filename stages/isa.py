"""`k3tool isa`: the manual of the instruction set, from the table every part derives from."""

from dataclasses import dataclass

import click

from k3tool.canonical import canonical_json
from k3tool.isa import manual


@dataclass(frozen=True, slots=True)
class Options:
    """The format: `md` or `json`."""

    format: str = "md"


def run(options: Options) -> str:
    """Return the manual's text."""
    if options.format == "json":
        return canonical_json(manual.as_data())
    return manual.manual_text().removesuffix("\n")


@click.command("isa")
@click.option(
    "--format", "format_", type=click.Choice(["md", "json"]), default="md", show_default=True,
    help="Markdown for people, JSON for programs.",
)  # fmt: skip
def command(format_: str) -> None:
    """Print the table of ops: numbers, operands, parameters, slicing, formula.

    \b
    Example:
      k3tool isa --format md
    """
    click.echo(run(Options(format_)))

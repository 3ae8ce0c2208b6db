"""What every command's help has in common, put there in one place: click's own words say less."""

import re
from collections.abc import Mapping
from typing import Any

import click

# One line a code; the README and docs/errors.md say more. A test compares them with the classes.
EXIT_CODES = (
    "Exit codes: 0 done and sound, 1 failed, 2 usage, 3 an input missing, damaged or mismatched, "
    "4 the result must not be trusted, 5 this machine lacks something (docs/errors.md)."
)
_COUNT, _NUMBER = "N", "X"  # instead of INTEGER RANGE and FLOAT RANGE, beside which the range is


TRACEBACK = "--traceback"


class Sectioned(click.Command):
    """A command whose options stand in sections: fifty in one list are read by nobody."""

    def __init__(self, *args: Any, sections: Mapping[str, str], **kwargs: Any) -> None:
        """Take the sections in their order: heading, and the first option that stands in it.

        The others follow as they are declared, so that a new one has a section at once.
        """
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        headings = {first: heading for heading, first in self.sections.items()}
        rows: dict[str, list[tuple[str, str]]] = {}
        heading = "Options"
        for one in self.get_params(ctx):
            heading = next((headings[name] for name in one.opts if name in headings), heading)
            record = one.get_help_record(ctx)
            if record is not None and isinstance(one, click.Option):
                rows.setdefault(heading, []).append(record)
        for heading, found in rows.items():
            with formatter.section(heading):
                formatter.write_dl(found)


def finish(command: click.Command) -> None:
    """Give a command and its subcommands exit codes at the end, numbers a short name, and lists of
    commands the whole first sentence: click cuts one that is longer than the line's rest, and for
    a shell's completion at 45 characters. And --traceback, which one adds to the end of the line
    that was refused.
    """
    command.epilog = EXIT_CODES
    if not any(TRACEBACK in one.opts for one in command.params):
        command.params.append(_traceback())
    command.short_help = command.short_help or _first_sentence(command.help or "")
    for one in command.params:
        if isinstance(one, click.Option) and one.metavar is None and not one.is_flag:
            if isinstance(one.type, click.types.IntParamType):
                one.metavar = _COUNT
            elif isinstance(one.type, click.types.FloatParamType):
                one.metavar = _NUMBER
            elif one.type is click.STRING and one.opts[-1].startswith("--"):
                one.metavar = one.opts[-1][2:].upper()  # --target TARGET, not TEXT
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            finish(subcommand)


def _traceback() -> click.Option:
    """Return the option that k3tool itself has, for the end of a line."""

    def tell(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_root().params["traceback"] = True

    return click.Option(
        [TRACEBACK], is_flag=True, expose_value=False, is_eager=True, callback=tell,
        help="Show where in the code an error arose.",
    )  # fmt: skip


def _first_sentence(text: str) -> str:
    words = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", words, maxsplit=1)[0]

"""What every command's help has in common, put there in one place: click's own words say less."""

import re

import click

# One line a code; the README and docs/errors.md say more. A test compares them with the classes.
EXIT_CODES = (
    "Exit codes: 0 done and sound, 1 failed, 2 usage, 3 an input missing, damaged or mismatched, "
    "4 the result must not be trusted, 5 this machine lacks something (docs/errors.md)."
)
_COUNT, _NUMBER = "N", "X"  # instead of INTEGER RANGE and FLOAT RANGE, beside which the range is


TRACEBACK = "--traceback"


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

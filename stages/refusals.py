"""What click refuses, in the form of all refusals: `k3tool run: --gen: got 0, need at least 1`.

click says what is wrong in a sentence; what was given is taken out of it, what is needed comes from
the parameter. A value that has its own words raises UsageError itself, and does not come here.
"""

import re
from collections.abc import Iterable

import click

from k3tool.errors import UsageError, bounded, listed, quoted

PROGRAM = "k3tool"
_VALUE = re.compile(r"(.*) is not ", re.DOTALL)  # of all of click's own types
_IN_BRACKETS = re.compile(r"\((.*)\)", re.DOTALL)
_MOST_GOT = 200  # characters of a value: a whole prompt says no more than its beginning
_WORDS = "k3tool.words"


class Commands(click.Group):
    """A group that notes which of its commands was chosen, and names the nearest of one it lacks.

    A refusal says who refuses, `k3tool verify ranks`, also where that command was not yet there.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command. Raises: UsageError for one that is not there."""
        if not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            if args[0] not in names:
                raise UsageError(
                    quoted_if_odd(args[0]), got="no such command", need=f"one of {listed(names)}",
                    hint=_next_step(ctx, _nearest(args[0], names)),
                )  # fmt: skip
            ctx.meta.setdefault(_WORDS, []).append(args[0])
        return super().resolve_command(ctx, args)


def command_of(ctx: click.Context | None) -> str:
    """Return the command that was chosen, `verify ranks`; nothing where none was found."""
    return " ".join(() if ctx is None else ctx.meta.get(_WORDS, ()))


def name_of(param: click.Parameter) -> str:
    """Return what a message calls an option or argument: `--gen`, `-o`, `CHECKPOINT`."""
    if isinstance(param, click.Option):
        return "-o" if "-o" in param.opts else param.opts[-1]
    return (param.metavar or param.human_readable_name).split()[0].upper()


def unfit(
    param: click.Parameter | None, ctx: click.Context | None, *, got: object, need: str
) -> UsageError:
    """Return the refusal of a value by a type or callback of ours."""
    name = "a value" if param is None else name_of(param)
    return UsageError(name, got=got, need=need, hint=_next_step(ctx))


def in_our_form(error: click.UsageError, root: click.Context | None) -> UsageError:
    """Return what click refused, on a line that began as `root`, as a refusal of ours."""
    ctx = error.ctx or _chosen(root)
    found = _refusal(error, ctx)
    found.hint = found.hint or _next_step(ctx)
    found.__cause__ = error  # where it arose, for --traceback
    return found


def _chosen(root: click.Context | None) -> click.Context | None:
    """Return a context of the command that was chosen: click's parser does not say its own."""
    ctx = root
    for name in () if root is None else root.meta.get(_WORDS, ()):
        assert ctx is not None
        assert isinstance(ctx.command, click.Group)
        command = ctx.command.get_command(ctx, name)
        assert command is not None
        ctx = click.Context(command, parent=ctx, info_name=name)
    return ctx


def _refusal(error: click.UsageError, ctx: click.Context | None) -> UsageError:
    if isinstance(error, click.NoSuchOption):
        need, near = f"an option of {_path(ctx)}", (error.possibilities or ())[:1]
        name = quoted_if_odd(error.option_name)
        return UsageError(name, got="no such option", need=need, hint=_next_step(ctx, near))
    if isinstance(error, click.BadOptionUsage):
        return _without_value(error.option_name, ctx)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return UsageError(name_of(error.param), got="none", need=_missing(error.param))
    if isinstance(error, click.BadParameter) and error.param is not None:
        return _bad_value(error.param, error.message, ctx)
    extra = _IN_BRACKETS.search(error.message)
    if extra is not None and ctx is not None:
        # The only refusal of click's that has no class of its own.
        pieces = ctx.command.collect_usage_pieces(ctx)[1:]
        need = f"{' '.join(pieces)} alone" if pieces else "options alone"
        return UsageError(quoted_if_odd(extra[1]), got="an argument too many", need=need)
    return UsageError("command line", got=error.format_message(), need="what the help says")


def _without_value(option: str, ctx: click.Context | None) -> UsageError:
    """Return the refusal of an option without its value, or of a switch with one."""
    params = () if ctx is None else ctx.command.params
    param = next((one for one in params if option in (*one.opts, *one.secondary_opts)), None)
    if param is None or (isinstance(param, click.Option) and param.is_flag):
        return UsageError(option, got="a value", need=f"{option} alone: it is a switch")
    return UsageError(name_of(param), got="no value", need=needed(param))


def _bad_value(param: click.Parameter, message: str, ctx: click.Context | None) -> UsageError:
    """Return the refusal of a value by one of click's types."""
    found = _VALUE.match(message)
    got = message if found is None else found[1]
    is_out_of_range = got == _plain(got)  # a number that was read; else the text that was typed
    got = _plain(got).removesuffix(".0" if is_out_of_range else "")
    near: list[str] = []
    if isinstance(param.type, click.Choice):
        near = _nearest(got, map(str, param.type.choices))
    need = _bounds(param.type) if is_out_of_range else ""
    return UsageError(
        name_of(param), got=bounded(quoted_if_odd(got), _MOST_GOT), need=need or needed(param),
        hint=_next_step(ctx, near),
    )  # fmt: skip


def needed(param: click.Parameter) -> str:
    """Return what a parameter takes."""
    kind = param.type
    if isinstance(kind, click.Choice):
        return f"one of {listed(kind.choices)}"
    if isinstance(kind, click.Path):
        return "a path"
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        what = "a number" if isinstance(kind, click.types.FloatParamType) else "a whole number"
        return ", ".join(filter(None, (what, _bounds(kind))))
    return f"a value ({param.metavar})" if param.metavar else "a value"


def _bounds(kind: object) -> str:
    """Return the range of a number: `at least 1`, `0 to 64`; nothing where there is none."""
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    least, most = (None if one is None else f"{one}".removesuffix(".0")
                   for one in (kind.min, kind.max))  # fmt: skip
    if least is not None and most is not None and not (kind.min_open or kind.max_open):
        return f"{least} to {most}"
    parts = []
    if least is not None:
        parts.append(f"{'above' if kind.min_open else 'at least'} {least}")
    if most is not None:
        parts.append(f"{'below' if kind.max_open else 'at most'} {most}")
    return ", ".join(parts)


def _missing(param: click.Parameter) -> str:
    """Return what is needed where nothing was given: its kind, and of an option what it says."""
    said = (param.help or "").split(". ")[0].rstrip(".") if isinstance(param, click.Option) else ""
    return f"{needed(param)}: {said[:1].lower()}{said[1:]}" if said else needed(param)


def _nearest(word: str, words: Iterable[str]) -> list[str]:
    import difflib  # not before something is refused

    return difflib.get_close_matches(word, list(words), n=1)


def _next_step(ctx: click.Context | None, near: Iterable[str] = ()) -> str:
    see = f"see {_path(ctx)} --help"
    names = " or ".join(near)
    return f"did you mean {names}? Else {see}" if names else see


def _path(ctx: click.Context | None) -> str:
    return PROGRAM if ctx is None else ctx.command_path


def _plain(text: str) -> str:
    """Return a value as it was typed: click shows most as Python writes them."""
    if text[:1] in ("'", '"'):
        import ast

        try:
            return str(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            return text
    return text


def quoted_if_odd(text: str) -> str:
    """Return what was typed; quoted where it is empty, or white space could hide in it."""
    return text if text and text == text.strip() else quoted(text)

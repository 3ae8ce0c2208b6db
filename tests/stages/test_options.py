"""All commands as one set: an option is the same thing everywhere, and help is in one form."""

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click
import pytest

from k3tool.errors import K3Error
from stages import cli
from stages.help import EXIT_CODES, Sectioned

Run = Callable[..., Any]
# click's names for types, which say nothing to a person: an option names what it takes.
TYPE_NAMES = {"INTEGER", "FLOAT", "INTEGER RANGE", "FLOAT RANGE", "FILENAME", "DIRECTORY"}
# The same word for two things, each plain from its command; nothing else may join without a reason.
TWO_MEANINGS = {
    "--weights": "run: how they are held; verify coverage: where they are",
    "--preset": "run: an amount of memory; sample: a shape of model",
    "--against": "inspect: a fingerprint; verify blocks: a checkpoint; bench decode: another build",
    "--batch": "run: a file of requests; compile-plan: how many sequences a program holds",
}
# Words of a shell that end one command or lead its output elsewhere.
_SHELL = {"|", "&&", ";", "||", "&"}


class Named(NamedTuple):
    """A command by its words: ("verify", "ranks")."""

    words: tuple[str, ...]
    command: click.Command

    @property
    def text(self) -> str:
        """Return it as it is typed."""
        return " ".join(("k3tool", *self.words))


def commands() -> list[Named]:
    """Return every command, groups too."""

    def walk(words: tuple[str, ...], command: click.Command) -> Iterator[Named]:
        yield Named(words, command)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk((*words, name), found)

    return list(walk((), cli.cli))


COMMANDS = commands()
IDS = [named.text for named in COMMANDS]


def options() -> dict[str, list[tuple[str, click.Option]]]:
    """Return the uses of each option by its name: (command, option)."""
    found: dict[str, list[tuple[str, click.Option]]] = defaultdict(list)
    for named in COMMANDS:
        for one in named.command.params:
            if isinstance(one, click.Option):
                for name in (*one.opts, *one.secondary_opts):
                    found[name].append((named.text, one))
    return dict(found)


def metavar(one: click.Option) -> str:
    """Return what help shows that an option takes; nothing for a flag."""
    return "" if one.is_flag else one.make_metavar(click.Context(cli.cli))


def test_the_walk_sees_every_command() -> None:
    assert {"k3tool", "k3tool run", "k3tool verify ranks", "k3tool bench io"} <= set(IDS)
    assert {named.words[0] for named in COMMANDS if named.words} == set(cli.COMMANDS)


# -- one word, one thing --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(options()))
def test_the_same_option_takes_the_same_thing(name: str) -> None:
    uses = options()[name]
    if name in TWO_MEANINGS:
        assert len({metavar(one) for _, one in uses}) > 1, f"{name} has one meaning now"
        return
    assert len({metavar(one) for _, one in uses}) == 1, [(c, metavar(one)) for c, one in uses]
    assert len({tuple(one.opts) for _, one in uses}) == 1, uses  # -o is --output everywhere
    assert len({one.is_flag for _, one in uses}) == 1, uses


@pytest.mark.parametrize("named", COMMANDS, ids=IDS)
def test_help_of_options_is_in_one_form(named: Named) -> None:
    for one in named.command.params:
        if not isinstance(one, click.Option):
            continue
        name, text = one.opts[-1], one.help or ""
        assert metavar(one) not in TYPE_NAMES, f"{name}: say what it takes"
        assert re.match(r"[A-Z$-]", text), f"{name}: {text}"
        assert text.endswith("."), f"{name}: {text}"
        assert "(default" not in text, f"{name}: 'Default: ...' at the end"
        has_default = isinstance(one.default, int | float | str) and not one.is_flag
        assert not has_default or one.show_default, f"{name}: its default is not shown"


@pytest.mark.parametrize("named", COMMANDS, ids=IDS)
def test_json_and_output_are_spelled_alike(named: Named) -> None:
    names = {option for one in named.command.params for option in one.opts}
    assert ("-o" in names) == ("--output" in names)
    assert ("-v" in names) == ("--verbose" in names)
    assert not names & {"--out", "--outfile", "--as-json", "--tensor-parallel", "--nthreads"}


# -- help as a manual's page ----------------------------------------------------------------------


def examples(command: click.Command) -> list[str]:
    """Return the lines of a help text's Example block, continued lines joined."""
    _, _, block = (command.help or "").partition("Example:\n")
    text = block.split("\n\n")[0].replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip()]


def parts(line: str) -> list[list[str]]:
    """Return the commands of a line of shell, as words: without pipes and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in _SHELL:
            found.append([])
        elif word in (">", "<", ">>"):
            next(words)
        else:
            found[-1].append(word)
    return found


def parse(words: list[str]) -> str:
    """Parse a command line as k3tool would, run nothing, and return the command's text.

    Raises: as the command line does for a bad one.
    """
    command, seen = cli.cli, ["k3tool"]
    rest = words[words.index("k3tool") + 1 :]  # behind mpirun, say
    current: click.Command = command
    while isinstance(current, click.Group):
        found = current.get_command(click.Context(current), rest[0])
        if found is None:
            raise click.UsageError(f"no command {rest[0]}")
        seen.append(rest.pop(0))
        current = found
    with current.make_context(" ".join(seen), rest, resilient_parsing=False):
        return " ".join(seen)


@pytest.mark.parametrize("named", COMMANDS, ids=IDS)
def test_every_command_says_what_it_does_and_has_examples_that_parse(named: Named) -> None:
    text = named.command.help or ""
    first = text.split("\n\n")[0]
    assert first.rstrip().endswith("."), first
    shown = examples(named.command)
    assert shown, "no Example block"
    assert all("k3tool" in line or line.startswith("curl ") for line in shown), shown
    parsed = [parse(words) for line in shown for words in parts(line) if "k3tool" in words]
    assert len(parsed) >= sum("k3tool" in line for line in shown)
    assert any(each.startswith(named.text) for each in parsed), shown


MOST_IN_A_LIST = 18  # options, which one still looks through


@pytest.mark.parametrize("named", COMMANDS, ids=IDS)
def test_a_long_list_of_options_has_headings(k3tool: Run, named: Named) -> None:
    own = [one for one in named.command.params if isinstance(one, click.Option)]
    out = k3tool(*named.words, "--help").out
    if isinstance(named.command, Sectioned):
        first = {name for one in own for name in one.opts} & set(named.command.sections.values())
        assert first == set(named.command.sections.values()), "a section begins with no option"
        at = [out.index(f"\n{heading}:\n") for heading in named.command.sections]
        assert at == sorted(at)
        assert "\nOptions:\n" not in out, "an option stands in front of all headings"
        assert all(f"  {one.opts[-1]}" in out or f", {one.opts[-1]}" in out for one in own)
    else:
        assert len(own) <= MOST_IN_A_LIST, f"{len(own)} options in one list: give it sections"


def test_an_example_with_a_wrong_option_would_be_seen() -> None:
    assert parse(["mpirun", "-n", "8", "k3tool", "shard", "CKPT", "--tp", "8"]) == "k3tool shard"
    for words in ("run CKPT --nonsense", "bench nonsense", "run CKPT --gen none", "shard"):
        with pytest.raises((click.UsageError, K3Error)):
            parse(["k3tool", *words.split()])
    assert parts("echo a | k3tool run CKPT > out.txt && k3tool isa") == [
        ["echo", "a"], ["k3tool", "run", "CKPT"], ["k3tool", "isa"],
    ]  # fmt: skip


@pytest.mark.parametrize("named", COMMANDS, ids=IDS)
def test_help_ends_with_what_an_exit_code_means(k3tool: Run, named: Named) -> None:
    done = k3tool(*named.words, "--help")
    assert done.code == 0
    assert done.out.startswith(f"Usage: {named.text} ")
    assert "Exit codes: 0 done and sound" in done.out
    assert "docs/errors.md" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_exit_codes_of_help_are_those_of_the_classes() -> None:
    classes = {K3Error, *K3Error.__subclasses__()}
    said = {int(code) for code in re.findall(r"\b(\d) ", EXIT_CODES)}
    assert said == {0} | {one.exit_code for one in classes}

"""What click refuses is said in the one form of all refusals, of every command."""

import shlex
from collections.abc import Callable
from typing import Any

import click
import pytest

from stages import refusals
from tests.stages.test_options import COMMANDS, IDS, Named

Run = Callable[..., Any]
UNFINISHED = (",", "of")  # a list that goes on
# Every kind of refusal that click has: the exact words for it, and the next step.
REFUSED = {
    "inpsect x": (
        "k3tool: inpsect: got no such command, need one of inspect, shard,",
        "did you mean inspect? Else see k3tool --help",
    ),
    "nonsense": (
        "k3tool: nonsense: got no such command, need one of",
        "see k3tool --help",
    ),
    "verify rank a": (
        "k3tool verify: rank: got no such command, need one of blocks, coverage,",
        "did you mean ranks? Else see k3tool verify --help",
    ),
    "--no": (
        "k3tool: --no: got no such option, need an option of k3tool",
        "see k3tool --help",
    ),
    "run x --ids 1 --gne 3": (
        "k3tool run: --gne: got no such option, need an option of k3tool run",
        "did you mean --gen? Else see k3tool run --help",
    ),
    "bench decode": (
        "k3tool bench decode: CHECKPOINT: got none, need a path",
        "see k3tool bench decode --help",
    ),
    "completion": (
        "k3tool completion: SHELL: got none, need one of bash, zsh, fish",
        "see k3tool completion --help",
    ),
    "emit-isa plan.h5": (
        "k3tool emit-isa: -o: got none, need a path: where to write the streams (isa.h5)",
        "see k3tool emit-isa --help",
    ),
    "inspect a b c": (
        "k3tool inspect: b c: got an argument too many, need CHECKPOINT alone",
        "see k3tool inspect --help",
    ),
    "isa b": (
        "k3tool isa: b: got an argument too many, need options alone",
        "see k3tool isa --help",
    ),
    "run x --ids 1 --gen 0": (
        "k3tool run: --gen: got 0, need at least 1",
        "see k3tool run --help",
    ),
    "run x --gen two": (
        "k3tool run: --gen: got two, need a whole number, at least 1",
        "see k3tool run --help",
    ),
    "run x --gen ''": (
        'k3tool run: --gen: got "", need a whole number, at least 1',
        "see k3tool run --help",
    ),
    "run x --gen": (
        "k3tool run: --gen: got no value, need a whole number, at least 1",
        "see k3tool run --help",
    ),
    "run x --prompt": (
        "k3tool run: --prompt: got no value, need a value (TEXT)",
        "see k3tool run --help",
    ),
    "inspect x -o": (
        "k3tool inspect: -o: got no value, need a path",
        "see k3tool inspect --help",
    ),
    "run x --json=3": (
        "k3tool run: --json: got a value, need --json alone: it is a switch",
        "see k3tool run --help",
    ),
    "run x --numerics f3": (
        "k3tool run: --numerics: got f3, need one of f32, bf16",
        "did you mean f32? Else see k3tool run --help",
    ),
    "bench gemv --threads 0": (
        "k3tool bench gemv: --threads: got 0, need 1 to 1024",
        "see k3tool bench gemv --help",
    ),
    "bench simulate x --stall-rate 2": (
        "k3tool bench simulate: --stall-rate: got 2, need 0 to 1",
        "see k3tool bench simulate --help",
    ),
    "verify logits a b --rms 0": (
        "k3tool verify logits: --rms: got 0, need above 0",
        "see k3tool verify logits --help",
    ),
    "verify logits a b --rms inf": (
        "k3tool verify logits: --rms: got inf, need a finite number",
        "see k3tool verify logits --help",
    ),
    "verify logits a b --rms x": (
        "k3tool verify logits: --rms: got x, need a number, above 0",
        "see k3tool verify logits --help",
    ),
    "bench gemv --numerics f32 --numerics f32": (
        "k3tool bench gemv: --numerics: got f32 more than once, need each value once",
        "see k3tool bench gemv --help",
    ),
    "verify plan ''": (
        "k3tool verify plan: PLAN: got an empty path, need a name; the current folder is .",
        "see k3tool verify plan --help",
    ),
    "inspect x --layers 5-3": (
        'k3tool inspect: --layers: got "5-3", need a layer or a range such as 3-5, below 1024',
        "see k3tool inspect --help",
    ),
    "disasm x --range a": (
        'k3tool disasm: --range: got "a", need A:B, such as 0:8',
        "see k3tool disasm --help",
    ),
    "disasm x --range=-3:2": (
        'k3tool disasm: --range: got "-3:2", need bounds that count from 0',
        "see k3tool disasm --help",
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_click_refuses_is_said_in_our_form(k3tool: Run, line: str) -> None:
    words, hint = REFUSED[line]
    done = k3tool(*shlex.split(line))
    assert (done.code, done.out) == (2, "")
    said, step = done.err.splitlines()
    assert said.startswith(words)
    assert said == words or words.endswith(UNFINISHED)
    assert step == f"  hint: {hint}"


def options_with_a_type() -> list[tuple[Named, click.Option]]:
    """Return all options that click itself reads, number or choice, of all commands."""
    kinds = (click.Choice, click.types.IntParamType, click.types.FloatParamType)
    return [
        (named, one)
        for named in COMMANDS
        for one in named.command.params
        if isinstance(one, click.Option) and isinstance(one.type, kinds) and not one.is_flag
    ]


TYPED = options_with_a_type()


@pytest.mark.parametrize(
    ("named", "option"), TYPED, ids=[f"{named.text} {one.opts[-1]}" for named, one in TYPED]
)
def test_every_option_refuses_a_value_of_another_type_by_its_name(
    k3tool: Run, named: Named, option: click.Option
) -> None:
    given = k3tool(*named.words, option.opts[-1], "~")
    assert given.code == 2
    name = refusals.name_of(option)
    assert given.err.startswith(f"{named.text}: {name}: got ~, need {refusals.needed(option)}\n")
    assert f"see {named.text} --help" in given.err


@pytest.mark.parametrize("named", COMMANDS, ids=IDS)
def test_every_command_says_who_refuses(k3tool: Run, named: Named) -> None:
    given = k3tool(*named.words, "--no-such-option")
    assert (given.code, given.out) == (2, "")
    need = f"need an option of {named.text}"
    assert given.err.startswith(f"{named.text}: --no-such-option: got no such option, {need}\n")


def test_a_library_s_refusal_has_the_subcommand_in_front(k3tool: Run) -> None:
    for words in ("verify ranks", "bench chain", "disasm", "provenance"):
        given = k3tool(*words.split(), "nowhere.h5")
        assert given.code == 3
        assert given.err.startswith(f"k3tool {words}: nowhere.h5: got ")


def test_where_click_refused_is_shown_with_traceback(k3tool: Run) -> None:
    plain, traced = (k3tool(*where, "run", "x", "--gen", "0") for where in ((), ("--traceback",)))
    assert traced.err.startswith(plain.err)
    assert "Traceback" in traced.err
    assert "Traceback" not in plain.err


def test_what_click_says_in_other_words_is_not_lost() -> None:
    """A later click may have kinds and words that are not known here."""
    context = click.Context(click.Command("x"), info_name="x")
    option = click.Option(["--n"], type=int)
    other = click.BadParameter("seven, alas", ctx=context, param=option)
    assert refusals.in_our_form(other, None).text("x") == (
        "k3tool x: --n: got seven, alas, need a whole number\n  hint: see x --help"
    )
    other = click.UsageError("Do not do that.", ctx=context)
    assert "got Do not do that., need" in refusals.in_our_form(other, None).text("x")

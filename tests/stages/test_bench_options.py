"""bench: every option reaches what is measured; one that is dropped measures something else."""

import importlib
from collections.abc import Callable
from typing import Any

import click
import pytest

from k3tool.errors import K3Error
from stages.bench import command

# Of the output, not of the measurement; what they do is tried with the report and the baseline.
OUTPUT = {"strict", "as_json", "baseline", "chrome_trace", "page", "traceback"}
MODULES = {"inspect": "inspect_checkpoint", "long": "long_run"}
NAMES = sorted(set(command.commands) - {"report"})
CASES = [
    (name, param)
    for name in NAMES
    for param in command.commands[name].params
    if isinstance(param, click.Option) and param.name not in OUTPUT
]


class Asked(K3Error):
    """Raised in place of measuring."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, k3tool: Callable) -> Callable[..., str]:
    """Return what a command would measure, in words."""

    def ask(name: str, *options: str) -> str:
        found: list[str] = []

        def run(*args: Any, **kwargs: Any) -> None:
            found.append(repr((args, kwargs)))
            raise Asked("asked", got="enough", need="no more")

        module = importlib.import_module(f"stages.bench.{MODULES.get(name, name)}")
        monkeypatch.setattr(module, "run", run)
        arguments = ["x" for p in command.commands[name].params if isinstance(p, click.Argument)]
        done = k3tool("bench", name, *arguments, *options)
        assert found, done.err
        return found[0]

    return ask


def another(param: click.Option) -> list[str]:
    """An option with a value that is not its default."""
    kind, option = param.type, param.opts[-1]
    if param.is_flag:
        return [option]
    if isinstance(kind, click.Choice):
        default = param.default if isinstance(param.default, tuple) else (param.default,)
        others = [one for one in kind.choices if [one] != [*default]]
        return [option, str(others[-1])]
    if isinstance(kind, click.FloatRange):
        return [option, "0.5" if kind.max == 1.0 else "77.5"]
    if isinstance(kind, click.types.IntParamType):
        return [option, "11"]
    return [option, "1,2" if param.name in ("ids", "layers") else "elsewhere"]


@pytest.mark.parametrize(
    ("name", "param"), CASES, ids=[f"{name} {param.opts[-1]}" for name, param in CASES]
)
def test_an_option_changes_what_is_measured(
    asked: Callable[..., str], name: str, param: click.Option
) -> None:
    given = another(param)
    assert asked(name, *given) == asked(name, *given), "the control: the same is the same"
    assert asked(name, *given) != asked(name)


@pytest.mark.parametrize("name", NAMES)
def test_common_options_are_everywhere(name: str) -> None:
    """--json and --baseline of all; --repeats of all that is measured more than once."""
    options = {param.name for param in command.commands[name].params}
    assert {"as_json", "baseline"} <= options
    counts = {"chain", "cache", "simulate", "roofline"}  # the same every time
    assert ("repeats" in options) == (name not in counts | {"long"})


def test_a_value_given_twice_is_refused(k3tool: Callable) -> None:
    for name, option, value in (("gemv", "--numerics", "f32"), ("cache", "--slots", "3")):
        path = ["x"] if name == "cache" else []
        done = k3tool("bench", name, *path, option, value, option, value)
        assert (done.code, "more than once" in done.err) == (2, True), name

"""`k3tool doctor`: what this machine can do, what of a model fits, and the command to type next."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.canonical import canonical_json
from k3tool.errors import ArtifactError, TargetError, incomplete
from k3tool.tables import count_text
from k3tool.verdict import Check, not_run, passed, summary
from stages import options as common

if TYPE_CHECKING:
    from k3tool.runtime.advice import Advice
    from k3tool.runtime.machine_rates import Rate

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to look at: a checkpoint, shards, a config, or the machine alone.

    `tp` is the degree to run a model at; None: its shards', or 1.
    """

    source: Path | None = None
    cache: Path | None = None
    measure: bool = True
    tp: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """All checks, in order; rates in bytes a second, None where not measured; what to type next."""

    checks: tuple[Check, ...]
    storage_rate: float | None
    memory_rate: float | None
    advice: "Advice | None"
    next: str

    @property
    def failures(self) -> tuple[Check, ...]:
        """Return what no command, or no run of this model, can do without."""
        return tuple(check for check in self.checks if check.status == "FAIL")


def run(options: Options, say: Say = lambda text: None) -> Result:
    """Look at the machine, then at the model.

    Raises: ArtifactError for a source that a run would refuse, UsageError for a degree, before
    anything is measured.
    """
    from k3tool.runtime import advice as advising
    from k3tool.runtime.cache import default_cache
    from k3tool.runtime.machine import existing, machine_checks
    from k3tool.runtime.machine_devices import device_checks

    if options.tp is not None and options.source is None:
        raise incomplete("--tp", "SOURCE", "a degree is a model's")
    model = None if options.source is None else advising.open_model(options.source, options.tp)
    cache = options.cache or default_cache()
    checks = [*machine_checks(cache), *device_checks()]
    size = advising.expert_bytes(model.config) if model else advising.RELEASED_EXPERT_BYTES
    has_weights = model is not None and model.has_weights
    place = options.source if options.source is not None and has_weights else existing(cache)
    storage, memory = _rates(options, place, has_weights, size, checks, say)
    advice = None
    if model is not None:
        say("compiling for the least budget and for all of it")
        advice = advising.advise(model)
        checks += advising.model_checks(model, advice) + advising.own_checks(model, cache)
    broken = [check for check in checks if check.status == "FAIL"]
    following = advising.next_command(model, advice, storage, memory, broken)
    return Result(tuple(checks), storage, memory, advice, following)


def _rates(
    options: Options, place: Path, has_weights: bool, size: int, checks: list[Check], say: Say
) -> tuple[float | None, float | None]:
    """Measure storage and memory, and add what was found to the checks."""
    from k3tool.runtime.machine import INTERPRETER

    broken = any(check.name == INTERPRETER and check.status == "FAIL" for check in checks)
    if broken or not options.measure:
        why = f"needs the {INTERPRETER}" if broken else "--no-measure"
        checks += [not_run(name, why) for name in ("storage rate", "memory rate")]
        return None, None
    from k3tool.runtime import machine_rates

    say(f"reading from {place}, a few seconds")
    reader = machine_rates.storage_of if has_weights else machine_rates.storage_at
    storage = reader(place, size)
    say("reading memory, a few seconds")
    memory = machine_rates.memory()
    checks += [_rate_check("storage rate", storage), _rate_check("memory rate", memory)]
    return storage.value, memory.value


def _rate_check(name: str, rate: "Rate") -> Check:
    return not_run(name, rate.detail) if rate.value is None else passed(name, rate.detail)


@click.command("doctor")
@click.argument("source", type=common.PATH, required=False)
@click.option(
    "--cache",
    type=common.PATH,
    help="Where missing stages are built. Default: $XDG_CACHE_HOME/k3tool, or ~/.cache/k3tool.",
)
@click.option(
    "--measure/--no-measure", default=True, show_default=True,
    help="Measure storage and memory: some seconds, at most 512 MiB read of the weights; without "
    "any, of a temporary file of 128 MiB beside the cache, which is removed.",
)  # fmt: skip
@common.tp()
@common.as_json()
def command(
    source: Path | None, cache: Path | None, measure: bool, tp: int | None, as_json: bool
) -> None:
    """Say what this machine can do, which preset fits a model, and what to type next.

    SOURCE is a checkpoint folder, a shards folder or a config.json; its tokenizer is looked at as a
    run does. Each line is PASS, FAIL or NOT RUN: what is merely not here, with what to install. The
    last line is a command to copy. Exit code 5 where this machine cannot run, or not this model,
    and 3 where the tokenizer alone is at fault.

    \b
    Example:
      k3tool doctor
      k3tool doctor CKPT --tp 8
      k3tool doctor config.json --json
    """

    def say(text: str) -> None:
        if not as_json:
            click.echo(text, err=True)

    result = run(Options(source, cache, measure, tp), say)
    if as_json:
        click.echo(canonical_json(asdict(result)))
    else:
        for check in result.checks:
            click.echo(f"{check.status:<7} {check.name}: {check.detail}")
        verdict = "FAIL" if result.failures else "PASS"
        click.echo(f"{verdict}: {summary(result.checks)}")
        click.echo(f"next: {result.next}")
    if result.failures:
        from k3tool.runtime.text_checks import TOKENIZER

        names = list(dict.fromkeys(check.name for check in result.failures))
        got = f"{count_text(len(result.failures), 'failed check')} ({', '.join(names)})"
        if names == [TOKENIZER]:
            raise ArtifactError(str(source), got=got, need="none", hint=result.next)
        raise TargetError("this machine", got=got, need="none", hint=result.next)

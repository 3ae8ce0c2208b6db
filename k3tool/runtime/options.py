"""What a run is asked for, and every refusal that needs no weight: ids, lengths, prefill."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from k3tool.errors import UsageError, excluded, incomplete, quoted, shown
from k3tool.isa.table import PAGE_TOKENS
from k3tool.model.config import K3Config
from k3tool.model.graph import MODES
from k3tool.runtime.sampling import GREEDY, Sampler
from k3tool.targets import DEFAULT_CONTEXT, check_layout
from k3tool.trace.kept import Kept

_MOST_THREADS = 1024
_RECOMPILE = "leave it out, or compile a plan with it"
_MOST_DIGITS = 20  # of an id: int() itself fails at some thousands
MOST_DEADLINE_SECONDS = 1e6  # the rank counts nanoseconds in 64 bits; more is a mistake anyway


@dataclass(frozen=True, slots=True)
class RunOptions:
    """One run. `source` is a checkpoint or a shards folder; None means: chosen from the rest.

    `beside` are more folders of the same model: copies of its files, or the rest of them.

    `threads` is per rank. `batch` is how many sequences are held at once: slots of the program.
    `prefill` names the program that reads the prompt; `decode` reads one token a step. `numerics`,
    `without` and `eps` change the plan. `memory_bytes` is for all ranks and the driver; None maps
    the weights and leaves memory to the system, or copies them as `weights` says
    (``k3tool.runtime.copying``). `expert_trace` is where to record which experts were asked for,
    `trace_hashes` where to record a hash of every result, with the values that `trace_at` names.
    `stop_ids` end the run beside the model's own end ids, which `ignore_eos` leaves out.
    `interpreter` runs another build of `k3-cpu`. `target` is refused where it is not here; nothing
    else runs in its place. `logits` keeps all logits, `logits_output` is where to write them.
    `save_state` is where to keep the sequence as it stands at the end, `load_state` such a file to
    go on from: `ids` come behind what it holds.
    """

    source: Path
    ids: tuple[int, ...]
    gen: int
    tp: int | None = None
    threads: int | None = None
    chunk: int | None = None
    ctx: int | None = None
    batch: int | None = None
    workgroups: int | None = None
    numerics: str | None = None  # mode of a compiled program: f32 unless asked for
    leaves: str = "auto"
    cache: Path | None = None
    ignore_eos: bool = False
    logits: bool = False
    logits_output: Path | None = None
    output: Path | None = None
    isa: Path | None = None
    plan: Path | None = None
    deadline_seconds: float = 60.0
    memory_bytes: int | None = None
    weights: str = "auto"
    expert_trace: Path | None = None
    prefill: str = "prefill"
    without: tuple[str, ...] = ()
    eps: Mapping[str, float] = field(default_factory=dict)
    interpreter: Path | None = None
    target: str = "cpu"
    devices: int = 1  # that a GPU target's ranks are shared out among, as many on each
    is_launch_per_op: bool = False  # on a GPU, for bench: a launch for each instruction of a step
    beside: tuple[Path, ...] = ()
    save_state: Path | None = None
    load_state: Path | None = None
    start: int = 0  # positions before the prompt: those of a state that was loaded
    sampler: Sampler = GREEDY
    stop_ids: tuple[int, ...] = ()
    trace_hashes: Path | None = None
    trace_at: Kept | None = None


def parse_ids(text: str, option: str = "--ids") -> tuple[int, ...]:
    """Return token ids of `1,2,3`. Raises: UsageError quoting the part that is no id."""
    ids = []
    for part in text.split(","):
        word = part.strip()
        # Not int(): it takes "-1", "+1", "1_000" and digits of other scripts.
        if not (word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS):
            raise UsageError(option, got=quoted(part), need="token ids such as 1,2,3")
        ids.append(int(word))
    return tuple(ids)


_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)
_SIZE_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip


def parse_size(text: str, option: str = "--memory") -> int:
    """Return the bytes of `8GB`, `512 MiB` or a plain number. Raises: UsageError quoting it."""
    found = _SIZE.fullmatch(text)
    if found is None or found[2].upper() not in _SIZE_UNITS:
        raise UsageError(option, got=quoted(text), need="a size such as 8GB, 8GiB or 500MB")
    return int(Fraction(found[1]) * _SIZE_UNITS[found[2].upper()])  # a double may be a byte short


def check_request(options: RunOptions, config: K3Config, *, has_ids: bool = True) -> None:
    """Refuse what does not fit the model. Raises: UsageError naming the option.

    An engine is asked with no ids: its sequences come later.
    """
    if has_ids and not options.ids:
        raise UsageError("--ids", got="none", need="at least one token id")
    for nth, token in enumerate(options.ids, 1):
        if not 0 <= token < config.vocab_size:
            raise UsageError(
                f"--ids: id {nth} of {len(options.ids)}", got=token,
                need=f"0 to {config.vocab_size - 1} (vocab_size)",
            )  # fmt: skip
    for token in options.stop_ids:
        if not 0 <= token < config.vocab_size:
            need = f"0 to {config.vocab_size - 1} (vocab_size)"
            raise UsageError("--stop-id", got=token, need=need)
    for name in ("gen", "chunk", "ctx", "workgroups", "batch"):
        value = getattr(options, name)
        if value is not None:
            check_layout(name, value, "slots" if name == "batch" else None)
    if options.threads is not None and not 1 <= options.threads <= _MOST_THREADS:
        raise UsageError("--threads", got=options.threads, need=f"1 to {_MOST_THREADS}")
    if options.numerics not in (None, *MODES):
        raise UsageError("--numerics", got=options.numerics, need=" or ".join(MODES))
    if options.prefill not in ("prefill", "decode"):
        raise UsageError("--prefill", got=options.prefill, need="prefill or decode")
    if options.prefill == "decode" and options.chunk not in (None, 1):
        hint = "the decode program reads one prompt token a step: leave --chunk out"
        raise UsageError("--chunk", got=options.chunk, need="1 with --prefill decode", hint=hint)
    _check_trace(options, config)
    if options.isa is not None and options.plan is not None:
        raise excluded("--plan", "--isa")
    if options.memory_bytes is not None and (options.isa or options.plan):
        other = "--plan" if options.isa is None else "--isa"
        raise excluded("--memory", other, "a plan has its own budget")
    if not 0 < options.deadline_seconds <= MOST_DEADLINE_SECONDS:
        most = f"seconds above 0, at most {MOST_DEADLINE_SECONDS:.0f}"
        raise UsageError("--deadline", got=options.deadline_seconds, need=most)
    check_length(options, context_of(options, config), config.max_position_embeddings)


def _check_trace(options: RunOptions, config: K3Config) -> None:
    """Refuse values without a trace, or of what the run has not."""
    kept = options.trace_at
    if kept is None:
        return
    if options.trace_hashes is None:
        raise incomplete("--trace-at", "--trace-hashes", "values go to its file")
    n_positions = len(options.ids) + options.gen - 1
    if kept.last >= n_positions and options.load_state is None:  # else it begins further on
        need = f"positions 0 to {n_positions - 1}, the prompt's and those of tokens"
        raise UsageError("--trace-at", got=f"position {kept.last}", need=need)
    n_layers = len(config.layers)
    beyond = sorted(layer for layer in kept.layers or () if layer >= n_layers)
    if beyond:
        raise UsageError("--trace-at", got=f"layer {beyond[0]}", need=f"0 to {n_layers - 1}")


def logits_shape(options: RunOptions, config: K3Config) -> tuple[int, int] | None:
    """Return rows and columns of the logits that a run keeps, None where it keeps none.

    To draw a token, its own row is enough.
    """
    if not options.logits:
        return None if options.sampler.is_greedy else (1, config.vocab_size)
    return len(options.ids) + options.gen - 1, config.vocab_size


def logits_bytes(options: RunOptions, config: K3Config) -> int:
    """Return the bytes of logits in memory, those of an engine's slots with them."""
    rows, _ = logits_shape(options, config) or (0, 0)
    return max(rows, options.batch or 0) * config.vocab_size * 4


def check_length(options: RunOptions, context: int, limit: int) -> None:
    """Refuse a prompt and tokens that do not fit `context` positions; `limit` is the model's.

    Raises: UsageError with a hint that can work: no --ctx goes past the model's own limit.
    """
    n_read = options.start + len(options.ids)
    need = n_read + options.gen
    if need <= context:
        return
    of_model, fewer = "", "generate fewer, or shorten the prompt"
    if need > limit:
        of_model, hint = " (max_position_embeddings)" if context == limit else "", fewer
    elif options.isa is not None or options.plan is not None:
        hint = f"compile a plan with --ctx {need} or more, or {fewer}"
    else:
        hint = f"--ctx {need} or more, or {fewer}"
    raise UsageError(
        "prompt and tokens", got=f"{n_read} + {options.gen} = {need} positions",
        need=f"at most {context}{of_model}", hint=hint,
    )  # fmt: skip


def check_fixed(options: RunOptions, params: Mapping[str, Any], epsilons: object) -> None:
    """Refuse options that say otherwise than the program that was given: it is not compiled anew.

    `params` are the program's; `epsilons` is the model's with the options' own. `--chunk` may be
    less, it is a step's; `--ctx` names the positions or, as when compiling, any of the last page.
    Raises: UsageError naming the option.
    """
    which = "--isa" if options.isa is not None else "--plan"
    ctx, fixed = int(params["ctx"]), f"what {which} was compiled with"
    first = ctx - (ctx - 1) % PAGE_TOKENS
    if options.ctx is not None and not first <= options.ctx <= ctx:
        raise UsageError("--ctx", got=options.ctx, need=f"{ctx}, {fixed}", hint=_RECOMPILE)
    stated = {
        "tp": (options.tp, params["tp"]),
        "workgroups": (options.workgroups, params["workgroups"]),
        "slots": (options.batch, params["batch"]),
        "without": (sorted(set(options.without)) or None, params["rules_off"]),
        "eps": (epsilons if options.eps else None, params["eps"]),
    }
    for name, (got, need) in stated.items():
        if got is not None and got != need:
            raise UsageError(f"--{name}", got=got, need=f"{shown(need)}, {fixed}", hint=_RECOMPILE)
    if options.chunk is not None and options.chunk > int(params["chunk"]):
        need = f"at most {params['chunk']}, {fixed}"
        raise UsageError("--chunk", got=options.chunk, need=need, hint=_RECOMPILE)


def context_of(options: RunOptions, config: K3Config) -> int:
    """Return the positions to compile for: the default, or what a longer run needs.

    Raises: UsageError for more than the model has.
    """
    limit = config.max_position_embeddings
    if options.ctx is not None:
        if options.ctx > limit:
            raise UsageError(
                "--ctx", got=options.ctx, need=f"at most max_position_embeddings = {limit}"
            )
        return options.ctx
    need = options.start + len(options.ids) + options.gen
    context = DEFAULT_CONTEXT
    while context < need:
        context *= 2
    return min(context, limit)

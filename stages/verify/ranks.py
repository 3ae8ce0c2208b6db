"""`k3tool verify ranks`: compare the ranks of runs, and runs of any engine with each other."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from k3tool.compare.differences import NEAR_TIE, Decode, Difference
from k3tool.compare.ranks import Comparison, Terms, compare
from k3tool.compare.records import Record, read_records
from k3tool.errors import ArtifactError, UnsoundError, UsageError, listed, quoted, shown
from k3tool.model.config import K3Config
from k3tool.runtime.cache import default_cache
from k3tool.tables import Column, Table, count_text
from k3tool.terminal import print_table
from k3tool.text.tokenizer import open_tokenizer
from k3tool.verdict import Check, failed, require
from stages import options as common
from stages.verify import shared


@dataclass(frozen=True, slots=True)
class Options:
    """Which records to compare, and the margin below which a difference is a near tie."""

    files: tuple[Path, ...]
    strict: bool = False
    near_tie: float = NEAR_TIE
    tokenizer: Path | None = None
    request: str | None = None


@dataclass(frozen=True, slots=True)
class Result(shared.Result):
    """The checks, what was read, and what differs."""

    records: tuple[Record, ...]
    found: Comparison


def run(options: Options) -> Result:
    """Make the checks.

    Raises: UsageError for a file given twice; ArtifactError for damaged or unrelated inputs.
    """
    shared.require_apart(options.files)
    each = [read_records(path) for path in options.files]
    chosen = _alike(each, options.request)
    records = tuple(one for file in chosen for one in file)
    decode, vocab_size = None, None
    if options.tokenizer is not None:
        decode, vocab_size = _decoder(options.tokenizer)
    found = compare(records, Terms(options.near_tie, decode, vocab_size))
    found.checks += _lacking(options, chosen)
    made = shared.result_of(found.checks, strict=options.strict)
    return Result(made.checks, made.sound and found.verdict == "identical", records, found)


def _alike(files: list[list[Record]], request: str | None) -> list[list[Record]]:
    """Return each file's records, or those of one request, so that they can meet the others'.

    A file of one answer without a name meets one request of a file of several. Raises: UsageError
    where it is not said which.
    """
    everything = [one for file in files for one in file]
    names = sorted({str(one.request) for one in everything if one.request is not None})
    if request is not None and request not in names:
        raise UsageError("--request", got=quoted(request), need=f"one of {listed(names)}")
    if not names or (request is None and all(one.request is not None for one in everything)):
        return files
    if request is None and len(names) > 1:
        raise UsageError(
            "FILES", got=f"one answer beside {count_text(len(names), 'request')}",
            need="one request", hint=f"choose it with --request, of {listed(names)}",
        )  # fmt: skip
    chosen = names[0] if request is None else request
    return [
        [replace(one, file=one.name, request=None) for one in _of_one_name(file, chosen)]
        for file in files
    ]


def _of_one_name(file: Sequence[Record], name: str) -> list[Record]:
    """Return a file's answer of this name, or its only one that has none; nothing if it lacks it.

    Raises: ArtifactError where two have it, as the number 1 and the word "1": these answer
    different questions and must not meet each other.
    """
    found = [one for one in file if one.request is None or str(one.request) == name]
    if len(found) > 1:
        raise ArtifactError(
            f"{found[0].file}: request {shown(name)}",
            got="two of this name, a number and a word", need="one",
            hint="compare all requests (leave --request out), or name one of the two otherwise",
        )  # fmt: skip
    return found


def _lacking(options: Options, chosen: Sequence[Sequence[Record]]) -> list[Check]:
    """Return a failure for each file that was given and has nothing of what is compared."""
    have = [str(path) for path, file in zip(options.files, chosen, strict=True) if file]
    what = "" if options.request is None else f" request {shown(options.request)}"
    return [
        failed(f"{path}{what}", f"absent: only {listed(have)} has it")
        for path, file in zip(options.files, chosen, strict=True)
        if not file
    ]


def _decoder(folder: Path) -> tuple[Decode, int]:
    """Return what makes text of ids, and how many ids there are. Raises: ArtifactError."""
    n_ids = K3Config.load(folder / "config.json").vocab_size
    tokenizer = open_tokenizer(folder, n_ids, default_cache())

    def decode(ids: Sequence[int]) -> str:
        parts = (tokenizer.control_tokens.get(token, "").encode() or tokenizer.token_bytes(token)
                 for token in ids)  # fmt: skip
        return b"".join(parts).decode(errors="replace")

    return decode, n_ids


# -- what is printed -----------------------------------------------------------------------------


def stream_table(records: Sequence[Record]) -> Table:
    """Return one row a record: kind, ranks, tokens, and what is known of the prompt."""
    titles = ("stream", "kind", "ranks", "tokens", "prompt")
    columns = [Column(title, "right" if title in ("ranks", "tokens") else "left")
               for title in titles]  # fmt: skip
    return Table(columns, [_row(record) for record in records])


def _row(record: Record) -> list[str]:
    n_tokens = sorted({len(rows) for rows in record.ranks.values()}) or [0]
    tokens = str(n_tokens[0]) if len(n_tokens) == 1 else f"{n_tokens[0]}-{n_tokens[-1]}"
    ranks = str(record.n_ranks) if record.n_ranks is not None else "-"
    if record.n_ranks is None and "tp" in record.facts:
        ranks = record.facts["tp"][1]
    prompt = "unknown"
    if "prompt_tokens" in record.facts:
        which = "" if "prompt" in record.facts else ", unknown which"
        prompt = f"{record.facts['prompt_tokens'][1]} ids{which}"
    return [record.name, record.kind, ranks, tokens, prompt]


def _json(result: Result, near_tie: float) -> dict[str, object]:
    table = stream_table(result.records)
    titles = [column.title for column in table.columns]
    streams: list[dict[str, object]] = [
        dict(zip(titles, row, strict=True)) for row in table.rows
    ]  # fmt: skip
    for stream, record in zip(streams, result.records, strict=True):
        stream |= {"file": record.file, "request": record.request}
        stream["tokens"] = {rank: len(rows) for rank, rows in record.ranks.items()}
    return {
        "streams": streams,
        "verdict": result.found.verdict,
        "near_tie": near_tie,
        "differences": [_difference_json(each) for each in result.found.differences],
        "majorities": [asdict(each) for each in result.found.majorities],
    }


def _difference_json(difference: Difference) -> dict[str, object]:
    values = asdict(difference)
    for side in (values["left"], values["right"]):
        for name in ("logit", "margin"):  # JSON has no NaN
            if side is not None and side[name] is not None and not math.isfinite(side[name]):
                side[name] = None
    return values


def _show(result: Result) -> None:
    print_table(stream_table(result.records))
    click.echo()
    for check in result.checks:
        click.echo(shared.line(check))
    for each in result.found.majorities:
        click.echo(f"majority: {each.words()}")
    click.echo(f"verdict: {result.found.verdict}")
    click.echo(shared.total(result))


@click.command("ranks", short_help="Compare ranks, and runs of any engine or TP degree.")
@click.argument("files", type=common.PATH, nargs=-1, required=True)
@click.option(
    "--near-tie", type=common.Finite(min=0.0), metavar="LOGITS", default=NEAR_TIE,
    show_default=True,
    help="Call a difference a near tie where all known margins are at most this; it is a "
    "difference all the same. The default is for binary32 and few layers: see docs/verify.md.",
)  # fmt: skip
@click.option(
    "--tokenizer", type=common.PATH, metavar="CKPT",
    help="A checkpoint whose tokenizer makes text of ids; ids past its vocabulary fail.",
)  # fmt: skip
@click.option("--request", metavar="NAME", help="Of files with several, compare this one alone.")
@shared.strict()
@common.as_json()
def command(
    files: tuple[Path, ...], near_tie: float, tokenizer: Path | None, request: str | None,
    strict: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compare the ranks inside each record of tokens, then every record with the first.

    A record is a tokens.h5, the events of run --json, another engine's lines of JSON with token
    ids, or plain ids; any number of them, mixed. Runs of ours are compared in all recorded bits, at
    any TP degree; they have to answer one prompt from one checkpoint. The first difference is shown
    with step, ranks, ids and margins, and called a near tie or real; a stream that only ends sooner
    differs too. Of three or more, those that differ from most are named.

    \b
    Example:
      k3tool verify ranks tp1.h5 tp8.h5
      k3tool verify ranks tokens.h5 events.jsonl other-engine.txt
    """
    result = run(Options(files, strict, near_tie, tokenizer, request))
    if as_json:
        shared.show_json(result, _json(result, near_tie))
    else:
        _show(result)
    require(result.checks, strict=strict, alone="give a second record to compare it with")
    if not result.sound:
        hint = "its lines above say where they differ first"
        raise UnsoundError("verdict", got=result.found.verdict, need="identical", hint=hint)

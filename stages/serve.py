"""`k3tool serve`: an OpenAI-compatible endpoint over one resident engine."""

import hashlib
import ipaddress
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from k3tool.checkpoint.regular_file import read_regular
from k3tool.errors import K3Error, UsageError, quoted
from k3tool.runtime.cache import cache_folder
from k3tool.runtime.options import RunOptions
from k3tool.runtime.prepare import Job, prepare, running
from k3tool.runtime.stop_ids import stop_ids
from k3tool.serve.server import Server, bind, require_server, url_of
from k3tool.serve.service import Served, Service
from k3tool.tables import count_text
from k3tool.targets import MOST
from k3tool.text.tokenizer import Tokenizer, has_tokenizer, open_tokenizer
from stages import options as common
from stages.engine_options import engine_options, run_options
from stages.help import Sectioned
from stages.streams import NobodyReads, flush_or_stop

DEFAULT_SLOTS, DEFAULT_WAITING, DEFAULT_PORT, DEFAULT_GRACE = 4, 64, 8000, 10
LOCALHOST = "127.0.0.1"
_MOST_PORT = 65_535
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to serve and to whom. `engine.batch` are the slots, `name` None is the folder's.

    `waiting` sequences may wait for a slot; `key` None lets anybody ask; `grace` in seconds.
    """

    engine: RunOptions
    host: str = LOCALHOST
    port: int = DEFAULT_PORT
    waiting: int = DEFAULT_WAITING
    key: str | None = None
    name: str | None = None
    grace: int = DEFAULT_GRACE
    logs: bool = False


def run(options: Options, on_ready: Callable[[str], None], say: Say, note: Say) -> None:
    """Serve until a signal or a fault; `on_ready` gets the address once requests are answered.

    Raises: UsageError for an address that cannot be had, before anything is read; as
    k3tool.runtime.prepare.prepare; the fault that ended the engine.
    """
    require_server()
    with closing(bind(options.host, options.port)) as listening:
        if options.key is None and not _is_local(listening.getsockname()[0]):
            note(f"no --api-key-file: anybody who reaches {url_of(listening)} may ask")
        # The program says how many slots there are: --isa and --plan have theirs.
        job = prepare(options.engine, say, note, is_engine=True, logits_rows=MOST["batch"])
        with running(job, say) as engine:
            from k3tool.serve.app import App  # its package is an extra's

            service = Service(
                served_of(job, options.name, options.waiting), engine,
                tokenizer_of(job, options.engine), in_words=job.faults_in_words,
                watch=engine.watch,
            )  # fmt: skip
            server = Server(
                App(service, options.key).asgi(), grace_seconds=options.grace, logs=options.logs,
                on_ready=lambda: on_ready(url_of(listening)), on_end=service.close,
            )  # fmt: skip
            service.on_fault = server.stop
            try:
                with service:
                    note(f"{service.served.name}: {count_text(engine.n_slots, 'slot')} of "
                         f"{count_text(engine.context, 'position')}")  # fmt: skip
                    server.run(listening)
            finally:
                if service.error is not None:  # a signal that came as well says less
                    raise service.error


_SECTIONS = {
    "Weights, ranks and target": "--shards",
    "Memory": "--memory",
    "The program": "--cache",
    "Sequences and clients": "--slots",
    "What is printed": "--verbose",
}


@click.command("serve", cls=Sectioned, sections=_SECTIONS)
@engine_options
@click.option(
    "--slots",
    "batch",
    type=click.IntRange(1, MOST["batch"]),
    help="Sequences at once; each holds a context of its own in memory. Default: "
    f"{DEFAULT_SLOTS}, or what --isa or --plan was compiled with.",
)
@click.option(
    "--waiting",
    type=click.IntRange(min=0),
    default=DEFAULT_WAITING,
    show_default=True,
    help="Sequences that may wait for a slot; more are answered 429.",
)
@click.option("--host", default=LOCALHOST, show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, _MOST_PORT),
    default=DEFAULT_PORT,
    show_default=True,
    help="The port to listen on; 0 takes a free one.",
)
@click.option(
    "--api-key-file",
    type=common.PATH,
    metavar="FILE",
    help="A file with the key that clients must show; without one anybody may ask.",
)
@click.option("--name", metavar="NAME", help="The model's name for clients. Default: SOURCE's.")
@click.option(
    "--grace",
    type=click.IntRange(min=0),
    default=DEFAULT_GRACE,
    show_default=True,
    metavar="SECONDS",
    help="At the end, time for answers that are being given.",
)
@common.verbose("Say more on stderr, and a line for each request.")
def command(api_key_file: Path | None, verbose: bool, **given: Any) -> None:
    """Serve a model to OpenAI's clients, from this machine.

    The address goes to stdout when the engine is ready: /v1/models, /v1/completions,
    /v1/chat/completions (whole or streamed), and beside /v1 /health and /metrics. Requests share
    steps, and each is answered as it would be alone. It listens to this machine only, unless --host
    says otherwise. Ctrl-C or SIGTERM end it.

    \b
    Example:
      k3tool serve CKPT
      k3tool serve SHARDS --slots 8 --port 0 --api-key-file key.txt
    """
    require_server()
    key = None if api_key_file is None else read_key(api_key_file)
    own = {name: given.pop(name) for name in ("host", "port", "waiting", "name", "grace")}
    name = own["name"]
    if name is not None and not (name and name.isprintable()):
        raise UsageError(
            "--name",
            got=quoted(name),
            need="a name in characters that can be shown",
            hint="leave out --name to take the name of SOURCE",
        )
    if given["batch"] is None and given["isa"] is None and given["plan"] is None:
        given["batch"] = DEFAULT_SLOTS
    engine = run_options(given, ids=(), gen=1)

    def say(text: str) -> None:
        if verbose or sys.stderr.isatty():
            click.echo(text, err=True)

    def note(text: str) -> None:
        click.echo(text, err=True)

    run(Options(engine, key=key, logs=verbose, **own), _print_address, say, note)


def _print_address(url: str) -> None:
    """Tell where to ask. Raises: K3Error where nobody can hear it."""
    try:
        click.echo(url)
        flush_or_stop()
    except NobodyReads:  # elsewhere no fault; here the address was all there was to say
        hint = "leave stdout open, or send it to a file"
        raise K3Error("stdout", got="closed", need="a reader of the address", hint=hint) from None


def served_of(job: Job, name: str | None, waiting: int) -> Served:
    """Return what clients are told of a model. Raises: ArtifactError for its end ids' files."""
    source, isa = job.source, job.program.isa
    made_of = f"{source.identity} {isa.digest} {isa.params['numerics']}"
    return Served(
        name=name or source.path.resolve().name,
        created=int(time.time()),
        fingerprint=f"k3_{hashlib.sha256(made_of.encode()).hexdigest()[:16]}",
        end_ids=frozenset(stop_ids(source.path, source.config)),
        most_waiting=waiting,
    )


def tokenizer_of(job: Job, options: RunOptions) -> Tokenizer | None:
    """Return the model's tokenizer, None where it has none. Raises: ArtifactError."""
    folder = job.source.path
    if not has_tokenizer(folder):
        return None
    return open_tokenizer(folder, job.source.config.vocab_size, cache_folder(options))


def read_key(path: Path) -> str:
    """Return the key in a file, without white space around it. Raises: UsageError for none."""
    raw = read_regular(path, "a key in one line", is_fetched=False)
    try:
        key = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isprintable() or " " in key:
        hint = "put the key alone into the file, in one line without spaces"
        raise UsageError(f"--api-key-file: {path}", got="no key", need="one, in ASCII", hint=hint)
    return key


def _is_local(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback

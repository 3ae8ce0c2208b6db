"""Run one layer of a model through the interpreter and hold all of it against NumPy in float64.

Each op against its meaning on the engine's own inputs; and the inputs and outputs of sub-layers
against the unfused graph, run from what came into the layer. The second is what finds a wrong
wiring, and why inputs are compared too: most layers' outputs would hide a wrong mix of residuals.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k3tool.blocks.meaning import Meaning, numbers_of
from k3tool.blocks.tolerance import BLOCK, OP, Tolerance, Worst, worst_of
from k3tool.blocks.weights import LayerLeaves, LayerWeights, Source, Tables
from k3tool.checkpoint.reader import Checkpoint
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.rules import FUSIONS
from k3tool.errors import UsageError
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa
from k3tool.model.config import K3Config
from k3tool.model.graph import (
    PROBE_HEAD,
    PROBE_PREFIX,
    blocks_before,
    build_layer_graph,
    probe_block,
)
from k3tool.model.nodes import Graph
from k3tool.ref.formats import Array
from k3tool.ref.forward import Sequence64, exact_constants
from k3tool.runtime.engine import StepToken
from k3tool.runtime.image import build_image
from k3tool.runtime.ranks import FaultError, Launch, RankGroup
from k3tool.runtime.slots import state_rows
from k3tool.targets import DEFAULT_CHUNK
from k3tool.trace.kept import Kept
from k3tool.trace.recorder import Recorder
from k3tool.trace.results import Result
from k3tool.verdict import Check, failed, not_run, passed

TOKENS = 3  # of the prefill step, by default; one more is decoded
_ROWS = 64  # of a table: more than positions, and whole tiles on eight ranks
MOST_TOKENS = min(DEFAULT_CHUNK, _ROWS - 1)
_SEED = 20261130

# Points of a layer, by the ends of their names, in its order: what goes into a sub-layer, and out.
_POINTS = (
    "attn_mix", "attn_in", "self_attn.out", "attn_out", "mlp_mix", "mlp_in", "mlp.down",
    "block_sparse_moe.y", "block_sparse_moe.shared_experts.down", "block_sparse_moe.out", "out",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """What is checked: a checkpoint, or every rank of shards; `against` is the reference's own.

    `path` names it in messages. `table` are rows that come into each layer as its prefix, f32
    (tokens, hidden), None for noise.
    """

    path: str
    config: K3Config
    folders: Sequence[Checkpoint]
    against: Sequence[Checkpoint]
    table: Array | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """How it is run: `tokens` in one prefill step, one more decoded; `plain` without fusions."""

    numerics: str = "f32"
    tokens: int = TOKENS
    plain: bool = False
    interpreter: Path | None = None
    leaves: str = "auto"
    threads: int = 1


class Outcome(NamedTuple):
    """A layer's checks, and the tensors of the checkpoint that the reference read, with bytes."""

    checks: list[Check]
    read: Mapping[str, int]

    @property
    def read_bytes(self) -> int:
        """Return the bytes of all of them."""
        return sum(self.read.values())


# -- what comes into a layer -------------------------------------------------------------------


def noise_rms(folder: Checkpoint) -> float:
    """Return the scale of a layer's input: the rms of the first rows of the model's embedding."""
    name = f"{folder.config.prefix}model.embed_tokens.weight"
    info = folder.tensor_info(name)
    data = bytearray(min(info.n_bytes, _ROWS * info.shape[1] * 2))
    folder.read_into(info, info.offset, memoryview(data))
    rows = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return float(np.sqrt(np.mean(np.square(rows.astype(np.float64))))) or 1.0


def embedded(folder: Checkpoint, ids: Sequence[int]) -> Array:
    """Return the embedding's rows of some ids, (tokens, hidden). Raises: UsageError for others."""
    name = f"{folder.config.prefix}model.embed_tokens.weight"
    info, rows = folder.tensor_info(name), []
    for token in ids:
        if not 0 <= token < info.shape[0]:
            raise UsageError("--ids", got=token, need=f"ids below {info.shape[0]}")
        data = bytearray(info.shape[1] * 2)
        folder.read_into(info, info.offset + token * len(data), memoryview(data))
        rows.append((np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32))
    return np.array(rows, np.float64)


def _tables(model: Model, layer: int, rms: float) -> dict[str, Array]:
    """Return the tables that come into a layer: seeded noise as bf16, or the given prefix."""
    rng = np.random.default_rng([_SEED, layer])
    hidden = model.config.hidden_size
    names = [PROBE_PREFIX, *map(probe_block, range(blocks_before(model.config, layer)))]
    tables = {name: rng.normal(0.0, rms, (_ROWS, hidden)) for name in names}
    if model.table is not None:
        tables[PROBE_PREFIX][: len(model.table)] = model.table
    tables[f"{PROBE_HEAD}.weight"] = rng.normal(0.0, hidden**-0.5, (_ROWS, hidden))
    return {name: _bf16(table) for name, table in tables.items()}


def _bf16(values: Array) -> Any:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# -- one layer ---------------------------------------------------------------------------------


def check_layer(
    model: Model, layer: int, terms: Terms, rms: float, say: Callable[[str], None]
) -> Outcome:
    """Check one layer. Raises: as run_model, for weights and machines that cannot run it."""
    tp = len(model.folders)
    with tempfile.TemporaryDirectory(prefix="k3tool-") as name:
        tables = Tables(Path(name) / "tables.bin", _tables(model, layer, rms))
        source = Source(model.against, model.config, tables)
        graph = build_layer_graph(model.config, layer, _ROWS, tp, terms.numerics)
        isa = _program(model, layer, graph, terms)
        say(f"layer {layer}: {len(isa.streams['decode'].instructions[0])} packets to decode")
        with Recorder(Path(name) / "trace", isa, Kept(0, terms.tokens)) as recorder:
            _run(model, isa, tables, recorder, terms)
            say(f"layer {layer}: comparing")
            checks = list(_op_checks(isa, _split(source, model, tables), recorder, layer, terms))
            checks += _block_checks(model, graph, source, recorder, layer, terms)
    return Outcome(checks, dict(source.read_bytes))


def _split(source: Source, model: Model, tables: Tables) -> Source:
    """Return where a rank's reference weights are: its own shards, or those it is held against."""
    if len(model.against) == len(model.folders):
        return source
    return _Shared(source, len(model.folders), tables)


class _Shared(Source):
    """A whole checkpoint as the parts of several ranks."""

    def __init__(self, whole: Source, tp: int, tables: Tables) -> None:
        """Take the whole."""
        super().__init__((), whole.config, tables)
        self._whole, self._tp = whole, tp

    def read(self, name: str, rank: int | None = None) -> Any:
        """Return a rank's part of a tensor."""
        return self._whole.part(name, rank, self._tp)


def _program(model: Model, layer: int, graph: Graph, terms: Terms) -> Isa:
    plan = compile_plan(
        model.config, tp=len(model.folders), target="cpu", workgroups=8, chunk=DEFAULT_CHUNK,
        batch=1, ctx=min(256, model.config.max_position_embeddings), numerics=terms.numerics,
        without=FUSIONS if terms.plain else (), graph=graph,
    )  # fmt: skip
    return emit(plan, "cpu", f"layer {layer}")


def _run(model: Model, isa: Isa, tables: Tables, recorder: Recorder, terms: Terms) -> None:
    """Run one prefill step and one decode step on all ranks."""
    tp = len(model.folders)
    ranks = [LayerWeights(folder, tp, r, tables) for r, folder in enumerate(model.folders)]
    images = [build_image(isa, r, weights, None, _ROWS) for r, weights in enumerate(ranks)]
    launch = Launch(
        terms.interpreter, images, terms.threads, terms.leaves, program="one layer",
        states=state_rows(isa), recorder=recorder,
    )  # fmt: skip
    tokens = [StepToken(position, position, 0) for position in range(terms.tokens + 1)]
    try:
        with RankGroup(launch) as group:
            group.wait_ready()
            group.step(tokens[:-1], 1)
            group.step(tokens[-1:], 1)
            group.end()
    except FaultError as stop:
        raise stop.fault.error() from None


# -- comparing ---------------------------------------------------------------------------------


def _op_checks(
    isa: Isa, source: Source, recorder: Recorder, layer: int, terms: Terms
) -> Iterator[Check]:
    """Yield a check for each result of each packet, worst rank first."""
    found: dict[tuple[str, int, str], tuple[Result, list[tuple[Worst, int]]]] = {}
    tolerance = OP[terms.numerics]

    def take(phase: str, result: Result, rank: int, want: Array, got: Array, first: int) -> None:
        if result.layer is None and not result.name.startswith("blocks["):
            return  # the head that a program ends in
        worst = worst_of(want, got, first, tolerance)
        row = found.setdefault((phase, result.inst, result.name), (result, []))
        row[1].append((worst, rank))

    # No binary64 constants: the engine's are rounded once, and an op is held against its own.
    meaning = Meaning(isa, source, recorder, {}, take)
    meaning.step("prefill", list(range(terms.tokens)))
    meaning.step("decode", [terms.tokens])
    for (phase, _, _), (result, each) in found.items():
        worst, rank = max(each, key=lambda pair: pair[0].ratio)
        name = f"layer {layer}: {phase} {result.op} {short(result.name, layer)}"
        on = f" on rank {rank}" if isa.tp > 1 else ""
        yield _check(name, worst, tolerance, on)


def short(value: str, layer: int) -> str:
    """Return a graph value's name without its layer."""
    return value.removeprefix(f"layers.{layer}.")


def _check(name: str, worst: Worst, tolerance: Tolerance, where: str = "") -> Check:
    detail = f"{worst.text}{where}, tol {tolerance.text}, rms {worst.rms:.3g}"
    return passed(name, detail) if worst.ratio <= 1 else failed(name, detail)


def _block_checks(
    model: Model, graph: Graph, source: Source, recorder: Recorder, layer: int, terms: Terms
) -> Iterator[Check]:
    """Yield a check for each point of the layer that its program has a value for."""
    sequence = Sequence64(
        graph, LayerLeaves(source, graph.weights), constants=exact_constants(model.config)
    )
    wanted = sequence.advance(list(range(terms.tokens + 1)))
    values = {graph.names[node]: value for node, value in wanted.items()}
    tolerance = BLOCK[terms.numerics]
    for point in _POINTS:
        want = values.get(f"layers.{layer}.{point}")
        if want is None:
            continue
        name = f"layer {layer}: {_word(point)}"
        got = _recorded(recorder, f"layers.{layer}.{point}", terms.tokens)
        if not got:
            yield not_run(name, "inside a fused op of both programs: --plain has it")
            continue
        worsts = [worst_of(want[first : first + len(rows)], rows, first, tolerance)
                  for first, rows in got]  # fmt: skip
        first, rows = got[0]
        which = "" if len(got) == 2 else f", positions {first} to {first + len(rows) - 1}"
        yield _check(name, max(worsts, key=lambda worst: worst.ratio), tolerance, which)


def _word(point: str) -> str:
    if point in ("attn_in", "mlp_in"):
        return f"input of the sub-layer {point}"
    return {"out": "output of the layer"}.get(point, point)


def _recorded(recorder: Recorder, name: str, n_prefill: int) -> list[tuple[int, Array]]:
    """Return (first position, rows) of a value in each phase that writes it whole."""
    found = []
    spans = {"prefill": (0, n_prefill), "decode": (n_prefill, n_prefill + 1)}
    for phase, results in recorder.results.items():
        for number, result in enumerate(results.results):
            bits = recorder.kept_whole(phase, number) if result.name == name else None
            if bits is not None:
                first, end = spans[phase]
                found.append((first, numbers_of(result, bits[first:end])))
    return found

"""A seven-instruction model that any number of ranks can run: the bench for traps and rank deaths.

    x = embed(token); partial = x + x; s = all_reduce(partial); h = rmsnorm(s)
    logits = head h (vocabulary rows split over ranks); candidate = argmax; token = fold

Every replicated result enters the digest. Tests damage one thing in it and expect to be told which.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.compiler.plan import Tensor
from k3tool.isa import device, queues
from k3tool.isa.columns import GATE, PACKET_DIGEST, PACKET_REARM, WAIT_DTYPE, Columns, empty_packets
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.table import Op
from k3tool.runtime import records
from k3tool.runtime.image import Request, build_image
from k3tool.runtime.interpreter import load
from k3tool.runtime.ranks import Launch, RankGroup
from k3tool.runtime.weights import TensorBytes

VOCAB, HIDDEN, GRAIN = 32, 64, 16
EMBED, ADD, REDUCE, NORM, HEAD, ARGMAX, FOLD = range(7)
MAX_TOKENS = {"decode": 1, "prefill": 4}
FLOAT = 4

Change = Callable[[Isa], Isa]


def bf16(values: np.ndarray) -> np.ndarray:
    """Truncate float32 to bf16 bits: the toy chooses values that bf16 holds."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def random_weights(seed: int = 7) -> dict[str, np.ndarray]:
    """Return table [V, H], norm [H] and head [V, H] as numbers that bf16 holds."""
    rng = np.random.default_rng(seed)
    draw = {
        "table": rng.integers(-8, 9, (VOCAB, HIDDEN)) / 4,
        "norm": rng.integers(1, 5, HIDDEN) / 2,
        "head": rng.integers(-8, 9, (VOCAB, HIDDEN)) / 8,
    }
    return {name: value.astype("<f4") for name, value in draw.items()}


def expected_tokens(
    weights: dict[str, np.ndarray], prompt: tuple[int, ...], n_gen: int
) -> list[int]:
    """Return what the toy says, in float64; each token depends on the one before alone."""
    tokens, last = [], prompt[-1]
    for _ in range(n_gen):
        x = weights["table"][last].astype("f8")
        h = x / np.sqrt((x * x).mean()) * weights["norm"]
        last = int(np.argmax(weights["head"] @ h))
        tokens.append(last)
    return tokens


@dataclass(frozen=True)
class RawWeights:
    """One rank's weights in a file of their own, in place of a shards folder."""

    path: Path
    places: dict[str, tuple[int, int]]

    @classmethod
    def write(cls, path: Path, weights: dict[str, np.ndarray], rank: int, tp: int) -> "RawWeights":
        rows = VOCAB // tp
        own = weights | {"head": weights["head"][rank * rows : (rank + 1) * rows]}
        places, data = {}, b"\0"  # an odd start: the interpreter has to align what it maps
        for name, value in own.items():
            places[name] = (len(data), value.size * 2)
            data += bf16(value).tobytes()
        path.write_bytes(data)
        return cls(path, places)

    def tensor(self, tensor: Tensor) -> TensorBytes:
        offset, n_bytes = self.places[tensor.leaf]
        assert n_bytes == tensor.n_bytes
        return TensorBytes(str(self.path), offset, n_bytes, self.path.stat().st_size)

    def copies(self, path: str) -> list[tuple[str, int]]:
        return [(path, 0)]


def _tensors(tp: int) -> list[Tensor]:
    rows = VOCAB // tp
    out = [
        Tensor("table", "weight", "bf16", (VOCAB, HIDDEN), (VOCAB, HIDDEN), VOCAB * HIDDEN * 2),
        Tensor("norm", "weight", "bf16", (HIDDEN,), (HIDDEN,), HIDDEN * 2),
        Tensor("head", "weight", "bf16", (VOCAB, HIDDEN), (rows, HIDDEN), rows * HIDDEN * 2),
    ]
    out = [t._replace(leaf=t.name) for t in out]
    peer = 0
    for phase, tokens in MAX_TOKENS.items():
        at = 0
        for name in ("x", "s", "h"):
            n_bytes = tokens * HIDDEN * FLOAT
            shape = (tokens, HIDDEN)
            out.append(Tensor(f"{phase}/{name}", "arena", "f32", shape, shape, n_bytes, at, phase))
            at += n_bytes
        for name, width in (("partial", HIDDEN), ("candidate", 4)):
            n_bytes, shape = tokens * width * FLOAT, (tokens, width)
            out.append(Tensor(f"{phase}/{name}", "peer", "f32", shape, shape, n_bytes, peer, phase))
            peer += -(-n_bytes // 64) * 64
        for name, width in (("logits", rows), ("output", 4)):
            shape = (tokens, width)
            out.append(
                Tensor(
                    f"{phase}/{name}", name, "f32", shape, shape, tokens * width * FLOAT, 0, phase
                )
            )
    return out


def _packets(
    phase: str, tensors: list[Tensor], tp: int, workgroups: int
) -> tuple[Columns, Columns]:
    handle = {t.name.removeprefix(f"{phase}/"): h for h, t in enumerate(tensors)}
    tokens, rows = MAX_TOKENS[phase], VOCAB // tp
    packets = empty_packets(7)
    waits: list[tuple[int, int]] = []

    def put(
        index: int, op: Op, operands: str, units: int, width: int, unit_cols: int, grain: int,
        params: tuple[int, ...] = (), flags: int = PACKET_DIGEST, gate: int | None = None,
        after: int | None = None,
    ) -> None:  # fmt: skip
        row = packets[index : index + 1]
        names = operands.split()
        row["op"], row["flags"] = op, flags
        row["handles"][0, : len(names)] = [handle[name] for name in names]
        row["n_units"], row["width"], row["unit_cols"] = units, width, unit_cols
        row["grain"], row["params"][0, : len(params)] = grain, params
        n_slices = min(workgroups, -(-units // grain))
        row["n_slices"] = n_slices
        row["counter"] = index if gate is None else GATE | gate
        row["threshold"] = n_slices * (1 if gate is None else tp)
        row["wait_ofs"] = len(waits)
        if after is not None:
            waits.append((int(packets["counter"][after]), int(packets["threshold"][after])))
            row["n_waits"] = 1

    put(EMBED, Op.EMBED_BF16, "table x", HIDDEN, HIDDEN, 1, GRAIN, (VOCAB,))
    put(ADD, Op.ADD, "x x partial", HIDDEN, HIDDEN, 1, GRAIN, flags=0, gate=0, after=EMBED)
    put(REDUCE, Op.ALL_REDUCE, "partial s", HIDDEN, HIDDEN, 1, GRAIN, after=ADD)
    put(NORM, Op.RMSNORM, "s norm h", tokens, HIDDEN, 0, 1, after=REDUCE)
    put(HEAD, Op.GEMV_BF16, "h head logits", rows, rows, 1, 8, (HIDDEN, 1), flags=0, after=NORM)
    put(ARGMAX, Op.ARGMAX, "logits candidate", 1, 4, 0, 1, (rows, rows), flags=PACKET_REARM, gate=1,
        after=HEAD)  # fmt: skip
    put(FOLD, Op.ARGMAX_FOLD, "candidate output", 1, 4, 0, 1, after=ARGMAX)
    return packets, np.array(waits, WAIT_DTYPE)


def toy_isa(tp: int = 1, workgroups: int = 4, ctx: int = 4096) -> Isa:
    """Return the toy's program."""
    tensors = _tensors(tp)
    streams = {}
    for phase, tokens in MAX_TOKENS.items():
        packets, waits = _packets(phase, tensors, tp, workgroups)
        streams[phase] = Stream(
            phase, tokens, queues.scratch_floats(packets, tokens),
            tokens * 3 * HIDDEN * FLOAT, 1 << 14,
            tuple(device.pack(packets, rank) for rank in range(tp)),
            queues.build(packets, waits, queues.Crew(workgroups), tp),
        )  # fmt: skip
    params = {"tp": tp, "workgroups": workgroups, "ctx": ctx, "batch": 1, "target": "cpu"}
    return Isa("cpu", tuple(tensors), streams, params, ())


def change_stream(isa: Isa, change: Callable[[Stream], Stream]) -> Isa:
    """Return the program with every phase's stream changed."""
    return replace(isa, streams={name: change(s) for name, s in isa.streams.items()})


def change_queues(isa: Isa, **columns: Callable[[Columns], Columns]) -> Isa:
    """Return the program with columns of its queues changed, in every phase."""

    def change(stream: Stream) -> Stream:
        new = {name: edit(getattr(stream.queues, name).copy()) for name, edit in columns.items()}
        return replace(stream, queues=replace(stream.queues, **new))

    return change_stream(isa, change)


def change_records(isa: Isa, edit: Callable[[Columns], None]) -> Isa:
    """Return the program with every rank's instruction records edited in place."""

    def change(stream: Stream) -> Stream:
        copies = tuple(r.copy() for r in stream.instructions)
        for copy in copies:
            edit(copy)
        return replace(stream, instructions=copies)

    return change_stream(isa, change)


def images(
    isa: Isa, folder: Path, prompt: tuple[int, ...] = (3, 1, 4, 1, 5), n_gen: int = 6,
    per_rank: dict[int, dict[str, np.ndarray]] | None = None, chunk: int = 3, **request: Any,
) -> list[bytes]:  # fmt: skip
    """Return every rank's image; `per_rank` gives single ranks other weights."""
    asked = Request(prompt, n_gen, (), chunk=chunk, **request)
    out = []
    for rank in range(isa.tp):
        weights = (per_rank or {}).get(rank, random_weights())
        raw: Any = RawWeights.write(folder / f"rank{rank}.bin", weights, rank, isa.tp)
        out.append(build_image(isa, rank, raw, asked, VOCAB))
    return out


def launch(made: list[bytes], **options: Any) -> Launch:
    """Return a launch of the built interpreter with a short deadline."""
    given = {"images": made, "deadline_seconds": 5.0} | options
    if "interpreter" not in given:
        given["interpreter"] = load().path
    return Launch(**given)


def run(start: Launch) -> list[int]:
    """Run to the end and return the tokens."""
    with RankGroup(start) as group:
        return [int(rows["id"][0]) for rows in group.steps() if rows["kind"][0] == records.TOKEN]

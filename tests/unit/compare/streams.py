"""Streams of tokens for the tests of comparing: ours by rank, and other engines' as text."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from k3tool.artifact import InputRef
from k3tool.runtime.tokens import TOKEN_DTYPE, Columns, TokenFile, read_tokens, write_tokens

N = 5


def stream(rank: int, tp: int) -> Columns:
    """One rank's rows; the logits digests of all ranks add up to the same at every tp."""
    rows = np.zeros(N, TOKEN_DTYPE)
    rows["step"] = np.arange(N)
    rows["position"] = 3 + np.arange(N)
    rows["id"] = 10 + np.arange(N)
    rows["best"], rows["second"] = 2.5, 2.25
    rows["digest"] = 77 * tp + np.arange(N)
    whole, share = 2**64 - 5, 2**63 + 11
    rows["logits_digest"] = (whole - share * (tp - 1)) % 2**64 if rank == 0 else share
    return rows


def write(
    path: Path,
    tp: int,
    ranks: list[Columns] | None = None,
    *,
    checkpoint: str = "c" * 64,
    prompt: Sequence[int] = (1, 2, 3),
    mode: str = "f32",
    isa: str | None = None,
) -> TokenFile:
    write_tokens(
        path,
        [stream(rank, tp) for rank in range(tp)] if ranks is None else ranks,
        prompt,
        params={"tp": tp, "numerics": {"mode": mode, "version": 1}},
        inputs=[
            InputRef("checkpoint", "checkpoint", "tiny", checkpoint),
            InputRef("isa", "isa", "isa.h5", f"{tp}" * 64 if isa is None else isa),
        ],
    )
    return read_tokens(path)


# -- the same stream in every form -----------------------------------------------------------------

START = {"event": "start", "checkpoint": "c" * 64, "numerics": {"mode": "f32", "version": 1},
         "prompt_tokens": 3, "tp": 1}  # fmt: skip


def events(ids: Sequence[int], margin: float = 0.25, tp: int = 1) -> list[dict[str, object]]:
    """Return the events of a run of this project."""
    tokens: list[dict[str, object]] = [
        {"event": "token", "step": n, "id": token, "position": 3 + n - 1, "margin": margin,
         "ranks_agree": tp}
        for n, token in enumerate(ids)
    ]  # fmt: skip
    return [START | {"tp": tp}, *tokens, {"event": "end", "tokens": list(ids)}]


def lines(path: Path, values: Iterable[object], end: str = "\n") -> Path:
    """Write one JSON value a line."""
    path.write_bytes("".join(json.dumps(value) + end for value in values).encode())
    return path


def _tokens_file(path: Path, ids: Sequence[int]) -> Path:
    rows = np.zeros(len(ids), TOKEN_DTYPE)
    rows["step"], rows["id"] = np.arange(len(ids)), ids
    rows["position"] = 2 + np.arange(len(ids))
    rows["best"], rows["second"] = 2.5, 2.25
    write(path, 1, [rows])
    return path


def _text(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


# A writer of each form that a record of tokens may have: (path, ids) -> path.
FORMS: dict[str, Callable[[Path, Sequence[int]], Path]] = {
    "tokens.h5": _tokens_file,
    "events": lambda path, ids: lines(path, events(ids)),
    "one id a line": lambda path, ids: lines(
        path, ({"token_id": token, "margin": 0.25} for token in ids)
    ),
    "steps and crlf": lambda path, ids: lines(
        path, ({"step": n, "id": token} for n, token in enumerate(ids)), "\r\n"
    ),
    "ranks": lambda path, ids: lines(
        path, ({"rank": rank, "token": token} for token in ids for rank in range(2))
    ),
    "a list": lambda path, ids: lines(path, [list(ids)]),
    "a list by name": lambda path, ids: lines(path, [{"tokens": list(ids)}]),
    "spaces": lambda path, ids: _text(path, " ".join(map(str, ids)) + "\n"),
    "commas": lambda path, ids: _text(path, ",".join(map(str, ids))),
    "lines, CRLF and a BOM": lambda path, ids: _text(path, "\ufeff" + "\r\n".join(map(str, ids))),
}

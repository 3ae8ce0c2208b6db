"""state.h5: a sequence as it stands in its slot, so that another run goes on as if it never ended.

Schema 2 of kind `state`. Dataset `ids` u4 [n]: all token ids so far, of which the last has been
chosen and not been read; per rank `rank-NN/state` u1 [bytes], what the slot holds after the n - 1
before it (k3tool.runtime.slots says in which order). Inputs: `checkpoint` (identity) and `isa`.
Params: `tp`, `numerics`, `eps`, `states` (digest of what a slot of the plan holds), `generated`
(tokens chosen so far, by which drawn ones are numbered), and `layout`: what the program was
compiled for, which a run that goes on takes unless it says otherwise.

A state belongs to its weights, arithmetic, degree, and a plan whose slots hold the same. It does
not belong to a memory budget, chunk, context, number of workgroups or target: bits do not depend on
them. Another context than its own is what a conversation that grows needs.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.artifact import Dataset, InputRef, open_artifact, write_artifact
from k3tool.canonical import canonical_json
from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.errors import ArtifactError, shown
from k3tool.fields import column, params_of
from k3tool.isa.stream import Isa
from k3tool.isa.table import isa_hash
from k3tool.runtime.engine import SlotState
from k3tool.runtime.options import RunOptions
from k3tool.runtime.slots import saved_bytes, state_rows
from k3tool.targets import DEFAULT_CHUNK, MOST_RANKS

STATE_SCHEMA = 2
_LAYOUT = ("ctx", "chunk", "batch", "workgroups")  # options of a program that have defaults


@dataclass(frozen=True, slots=True)
class SavedState:
    """A loaded file. `ids` are all ids so far, the last of them not read yet."""

    path: str
    ids: tuple[int, ...]
    slot: SlotState
    n_generated: int
    params: Mapping[str, Any]
    inputs: tuple[InputRef, ...]

    def go_on(self, options: RunOptions) -> RunOptions:
        """Return the options of a run that goes on: behind the ids so far, in the same program
        where the options leave it open and it has the positions.
        """
        given = options.isa is not None or options.plan is not None
        layout = {} if given else dict(self.params["layout"])
        if layout.get("ctx", 0) < len(self.ids) + len(options.ids) + options.gen:
            layout.pop("ctx", None)
        by_decode = options.prefill == "decode" and layout.get("chunk") == DEFAULT_CHUNK
        if options.memory_bytes is not None or by_decode:
            # What was asked for: a budget leaves less of it, and beside --prefill decode it is no
            # --chunk that anybody gave.
            layout.pop("chunk", None)
        open_ones = {name: layout[name] for name in layout if getattr(options, name) is None}
        if not given and options.numerics is None:
            open_ones["numerics"] = self.params["numerics"]["mode"]
        if not given and options.tp is None and not os.path.exists(options.source / SHARDS_NAME):
            open_ones["tp"] = self.params["tp"]
        ids = (self.ids[-1], *options.ids)
        return replace(options, ids=ids, start=self.slot.length, **open_ones)


def write_state(
    path: Path, ids: Sequence[int], slot: SlotState, n_generated: int, isa: Isa,
    inputs: Sequence[InputRef],
) -> str:  # fmt: skip
    """Write state.h5 atomically and return its content digest. Raises: K3Error."""
    assert slot.length == len(ids) - 1, (slot.length, len(ids))
    datasets = {"ids": Dataset(np.array(ids, "<u4"), ("position",), "token id")}
    for rank, data in enumerate(slot.ranks):
        found = np.frombuffer(data, "u1")
        datasets[f"rank-{rank:02d}/state"] = Dataset(found, ("byte",), "byte")
    params = {
        "tp": isa.tp,
        "numerics": isa.params["numerics"],
        "eps": isa.params["eps"],
        "states": states_digest(isa),
        "generated": n_generated,
        "layout": {name: isa.params[name] for name in _LAYOUT},
    }
    kept = [ref for ref in inputs if ref.role in ("checkpoint", "isa")]
    return write_artifact(
        path, "state", STATE_SCHEMA, datasets, inputs=kept, params=params, target=isa.target
    )


def states_digest(isa: Isa) -> str:
    """Return a digest of what a slot holds: each state's name, type and bytes, in order, under this
    table of ops. How many slots and positions a program has room for is no part of it.
    """
    rows = [
        [isa.tensors[row.handle].name, isa.tensors[row.handle].dtype, row.position_bytes]
        + ([] if row.position_bytes else [row.slot_bytes])
        for row in state_rows(isa)
    ]
    return hashlib.sha256(canonical_json([isa_hash(), rows]).encode()).hexdigest()


def read_state(path: Path) -> SavedState:
    """Read state.h5. Raises: ArtifactError naming the file and what is damaged."""
    with open_artifact(path, "state", STATE_SCHEMA) as file:
        ids = tuple(column(file, "ids", "<u4").tolist())
        fields = params_of(file)
        tp = fields.count("tp", least=1, most=MOST_RANKS)
        n_generated = fields.count("generated")
        if not ids:
            raise ArtifactError(f"{path}: ids", got="none", need="at least one")
        fields.present("eps")
        fields.text("states")
        if not isinstance(file.params.get("numerics"), dict):
            raise ArtifactError(f"{path}: numerics", got="none", need="a mode of the arithmetic")
        layout = file.params.get("layout")
        numbers = layout if isinstance(layout, dict) else {}
        if set(numbers) != set(_LAYOUT) or {type(n) for n in numbers.values()} != {int}:
            raise ArtifactError(f"{path}: layout", got=shown(layout), need=", ".join(_LAYOUT))
        ranks = tuple(column(file, f"rank-{rank:02d}/state", "u1").tobytes() for rank in range(tp))
        slot = SlotState(len(ids) - 1, ranks)
        return SavedState(str(path), ids, slot, n_generated, file.params, tuple(file.inputs))


def check_state(saved: SavedState, isa: Isa, identity: str) -> None:
    """Refuse a state of other weights, another arithmetic or degree, or of other slots or size.

    `identity` is the checkpoint's. Raises: ArtifactError naming what differs.
    """
    found = {ref.role: ref.content_sha256 for ref in saved.inputs}
    own = {
        "checkpoint": (found.get("checkpoint"), identity, "of this model"),
        "tp": (saved.params["tp"], isa.tp, "of this run"),
        "numerics": (saved.params["numerics"], isa.params["numerics"], "of this run"),
        "eps": (saved.params["eps"], isa.params["eps"], "of this program"),
        "states": (saved.params["states"], states_digest(isa), "of this program"),
    }
    for name, (got, need, whose) in own.items():
        if got != need:
            raise ArtifactError(
                f"{saved.path}: {name}", got=_short(got), need=f"{_short(need)} {whose}",
                hint=f"go on with {_saved_under(saved, name)}, or read the prompt again",
            )  # fmt: skip
    need_bytes = saved_bytes(state_rows(isa), saved.slot.length)
    for rank, data in enumerate(saved.slot.ranks):
        if len(data) != need_bytes:
            where = f"{saved.path}: rank-{rank:02d}"
            raise ArtifactError(where, got=f"{len(data)} bytes", need=need_bytes)


def _saved_under(saved: SavedState, name: str) -> str:
    """Return what a run that goes on needs, where `name` is not what it was."""
    if name == "checkpoint":
        return "the checkpoint that it was saved from"
    if name in ("eps", "states"):
        return "a plan compiled as the one that it was saved under (--eps, --without, this build)"
    mode = saved.params["numerics"].get("mode")
    return f"what it was saved under (--tp {saved.params['tp']}, --numerics {mode})"


def _short(value: object) -> str:
    text = shown(value) if value is not None else "none"
    return f"{text[:16]}.." if len(text) == 64 else text

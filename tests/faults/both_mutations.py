"""Single faults of what a plan and a stream both hold: states, results, parameters, buffers."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from k3tool.compiler.plan import Tensor
from tests.faults.mutations import Broken, set_tensor, with_params

# -- states ----------------------------------------------------------------------------------------


def with_inner(state: Tensor, *sizes: int) -> dict[str, Any]:
    """Return the columns of a state of other sizes behind its slots or pages."""
    local = (state.local[0], *sizes)
    return {"local": local, "n_bytes": 4 * math.prod(local)}


STATES: list[tuple[str, str, Callable[[Tensor], dict[str, Any]]]] = [
    # label, the end of the state's name, what is altered
    ("a state of one element", ".s", lambda t: with_inner(t, 1, 1, 1)),
    ("a state of a head less", ".s", lambda t: with_inner(t, t.local[1] - 1, *t.local[2:])),
    ("a state of a row less", ".s",
     lambda t: with_inner(t, t.local[1], t.local[2] - 1, t.local[3])),
    ("a state of a column less", ".s", lambda t: with_inner(t, *t.local[1:3], t.local[3] - 1)),
    ("a tap less", "_taps", lambda t: with_inner(t, t.local[1] - 1, t.local[2])),
    ("taps of one element", "_taps", lambda t: with_inner(t, 1, 1)),
    ("a cache of one element a page", ".cache", lambda t: with_inner(t, 1, 1)),
    ("a cache of a token less a page", ".cache",
     lambda t: with_inner(t, t.local[1] - 1, t.local[2])),
    ("a cache of narrower tokens", ".cache", lambda t: with_inner(t, t.local[1], t.local[2] - 1)),
    ("a slot more than the batch", ".s",
     lambda t: {"local": (t.local[0] + 1, *t.local[1:]),
                "n_bytes": t.n_bytes // t.local[0] * (t.local[0] + 1)}),
    ("a state's dtype", ".s", lambda t: {"dtype": "u32"}),
    ("a state's split", "_taps", lambda t: {"split": "column"}),
    ("a state's whole shape", ".s", lambda t: {"logical": t.local}),
    ("a state's role", ".cache", lambda t: {"role": "output"}),
]  # fmt: skip


def spoilt_state(what: Any, end: str, change: Callable[[Tensor], dict[str, Any]]) -> Broken:
    """Alter the first state whose name ends so."""
    state = next(t for t in what.tensors if t.role == "state" and t.name.endswith(end))
    return Broken(set_tensor(what, state.name, **change(state)), None)


# -- which tensors are the step's results ----------------------------------------------------------


def moved_role(what: Any, role: str) -> Broken:
    """Give a result's role to another buffer of its phase, whose place becomes its own."""
    own = next(t for t in what.tensors if t.role == role and t.phase == "decode")
    other = next(t for t in what.tensors if t.role == "arena" and t.phase == "decode")
    what = set_tensor(what, own.name, role="arena", offset=other.offset)
    return Broken(set_tensor(what, other.name, role=role, offset=0), None)


def second_role(what: Any, role: str) -> Broken:
    other = next(t for t in what.tensors if t.role == "arena" and t.phase == "decode")
    return Broken(set_tensor(what, other.name, role=role, offset=0), None)


def of_no_phase(what: Any, role: str) -> Broken:
    own = next(t for t in what.tensors if t.role == role and t.phase == "decode")
    return Broken(set_tensor(what, own.name, phase=""), None)


RESULTS: list[tuple[str, Callable[[Any], Broken]]] = [
    (f"{role}: {label}", partial(make, role=role))
    for role in ("output", "logits")
    for label, make in (
        ("another buffer", moved_role),
        ("two buffers", second_role),
        ("of no phase", of_no_phase),
    )
]
# -- tokens, positions, numerics, keys: what no packet shows by itself -----------------------------


def altered(what: Any, *path: str, value: Any) -> Broken:
    """Set a parameter, or one inside a parameter."""
    name, *inner = path
    held = dict(what.params[name], **{inner[0]: value}) if inner else value
    return Broken(with_params(what, **{name: held}), None)


def without_site(what: Any) -> Broken:
    eps = {name: value for name, value in what.params["eps"].items() if name != "norm"}
    return Broken(with_params(what, eps=eps), None)


PARAMS: list[tuple[str, Callable[[Any], Broken]]] = [
    ("a chunk of a token more", lambda w: altered(w, "chunk", value=w.params["chunk"] + 1)),
    ("a chunk of a token less", lambda w: altered(w, "chunk", value=w.params["chunk"] - 1)),
    ("a chunk that is the batch", lambda w: altered(w, "chunk", value=w.params["batch"])),
    ("a sequence more", lambda w: altered(w, "batch", value=w.params["batch"] + 1)),
    ("a position less", lambda w: altered(w, "ctx", value=w.params["ctx"] - 1)),
    ("a key of no build", lambda w: altered(w, "speculate", value=True)),
    ("a key of no build's numerics", lambda w: altered(w, "numerics", "ftz", value=False)),
    ("a numerics version of 1.0", lambda w: altered(w, "numerics", "version", value=1.0)),
    ("a numerics version of true", lambda w: altered(w, "numerics", "version", value=True)),
    ("no eps of a site", without_site),
    ("a page more for a slot",
     lambda w: altered(w, "pages_per_slot", value=w.params["pages_per_slot"] + 1)),
    ("a rule that it does not rest on",
     lambda w: altered(w, "rules", value=[*w.params["rules"], "zero-fuse"])),
    ("a rule is off that it rests on", lambda w: altered(w, "rules_off", value=["kda-heads-fuse"])),
    ("another theorem", lambda w: altered(w, "theorems", w.params["rules"][0], value="0")),
]  # fmt: skip


# -- columns of buffers that only readers of listings take -----------------------------------------


def buffer(what: Any, **change: Any) -> Broken:
    low = next(t for t in what.tensors if t.role == "arena" and t.phase == "decode")
    return Broken(set_tensor(what, low.name, **change), None)


def renamed(what: Any, role: str, name: str) -> Broken:
    own = next(t for t in what.tensors if t.role == role)
    rows = [t._replace(name=name) if t is own else t for t in what.tensors]
    return Broken(replace(what, tensors=tuple(rows)), None)


LABELS: list[tuple[str, Callable[[Any], Broken]]] = [
    ("a buffer with a leaf", lambda w: buffer(w, leaf="embed_tokens.weight")),
    ("a buffer with a stored name", lambda w: buffer(w, source="model.norm.weight")),
    ("a buffer with a split", lambda w: buffer(w, split="rows")),
    ("a buffer named after no phase", lambda w: renamed(w, "arena", "x")),
    ("a weight by another name than its leaf's", lambda w: renamed(w, "weight", "x")),
]


def flat(what: Any) -> Broken:
    rows = [t for t in what.tensors if t.role == "arena" and t.phase == "decode"]
    low = next(t for t in rows if len(t.local) == 2)
    return Broken(set_tensor(what, low.name, local=(math.prod(low.local),)), None)


def of_words(what: Any) -> Broken:
    """Numbers said to be words."""
    return buffer(what, dtype="u32")


# label, the check of a plan, the check of a stream, how to make the fault
BOTH: list[tuple[str, str, str, Callable[[Any], Broken]]] = [
    *((label, "A states", "F states", partial(spoilt_state, end=end, change=change))
      for label, end, change in STATES),
    *((label, "A meaning decode", "F meaning decode", make) for label, make in RESULTS),
    *((label, "A params", "F params", make) for label, make in PARAMS),
    *((label, "C tensors", "F records decode", make) for label, make in LABELS),
    ("a buffer without its axis of tokens", "B records decode", "F records decode", flat),
    ("a buffer of numbers said to hold words", "B records decode", "F records decode", of_words),
]  # fmt: skip

"""The root attributes of an artifact: their form, and what a reader may refuse in them.

It knows no HDF5 library: `k3tool.artifact` hands it plain values.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.errors import ArtifactError, listed, quoted

# Every kind, and the command that writes one.
MADE_BY = {
    "coverage": "k3tool inspect CKPT -o coverage.h5",
    "fingerprint": "k3tool inspect CKPT --values --fingerprint FILE",
    "shards": "k3tool shard CKPT --tp N -o SHARDS",
    "rank": "k3tool shard CKPT --tp N -o SHARDS",
    "plan": "k3tool compile-plan SHARDS -o plan.h5",
    "isa": "k3tool emit-isa plan.h5 -o isa.h5",
    "tokens": "k3tool run CKPT --ids 1,2,3 -o tokens.h5",
    "trace": "k3tool run CKPT --ids 1,2,3 --trace-hashes trace.h5",
    "state": "k3tool run CKPT --ids 1,2,3 --save-state state.h5",
}
KINDS = tuple(MADE_BY)
REQUIRED = ("k3.kind", "k3.schema", "k3.inputs", "k3.params", "k3.content_sha256", "k3.tool")
OPTIONAL = {"target": "k3.target", "phase": "k3.phase", "isa_hash": "k3.isa_hash"}
_HINTS = {"k3.isa_hash": "re-run emit-isa with this build", "k3.schema": "re-run its stage"}


class InputRef(NamedTuple):
    """Name one input of an artifact by content; chained, these are its provenance."""

    role: str
    kind: str
    name: str
    content_sha256: str


Wanted = str | tuple[str, ...] | None  # a kind, one of several, or any of ours


def kinds_of(kind: Wanted) -> tuple[str, ...]:
    """Return the kinds that are wanted; none where any is."""
    return (kind,) if isinstance(kind, str) else kind or ()


def a_kind(kind: Wanted) -> str:
    """Return `an isa artifact`, `a plan or isa artifact`; None is any of ours."""
    word = " or ".join(kinds_of(kind)) or "k3tool"
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word} artifact"


def how_made(kind: Wanted) -> str:
    """Return the hint that says which command writes a kind."""
    made = [MADE_BY[each] for each in kinds_of(kind) if each in MADE_BY]
    if not made:
        return "artifacts are what k3tool shard, compile-plan, emit-isa and run -o write"
    return f"one is made by: {', or '.join(made)}"


def check_roots(path: Path, roots: Mapping[str, Any], wanted: Mapping[str, object]) -> None:
    """Refuse roots that are absent, of another type or not what is wanted (None: anything).

    Raises: ArtifactError naming file and attribute.
    """
    for name in REQUIRED:
        if name not in roots:
            raise ArtifactError(f"{path}: {name}", got="absent", need="a k3tool artifact")
    require_plain(str(path), roots)
    for name in (*REQUIRED, *OPTIONAL.values()):
        need = int if name == "k3.schema" else str
        if name in roots and type(roots[name]) is not need:
            got = type(roots[name]).__name__
            raise ArtifactError(f"{path}: {name}", got=f"a {got}", need=f"a {need.__name__}")
    for name, need_value in wanted.items():
        allowed = need_value if isinstance(need_value, tuple) else (need_value,)
        if need_value is not None and roots.get(name) not in allowed:
            got, need_text = roots.get(name, "none"), " or ".join(map(str, allowed))
            is_kind = name == "k3.kind"
            hint = how_made(tuple(map(str, allowed))) if is_kind else _HINTS.get(name)
            raise ArtifactError(f"{path}: {name[3:]}", got=got, need=need_text, hint=hint)
    if roots["k3.kind"] not in KINDS:
        raise ArtifactError(f"{path}: kind", got=roots["k3.kind"], need=f"one of {listed(KINDS)}")
    parse_inputs(path, roots)
    parse_params(path, roots)


def require_plain(where: str, attributes: Mapping[str, Any]) -> None:
    """Refuse an attribute that is neither a text nor a number. Raises: ArtifactError."""
    for name, value in attributes.items():
        if not isinstance(value, str | int | float):
            got = type(value).__name__
            raise ArtifactError(f"{where}: {name}", got=got, need="a text or a number")


def parse_inputs(path: Path, roots: Mapping[str, Any]) -> list[InputRef]:
    """Return the inputs. Raises: ArtifactError where they are no list of the four texts."""
    rows = _json(path, roots, "k3.inputs")
    need = f"a list of {', '.join(InputRef._fields)}"
    if not isinstance(rows, list):
        raise ArtifactError(f"{path}: inputs", got=f"a JSON {type(rows).__name__}", need=need)
    for row in rows:
        fields = set(row) if isinstance(row, dict) else set()
        if fields != set(InputRef._fields) or not all(isinstance(v, str) for v in row.values()):
            raise ArtifactError(f"{path}: inputs", got=quoted(row), need=need)
    return [InputRef(**row) for row in rows]


def parse_params(path: Path, roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options. Raises: ArtifactError where they are no JSON object."""
    params = _json(path, roots, "k3.params")
    if not isinstance(params, dict):
        got = f"a JSON {type(params).__name__}"
        raise ArtifactError(f"{path}: params", got=got, need="a JSON object")
    return params


def _json(path: Path, roots: Mapping[str, Any], name: str) -> Any:
    try:
        return json.loads(roots[name])
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: {name}", got=str(error), need="JSON") from None

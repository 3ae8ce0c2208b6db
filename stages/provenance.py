"""`k3tool provenance`: print what an artifact was made from, back to the checkpoint."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from k3tool.artifact import Artifact, InputRef, open_artifact
from k3tool.checkpoint.names import RANK_NAME, SHARDS_NAME
from k3tool.errors import ArtifactError
from k3tool.runtime.cache import default_cache
from stages import options

SHORT = 16  # digits of a digest that a person is shown
_MANY = 4  # a list or table of more entries is counted, not printed


@dataclass(frozen=True, slots=True)
class Options:
    """Which artifact, or shards folder, and more folders in which its inputs are looked for."""

    artifact: Path
    search: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """One artifact of the chain. `path` is None for an input that was not found."""

    role: str
    kind: str
    name: str
    digest: str
    path: Path | None
    facts: dict[str, Any]
    inputs: tuple["Link", ...]


def run(opts: Options) -> Link:
    """Return the chain of an artifact. Raises: ArtifactError if it is damaged, or a folder."""
    path = _file_of(opts.artifact)
    candidates = _Candidates([path.parent, *opts.search, default_cache()])
    with open_artifact(path) as artifact:
        return _link("artifact", artifact, candidates)


def _file_of(path: Path) -> Path:
    """Return the artifact file: of a folder that shard wrote, its own."""
    if not path.is_dir():
        return path
    for name in (SHARDS_NAME, RANK_NAME):
        if (path / name).is_file():
            return path / name
    need = f"an artifact file, or a folder with {SHARDS_NAME} in it"
    hint = "name the artifact itself; of a checkpoint k3tool inspect says what it is"
    raise ArtifactError(str(path), got="a folder", need=need, hint=hint)


class _Candidates:
    """Artifacts by digest, looked for one folder after the other and no further than needed."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._files = _files_in(folders)
        self._found: dict[str, Path] = {}

    def get(self, digest: str) -> Path | None:
        """Return the file with this digest; files that are no artifacts are passed over."""
        while digest not in self._found:
            path = next(self._files, None)
            if path is None:
                return None
            try:
                with open_artifact(path) as artifact:
                    self._found.setdefault(artifact.digest, path)
            except ArtifactError:
                continue
        return self._found[digest]


def _files_in(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted([*folder.glob("*.h5"), *folder.glob("*/*.h5")])


def _link(role: str, artifact: Artifact, candidates: _Candidates) -> Link:
    facts = {
        "schema": artifact.schema,
        "tool": artifact.tool,
        "params": artifact.params,
        "target": artifact.target,
        "phase": artifact.phase,
        "isa_hash": artifact.isa_hash,
    }
    return Link(
        role=role,
        kind=artifact.kind,
        name=artifact.path.name,
        digest=artifact.digest,
        path=artifact.path,
        facts={name: value for name, value in facts.items() if value is not None},
        inputs=tuple(_input_link(ref, candidates) for ref in artifact.inputs),
    )


def _input_link(ref: InputRef, candidates: _Candidates) -> Link:
    path = None if ref.kind == "checkpoint" else candidates.get(ref.content_sha256)
    if path is None:
        return Link(ref.role, ref.kind, ref.name, ref.content_sha256, None, {}, ())
    with open_artifact(path) as artifact:
        return _link(ref.role, artifact, candidates)


# -- output ------------------------------------------------------------------------------------


def chain_lines(link: Link) -> list[str]:
    """Return the chain as indented lines, each artifact's own chain once."""
    return list(_lines(link, 0, set()))


def _lines(link: Link, depth: int, seen: set[str]) -> Iterator[str]:
    pad = "  " * depth
    role = link.kind if link.role == "artifact" else link.role
    kind = "" if role == link.kind else f" ({link.kind})"
    head = f"{pad}{role}: {link.name}{kind} {link.digest[:SHORT]}"
    if link.digest in seen:
        yield f"{head}, see above" if link.path else head
        return
    seen.add(link.digest)
    if link.path is None and link.kind != "checkpoint":
        yield f"{head}, not found: name its folder with --search"
        return
    yield head
    known = {name: value for name, value in link.facts.items() if name != "params"}
    if known:
        yield f"{pad}  {_listed(known)}"
    if link.facts.get("params"):
        yield f"{pad}  params: {_listed(link.facts['params'])}"
    for entry in link.inputs:
        yield from _lines(entry, depth + 1, seen)


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_text(facts[name])}" for name in sorted(facts))


def _text(value: object) -> str:
    if isinstance(value, dict | list):
        if len(value) > _MANY or isinstance(value, dict):
            return f"[{len(value)} entries]"
        return f"[{', '.join(map(str, value))}]"
    is_digest = isinstance(value, str) and len(value) == 64
    return str(value)[:SHORT] if is_digest else str(value)


def as_dict(link: Link) -> dict[str, Any]:
    """Return the chain as plain values for `--json`."""
    return {
        "role": link.role,
        "kind": link.kind,
        "name": link.name,
        "digest": link.digest,
        "path": str(link.path) if link.path else None,
        **link.facts,
        "inputs": [as_dict(entry) for entry in link.inputs],
    }


@click.command(name="provenance")
@click.argument("artifact", type=options.PATH)
@click.option(
    "--search",
    type=options.PATH,
    multiple=True,
    metavar="FOLDER",
    help="Also look for inputs here. Default: beside the artifact and in run's default cache.",
)
@options.as_json()
def command(artifact: Path, search: tuple[Path, ...], as_json: bool) -> None:
    """Print what an artifact was made from, back to the checkpoint.

    ARTIFACT is a file, or a folder that shard wrote. Inputs are found by content, not by name;
    each is printed once. Digests are cut to 16 digits and long parameters counted: --json has all.

    \b
    Example:
      k3tool provenance isa.h5
    """
    link = run(Options(artifact, search))
    click.echo(json.dumps(as_dict(link), indent=1) if as_json else "\n".join(chain_lines(link)))

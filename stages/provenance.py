"""`k3tool provenance`: print what an artifact was made from, back to the checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from k3tool.artifact import Artifact, InputRef, open_artifact
from k3tool.errors import ArtifactError
from stages import options


@dataclass(frozen=True, slots=True)
class Options:
    """Which artifact, and the folders in which its inputs are looked for."""

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
    """Return the chain of an artifact. Raises: ArtifactError if it is damaged."""
    folders = [opts.artifact.parent, *opts.search]
    with open_artifact(opts.artifact) as artifact:
        return _link("artifact", artifact, _candidates(folders))


def _candidates(folders: list[Path]) -> dict[str, Path]:
    """Return artifacts beside the first one by digest; files that are none are passed over."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted([*folder.glob("*.h5"), *folder.glob("*/*.h5")]):
            try:
                with open_artifact(path) as artifact:
                    found[artifact.digest] = path
            except ArtifactError:
                continue
    return found


def _link(role: str, artifact: Artifact, candidates: dict[str, Path]) -> Link:
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


def _input_link(ref: InputRef, candidates: dict[str, Path]) -> Link:
    path = candidates.get(ref.content_sha256)
    if path is None:
        return Link(ref.role, ref.kind, ref.name, ref.content_sha256, None, {}, ())
    with open_artifact(path) as artifact:
        return _link(ref.role, artifact, candidates)


def chain_lines(link: Link, depth: int = 0) -> list[str]:
    """Return the chain as indented lines."""
    pad = "  " * depth
    lines = [f"{pad}{link.role}: {link.kind} {link.name} {link.digest}"]
    lines += [f"{pad}  {name}: {_text(value)}" for name, value in link.facts.items()]
    for entry in link.inputs:
        lines += chain_lines(entry, depth + 1)
    return lines


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)


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
    metavar="DIR",
    help="Also look for inputs in this folder. Default: beside the artifact.",
)
@options.as_json()
def command(artifact: Path, search: tuple[Path, ...], as_json: bool) -> None:
    """Print what an artifact was made from, back to the checkpoint.

    Inputs are found by content, not by name.

    \b
    Example:
      k3tool provenance isa.h5
    """
    link = run(Options(artifact, search))
    click.echo(json.dumps(as_dict(link), indent=1) if as_json else "\n".join(chain_lines(link)))

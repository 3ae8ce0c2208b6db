"""Expand a GPU source and everything it includes into one text.

One text, because NVRTC and hipRTC have no include path worth relying on, and because a kernel cache
that hashes only the file it was given does not notice an edited header. Does not preprocess: only
``#include`` lines are replaced, each file once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3tool.errors import TargetError
from k3tool.isa.table import ALL_PHASES, SPECS

ROOT = Path(__file__).resolve().parents[2]
COMMON = ROOT / "kernels_common"
OPS_HEADER = "k3_ops.h"  # not a file: the op table's list of bodies
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)')
# What a dialect spells itself, because these compilers have no system headers.
_SUPPLIED_BY_DIALECT = {"stdint.h", "stddef.h"}


@dataclass(frozen=True, slots=True)
class Source:
    """One text to compile; `digest` names it in caches and reports."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def op_includes(target: str) -> str:
    """Return the text of ``k3_ops.h`` for ``cuda`` or ``hip``: one include per op that it serves.

    An op whose file is absent is left out here and then is an undeclared name in the dispatch,
    which the compiler reports with the op's name.
    """
    names = [spec.name.lower() for _, spec in sorted(SPECS.items()) if target in spec.targets]
    present = [name for name in names if (COMMON / "ops" / f"{name}.h").exists()]
    return "".join(f'#include "ops/{name}.h"\n' for name in present)


@dataclass(slots=True)
class _Expansion:
    folders: Sequence[Path]
    ops: str
    seen: set[Path] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)

    def add(self, text: str, name: str, folder: Path) -> None:
        """Append `text`; `name` and line numbers reach the compiler's messages by #line."""
        self.lines.append(f'#line 1 "{name}"')
        for number, line in enumerate(text.splitlines(), start=1):
            match = _INCLUDE.match(line)
            if match is None:
                self.lines.append(line)
                continue
            self._include(match, name, folder)
            self.lines.append(f'#line {number + 1} "{name}"')

    def _include(self, match: re.Match[str], name: str, folder: Path) -> None:
        quoted, system = match.group(1), match.group(2)
        if system is not None:
            if system not in _SUPPLIED_BY_DIALECT:
                raise TargetError(name, got=f"#include <{system}>", need="no system header")
        elif quoted == OPS_HEADER:
            self.add(self.ops, OPS_HEADER, COMMON)
        else:
            self._include_file(quoted, name, folder)

    def _include_file(self, quoted: str, name: str, folder: Path) -> None:
        for base in (folder, *self.folders):
            path = (base / quoted).resolve()
            if path.is_file():
                if path not in self.seen:
                    self.seen.add(path)
                    self.add(path.read_text(), _shown(path), path.parent)
                return
        raise TargetError(name, got=f'#include "{quoted}"', need="a file on the include path")


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def expand(text: str, name: str, target: str) -> Source:
    """Return `text` with every include replaced by the file it names.

    `target` is ``cuda`` or ``hip``: its dialect and its ops. Raises TargetError for an include that
    names no file, or a system header that the dialect does not supply.
    """
    expansion = _Expansion((ROOT / f"kernels_{target}", COMMON), op_includes(target))
    expansion.add(text, name, ROOT / f"kernels_{target}")
    return Source(name, "\n".join(expansion.lines) + "\n")


def op_names(target: str, phase: str) -> tuple[str, ...]:
    """Return the names of the ops that `target` serves in `phase`, by number."""
    rows = sorted(SPECS.items())
    return tuple(s.name for _, s in rows if target in s.targets and phase in s.phases)


def phases(target: str) -> dict[str, tuple[str, ...]]:
    """Return phase -> ops, each set of ops once: equal phases compile to equal code."""
    distinct: dict[str, tuple[str, ...]] = {}
    for phase in ALL_PHASES:
        names = op_names(target, phase)
        if names not in distinct.values():
            distinct[phase] = names
    return distinct


def phases_label(target: str, phase: str) -> str:
    """Return the phases that share a compiled set of ops: `decode=prefill`."""
    names = op_names(target, phase)
    return "=".join(each for each in ALL_PHASES if op_names(target, each) == names)


def op_bodies(target: str, phase: str) -> Source:
    """Return the expanded source with every op body of `target` in `phase`."""
    path = ROOT / f"kernels_{target}" / {"cuda": "ops_body.cu", "hip": "ops_body.hip"}[target]
    define = f"#define K3_PHASE_{phase.upper()}\n"
    return expand(define + path.read_text(), _shown(path), target)

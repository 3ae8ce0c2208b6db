"""Expand a GPU source and everything it includes into one text.

One text, because NVRTC and hipRTC have no include path worth relying on, and because a kernel cache
that hashes only the file it was given does not notice an edited header. Does not preprocess: only
``#include`` lines are replaced, each file once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from k3tool.errors import TargetError
from k3tool.isa.table import ALL_PHASES, SPECS, Op
from k3tool.targets import Build, get_build

if TYPE_CHECKING:
    from k3tool.isa.stream import Isa

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


def op_includes(names: Sequence[str]) -> str:
    """Return the text of ``k3_ops.h``: one include for each op of `names`.

    An op whose file is absent is left out here and then is an undeclared name in the dispatch,
    which the compiler reports with the op's name.
    """
    files = [f"{name.lower()}.h" for name in names]
    present = [file for file in files if (COMMON / "ops" / file).exists()]
    return "".join(f'#include "ops/{file}"\n' for file in present)


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


def expand(text: str, name: str, target: str, ops: Sequence[str] = ()) -> Source:
    """Return `text` with every include replaced by the file it names.

    `target` is ``cuda`` or ``hip``, whose dialect is taken; `ops` are those of ``k3_ops.h``.
    Raises TargetError for an include that names no file, or a system header that the dialect does
    not supply.
    """
    expansion = _Expansion((ROOT / f"kernels_{target}", COMMON), op_includes(ops))
    expansion.add(text, name, ROOT / f"kernels_{target}")
    return Source(name, "\n".join(expansion.lines) + "\n")


def op_names(target: str, phase: str) -> tuple[str, ...]:
    """Return the names of the ops that `target` serves in `phase`, by number."""
    rows = sorted(SPECS.items())
    return tuple(s.name for _, s in rows if target in s.targets and phase in s.phases)


def program_ops(isa: Isa) -> dict[str, tuple[str, ...]]:
    """Return phase -> the ops that a program's streams use, by number, and NOP.

    A body is measured by putting NOP in its place.
    """
    return {
        phase: tuple(SPECS[Op(op)].name for op in sorted({*opcodes, int(Op.NOP)}))
        for phase, opcodes in isa.opcodes().items()
    }


def builds(ops: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return phases -> ops: phases of the same ops share an interpreter."""
    groups: dict[tuple[str, ...], tuple[str, ...]] = {}
    for names in dict.fromkeys(ops.values()):
        groups[tuple(phase for phase, each in ops.items() if each == names)] = names
    return groups


def interpreter(
    target: str, phases: Sequence[str], ops: Sequence[str], build: Build | None = None
) -> Source:
    """Return the expanded interpreter of `target` for phases that share a build.

    Only the bodies of `ops` are in it; any other opcode is a fault there. `build` is the table's
    for them unless given. Raises TargetError where a phase has no build, or not the same.
    """
    (build,) = {build or get_build(target, phase, ops) for phase in phases}
    path = ROOT / build.source
    served = sum(1 << ALL_PHASES.index(phase) for phase in phases)
    rows = " ".join(f"X({name}, {name.lower()})" for name in ops)
    head = f"#define K3_PHASES {served}u\n#define K3_INTERP_OPS(X) {rows}\n"
    return expand(head + path.read_text(), _shown(path), target.partition(":")[0], ops)

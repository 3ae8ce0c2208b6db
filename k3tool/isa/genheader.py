"""Renders what the op table generates: ``kernels_common/gen/k3_isa.h`` and the manual's pages.

``python -m k3tool.isa.genheader`` writes them: the header, docs/isa.md and the README's list of
ops. All are committed; ``--check`` (``make gen-check``) renders them again and compares bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from k3tool.isa import manual, op_spec, table

HEADER_PATH = Path(__file__).resolve().parents[2] / "kernels_common" / "gen" / "k3_isa.h"


def _constants() -> list[str]:
    pairs = {
        "K3_ISA_VERSION": table.ISA_VERSION,
        "K3_N_HANDLES": op_spec.N_HANDLES,
        "K3_N_PARAMS": op_spec.N_PARAMS,
        "K3_PAGE_TOKENS": table.PAGE_TOKENS,
        "K3_CANDIDATE_WORDS": table.CANDIDATE_WORDS,
        "K3_RUN_SHIFT": op_spec.RUN_SHIFT,
        "K3_LOAD_BLOCK_BYTES": table.LOAD_BLOCK_BYTES,
        "K3_MOST_IO_QUEUES": table.MOST_IO_QUEUES,
    }
    return [f"#define {name} {value}" for name, value in pairs.items()]


def _op_lines(spec: op_spec.OpSpec) -> list[str]:
    lines = [f"/* {spec.doc} */", f"#define K3_OP_{spec.name} {int(spec.op)}"]
    for operand in spec.operands:
        name = f"K3_{spec.name}_{operand.name.upper()}"
        where = operand.slot | operand.run << op_spec.RUN_SHIFT  # k3_tensor takes it apart
        lines.append(f"#define {name} {where} /* handle: {operand.role} */")
    for index, param in enumerate(spec.params):
        name = f"K3_{spec.name}_{param.name.upper()}"
        lines.append(f"#define {name} {index} /* param: {param.kind}, {param.unit} */")
    bits = {f"K3_{spec.name}_{name.upper()}": spec.flag(name) for name in spec.flags}
    lines += [f"#define {name} {bit}u /* flag */" for name, bit in bits.items()]
    return lines


def _dispatch_lines() -> list[str]:
    lines = []
    for target in table.ALL_TARGETS:
        for phase in table.ALL_PHASES:
            rows = [
                f"  X({spec.name}, {spec.name.lower()})"
                for _, spec in sorted(table.SPECS.items())
                if target in spec.targets and phase in spec.phases
            ]
            head = f"#define K3_OPS_{target.upper()}_{phase.upper()}(X)"
            lines.append(" \\\n".join([head, *rows]))
    return lines


def render() -> str:
    """Return the header's text."""
    lines = [
        "/* Generated from k3tool/isa/table.py by genheader.py. Do not edit: run `make gen`. */",
        "#ifndef K3_ISA_H",
        "#define K3_ISA_H",
        *_constants(),
        f'#define K3_ISA_HASH "{table.isa_hash()}"',
        "",
    ]
    for _, spec in sorted(table.SPECS.items()):
        if spec.is_emitted:
            lines += [*_op_lines(spec), ""]
    lines += ["/* X(NAME, name): every op that a target serves in a phase. */", *_dispatch_lines()]
    return "\n".join([*lines, "", "#endif", ""])


def outputs() -> dict[Path, str]:
    """Return the text of each generated file by its path. Raises: ValueError as `readme_text`."""
    return {
        HEADER_PATH: render(),
        manual.MANUAL_PATH: manual.manual_text(),
        manual.README_PATH: manual.readme_text(manual.README_PATH.read_text()),
    }


def main(arguments: list[str]) -> int:
    """Write the files; with ``--check`` compare instead, and return 1 when one differs."""
    try:
        files = outputs()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    differing = [p for p, text in files.items() if not p.exists() or p.read_text() != text]
    for path in differing:
        if "--check" in arguments:
            print(f"{path.name} differs from the op table: run `make gen`", file=sys.stderr)
        else:
            path.write_text(files[path])
    return int("--check" in arguments and bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Renders ``kernels_common/gen/k3_isa.h`` from the op table.

``python -m k3tool.isa.genheader`` writes it.

The header is committed; ``make gen-check`` renders it again and compares bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from k3tool.isa import table

HEADER_PATH = Path(__file__).resolve().parents[2] / "kernels_common" / "gen" / "k3_isa.h"


def _constants() -> list[str]:
    pairs = {
        "K3_ISA_VERSION": table.ISA_VERSION,
        "K3_N_HANDLES": table.N_HANDLES,
        "K3_N_PARAMS": table.N_PARAMS,
        "K3_PAGE_TOKENS": table.PAGE_TOKENS,
        "K3_CANDIDATE_WORDS": table.CANDIDATE_WORDS,
        "K3_RUN_SHIFT": table.RUN_SHIFT,
    }
    return [f"#define {name} {value}" for name, value in pairs.items()]


def _op_lines(spec: table.OpSpec) -> list[str]:
    lines = [f"/* {spec.doc} */", f"#define K3_OP_{spec.name} {int(spec.op)}"]
    for operand in spec.operands:
        name = f"K3_{spec.name}_{operand.name.upper()}"
        where = operand.slot | operand.run << table.RUN_SHIFT  # k3_tensor takes it apart
        lines.append(f"#define {name} {where} /* handle: {operand.role} */")
    for index, param in enumerate(spec.params):
        name = f"K3_{spec.name}_{param.name.upper()}"
        lines.append(f"#define {name} {index} /* param: {param.kind}, {param.unit} */")
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


def main(arguments: list[str]) -> int:
    """Write the header; with ``--check`` compare instead, and return 1 when it differs."""
    text = render()
    if "--check" in arguments:
        same = HEADER_PATH.exists() and HEADER_PATH.read_text() == text
        if not same:
            print(f"{HEADER_PATH.name} differs from the op table: run `make gen`", file=sys.stderr)
        return 0 if same else 1
    HEADER_PATH.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

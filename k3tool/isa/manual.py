"""The manual of the instruction set, rendered from the op table: Markdown and plain data.

Its full text is committed as docs/isa.md, its list of ops stands in the README between two
markers; `k3tool.isa.genheader` writes both.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3tool.isa import op_spec, table
from k3tool.isa.op_spec import OpSpec

_ROOT = Path(__file__).resolve().parents[2]
MANUAL_PATH = _ROOT / "docs" / "isa.md"
README_PATH = _ROOT / "README.md"
BEGIN, END = "<!-- ops: written by `make gen` -->", "<!-- end of ops -->"


def as_data() -> dict[str, Any]:
    """Return the whole table as plain values, in number order."""
    return {
        "isa_version": table.ISA_VERSION,
        "isa_hash": table.isa_hash(),
        "record_words": op_spec.RECORD_WORDS,
        "ops": [_op_data(spec) for _, spec in sorted(table.SPECS.items()) if spec.is_emitted],
        "reserved": {str(number): name for number, name in sorted(table.RESERVED.items())},
    }


def _op_data(spec: OpSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "opcode": int(spec.op),
        "operands": [
            {"slot": o.slot, "run": o.run, "name": o.name, "role": o.role} for o in spec.operands
        ],
        "params": [
            {"word": spec.word(p.name), "name": p.name, "kind": p.kind, "unit": p.unit}
            for p in spec.params
        ],
        "flags": {name: spec.flag(name) for name in spec.flags},
        "unit": spec.unit,
        "grain": spec.grain,
        "placement": spec.placement,
        "phases": list(spec.phases),
        "targets": list(spec.targets),
        "whole": dict(spec.whole),
        "again": list(spec.again),
        "inner_waits": spec.inner_waits,
        "doc": spec.doc,
    }


def as_markdown() -> Iterator[str]:
    """Yield the lines of one table, a row per op."""
    yield "# The instruction set"
    yield ""
    yield f"ISA version {table.ISA_VERSION}, hash `{table.isa_hash()[:16]}`:"
    yield (
        f"{op_spec.RECORD_WORDS} words of 32 bits; word 0 opcode and flags, words "
        f"{op_spec.WORD_HANDLES} to {op_spec.WORD_UNITS - 1} handles, {op_spec.WORD_UNITS} units, "
        f"{op_spec.WORD_WIDTH} width, {op_spec.WORD_UNIT_COLS} columns a unit, from "
        f"{op_spec.WORD_PARAMS} on parameters."
    )
    yield ""
    yield "| opcode | op | operands | parameters | unit | placement | result |"
    yield "|---|---|---|---|---|---|---|"
    for _, spec in sorted(table.SPECS.items()):
        if spec.is_emitted:
            yield _row(spec)
    yield ""
    names = ", ".join(f"{number} {name}" for number, name in sorted(table.RESERVED.items()))
    yield "An operand with + has the handle behind its neighbour's and no slot of its own."
    yield f"Reserved, and refused until they mean something: {names}."


def manual_text() -> str:
    """Return docs/isa.md: what `k3tool isa` prints."""
    return "\n".join([*as_markdown(), ""])


def readme_text(text: str) -> str:
    """Return a README's text with the list of ops between its markers, whatever stood there.

    Raises: ValueError where a marker is missing or there twice.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{README_PATH.name}: need {BEGIN} and then {END}, once each")
    head, _, rest = text.partition(BEGIN)
    return "\n".join([head + BEGIN, *_op_list(), END + rest.partition(END)[2]])


def _op_list() -> Iterator[str]:
    yield "| opcode | op | result |"
    yield "|---|---|---|"
    for _, spec in sorted(table.SPECS.items()):
        if spec.is_emitted:
            yield f"| {int(spec.op)} | `{spec.name}` | {_doc(spec)} |"


def _doc(spec: OpSpec) -> str:
    return spec.doc.replace("|", "\\|")


def _row(spec: OpSpec) -> str:
    operands = ", ".join(
        f"{'+' if o.run else ''}{o.name}{'' if o.role == 'in' else f' ({o.role})'}"
        for o in spec.operands
    )
    words = [f"{p.name} ({p.kind}, {p.unit})" for p in spec.params]
    params = ", ".join([*words, *(f"{name} (flag {spec.flag(name)})" for name in spec.flags)])
    unit = spec.unit if spec.grain == 1 else f"{spec.unit}, {spec.grain} a tile"
    cells = (
        str(int(spec.op)), f"`{spec.name}`", operands, params, unit, spec.placement, _doc(spec)
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"

"""Say in tables and lines what coverage found: one screen for a person, whole names for a pipe."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from k3tool.checkpoint.coverage import Coverage, ModuleCount
from k3tool.checkpoint.findings import FINDING_KINDS, Finding
from k3tool.errors import printable
from k3tool.model.config import K3Config
from k3tool.model.sizes import rank_bytes, token_bytes
from k3tool.tables import Column, Table, bytes_text, ranges_text

FINDINGS_SHOWN = 20  # of each kind, unless all are asked for


class Section(NamedTuple):
    """A table, or lines, under a title that markdown shows."""

    title: str
    table: Table | None
    lines: Sequence[str] = ()


def report_sections(
    coverage: Coverage,
    config: K3Config,
    *,
    layers: Collection[int] | None = None,
    every_finding: bool = False,
) -> list[Section]:
    """Return the whole report, or that of some layers, the verdict last."""
    if layers is None:
        body = [
            Section("Layers", _layer_groups(coverage, config)),
            Section("Modules", _modules(coverage)),
            Section("Sizes", None, _size_lines(coverage, config)),
        ]
    else:
        body = [Section("Layers", _layer_details(coverage, layers))]
    findings = [f for f in coverage.findings if layers is None or _is_of(f, layers)]
    return [
        Section("Checkpoint", None, _head_lines(coverage)),
        *body,
        Section("Findings", None, finding_lines(findings, every_finding)),
        Section("Verdict", None, [verdict_line(coverage)]),
    ]


def text_lines(sections: Sequence[Section], width: int | None) -> list[str]:
    """Return the report for a terminal of a width, or whole (None)."""
    lines: list[str] = []
    for section in sections:
        if section.table is not None:
            gap = [""] if lines and lines[-1] else []
            lines += [*gap, *section.table.text_lines(width), ""]
        lines += section.lines
    return lines


def markdown_lines(sections: Sequence[Section]) -> list[str]:
    """Return the report as markdown."""
    lines: list[str] = []
    for section in sections:
        body = (
            section.table.markdown_lines() if section.table else [f"* {x}" for x in section.lines]
        )
        lines += [f"## {section.title}", "", *(body or ["none"]), ""]
    return lines[:-1]


def json_value(
    coverage: Coverage, config: K3Config, layers: Collection[int] | None = None
) -> dict[str, Any]:
    """Return the comparison as plain values; modules and findings of some layers only, or all."""
    findings = [f for f in coverage.findings if layers is None or _is_of(f, layers)]
    return {
        "whole": coverage.is_whole,
        "checkpoint": str(coverage.path),
        "identity": coverage.identity,
        "tp": coverage.tp,
        "rank": coverage.rank,
        "files": coverage.n_files,
        "index": "headers" if coverage.from_headers else "index file",
        "tensors": {"expected": coverage.expected, "indexed": coverage.n_tensors},
        "dtypes": coverage.dtypes,
        "experts": _n_experts(config),
        "bytes": coverage.n_bytes,
        "total_bytes": coverage.total_bytes,
        "legal_tp": config.legal_tp(),
        "rank_bytes": [rank_bytes(config, tp)._asdict() for tp in config.legal_tp()],
        "token_bytes": token_bytes(config)._asdict(),
        "eps": dict(config.eps),
        "vision": coverage.vision._asdict(),
        "idle": coverage.idle,
        "modules": [
            row._asdict() for row in coverage.modules if layers is None or row.layer in layers
        ],
        "findings": [{**each._asdict(), "hint": each.next_step} for each in findings],
    }


# -- parts -------------------------------------------------------------------------------------


def _head_lines(coverage: Coverage) -> list[str]:
    source = "headers (no index file)" if coverage.from_headers else "index"
    part = "" if coverage.tp is None else f", rank {coverage.rank} of {coverage.tp}"
    dtypes = ", ".join(f"{name} {count:,}" for name, count in coverage.dtypes.items())
    total = coverage.total_bytes
    return [
        f"{printable(str(coverage.path))}{part}: {coverage.n_files} files by {source}, "
        f"{coverage.n_tensors:,} tensors ({dtypes}), {bytes_text(total)}"
    ]


def _layer_groups(coverage: Coverage, config: K3Config) -> Table:
    """Fold layers that have the same modules in the same state into one row."""
    by_layer: dict[int | None, list[ModuleCount]] = {}
    for row in coverage.modules:
        by_layer.setdefault(row.layer, []).append(row)
    groups: dict[tuple[object, ...], list[int]] = {}
    for layer, rows in by_layer.items():
        if layer is not None:
            groups.setdefault(tuple(row[1:] for row in rows), []).append(layer)
    table = []
    for layers in groups.values():
        rows = by_layer[layers[0]]
        table.append(_group_row(_kind(config, layers[0]), rows, len(layers), ranges_text(layers)))
    table.append(_group_row("outside layers", by_layer.get(None, []), 1))
    table.append(_group_row("text model", coverage.modules, 1))
    vision = coverage.vision
    if vision.expected or vision.found:
        counts, size = f"{vision.found:,}/{vision.expected:,}", bytes_text(vision.n_bytes)
        table.append(("vision", "", counts, "", size, "known, not read", ""))
    columns = [
        Column("layers", "left"), Column("how many"), Column("tensors"), Column("each"),
        Column("bytes"), Column("state", "left"), Column("which", "left"),
    ]  # fmt: skip
    return Table(columns, table)


def _kind(config: K3Config, layer: int) -> str:
    return " ".join(("mla" if config.is_mla(layer) else "kda", _ffn(config, layer)))


def _ffn(config: K3Config, layer: int) -> str:
    return "moe" if config.is_moe(layer) else "dense"


def _group_row(
    label: str, rows: Sequence[ModuleCount], n_layers: int, which: str = ""
) -> tuple[str, ...]:
    expected, sound = sum(row.expected for row in rows), sum(row.sound for row in rows)
    n_bytes = sum(row.n_bytes for row in rows)
    return (
        label,
        str(n_layers) if which else "",
        f"{n_layers * sound:,}/{n_layers * expected:,}",
        bytes_text(n_bytes) if which else "",
        bytes_text(n_layers * n_bytes),
        _state(n_layers * expected, n_layers * sound),
        which,
    )


def _state(expected: int, sound: int) -> str:
    return "whole" if sound == expected else f"{expected - sound:,} not sound"


def _modules(coverage: Coverage) -> Table:
    totals: dict[str, list[int]] = {}
    for _, module, *counts in coverage.modules:
        total = totals.setdefault(module, [0, 0, 0])
        totals[module] = [a + b for a, b in zip(total, counts, strict=True)]
    whole = max(1, coverage.n_bytes)
    rows = [
        (
            module,
            f"{sound:,}/{expected:,}",
            bytes_text(n_bytes),
            f"{100 * n_bytes / whole:.2f}%",
            _state(expected, sound),
        )
        for module, (expected, sound, n_bytes) in totals.items()
    ]
    columns = [Column("module", "left"), Column("tensors"), Column("bytes"), Column("share")]
    return Table([*columns, Column("state", "left")], rows)


def _layer_details(coverage: Coverage, layers: Collection[int]) -> Table:
    rows = [
        (
            str(row.layer),
            row.module,
            f"{row.sound:,}/{row.expected:,}",
            bytes_text(row.n_bytes),
            _state(row.expected, row.sound),
        )
        for row in coverage.modules
        if row.layer in layers
    ]
    columns = [Column("layer"), Column("module", "left"), Column("tensors"), Column("bytes")]
    return Table([*columns, Column("state", "left")], rows)


def _n_experts(config: K3Config) -> int:
    return sum(config.num_experts for layer in config.layers if config.is_moe(layer))


def _size_lines(coverage: Coverage, config: K3Config) -> list[str]:
    token, vision = token_bytes(config), coverage.vision
    lines = [
        f"all tensors: {coverage.n_tensors:,} of {coverage.total_bytes:,} bytes; text model "
        f"{coverage.n_bytes:,} bytes, vision {vision.n_bytes:,}",
        f"a token reads {bytes_text(sum(token))}: {bytes_text(token.trunk)} always, "
        f"{bytes_text(token.experts)} of experts ({config.num_experts_per_token} of "
        f"{config.num_experts} a layer, {_n_experts(config):,} in all)",
    ]
    if coverage.tp is None:
        ranks = [rank_bytes(config, tp) for tp in config.legal_tp()]
        sizes = ", ".join(f"TP {rank.tp} {bytes_text(rank.total)}" for rank in ranks)
        same = bytes_text(ranks[0].replicated)
        lines.append(f"weights on each rank: {sizes}; {same} of it on every rank")
    if coverage.idle:
        lines.append(f"stored and never read: {', '.join(coverage.idle)}")
    return lines


def _is_of(finding: Finding, layers: Collection[int]) -> bool:
    """Return whether a finding is about one of the layers, or about no layer at all."""
    tail = finding.name.partition("layers.")[2]
    number = tail.split(".")[0]
    return not number.isdecimal() or number in map(str, layers)


def finding_lines(findings: Sequence[Finding], every: bool) -> list[str]:
    """Return one line per finding, capped per kind unless `every` is set, and the next steps."""
    lines: list[str] = []
    for kind, group in groupby(findings, key=lambda finding: finding.kind):
        held = list(group)
        shown = held if every else held[:FINDINGS_SHOWN]
        lines += [f"{kind}: {finding.text()}" for finding in shown]
        if len(held) > len(shown):
            lines.append(f"{kind}: {len(held) - len(shown)} more (-v shows all)")
        steps = dict.fromkeys(finding.next_step for finding in shown)
        lines += [f"  hint: {printable(step)}" for step in steps]
    return lines


def verdict_line(coverage: Coverage) -> str:
    """Return the last line: whole, or how many of what."""
    source = "headers (no index file)" if coverage.from_headers else "index"
    if coverage.is_whole:
        return (
            f"whole: {coverage.expected} tensors in {coverage.n_files} files by {source}, "
            f"identity {coverage.identity}"
        )
    counts = Counter(finding.kind for finding in coverage.findings)
    listed = ", ".join(f"{counts[kind]} {kind}" for kind in FINDING_KINDS if counts[kind])
    return f"not whole: {listed}"

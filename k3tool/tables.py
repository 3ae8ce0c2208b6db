"""Tables and byte counts as a person reads them: aligned text or markdown, whole or cut short."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_UNITS = ("B", "KB", "MB", "GB", "TB")


def bytes_text(n_bytes: float) -> str:
    """Return a byte count with four digits and a decimal unit: GB is 1e9 bytes."""
    size, unit = float(n_bytes), 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    if unit == 0:
        return f"{size:.0f} B"
    digits = 3 - min(3, len(str(int(size))) - 1)
    return f"{size:.{max(0, digits)}f} {_UNITS[unit]}"


def need_text(n_bytes: int) -> str:
    """Return what is needed, never less than that: given back as an option it is enough."""
    return bytes_text(-_whole_steps(-n_bytes, _step(n_bytes)))


def size_option(n_bytes: int) -> str:
    """Return a need as an option takes it: need_text without its space."""
    return need_text(n_bytes).replace(" ", "")


def have_text(n_bytes: int) -> str:
    """Return what there is, never more: less than a need reads as less, however near it is."""
    return bytes_text(_whole_steps(n_bytes, _step(n_bytes)))


def _step(n_bytes: int) -> int:
    """Return the bytes between two texts of four digits."""
    return int(10 ** max(0, len(str(n_bytes)) - 4))


def _whole_steps(n_bytes: int, step: int) -> int:
    return n_bytes // step * step


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun: 1 rank, 8 ranks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def number_text(value: float, digits: int = 3) -> str:
    """Return a number of so many digits; up to millions without an exponent, which reads badly."""
    is_plain = 10**digits <= abs(value) < 1e7
    return f"{value:.0f}" if is_plain else f"{value:.{digits}g}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: 1-2,4-6,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading and side; numbers stand to the right."""

    title: str
    side: Literal["left", "right"] = "right"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of ready texts under columns; the last column may be long and is best a left one."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    def text_lines(self, width: int | None = None) -> list[str]:
        """Return aligned lines, each cut to `width` with an ellipsis where one is given."""
        titles = [column.title for column in self.columns]
        widths = [max(map(len, cells)) for cells in zip(titles, *self.rows, strict=True)]
        lines = []
        for cells in (titles, *self.rows):
            padded = [
                cell.rjust(size) if column.side == "right" else cell.ljust(size)
                for cell, size, column in zip(cells, widths, self.columns, strict=True)
            ]
            lines.append(cut("  ".join(padded).rstrip(), width))
        return lines

    def markdown_lines(self) -> list[str]:
        """Return a markdown table."""
        titles = [column.title for column in self.columns]
        rule = ["---:" if column.side == "right" else "---" for column in self.columns]
        return [_markdown_row(cells) for cells in (titles, rule, *self.rows)]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def cut(line: str, width: int | None) -> str:
    """Return a line cut to a terminal's width; None leaves it whole."""
    if width is None or len(line) <= width:
        return line
    return line[: max(0, width - 1)] + "…"

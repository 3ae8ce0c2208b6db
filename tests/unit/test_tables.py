"""Byte counts, ranges and tables as a person reads them."""

import pytest

from k3tool.runtime.options import parse_size
from k3tool.tables import Column, Table, bytes_text, cut, have_text, need_text, ranges_text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.000 KB"), (163_840, "163.8 KB"),
        (8_090_608, "8.091 MB"), (999_949_999, "999.9 MB"), (999_950_000, "1.000 GB"),
        (1_560_860_324_864, "1.561 TB"), (5e15, "5000 TB"),
    ],
)  # fmt: skip
def test_bytes_have_four_digits_and_a_decimal_unit(n_bytes: float, text: str) -> None:
    assert bytes_text(n_bytes) == text


@pytest.mark.parametrize(
    ("n_bytes", "have", "need"),
    [
        (0, "0 B", "0 B"), (999, "999 B", "999 B"), (1000, "1.000 KB", "1.000 KB"),
        (1001, "1.001 KB", "1.001 KB"), (10_001, "10.00 KB", "10.01 KB"),
        (999_999, "999.9 KB", "1.000 MB"), (183_000_001, "183.0 MB", "183.1 MB"),
        (1_626_191_307_904, "1.626 TB", "1.627 TB"),
    ],
)  # fmt: skip
def test_a_need_is_never_said_too_small_nor_what_there_is_too_large(
    n_bytes: int, have: str, need: str
) -> None:
    assert have_text(n_bytes) == have
    assert need_text(n_bytes) == need


@pytest.mark.parametrize("exponent", range(13))
def test_what_is_said_can_be_given_back(exponent: int) -> None:
    """As a size of --memory, with and without its space: a need is enough, and by a thousandth."""
    for lead in (*range(1000, 10_000, 7), 1001, 1183, 4095, 9999):
        for more in (-1, 0, 1, 10**exponent // 3):
            n_bytes = lead * 10**exponent + more
            for text in (need_text(n_bytes), need_text(n_bytes).replace(" ", "")):
                assert n_bytes <= parse_size(text) <= n_bytes * 1.001 + 1
            assert n_bytes * 0.999 - 1 <= parse_size(have_text(n_bytes)) <= n_bytes
            assert have_text(n_bytes) != need_text(n_bytes + 1), "less reads as less"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([0], "0"), ([1, 2, 4, 5, 6, 8], "1-2,4-6,8"), ([3, 7, 91, 92], "3,7,91-92")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges_text(numbers) == text


def test_columns_stay_aligned_however_long_a_cell_is() -> None:
    table = Table(
        [Column("name", "left"), Column("n"), Column("which", "left")],
        [("a", "1", "x"), ("a long name", "1,234", ""), ("b", "22", "y" * 50)],
    )
    lines = table.text_lines()
    assert lines[0] == "name             n  which"
    assert lines[2] == "a long name  1,234"
    ends = {line.index(n) + len(n) for line, n in zip(lines[1:], ("1", "1,234", "22"), strict=True)}
    assert ends == {18}
    assert all(len(line) <= 30 for line in table.text_lines(30))
    assert table.text_lines(30)[3].endswith("y…")
    assert table.text_lines()[3].endswith("y" * 50)
    assert cut("abc", 3) == "abc"
    assert table.markdown_lines()[1] == "| --- | ---: | --- |"


def test_markdown_cells_keep_their_columns() -> None:
    lines = Table([Column("a|b")], [("c|d",)]).markdown_lines()
    assert lines[0] == r"| a\|b |"
    assert lines[2] == r"| c\|d |"

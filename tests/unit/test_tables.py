"""Byte counts, ranges and tables as a person reads them."""

import pytest

from k3tool.tables import Column, Table, bytes_text, cut, ranges_text


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

"""A table on a terminal and off it: the same words, drawn only where a person reads."""

import re
import sys

import pytest

from k3tool.tables import Column, Table
from k3tool.terminal import print_table

TABLE = Table([Column("stream", "left"), Column("tokens")],
              [["a [bold]b[/bold]", "3"], ["[red]", "12"]])  # fmt: skip


def test_text_is_aligned_and_bare_where_a_program_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(TABLE)
    assert capsys.readouterr().out.splitlines() == TABLE.text_lines()


def test_a_terminal_gets_the_same_words_and_no_markup_of_a_file_s_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    print_table(TABLE)
    drawn = capsys.readouterr().out
    assert drawn.splitlines() != TABLE.text_lines()
    bare = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    for word in ("stream", "tokens", "a [bold]b[/bold]", "[red]", "12"):
        assert word in bare

"""A table on stdout: drawn on a terminal, aligned text where a program may read it.

The rows are the same; only the drawing library is loaded for a terminal alone.
"""

import sys

from k3tool.tables import Table


def print_table(table: Table) -> None:
    """Print a table to stdout. On a terminal long cells wrap; elsewhere nothing is cut."""
    if not sys.stdout.isatty():
        for line in table.text_lines():
            print(line)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in table.columns:
        drawn.add_column(column.title, justify=column.side, overflow="fold")
    for cells in table.rows:
        drawn.add_row(*map(Text, cells))  # a name may hold what the library takes for markup
    Console().print(drawn)

"""The page that a report is: headings, words, tables and pictures in one file without links.

The text is well-formed XML too, so that a test can read it. Colours follow the reader's choice of
light or dark, and paper.
"""

from collections.abc import Iterable, Sequence
from html import escape

MARK = b"<!DOCTYPE html>\n<!-- k3tool report -->"  # how a page of ours begins
NOT_MEASURED = "NOT MEASURED"

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1d21; --dim: #5b6168;
  --grid: #dfe3e7; --box: #f4f5f7; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #e6e8ea; --dim: #a2a9b0;
  --grid: #363b42; --box: #1e2126; } }
body { background: var(--paper); color: var(--ink); max-width: 66rem; margin: 0 auto;
  padding: 1rem 1.25rem 4rem; font: 15px/1.5 system-ui, sans-serif; }
h1, h2, h3, p, figcaption { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem;
  border-top: 1px solid var(--grid); padding-top: 1rem; }
h3 { font-size: 1rem; margin-bottom: 0.3rem; }
p, li { max-width: 52rem; } .dim { color: var(--dim); } .none { font-weight: 600; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; color: var(--ink);
  min-width: 46rem; }
figcaption { color: var(--dim); font-size: 0.9rem; max-width: 52rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem;
  margin-bottom: 1rem; }
th, td { padding: 0.15rem 0.7rem; text-align: right; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; } th.text, td.text { text-align: left; }
@media (max-width: 40rem) { th, td { padding: 0.15rem 0.4rem; }
  th.text, td.text { white-space: normal; min-width: 6.5rem; } }
details { margin: 0.3rem 0 1.5rem; } summary { cursor: pointer; color: var(--dim); }
code { background: var(--box); padding: 0.1rem 0.3rem; border-radius: 3px; }
@page { margin: 15mm; }
@media print { :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --dim: #444444;
  --grid: #cccccc; --box: #f2f2f2; } figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } figure svg { max-height: 11cm; min-width: 0; }
  .wide { overflow: visible; } th, td { white-space: normal; }
  details:not([open]) { display: none; }
  body { max-width: none; margin: 0; padding: 0; font-size: 10.5pt; }
  svg, td, th { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def page(title: str, sections: Sequence[tuple[str, Iterable[str]]]) -> str:
    """Return the whole page; a section is its heading and the elements below it."""
    parts = [MARK.decode(), '<html lang="en">', "<head>", '<meta charset="utf-8"/>',
             '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
             f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", "</head>", "<body>",
             f"<h1>{escape(title)}</h1>"]  # fmt: skip
    for heading, elements in sections:
        parts += ["<section>", f"<h2>{escape(heading)}</h2>", *elements, "</section>"]
    return "\n".join([*parts, "</body>", "</html>", ""])


def words(*lines: str, kind: str = "") -> str:
    """Return a paragraph of some lines."""
    text = "<br/>\n".join(escape(line) for line in lines)
    return f"<p{_class(kind)}>{text}</p>"


def heading(text: str) -> str:
    """Return a heading inside a section."""
    return f"<h3>{escape(text)}</h3>"


def not_measured(what: str, command: str) -> str:
    """Return what stands in place of a picture whose numbers nobody brought."""
    return (
        f'<p class="none">{NOT_MEASURED}</p>\n'
        f"<p>{escape(what)} Measure with <code>{escape(command)}</code> and name the file.</p>"
    )


def picture(svg: str, label: str, caption: str) -> str:
    """Return a picture with what it shows, said for those who do not see it too."""
    named = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    drawing = _wide(f"{named}\n", label)
    return f"<figure>\n{drawing}<figcaption>{escape(caption)}</figcaption>\n</figure>"


def numbers(titles: Sequence[str], rows: Sequence[Sequence[str]], *, n_text: int = 1) -> str:
    """Return a picture's numbers as a table that opens: for who does not see it, and to copy."""
    inside = table(titles, rows, n_text=n_text)
    return f"<details><summary>these numbers as a table</summary>\n{inside}\n</details>"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, n_text: int = 1) -> str:
    """Return a table; the first `n_text` columns are text, and what is called a unit; others are
    numbers.
    """
    kinds = [_class("text" if at < n_text or t == "unit" else "") for at, t in enumerate(titles)]
    head = "".join(
        f'<th scope="col"{kind}>{escape(title)}</th>'
        for kind, title in zip(kinds, titles, strict=True)
    )
    body = ""
    for row in rows:
        cells = zip(kinds, row, strict=True)
        body += f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in cells)}</tr>\n"
    inside = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    return _wide(inside, f"table: {', '.join(titles)}")


def _wide(inside: str, label: str) -> str:
    """Return what scrolls by itself where the screen is narrow, by keys too."""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"{inside}</div>\n"
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""

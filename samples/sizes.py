"""Prints lines per file and the ten longest functions, so that growth is noticed (`make sizes`)."""

import ast
import sys
from pathlib import Path


def main(folders: list[str]) -> None:
    """Print the report for every Python file below the folders."""
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    functions = []
    for path in files:
        text = path.read_text()
        print(f"{len(text.splitlines()):6} {path}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((lines, f"{path}:{node.lineno} {node.name}"))
    print("\nlongest functions")
    for lines, place in sorted(functions, reverse=True)[:10]:
        print(f"{lines:6} {place}")


if __name__ == "__main__":
    main(sys.argv[1:])

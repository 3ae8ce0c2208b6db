"""docs/bench.md names every benchmark and its options as they are, and its numbers are counted."""

import re
import shlex
from pathlib import Path

import click
import pytest

from k3tool.bench.devices import get_device
from k3tool.bench.roofline import GIB, Asked, parts_of
from k3tool.bench.shapes import SHAPES
from k3tool.model.config import K3Config
from stages.bench import command

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "bench.md").read_text()


def test_every_benchmark_has_its_row() -> None:
    rows = re.findall(r"^\| `bench ([a-z]+)`", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(command.commands)
    assert len(rows) == len(set(rows))


def shown_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`((?:k3tool )?bench [a-z]+ [^`]*)`", PAGE)
    return lines + [line for line in inline if "--" in line]


@pytest.mark.parametrize("line", shown_commands())
def test_what_is_shown_has_these_options(line: str) -> None:
    words = [word for word in shlex.split(line.split(">")[0]) if word != "k3tool"]
    assert words[0] == "bench"
    sub = command.commands[words[1]]
    assert isinstance(sub, click.Command)
    known = {name for param in sub.params for name in param.opts}
    for word in words[2:]:
        assert not word.startswith("-") or word in known, word


def test_the_known_numbers_are_counted() -> None:
    config = K3Config.load(REPO / "tests" / "data" / "kimi-k3-config.json")
    weights = sum(
        part.whole_bytes for part in parts_of(config, Asked()) if part.module not in
        ("states", "latents")
    )  # fmt: skip
    bandwidth = get_device("MI355X").bandwidth
    assert f"{weights / 1e9:.1f} GB = {weights / GIB:.1f} GiB" in PAGE
    assert f"{weights / 8e9:.2f} GB = {weights / 8 / GIB:.2f} GiB an eighth" in PAGE
    assert f"{weights / 8 / bandwidth * 1e3:.2f} ms\nat {bandwidth / 1e9:,.0f} GB/s" in PAGE


def test_measurements_with_pictures_are_named() -> None:
    for name in SHAPES:
        assert f"`bench {name}`" in PAGE

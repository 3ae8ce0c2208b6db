"""The same bits: one hash of all logits, however the work is cut, spread or fused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.compiler.rules import FUSIONS
from k3tool.runtime.interpreter import load
from k3tool.runtime.run import RunResult
from tests.conftest import SAMPLE_WIDE
from tests.oracle.conftest import digest
from tests.oracle.gate import distance

GEN = 6
# Not the reference point of any line below: every variant differs from it in something.
BASE: dict[str, Any] = {"tp": 1, "threads": 1, "leaves": "scalar", "workgroups": 8}

VARIANTS: dict[str, dict[str, Any]] = {
    "2-threads": {"threads": 2},
    "avx2": {"leaves": "avx2"},
    "avx512": {"leaves": "avx512"},
    "chunks-of-1": {"chunk": 1},
    "chunks-of-3": {"chunk": 3},
    "chunks-of-7": {"chunk": 7},
    "token-by-token": {"prefill": "decode"},
    "2-workgroups": {"workgroups": 2},
    "256-workgroups": {"workgroups": 256, "threads": 2},
    "no-rules": {"without": FUSIONS},
    "long-context": {"ctx": 2048},
}
SPLITS: dict[str, dict[str, Any]] = {
    "tp-2": {"tp": 2, "leaves": "auto"},
    "tp-4": {"tp": 4, "leaves": "auto"},
    "tp-8": {"tp": 8, "leaves": "auto"},
    "tp-8-unfused-in-chunks": {"tp": 8, "leaves": "avx2", "chunk": 3, "without": FUSIONS},
    "tp-4-token-by-token": {"tp": 4, "threads": 2, "workgroups": 256, "prefill": "decode"},
    "tp-2-scalar": {"tp": 2, "workgroups": 2, "chunk": 7},
}
CASES = [(o, v) for o in ("tiny13", "tiny_tp8", "tiny_wide") for v in VARIANTS]
CASES += [(o, v) for o in ("tiny_tp8", "tiny_wide", SAMPLE_WIDE) for v in SPLITS]

Engine = Callable[..., RunResult]


@pytest.fixture(scope="module")
def base(engine: Engine, gold: Callable[[str], dict[str, np.ndarray]]) -> Callable[[str], str]:
    """Return a function from an oracle to the hash of its reference point, near gold if it has."""

    @cache
    def base_of(name: str) -> str:
        result = engine(name, "p40", gen=GEN, **BASE)
        if name != SAMPLE_WIDE:
            found = distance(gold(name), "p40", result.prefill, result.steps, result.tokens)
            assert found.passes, found
        return digest(result)

    return base_of


def require(interpreter: Path, leaves: str) -> None:
    found = load(interpreter, any_source=True)  # a stale one must fail, not look like another CPU
    if leaves not in (*found.leaves, "auto"):
        pytest.skip(f"NOT RUN: this CPU has no {leaves}")


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_one_hash(
    engine: Engine, base: Callable[[str], str], interpreter: Path, name: str, variant: str
) -> None:
    options = BASE | (VARIANTS | SPLITS)[variant]
    require(interpreter, options["leaves"])
    result = engine(name, "p40", gen=GEN, **options)
    assert options["leaves"] in (result.leaves, "auto")
    assert digest(result) == base(name)


@pytest.mark.parametrize("rule", FUSIONS)
def test_any_rule_may_be_off(engine: Engine, base: Callable[[str], str], rule: str) -> None:
    assert digest(engine("tiny_tp8", "p40", gen=GEN, **BASE, without=(rule,))) == base("tiny_tp8")


def test_a_context_of_two_pages(engine: Engine) -> None:
    """Past 256 positions a softmax has two pages, wherever a chunk ends."""
    options: list[dict[str, Any]] = [
        {"chunk": 300}, {"chunk": 64}, {"chunk": 7, "threads": 2}, {"prefill": "decode"},
        {"tp": 8, "chunk": 100},
    ]  # fmt: skip
    hashes = {digest(engine("tiny_wide", "p300", gen=2, **given)) for given in options}
    assert len(hashes) == 1


def test_a_context_of_three_pages_by_pages_and_by_heads(engine: Engine) -> None:
    """Decode of a long context goes by pages, of a short one by heads, and prefill by neither."""
    ids = tuple((7 * i + 3) % 200 for i in range(520))
    by_pages = {"prefill": "decode", "ctx": 2048}
    options: list[dict[str, Any]] = [
        {"chunk": 200, "without": FUSIONS},
        by_pages | {"threads": 2, "workgroups": 256},
        by_pages | {"workgroups": 8, "without": ("mla-pages-split",)},
        by_pages | {"tp": 8},
    ]
    hashes = [digest(engine("tiny_tp8", ids, gen=3, **given)) for given in options]
    assert len(set(hashes)) == 1, hashes


def test_other_tokens_give_another_hash(engine: Engine, base: Callable[[str], str]) -> None:
    """The control: the hash is of this prompt's logits, not of something all runs share."""
    assert digest(engine("tiny_tp8", "p7", gen=GEN, **BASE)) != base("tiny_tp8")
    shorter = digest(engine("tiny_tp8", "p40", gen=GEN - 1, **BASE))
    assert shorter != base("tiny_tp8")

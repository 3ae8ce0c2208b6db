"""Arithmetic mistakes that pass every tolerance change the hash of the logits.

One build of patched sources holds all the mistakes; which one a run makes is chosen when it starts,
and with none chosen it must give the hash of the real interpreter. No source of ours has a switch.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from k3tool.runtime.build import ROOT, SOURCE_FOLDERS, build
from k3tool.runtime.run import RunResult
from k3tool.trace.compare import compare_traces
from k3tool.trace.file import TraceFile
from stages.verify import blocks
from tests.conftest import SAMPLE_WIDE
from tests.oracle.conftest import digest
from tests.oracle.gate import distance

VARIABLE = "K3_TEST_CONTROL"
SWITCH = f"""
#include <stdlib.h>
static inline int k3_control(int which) {{
    static int chosen = -1;
    if (chosen < 0) {{ const char *text = getenv("{VARIABLE}"); chosen = text ? atoi(text) : 0; }}
    return chosen == which;
}}
"""


class Control(NamedTuple):
    """One mistake: where it is made, on what it shows."""

    name: str
    file: str
    right: str  # a pattern of the source, with runs of blanks as one blank
    wrong: str
    oracle: str
    tp: int


EVEN_FIRST, LEFT_TO_RIGHT, RULE_6_OFF, BLOCKS_LEFT_TO_RIGHT, HALVING_FIRST = 1, 2, 3, 4, 5
GATE_FIRST, NO_SIGMOID = 6, 7  # the last is no mistake of the order of sums
CONTROLS = {
    EVEN_FIRST: Control(
        "even before odd in a pair",
        "kernels_cpu/leaves/scalar.h",
        "if (odd_ < (K)) *a_ = k3_fma(FETCH(odd_), (x)[odd_], *a_); \\\n"
        " *a_ = k3_fma(FETCH(even_), (x)[even_], *a_); \\\n",
        "if (k3_control(1)) *a_ = k3_fma(FETCH(even_), (x)[even_], *a_); \\\n"
        " if (odd_ < (K)) *a_ = k3_fma(FETCH(odd_), (x)[odd_], *a_); \\\n"
        " if (!k3_control(1)) *a_ = k3_fma(FETCH(even_), (x)[even_], *a_); \\\n",
        "tiny_tp8",
        1,
    ),
    LEFT_TO_RIGHT: Control(
        "all-reduce from left to right",
        "kernels_common/body.h",
        "return ((x[0][i] + x[1][i]) + (x[2][i] + x[3][i])) + "
        "((x[4][i] + x[5][i]) + (x[6][i] + x[7][i]));",
        "if (k3_control(2)) { float sum = x[0][i]; uint32_t r; "
        "for (r = 1; r < 8u; r++) sum = sum + x[r][i]; return sum; } "
        "return ((x[0][i] + x[1][i]) + (x[2][i] + x[3][i])) + "
        "((x[4][i] + x[5][i]) + (x[6][i] + x[7][i]));",
        "tiny_tp8",
        8,
    ),
    RULE_6_OFF: Control(
        "rule 6 switched off: long norms in one sum",
        "kernels_common/leaves.h",
        "if (K <= K3_AXIS_WHOLE) return k3_dot_f32(c, a, b, K);",
        "if (K <= K3_AXIS_WHOLE || k3_control(3)) return k3_dot_f32(c, a, b, K);",
        SAMPLE_WIDE,
        1,
    ),
    BLOCKS_LEFT_TO_RIGHT: Control(
        "eight blocks added from left to right",
        "kernels_common/leaves.h",
        "return ((b[0] + b[1]) + (b[2] + b[3])) + ((b[4] + b[5]) + (b[6] + b[7]));",
        "if (k3_control(4)) { float sum = b[0]; uint32_t i; "
        "for (i = 1; i < 8u; i++) sum = sum + b[i]; return sum; } "
        "return ((b[0] + b[1]) + (b[2] + b[3])) + ((b[4] + b[5]) + (b[6] + b[7]));",
        "tiny_tp8",
        1,
    ),
    HALVING_FIRST: Control(
        "lanes 0 and 1 of a quad added first",
        "kernels_cpu/leaves/scalar.h",
        "v[t] = (v[4u * t] + v[4u * t + 2u]) + (v[4u * t + 1u] + v[4u * t + 3u]);",
        "v[t] = k3_control(5) ? (v[4u * t] + v[4u * t + 1u]) + (v[4u * t + 2u] + v[4u * t + 3u]) : "
        "(v[4u * t] + v[4u * t + 2u]) + (v[4u * t + 1u] + v[4u * t + 3u]);",
        "tiny_tp8",
        1,
    ),
    GATE_FIRST: Control(
        "the gated norm's weight times its gate first",
        "kernels_common/ops/kda_gated_norm.h",
        "y[j] = k3_rnd(((o[j] * inv) * norm[j]) * k3_sigmoid(gate[j]), round);",
        # And, where control 7 is chosen, no sigmoid: no tolerance lets that through.
        "y[j] = k3_control(7) ? k3_rnd(((o[j] * inv) * norm[j]) * gate[j], round) : k3_control(6) "
        "? k3_rnd((o[j] * inv) * (norm[j] * k3_sigmoid(gate[j])), round) : "
        "k3_rnd(((o[j] * inv) * norm[j]) * k3_sigmoid(gate[j]), round);",
        "tiny_tp8",
        1,
    ),
}
# What a trace says of a mistake: packet, op and value of the first result that it changes.
NAMED = {
    EVEN_FIRST: ("NORM_GEMV_BF16", "layers.0.self_attn.q_in", 0),
    LEFT_TO_RIGHT: ("ALL_REDUCE", "layers.0.self_attn.out", 0),
    GATE_FIRST: ("KDA_GATED_NORM", "layers.0.self_attn.gated", 0),
}


def patch(root: Path, control: Control) -> None:
    """Put a mistake into a copy of the sources. Raises: AssertionError if it has no place there."""
    path = root / control.file
    pattern = re.escape(control.right).replace(r"\ ", r"[ ]+").replace("\\\n", r"\n")
    text, count = re.subn(pattern, lambda _: control.wrong, path.read_text())
    assert count == 1, f"{control.name}: {count} places in {control.file}"
    path.write_text(text)


@pytest.fixture(scope="module")
def wrong_interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("controls")
    for folder in SOURCE_FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("build"))
    for control in CONTROLS.values():
        patch(root, control)
    leaves = root / "kernels_common" / "leaves.h"
    leaves.write_text(
        leaves.read_text().replace('#include "dialect.h"', '#include "dialect.h"' + SWITCH)
    )
    return build(root / "k3-cpu", root=root)


Run = Callable[..., RunResult]


@pytest.fixture
def run(
    engine: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch, wrong_interpreter: Path
) -> Run:
    def one(
        number: int, interpreter: Path | None, control: Control, trace: Path | None = None
    ) -> RunResult:
        monkeypatch.setenv(VARIABLE, str(number))
        options: dict[str, Any] = {"trace_hashes": trace, "logits": trace is None}
        options |= {"interpreter": interpreter} if interpreter else {}
        return engine(
            control.oracle, "p7", gen=4, tp=control.tp, threads=1, leaves="scalar", **options
        )

    return one


def as_gold(result: RunResult) -> dict[str, np.ndarray]:
    """Return a run's own logits in the place of gold, where there is none."""
    assert result.prefill is not None
    assert result.steps is not None
    tokens = np.array(result.tokens)
    return {"p7.prefill": result.prefill, "p7.steps": result.steps, "p7.tokens": tokens}


@pytest.mark.parametrize("number", CONTROLS, ids=[c.name for c in CONTROLS.values()])
def test_a_mistake_changes_the_hash(
    run: Callable[..., RunResult],
    gold: Callable[[str], dict[str, np.ndarray]],
    wrong_interpreter: Path,
    number: int,
) -> None:
    control = CONTROLS[number]
    right = run(number, None, control)
    assert digest(run(0, wrong_interpreter, control)) == digest(right)
    wrong = run(number, wrong_interpreter, control)
    assert digest(wrong) != digest(right)
    expected = as_gold(right) if control.oracle == SAMPLE_WIDE else gold(control.oracle)
    found = distance(expected, "p7", wrong.prefill, wrong.steps, wrong.tokens)
    assert found.passes, "the tolerance was to let this one through"


@pytest.mark.parametrize("number", NAMED, ids=[CONTROLS[n].name for n in NAMED])
def test_a_trace_names_the_op_that_is_wrong(
    run: Run, wrong_interpreter: Path, number: int, tmp_path: Path
) -> None:
    control, names = CONTROLS[number], ("right", "same", "wrong")
    chosen = ((number, None), (0, wrong_interpreter), (number, wrong_interpreter))
    for name, (which, interpreter) in zip(names, chosen, strict=True):
        run(which, interpreter, control, tmp_path / name)
    with (
        TraceFile(tmp_path / "right") as right,
        TraceFile(tmp_path / "same") as same,
        TraceFile(tmp_path / "wrong") as wrong,
    ):
        assert compare_traces(right, same).difference is None
        first = compare_traces(right, wrong).difference
    assert first is not None
    assert (first.op, first.value, first.layer) == NAMED[number]
    assert (first.step, first.phase, first.first, first.last) == (0, "prefill", 0, 6)


def test_blocks_fail_the_lines_of_a_wrong_body(
    oracle: Callable[[str], Path], wrong_interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistakes of above pass its tolerances, as the logits; a wrong formula does not."""
    asked = blocks.Options(
        (oracle("tiny_tp8"),), (1,), interpreter=wrong_interpreter, leaves="scalar"
    )
    for number in (0, GATE_FIRST):
        monkeypatch.setenv(VARIABLE, str(number))
        assert blocks.run(asked).sound
    monkeypatch.setenv(VARIABLE, str(NO_SIGMOID))
    result = blocks.run(asked)
    assert not result.sound
    is_op = {check.name: check.name.split()[2] in ("prefill", "decode") for check in result.checks}
    ops = [check for check in result.checks if is_op[check.name]]
    assert {check.name for check in ops if check.status == "FAIL"} == {
        "layer 1: prefill KDA_GATED_NORM self_attn.gated",
        "layer 1: decode KDA_HEADS self_attn.gated",
    }
    points = {check.name: check.status for check in result.checks if not is_op[check.name]}
    assert points["layer 1: input of the sub-layer attn_in"] == "PASS"
    assert points["layer 1: input of the sub-layer mlp_in"] == "FAIL"
    assert points["layer 1: attn_out"] == "FAIL"

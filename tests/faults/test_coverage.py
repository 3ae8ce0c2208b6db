"""Coverage: a weight nobody reads, an opcode without handler, a handler nobody needs are named."""

from dataclasses import replace

import numpy as np
import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.rules import RULES
from k3tool.isa.coverage import check_handlers, check_weights, producible_ops
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.verdict import Check, is_sound
from tests.isa import plans

LEAVES = {"embed", "norm", "o", "lm_head"}
ALL = {int(op) for op, spec in SPECS.items() if spec.is_emitted}
FULL = {"decode": ALL, "prefill": ALL}


@pytest.fixture
def isa() -> Isa:
    return emit(plans.plan(), "cpu")


@pytest.fixture(scope="module")
def producible() -> set[int]:
    return producible_ops(K3Config.from_dict(preset_config(PRESETS["tiny"])))


def failures(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in checks if check.status == "FAIL"}


def with_stream(isa: Isa, stream: Stream) -> Isa:
    return replace(isa, streams={**isa.streams, stream.name: stream})


def test_a_whole_program_passes_every_check(isa: Isa, producible: set[int]) -> None:
    checks = check_weights(isa, LEAVES) + check_handlers(isa, FULL, producible)
    assert [check.status for check in checks] == ["PASS"] * 10
    assert checks[1].detail == "4 of 4 leaves"


def test_every_op_of_the_table_can_be_produced(producible: set[int]) -> None:
    assert producible == ALL


def test_a_weight_that_one_phase_does_not_read_is_named(isa: Isa) -> None:
    stream = isa.streams["prefill"]
    handle = {tensor.name: index for index, tensor in enumerate(isa.tensors)}
    for records in stream.instructions:  # the last norm reads the other norm's place twice
        words = np.ascontiguousarray(records[5, 1:7]).view("<u2")
        words[1] = handle["o"]
        records[5, 1:7] = words.view("<u4")
    found = failures(check_weights(isa, LEAVES))
    assert set(found) == {
        "weights of the program read, prefill", "weights of the model read, prefill",
    }  # fmt: skip
    assert all("lm_head" in detail for detail in found.values())


def test_a_tensor_of_the_model_that_nothing_reads_is_named(isa: Isa) -> None:
    found = failures(check_weights(isa, LEAVES | {"layers.3.self_attn.dt_bias"}))
    assert len(found) == 2
    assert all("1 of 5" in detail and "dt_bias" in detail for detail in found.values())


def test_a_weight_of_another_model_is_named(isa: Isa) -> None:
    found = failures(check_weights(isa, LEAVES - {"o"}))
    assert found["weights of the model read, decode"].endswith("does not have: o")


def test_an_instruction_that_no_queue_executes_reads_nothing(isa: Isa) -> None:
    stream = isa.streams["decode"]
    kept = stream.queues.entries[stream.queues.entries["inst"] != 5]
    queues = replace(stream.queues, entries=kept)
    found = failures(check_weights(with_stream(isa, replace(stream, queues=queues)), LEAVES))
    assert "lm_head" in found["weights of the model read, decode"]


def test_without_the_model_its_check_is_not_run_and_no_pass(isa: Isa) -> None:
    checks = check_weights(isa, None)
    assert [check.status for check in checks] == ["PASS", "NOT RUN"] * 2
    assert is_sound(checks, strict=False)
    assert not is_sound(checks, strict=True)
    assert failures(check_weights(isa, set()))


@pytest.mark.parametrize("op", [Op.RMSNORM, Op.ARGMAX_FOLD])
def test_an_op_whose_handler_is_removed_is_named(isa: Isa, producible: set[int], op: Op) -> None:
    checks = check_handlers(isa, {"decode": ALL - {int(op)}, "prefill": ALL}, producible)
    found = failures(checks)
    assert set(found) == {"opcodes handled, decode", "handlers complete, decode"}
    assert all(op.name in detail for detail in found.values())


def test_the_first_instruction_without_a_handler_is_given(isa: Isa, producible: set[int]) -> None:
    found = failures(check_handlers(isa, {"decode": ALL - {72}, "prefill": ALL}, producible))
    assert found["opcodes handled, decode"] == "no handler for ARGMAX (instruction 6 on)"


def test_a_handler_that_no_program_uses_is_not_complete_without(
    isa: Isa, producible: set[int]
) -> None:
    """This program has no MoE; the table says the interpreter serves it all the same."""
    missing = ALL - {int(Op.MOE_GLU_MXFP4)}
    found = failures(check_handlers(isa, {"decode": missing, "prefill": missing}, producible))
    assert set(found) == {"handlers complete, decode", "handlers complete, prefill"}


def test_a_handler_beyond_the_table_and_one_nothing_produces_are_named(
    isa: Isa, producible: set[int]
) -> None:
    found = failures(check_handlers(isa, {"decode": ALL | {250}, "prefill": ALL}, producible))
    assert "opcode 250" in found["handlers complete, decode"]
    assert "opcode 250" in found["handlers reachable, decode"]
    dead = producible - {int(RULES[0].right.op)}
    found = failures(check_handlers(isa, FULL, dead))
    name = SPECS[RULES[0].right.op].name
    assert found["handlers reachable, decode"] == f"no graph and no rule can make {name}"


def test_an_interpreter_without_handlers_is_no_pass(isa: Isa, producible: set[int]) -> None:
    found = failures(check_handlers(isa, {}, producible))
    assert len(found) == 6

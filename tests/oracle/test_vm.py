"""The encoded streams of a rank group, run by the host VM, mean what the released code computes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import save_plan
from k3tool.compiler.rules import FUSIONS
from k3tool.isa.columns import Columns
from k3tool.isa.emit import emit
from k3tool.isa.op_spec import WORD_HANDLES
from k3tool.isa.stream import Isa, load_isa, save_isa
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.ref.forward import Sequence64, exact_constants
from k3tool.ref.vm import FolderWeights, Vm
from k3tool.ref.weights import Weights
from tests.oracle.gate import MAX_DIFFERENCE_FLOAT64

Gold = Callable[[str], dict[str, np.ndarray]]
Prompts = Callable[[str], dict[str, list[int]]]
Ranks = Callable[[str, int], list[Checkpoint]]
CHUNK, N_STEPS = 4, 3


@pytest.fixture(scope="module")
def ranks(
    oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """Return a function that opens every rank's weights of an oracle."""
    with ExitStack() as stack:

        def ranks_of(name: str, tp: int) -> list[Checkpoint]:
            if tp == 1:
                return [stack.enter_context(Checkpoint.open(oracle(name)))]
            path = tmp_path_factory.mktemp("shards") / name
            shard_checkpoint(oracle(name), tp, path)
            shards = Shards.open(path)
            return [stack.enter_context(shards.rank(rank)) for rank in range(tp)]

        yield ranks_of


def program(
    config: K3Config, tp: int, without: tuple[str, ...], folder: Path, numerics: str = "f32"
) -> Isa:
    """Return streams as they come back from their file."""
    plan = compile_plan(
        config, tp=tp, target="cpu", workgroups=8, chunk=CHUNK, batch=1, ctx=512, without=without,
        numerics=numerics,
    )  # fmt: skip
    save_isa(emit(save_plan(plan, folder / "plan.h5"), "cpu", "plan.h5"), folder / "isa.h5")
    return load_isa(folder / "isa.h5")


def run(vm: Vm, ids: list[int], later: list[int]) -> np.ndarray:
    """Read a prompt by chunks and further tokens by decode steps; return all logits."""
    rows = [vm.step("prefill", ids[at : at + CHUNK]) for at in range(0, len(ids), CHUNK)]
    rows += [vm.step("decode", [token]) for token in later]
    return np.concatenate(rows)


def expected(gold: dict[str, np.ndarray], prompt: str) -> tuple[list[int], np.ndarray]:
    later = [int(token) for token in gold[f"{prompt}.tokens"][:N_STEPS]]
    steps = gold[f"{prompt}.steps"][1 : N_STEPS + 1]
    return later, np.concatenate([gold[f"{prompt}.prefill"], steps])


@pytest.mark.parametrize(
    ("name", "tp", "without"),
    [
        ("tiny13", 1, ()),
        ("tiny13", 1, FUSIONS),
        ("tiny_tp8", 2, ()),
        ("tiny_tp8", 8, ()),
        ("tiny_tp8", 8, FUSIONS),
    ],
)
def test_the_stream_means_the_model(
    ranks: Ranks, gold: Gold, prompts: Prompts, tmp_path: Path, name: str, tp: int,
    without: tuple[str, ...],
) -> None:  # fmt: skip
    folders = ranks(name, tp)
    config = folders[0].config
    vm = Vm(
        program(config, tp, without, tmp_path),
        list(map(FolderWeights, folders)),
        exact_constants(config),
    )
    later, logits = expected(gold(name), "p7")
    found = run(vm, prompts(name)["p7"], later)
    assert np.abs(found - logits).max() <= MAX_DIFFERENCE_FLOAT64


@pytest.mark.parametrize(("tp", "without"), [(2, ()), (8, ()), (8, FUSIONS)])
def test_a_stream_of_mode_bf16_means_the_graph_that_rounds(
    ranks: Ranks, oracle: Callable[[str], Path], prompts: Prompts, tmp_path: Path, tp: int,
    without: tuple[str, ...],
) -> None:  # fmt: skip
    """The fused and the primitive ops round at the same points, before and after reductions."""
    folders, ids = ranks("tiny_tp8", tp), prompts("tiny_tp8")["p7"]
    config, later = folders[0].config, [5, 3]
    constants = exact_constants(config)
    vm = Vm(
        program(config, tp, without, tmp_path, "bf16"), list(map(FolderWeights, folders)), constants
    )
    with Checkpoint.open(oracle("tiny_tp8")) as checkpoint:
        sequence, plain = (
            Sequence64(build_graph(config, mode=mode), Weights(checkpoint), constants=constants)
            for mode in ("bf16", "f32")
        )
        want = np.concatenate([sequence.logits(ids), *(sequence.logits([i]) for i in later)])
        exact = plain.logits(ids)
    found = run(vm, ids, later)
    assert np.abs(found - want).max() <= MAX_DIFFERENCE_FLOAT64
    assert np.abs(found[: len(ids)] - exact).max() > 1e-2, "the control: it does round"


# -- controls: a wrong program is seen -----------------------------------------------------------


def with_instructions(isa: Isa, change: Callable[[Columns], None]) -> Isa:
    """Return a program with its decode instructions changed on every rank."""
    decode = isa.streams["decode"]
    records = tuple(rank.copy() for rank in decode.instructions)
    for rank in records:
        change(rank)
    return replace(isa, streams={**isa.streams, "decode": replace(decode, instructions=records)})


def first(records: Columns, op: Op) -> int:
    return int(np.flatnonzero((records[:, 0] & 0xFFFF) == op)[0])


def other_slot(records: Columns) -> None:
    """Let a mix read one block less."""
    row = int(np.flatnonzero((records[:, 0] & 0xFFFF) == Op.ATTN_RES_NORM)[-1])
    records[row, SPECS[Op.ATTN_RES_NORM].word("n_blocks")] -= 1


def swapped(records: Columns) -> None:
    """Run two dependent instructions the wrong way round."""
    after = first(records, Op.ALL_REDUCE_ADD)
    before = first(records, Op.GEMV_BF16_BLOCKS)
    records[[before, after]] = records[[after, before]]


def other_weight(records: Columns) -> None:
    """Give the first router the second layer's correction bias."""
    first, second = np.flatnonzero((records[:, 0] & 0xFFFF) == Op.MOE_DOWN_TOPK)[:2]
    word, shift = divmod(SPECS[Op.MOE_DOWN_TOPK].slot("bias"), 2)
    word, mask = WORD_HANDLES + word, 0xFFFF << 16 * shift
    kept = records[first, word] & np.uint32(~mask & 0xFFFFFFFF)
    records[first, word] = kept | records[second, word] & np.uint32(mask)


@pytest.mark.parametrize("change", [other_slot, swapped, other_weight])
def test_a_changed_record_is_seen(
    ranks: Ranks, gold: Gold, prompts: Prompts, tmp_path: Path, change: Callable[[Columns], None]
) -> None:
    folders = ranks("tiny13", 1)
    config = folders[0].config
    isa = with_instructions(program(config, 1, (), tmp_path), change)
    later, logits = expected(gold("tiny13"), "p7")
    with np.errstate(invalid="ignore"):
        found = run(
            Vm(isa, list(map(FolderWeights, folders)), exact_constants(config)),
            prompts("tiny13")["p7"],
            later,
        )
    assert not np.abs(found - logits).max() <= MAX_DIFFERENCE_FLOAT64


def test_shared_bytes_are_seen(ranks: Ranks, gold: Gold, prompts: Prompts, tmp_path: Path) -> None:
    """The VM's memory is the program's: two live tensors in one place spoil each other."""
    folders = ranks("tiny13", 1)
    config = folders[0].config
    isa = program(config, 1, (), tmp_path)
    tensors = list(isa.tensors)
    arena = [i for i, t in enumerate(tensors) if t.role == "arena" and t.phase == "decode"]
    stack = next(i for i in arena if len(tensors[i].local) == 3)
    victim = next(i for i in arena if tensors[i].name.endswith("layers.2.self_attn.q_in"))
    tensors[victim] = tensors[victim]._replace(offset=tensors[stack].offset)
    broken = replace(isa, tensors=tuple(tensors))
    later, logits = expected(gold("tiny13"), "p7")
    found = run(
        Vm(broken, list(map(FolderWeights, folders)), exact_constants(config)),
        prompts("tiny13")["p7"],
        later,
    )
    assert np.abs(found[:7] - logits[:7]).max() <= MAX_DIFFERENCE_FLOAT64  # prefill is untouched
    assert not np.abs(found - logits).max() <= MAX_DIFFERENCE_FLOAT64

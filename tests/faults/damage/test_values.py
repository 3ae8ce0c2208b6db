"""Values that must not be used: inspect --values, shard and run find them in time."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from k3tool.checkpoint.reader import Checkpoint
from tests.faults.damage.edit import LAYERS, file_of, poke
from tests.faults.damage.harness import HINT, TP, Answer, Bench, Verdict, message, relative
from tests.faults.damage.record import VALUES

BF16_NAN, BF16_INF = b"\xc0\x7f", b"\x80\x7f"
F32_INF = struct.pack("<f", float("-inf"))
MOE = LAYERS + "2.block_sparse_moe."
SCALE = MOE + "experts.4.w2.weight_scale"  # [64, 8], of an expert that the prompt asks for
SCALE_PLACES = {
    "middle": (77, "row 9, group 5"),
    "first": (0, "row 0, group 0"),
    "last": (511, "row 63, group 7"),
}
EMBED = "language_model.model.embed_tokens.weight"


class Poke(NamedTuple):
    """One value, and where it stands."""

    name: str
    element: int
    data: bytes
    where: str


NON_FINITE = {
    "NaN in a norm": Poke(LAYERS + "3.input_layernorm.weight", 3, BF16_NAN, "[3]"),
    "Inf in a projection": Poke(LAYERS + "1.self_attn.q_proj.weight", 167, BF16_INF, "[1, 7]"),
    "NaN in an embedding row that no token uses": Poke(EMBED, 400 * 160, BF16_NAN, "[400, 0]"),
    "-Inf in the router's bias": Poke(MOE + "gate.e_score_correction_bias", 3, F32_INF, "[3]"),
    # These saturate in a sigmoid or a soft cap: no trap sees them, and the tokens change.
    "Inf that a sigmoid hides": Poke(LAYERS + "1.self_attn.b_proj.weight", 3, BF16_INF, "[0, 3]"),
    "Inf that a soft cap hides": Poke(
        MOE + "shared_experts.up_proj.weight", 3, BF16_INF, "[0, 3]"),
    "Inf in A_log": Poke(LAYERS + "1.self_attn.A_log", 3, F32_INF, "[3]"),
}  # fmt: skip


def _refused_alike(bench: Bench, folder: Path, *words: str) -> tuple[Answer, Answer, str]:
    """Ask inspect --values and run, which refuse in the same words; return answers and words."""
    inspect, run = bench.k3tool("inspect", folder, "--values"), bench.run(folder)
    assert (inspect.code, run.code) == (4, 4), (inspect, run)
    said = message("run", run, folder)
    for word in words:
        assert word in said, said
    for part in said.split(HINT):
        assert part in relative(inspect.out, folder), inspect.out
    split = bench.run(folder, "--tp", TP)  # it shards first, and meets a scale while it copies
    assert split.code == run.code, split
    assert said.split(": got ")[0].split(": ", 1)[1] in split.err, "another tensor"
    assert not list(bench.folder.glob("*.h5"))
    for answer in (run, split):
        assert '"event":"token"' not in answer.out, "a token came out before the refusal"
    return inspect, run, said


@pytest.mark.parametrize("name", NON_FINITE)
def test_non_finite_weight(bench: Bench, writable: Callable, name: str) -> None:
    folder, bad = writable("tiny_tp8"), NON_FINITE[name]
    assert bench.k3tool("inspect", folder, "--values").code == 0  # the control
    poke(folder, bad.name, bad.element, bad.data)
    file = file_of(folder, bad.name).name
    words = (file, f"{bad.name}: got 1 NaN or Inf, the first at {bad.where}", "finite values")
    inspect, run, said = _refused_alike(bench, folder, *words)
    shard = bench.shard(folder)
    assert shard.code == 0, shard  # it copies bits; what reads values says so
    on_shards = bench.run(bench.folder / "shards")
    assert on_shards.code == 4
    assert f"{bad.name}: got " in on_shards.err
    VALUES.verdicts[f"non-finite: {name}"] = Verdict(inspect.code, shard.code, run.code, said)


@pytest.mark.parametrize("value", [253, 254, 255])
@pytest.mark.parametrize("place", SCALE_PLACES)
def test_scale_that_leaves_the_range(
    bench: Bench, writable: Callable, value: int, place: str
) -> None:
    folder = writable("tiny_tp8")
    element, where = SCALE_PLACES[place]
    poke(folder, SCALE, element, bytes([value]))
    shard = bench.shard(folder)
    assert shard.code == 3
    assert not list(bench.folder.iterdir())
    words = (f"{SCALE}: {where}: got scale byte {value}", "need at most 252")
    inspect, run, said = _refused_alike(bench, folder, file_of(folder, SCALE).name, *words)
    assert message("shard", shard, folder) == said
    VALUES.verdicts[f"scale: {value}, {place}"] = Verdict(inspect.code, shard.code, run.code, said)


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("place", SCALE_PLACES)
def test_small_scale_is_legal_and_counted(
    bench: Bench, writable: Callable, value: int, place: str
) -> None:
    folder = writable("tiny_tp8")
    element, _ = SCALE_PLACES[place]
    with Checkpoint.open(folder) as checkpoint:
        before = sum(
            int((checkpoint.read(name) == value).sum())
            for name in checkpoint.names()
            if name.endswith("weight_scale")
        )
    assert before == 0
    poke(folder, SCALE, element, bytes([value]))
    answer = bench.k3tool("inspect", folder, "--values", "--json")
    assert answer.code == 0
    assert _count_of_scale(json.loads(answer.out), value) == 1
    verdict, _ = bench.acceptance(folder, None)
    assert bench.run(folder, "--tp", TP).code == 0
    VALUES.verdicts[f"scale: {value}, {place}, counted"] = verdict


def _count_of_scale(report: dict, value: int) -> int:
    """Return how often a scale byte was seen by the report."""
    places = report["values"]["places"]
    return sum(place.get("scales", {}).get(str(value), 0) for place in places)


def test_a_sound_folder_is_looked_at_once(
    bench: Bench, writable: Callable, k3tool: Callable, tmp_path: Path
) -> None:
    folder = writable("tiny_tp8")
    command = ("run", folder, "--ids", 1, "--gen", 1, "-v", "--cache", tmp_path / "own")
    assert "looking for NaN and Inf" in k3tool(*command).err
    assert "looking for NaN and Inf" not in k3tool(*command).err
    poke(folder, EMBED, 0, BF16_NAN)  # same names and sizes, other bytes
    answer = k3tool(*command)
    assert (answer.code, "embed_tokens.weight: got 1 NaN" in answer.err) == (4, True)

"""A trace compares across cuts of the work, names what differs, and outlives a full disk."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.artifact import Dataset, open_artifact, write_artifact
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import save_plan
from k3tool.compiler.rules import FUSIONS
from k3tool.errors import ArtifactError, UnsoundError, UsageError
from k3tool.runtime import budget
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import RunResult, run_model
from k3tool.runtime.sampling import Sampler
from k3tool.trace import recorder as recorder_module
from k3tool.trace.compare import compare_traces
from k3tool.trace.difference import Difference
from k3tool.trace.file import TRACE_SCHEMA, TraceFile
from k3tool.trace.kept import Kept, parse_kept
from k3tool.trace.results import CELL_DTYPE
from k3tool.trace.values import compare_values
from tests.conftest import Outcome

IDS = tuple(range(3, 23))
BASE: dict[str, Any] = {"tp": 1, "threads": 1, "workgroups": 8, "gen": 4, "logits": False}
# Every variant cuts the work otherwise; how many results it has to have in common with the base.
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp-8": ({"tp": 8}, 600),
    "tp-2-chunks-of-3": ({"tp": 2, "chunk": 3}, 500),
    "token-by-token": ({"prefill": "decode"}, 600),
    "3-workgroups": ({"workgroups": 3, "threads": 2, "leaves": "scalar"}, 700),
    "no-rules": ({"without": FUSIONS}, 600),
    "budget": ({"tp": 2, "memory_bytes": 160_000_000}, 600),
    "long-context": ({"ctx": 2048, "workgroups": 256}, 600),
    "all-logits": ({"logits": True}, 690),
}
Engine = Callable[..., RunResult]
Traced = Callable[..., Path]


@pytest.fixture(scope="module")
def traced(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Return a function that traces a run of tiny_tp8, each kind of run once."""
    made: dict[str, Path] = {}

    def run(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("trace") / "trace.h5"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(budget, "COMPILE_BYTES", 0)  # which is more than so small a one needs
                engine("tiny_tp8", IDS, **(BASE | options), trace_hashes=made[key])
        return made[key]

    return run


def first_difference(left: Path, right: Path) -> Difference | None:
    with TraceFile(left) as a, TraceFile(right) as b:
        found = compare_traces(a, b)
        failures = [check for check in found.checks if check.status == "FAIL"]
        assert bool(failures) == (found.difference is not None), found.checks
        return found.difference


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_trace_however_the_work_is_cut(traced: Traced, variant: str) -> None:
    options, least = VARIANTS[variant]
    kept = {"trace_at": Kept(2, 5)}
    with TraceFile(traced(**kept)) as a, TraceFile(traced(**kept, **options)) as b:
        found = compare_traces(a, b)
        assert [check.status for check in found.checks] == ["PASS"] * len(found.checks)
        assert found.n_results >= least
        check, _ = compare_values(a, b, None)
        assert check.status == "PASS", check
        assert int(check.detail.split()[0]) > 200, check


def test_another_token_differs_from_its_embedding_on(engine: Engine, tmp_path: Path) -> None:
    """The control: hashes are of values, not of a program. The prompts have to say one thing."""
    ids = [*IDS]
    ids[11] += 1
    for name, prompt in (("a", IDS), ("b", tuple(ids))):
        engine("tiny_tp8", prompt, **BASE, trace_hashes=tmp_path / name)
    with TraceFile(tmp_path / "a") as a, TraceFile(tmp_path / "b") as b:
        with pytest.raises(ArtifactError, match="prompt"):
            compare_traces(a, b)
        b.given = a.given
        first = compare_traces(a, b).difference
    assert first is not None
    assert (first.op, first.value) == ("EMBED_BF16", "embed")


def test_two_plans_emitted_in_memory_are_two_programs(
    engine: Engine, oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    """Neither has a digest; their packets and slices are others, their values are not."""
    traces = []
    with Checkpoint.open(oracle("tiny_tp8")) as source:
        for workgroups, without in ((8, ()), (5, FUSIONS)):
            plan, trace = (tmp_path / f"{workgroups}-{kind}.h5" for kind in ("plan", "trace"))
            made = compile_plan(
                source.config, tp=1, target="cpu", workgroups=workgroups, chunk=64, batch=1,
                ctx=256, without=without, inputs=[source.as_input()],
                checkpoint_identity=source.identity,
            )  # fmt: skip
            save_plan(made, plan)
            given = {key: BASE[key] for key in ("tp", "threads", "gen", "logits")}
            engine("tiny_tp8", IDS, **given, plan=plan, trace_hashes=trace)
            traces.append(trace)
    with TraceFile(traces[0]) as a, TraceFile(traces[1]) as b:
        assert a.input("isa").content_sha256 == b.input("isa").content_sha256 == ""
        found = compare_traces(a, b)
    assert [check.status for check in found.checks] == ["PASS"]
    assert found.n_results > 600


@pytest.fixture(scope="module")
def resumed(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return traces of a run of 8 tokens, of its first 4, and of what goes on behind those."""
    folder = tmp_path_factory.mktemp("resumed")
    made = {name: folder / f"{name}.h5" for name in ("whole", "begun", "behind", "drawn")}
    state = folder / "state.h5"
    base = BASE | {"gen": 8}
    engine("tiny_tp8", IDS, **base, trace_hashes=made["whole"])
    engine("tiny_tp8", IDS, **BASE, save_state=state, trace_hashes=made["begun"])
    engine("tiny_tp8", (), **BASE, load_state=state, trace_hashes=made["behind"])
    drawn = {"sampler": Sampler(2.0, seed=5)}
    engine("tiny_tp8", IDS, **base | drawn, trace_hashes=made["drawn"])
    return made


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_that_goes_on_compares_from_where_it_begins(
    resumed: dict[str, Path], is_first: bool
) -> None:
    """It has the same bits; what only one side has is no pass of its own."""
    names = ("behind", "whole") if is_first else ("whole", "behind")
    with TraceFile(resumed[names[0]]) as a, TraceFile(resumed[names[1]]) as b:
        found = compare_traces(a, b)
    assert [check.status for check in found.checks] == ["PASS", "NOT RUN"]
    assert " at positions 23 to 26, TP 1 and 1" in found.checks[0].detail
    assert found.checks[1].name.endswith("whole.h5: positions 0 to 22")
    assert found.checks[1].detail.endswith("behind.h5 begins at 23")
    assert found.n_results > 600


def test_runs_one_behind_the_other_have_nothing_in_common(resumed: dict[str, Path]) -> None:
    with TraceFile(resumed["begun"]) as a, TraceFile(resumed["behind"]) as b:
        found = compare_traces(a, b)
    assert [check.status for check in found.checks] == ["FAIL"]
    assert "nothing compared" in found.checks[0].detail
    assert "positions 0 to 22" in found.checks[0].detail


def test_a_run_that_goes_on_behind_other_ids_is_another(resumed: dict[str, Path]) -> None:
    with TraceFile(resumed["drawn"]) as a, TraceFile(resumed["behind"]) as b:
        with pytest.raises(ArtifactError, match=r"token at position 2[0-3]: got"):
            compare_traces(a, b)
        a.given = a.given._replace(chosen=b.given.asked[len(IDS) :])
        assert compare_traces(a, b).difference is not None, "the control: bits do differ"


def test_a_history_that_steps_are_not_behind(resumed: dict[str, Path], tmp_path: Path) -> None:
    changed = tmp_path / "changed.h5"
    with open_artifact(resumed["behind"], "trace", TRACE_SCHEMA) as file:
        data = {name: Dataset(file.read(name), ("position",)) for name in file.names()}
        data["history"] = Dataset(file.read("history")[1:], ("position",))
        write_artifact(changed, "trace", TRACE_SCHEMA, data, inputs=file.inputs, params=file.params)
    with pytest.raises(ArtifactError, match="history: got 22, need 23 ids"):
        TraceFile(changed)


def test_chunks_narrow_the_positions(traced: Traced, engine: Engine, tmp_path: Path) -> None:
    ids = [*IDS]
    ids[11] += 1
    engine("tiny_tp8", tuple(ids), **(BASE | {"chunk": 5}), trace_hashes=tmp_path / "b")
    with TraceFile(traced(chunk=2)) as a, TraceFile(tmp_path / "b") as b:
        b.given = a.given
        first = compare_traces(a, b).difference
    assert first is not None
    assert (first.value, first.first, first.last) == ("embed", 10, 19)


# -- a weight that is not what it was ----------------------------------------------------------


@pytest.fixture
def shards(oracle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return shards whose identity knows two bytes of each file, as it knows few of large ones."""
    for name, value in (("WHOLE_FILE_BYTES", 0), ("N_SAMPLES", 2), ("SAMPLE_BYTES", 1)):
        monkeypatch.setattr(f"k3tool.checkpoint.identity.{name}", value)
    shard_checkpoint(oracle("tiny_tp8"), 2, tmp_path / "tp2")
    return tmp_path / "tp2"


def run_shards(folder: Path, trace: Path, cache: Path, **options: Any) -> RunResult:
    fixed: dict[str, Any] = {"cache": cache, "ignore_eos": True, "trace_hashes": trace}
    return run_model(RunOptions(folder, (5, 9, 2), 2, threads=1, **(fixed | options)))


def flipped(shards: Path, to: Path, rank: int, tensor: str) -> Path:
    """Return a copy of shards in which one number of a tensor on a rank has another last bit."""
    shutil.copytree(shards, to)
    folder = to / f"rank-{rank:02d}-of-02"
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensor_info(f"{checkpoint.config.prefix}model.{tensor}")
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset + 2 * 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return to


def test_a_byte_of_a_ranks_shard_names_layer_op_and_rank(shards: Path, tmp_path: Path) -> None:
    bad = flipped(shards, tmp_path / "bad", 1, "layers.1.self_attn.k_proj.weight")
    for name, folder in (("a", shards), ("b", bad)):
        run_shards(folder, tmp_path / name, tmp_path / "cache", trace_at=parse_kept("0-2:1"))
    first = first_difference(tmp_path / "a", tmp_path / "b")
    assert first is not None
    assert (first.value, first.layer, first.ranks) == ("layers.1.self_attn.k_in", 1, (1,))
    assert (first.lo, first.hi, first.slices) == (64, 72, (0,))
    with TraceFile(tmp_path / "a") as a, TraceFile(tmp_path / "b") as b:
        check, largest = compare_values(a, b, first)
    assert check.status == "FAIL"
    assert largest is not None
    assert largest.column == 64  # row 0 of rank 1's half
    assert 0 < abs(largest.left - largest.right) < 0.1


def test_ranks_that_disagree_leave_a_trace_of_why(shards: Path, tmp_path: Path) -> None:
    bad = flipped(
        shards, tmp_path / "bad", 1, "layers.1.block_sparse_moe.routed_expert_down_proj.weight"
    )
    with pytest.raises(UnsoundError, match="digest"):
        run_shards(bad, tmp_path / "b", tmp_path / "cache")
    run_shards(shards, tmp_path / "a", tmp_path / "cache")
    with TraceFile(tmp_path / "a") as a, TraceFile(tmp_path / "b") as b:
        found = compare_traces(a, b)
        assert not b.is_whole
    alone = next(check for check in found.checks if str(tmp_path / "b") in check.name)
    assert alone.status == "FAIL"
    assert "layer 1, rank 1" in alone.detail
    assert found.difference is not None
    assert (found.difference.layer, found.difference.ranks) == (1, (1,))


# -- what may go wrong -------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT RUN: no /dev/full")
def test_a_full_disk_ends_the_trace_and_not_the_run(
    oracle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(recorder_module.Recorder):
        def _open(self, rank: int) -> Any:
            made = super()._open(rank)
            os.dup2(os.open("/dev/full", os.O_RDWR), made.hashes)
            return made

    path, said = tmp_path / "trace.h5", list[str]()
    options = {"cache": tmp_path / "cache", "ignore_eos": True, "threads": 1}
    asked = RunOptions(oracle("tiny_tp8"), IDS, 4, trace_hashes=path, **options)
    want = run_model(replace(asked, trace_hashes=None)).tokens
    monkeypatch.setattr("k3tool.trace.session.Recorder", Full)
    assert run_model(asked, note=said.append).tokens == want
    assert said == [f"{path}: No space left on device: the trace ends here, the run goes on",
                    f"{path}: no step was recorded: no trace is written"]  # fmt: skip
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]


def _cell(table: bytes, field: str, value: int) -> bytes:
    """Return a table whose last cell says otherwise."""
    cells = bytearray(table)
    last = np.frombuffer(cells, CELL_DTYPE, 1, len(cells) - CELL_DTYPE.itemsize)
    last[field] = value
    return bytes(cells)


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table[:-8],
        lambda table: table + bytes(16),
        lambda table: bytes(4) + table[4:],
        lambda table: _cell(table, "handle", 60000),
        lambda table: _cell(table, "rows", 5),
        lambda table: _cell(table, "base", 1 << 40),
        lambda table: _cell(table, "n_cols", 1 << 30),
        lambda table: _cell(table, "n_runs", 0),
        lambda table: _cell(table, "kept0", 1 << 30),
        lambda table: _cell(table, "row_words", 1 << 31),
    ],
)
def test_a_rank_refuses_a_table_that_is_not_of_its_image(
    oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes],
) -> None:  # fmt: skip
    cache = tmp_path_factory.getbasetemp() / "tables"
    asked = RunOptions(oracle("tiny_tp8"), IDS, 1, cache=cache, threads=1,
                       trace_hashes=tmp_path / "trace.h5", trace_at=Kept(0, 1))  # fmt: skip
    right = recorder_module.Recorder._table
    monkeypatch.setattr(
        recorder_module.Recorder, "_table", lambda self, rank, n: damage(right(self, rank, n))
    )
    with pytest.raises(ArtifactError, match="a table of hashes that is not of this image"):
        run_model(asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["", "5-3", "-1", "3:", "3:1,,2", "99999999", "1-2-3", "\u0663", "5:0,3-", "1 2"]
)
def test_positions_are_read_strictly(text: str) -> None:
    with pytest.raises(UsageError, match=r"--trace-at: .*need numbers"):
        parse_kept(text)


def test_kept_positions_are_read() -> None:
    assert parse_kept("5") == Kept(5, 5)
    assert parse_kept("0-7") == Kept(0, 7)
    assert parse_kept("5:0,3-5") == Kept(5, 5, frozenset({0, 3, 4, 5}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trace_at": Kept(0, 0)}, "--trace-at: got no --trace-hashes"),
        ({"trace_at": Kept(9, 99), "trace_hashes": Path("x")}, "--trace-at: got position 99"),
        ({"trace_at": Kept(0, 0, frozenset({50})), "trace_hashes": Path("x")}, "got layer 50"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    oracle: Callable[[str], Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    asked = RunOptions(oracle("tiny_tp8"), IDS, 4, cache=tmp_path)
    with pytest.raises(UsageError, match=said):
        run_model(replace(asked, **change))


def test_a_changed_hash_is_found_and_a_cut_file_refused(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "cut.h5"
    data = traced().read_bytes()
    for size in (0, 511, 4000, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ArtifactError, match="cut"):
            TraceFile(path)
    with TraceFile(traced()) as a, TraceFile(traced(threads=2)) as b:
        steps = [step._replace(hashes=step.hashes.copy()) for step in b.steps()]
        steps[2].hashes[0, 17] ^= np.uint64(1)
        monkeypatch.setattr(b, "steps", lambda: iter(steps))
        first = compare_traces(a, b).difference
        assert first is not None
        cell = a.programs["decode"]
        assert (first.step, first.phase, first.first) == (2, "decode", 21)
        assert first.value == cell.results[int(cell.result[17])].name
        assert first.slices == (int(cell.slice[17]),)


# -- the command ---------------------------------------------------------------------------------


def test_the_command_says_where_and_how_far(
    k3tool: Callable[..., Outcome], oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    common = ("run", oracle("tiny_tp8"), "--gen", 2, "--ignore-eos", "--cache", tmp_path / "c")
    paths = [tmp_path / f"{name}.h5" for name in "abc"]
    for path, more in zip(paths, ((), ("--tp", 2), ("--numerics", "bf16")), strict=True):
        traced = ("--trace-hashes", path, "--trace-at", "0-1:0")
        assert k3tool(*common, "--ids", "1,2,3", *traced, *more).code == 0
    same = k3tool("verify", "trace", *paths[:2], "--values", "--json")
    assert same.code == 0, same
    found = json.loads(same.out)
    assert found["sound"]
    assert found["difference"] is None
    assert found["results_equal"] > 300
    assert [check["status"] for check in found["checks"]] == ["PASS"] * 3
    assert k3tool("verify", "trace", paths[1]).code == 0
    other_mode = k3tool("verify", "trace", paths[0], paths[2])
    assert (other_mode.code, "numerics" in other_mode.err) == (3, True)
    linked = tmp_path / "linked.h5"
    linked.hardlink_to(paths[0])
    of_one = (paths[1], "--values")  # nothing to compare them with is no PASS
    for wrong in ((paths[0], paths[0]), (paths[0], linked), paths, of_one):
        assert k3tool("verify", "trace", *wrong).code == 2
    alone = k3tool("verify", "trace", paths[0])
    assert (alone.code, "NOT RUN" in alone.out) == (4, True)

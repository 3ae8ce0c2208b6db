"""`k3tool run`: what it prints, what it refuses before reading a weight, what it caches."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.compare.ranks import compare
from k3tool.compare.records import read_records

Run = Callable[..., "object"]
N_GEN = 6


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def run(k3tool: Run, cache: Path) -> Run:
    """Run with a cache of the test's own."""

    def call(source: object, *arguments: object, ids: str = "5,9,2", gen: int = N_GEN) -> object:
        return k3tool("run", source, "--ids", ids, "--gen", gen, "--cache", cache, *arguments)

    return call


def events(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


# -- what it gives -----------------------------------------------------------------------------


def test_ids_on_stdout_and_a_summary_on_stderr(run: Run, oracle: Run) -> None:
    done = run(oracle("tiny_tp8"), "--tp", 2, "--ignore-eos")
    assert done.code == 0
    assert re.fullmatch(r"\d+( \d+){5}\n", done.out)
    assert "2 ranks identical" in done.err
    assert "peak memory" in done.err
    assert "tokens/s" in done.err


def test_json_events(run: Run, oracle: Run) -> None:
    done = run(oracle("tiny_tp8"), "--tp", 4, "--ignore-eos", "--json")
    start, *tokens, end = events(done.out)
    assert (start["event"], start["tp"], start["target"]) == ("start", 4, "cpu")
    assert len(start["checkpoint"]) == len(start["isa"]) == 64
    assert [event["event"] for event in tokens] == ["token"] * N_GEN
    assert [event["step"] for event in tokens] == list(range(N_GEN))
    assert [event["position"] for event in tokens] == list(range(2, 2 + N_GEN))
    assert all(event["ranks_agree"] == 4 and event["margin"] >= 0 for event in tokens)
    assert end["tokens"] == [event["id"] for event in tokens]
    assert end["reason"] == "length"
    assert end["peak_memory_bytes"] > 0
    assert end["decode_tokens_per_second"] > 0


def test_logits_explain_the_tokens_and_match_gold(
    run: Run, oracle: Run, gold: Run, prompts: Run, tmp_path: Path
) -> None:
    ids = prompts("tiny_tp8")["p7"]
    out = tmp_path / "logits.npz"
    text = ",".join(map(str, ids))
    done = run(oracle("tiny_tp8"), "--ignore-eos", "--json", "--logits", out, ids=text)
    tokens = events(done.out)[-1]["tokens"]
    with np.load(out) as data:
        prefill, steps = data["prefill"], data["steps"]
    assert prefill.dtype == steps.dtype == np.float32
    assert (prefill.shape, steps.shape) == ((7, 512), (N_GEN, 512))
    assert (steps[0] == prefill[-1]).all()
    assert steps.argmax(axis=1).tolist() == tokens
    assert np.abs(prefill - gold("tiny_tp8")["p7.prefill"]).max() < 2e-4
    assert np.abs(steps - gold("tiny_tp8")["p7.steps"][:N_GEN]).max() < 2e-4


def test_tokens_of_one_and_four_ranks_compare_equal(run: Run, oracle: Run, tmp_path: Path) -> None:
    files = []
    for tp in (1, 4):
        path = tmp_path / f"tp{tp}.h5"
        assert run(oracle("tiny_tp8"), "--tp", tp, "--ignore-eos", "-o", path).code == 0
        files += read_records(path)
    found = compare(files)
    assert [check.status for check in found.checks] == ["PASS"] * 6
    assert found.verdict == "identical"


def test_it_stops_at_an_end_id_of_either_file(run: Run, writable: Run) -> None:
    folder = writable("tiny_tp8")
    free = events(run(folder, "--ignore-eos", "--json").out)[-1]["tokens"]
    end = next(token for token in free[1:] if token != free[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 511]}))
    last = events(run(folder, "--json").out)[-1]
    assert last["reason"] == "stop"
    assert last["tokens"] == free[: free.index(end) + 1]
    assert len(events(run(folder, "--json", "--ignore-eos").out)[-1]["tokens"]) == N_GEN


# -- what it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids", ["1,,2", "-1", "4294967301", "512", "", ",1", "1;2", "1.0", "+1", "1_0", "٣", "0x1"]
)
def test_bad_ids_are_usage_errors(run: Run, oracle: Run, cache: Path, ids: str) -> None:
    done = run(oracle("tiny_tp8"), ids=ids)
    assert (done.code, done.out) == (2, "")
    assert "--ids" in done.err
    assert not cache.exists()  # nothing was hashed, sharded or compiled


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ctx", 8), "at most 8"),
        (("--ctx", 1 << 40), "max_position_embeddings"),
        (("--tp", 3), "tp"),
        (("--tp", 16), "tp"),
        (("--threads", 5000), "--threads"),
        (("--chunk", 0), "--chunk"),
        (("--deadline", 0), "--deadline"),
        (("--deadline", "nan"), "--deadline"),
        (("--deadline", "inf"), "--deadline"),
        (("--deadline", 1.1e6), "--deadline"),
        (("--leaves", "sse"), "--leaves"),
        (("--logits", "/no/such/folder/x.npz"), "no such folder"),
        (("-o", "/no/such/folder/x.h5"), "no such folder"),
    ],
)
def test_bad_options_are_usage_errors(
    run: Run, oracle: Run, cache: Path, arguments: tuple[object, ...], word: str
) -> None:
    done = run(oracle("tiny_tp8"), *arguments)
    assert (done.code, done.out) == (2, "")
    assert word in done.err
    assert not cache.exists()


def test_the_same_request_without_mistakes_runs(run: Run, oracle: Run) -> None:
    assert run(oracle("tiny_tp8"), "--ctx", 9, "--chunk", 1, "--threads", 2).code == 0


def test_a_folder_that_is_no_checkpoint(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "absent").code == 3
    assert run(tmp_path).code == 3


def test_streams_of_another_model_or_degree_are_refused(
    run: Run, k3tool: Run, oracle: Run, writable: Run, tmp_path: Path
) -> None:
    plan, isa = tmp_path / "plan.h5", tmp_path / "isa.h5"
    assert k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 2, "-o", plan).code == 0
    assert k3tool("emit-isa", plan, "-o", isa).code == 0
    tokens = run(oracle("tiny_tp8"), "--tp", 2, "--isa", isa).out
    assert tokens == run(oracle("tiny_tp8"), "--tp", 2, "--plan", plan).out != ""
    shards = tmp_path / "shards"
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 4, "-o", shards).code == 0
    done = run(shards, "--isa", isa)
    assert done.code == 3
    assert "tp: got 2, need 4" in done.err
    other = writable("tiny_tp8")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config, indent=7))
    done = run(other, "--tp", 2, "--isa", isa)
    assert done.code == 3
    assert "checkpoint: got" in done.err
    data = bytearray(isa.read_bytes())
    data[len(data) // 2] ^= 1
    isa.write_bytes(data)
    assert run(oracle("tiny_tp8"), "--tp", 2, "--isa", isa).code == 3


def test_a_plan_of_a_bare_config_has_no_weights_to_run_on(
    run: Run, k3tool: Run, oracle: Run, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.h5"
    source = oracle("tiny_tp8") / "config.json"
    assert k3tool("compile-plan", source, "--tp", 1, "-o", plan).code == 0
    done = run(oracle("tiny_tp8"), "--plan", plan)
    assert done.code == 3
    assert "only a config" in done.err


# -- being stopped -----------------------------------------------------------------------------


def _start_long(source: Path, cache: Path, **options: object) -> subprocess.Popen[str]:
    words = f"run {source} --ids 1 --gen 4000 --tp 2 --ignore-eos --json --cache {cache}"
    command = [sys.executable, "-m", "stages.cli", *words.split()]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2], **options,
    )  # fmt: skip


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_ctrl_c_ends_with_130_and_no_stray_rank(oracle: Run, cache: Path) -> None:
    with _start_long(oracle("tiny_tp8"), cache) as process:
        lines = [process.stdout.readline() for _ in range(5)]
        assert '"event":"token"' in lines[-1]
        ranks = _children(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_closed_pipe_ends_quietly(oracle: Run, cache: Path) -> None:
    with _start_long(oracle("tiny_tp8"), cache) as process:
        process.stdout.readline()
        ranks = _children(process.pid)
        process.stdout.close()
        assert process.wait(timeout=30) == 0
        assert "Error" not in process.stderr.read()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


# -- the cache ---------------------------------------------------------------------------------


def test_stages_are_built_once_and_again_when_the_checkpoint_changes(
    run: Run, writable: Run, cache: Path
) -> None:
    folder = writable("tiny_tp8")
    first = run(folder, "--tp", 2, "--ignore-eos", "-v")
    assert "writing a copy of the weights for 2 ranks: 8.553 MB to" in first.err
    assert "compiling" in first.err
    second = run(folder, "--tp", 2, "--ignore-eos", "-v")
    assert "shards from the cache" in second.err
    assert "program from the cache" in second.err
    assert second.out == first.out
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensor_info("language_model.model.norm.weight")
        assert info.n_bytes > 0
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\0\x40" * (info.n_bytes // 2))  # another model with the same headers
    third = run(folder, "--tp", 2, "--ignore-eos", "-v")
    assert "writing a copy" in third.err
    assert third.out != first.out


def test_a_run_says_where_program_and_weights_came_from(
    run: Run, writable: Run, cache: Path
) -> None:
    folder = writable("tiny_tp8")
    first = run(folder, "--tp", 2, "--ignore-eos")
    assert f"program built, weights built (cache {cache})" in first.err
    renamed = folder.rename(folder.parent / "renamed")
    second = run(renamed, "--tp", 2, "--ignore-eos", "--json")
    assert f"program reused, weights reused (cache {cache})" in second.err
    assert "writing a copy" not in second.err
    start = events(second.out)[0]
    assert (start["program"], start["weights"], start["cache"]) == ("reused", "reused", str(cache))
    assert "weights in place" in run(renamed, "--tp", 1, "--ignore-eos").err


def test_a_plan_brings_its_own_degree(run: Run, k3tool: Run, oracle: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.h5"
    assert k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 2, "-o", plan).code == 0
    done = run(oracle("tiny_tp8"), "--plan", plan, "--ignore-eos")
    assert done.code == 0
    assert "2 ranks identical" in done.err
    refused = run(oracle("tiny_tp8"), "--plan", plan, "--tp", 4)
    assert refused.code == 2
    assert "--tp: got 4, need 2" in refused.err


def test_a_length_past_the_model_is_not_answered_with_ctx(run: Run, oracle: Run) -> None:
    done = run(oracle("tiny_tp8"), gen=10**6)
    assert done.code == 2
    assert "max_position_embeddings" in done.err
    assert "--ctx" not in done.err
    done = run(oracle("tiny_tp8"), "--ctx", 256, gen=300)
    assert done.code == 2
    assert "hint: --ctx 303 or more" in done.err


def test_provenance_finds_the_cached_program_of_a_short_run(
    k3tool: Run, oracle: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    tokens = tmp_path / "out" / "tokens.h5"
    tokens.parent.mkdir()
    words = ("run", oracle("tiny_tp8"), "--ids", "1,2", "--gen", 2, "--tp", 2)
    assert k3tool(*words, "-o", tokens).code == 0
    done = k3tool("provenance", tokens)
    assert done.code == 0
    assert re.search(r"^  isa: program-\w+\.isa\.h5 [0-9a-f]{16}$", done.out, re.M)
    assert re.search(r"^    plan: program-\w+\.plan\.h5 [0-9a-f]{16}$", done.out, re.M)
    assert "not found" not in done.out
    assert max(map(len, done.out.splitlines())) < 250
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    lost = k3tool("provenance", tokens)
    assert "not found: name its folder with --search" in lost.out


def test_a_damaged_cache_entry_is_built_again(run: Run, oracle: Run, cache: Path) -> None:
    first = run(oracle("tiny_tp8"), "--ignore-eos")
    program = next(cache.glob("*.isa.h5"))
    program.write_bytes(program.read_bytes()[:5000])
    again = run(oracle("tiny_tp8"), "--ignore-eos", "-v")
    assert "built again" in again.err
    assert (again.code, again.out) == (0, first.out)


# -- weights that must not be used -------------------------------------------------------------


def _put_scales(folder: Path, value: int, matrix: str = "w2", part: float = 0.0) -> list[int]:
    """Put a byte so far into the scales of every expert's matrix; return its row and group."""
    with Checkpoint.open(folder) as checkpoint:
        names = [n for n in checkpoint.names() if n.endswith(f"{matrix}.weight_scale")]
        infos = [checkpoint.tensor_info(name) for name in names]
    assert infos
    rows, groups = infos[0].shape
    at = int(part * (rows * groups - 1))
    for info in infos:
        with (folder / info.file).open("r+b") as file:
            file.seek(info.offset + at)
            file.write(bytes([value]))
    return [*divmod(at, groups)]


def test_a_refused_scale_is_found_before_its_first_use(run: Run, writable: Run) -> None:
    folder = writable("tiny_tp8")
    _put_scales(folder, 252)
    assert run(folder).code in (0, 4)  # legal, if far from any real weight
    _put_scales(folder, 253)
    done = run(folder)
    assert done.code == 4
    assert "w2.weight_scale: row 0, group 0: got scale byte 253, need at most 252" in done.err


@pytest.mark.parametrize("part", [0.0, 0.4, 0.61, 1.0])  # every slice looks at its own rows
@pytest.mark.parametrize(("matrix", "op"), [("w3", "MOE_GLU_TOPK"), ("w2", "MOE_DOWN_TOPK")])
def test_a_refused_scale_is_found_by_ops_that_choose_experts_themselves(
    run: Run, writable: Run, matrix: str, op: str, part: float
) -> None:
    folder = writable("tiny_tp8")
    row, group = _put_scales(folder, 253, matrix, part)
    done = run(folder, "--chunk", 1)
    assert done.code == 4
    assert f"{matrix}.weight_scale: row {row}, group {group}: got scale byte 253" in done.err
    assert f"(met by {op} on rank 0)" in done.err


def test_a_shard_changed_after_sharding_is_refused(
    run: Run, k3tool: Run, oracle: Run, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", shards).code == 0
    assert run(shards).code == 0
    with Shards.open(shards).rank(1) as folder:
        info = folder.tensor_info("language_model.model.norm.weight")
        path = folder.path / info.file
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\0\x40")
    done = run(shards)
    assert done.code == 3
    assert "rank-01-of-02" in done.err


def test_a_nan_weight_is_found_before_its_first_use(run: Run, writable: Run) -> None:
    folder = writable("tiny_tp8")
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensor_info(
            "language_model.model.layers.2.post_attention_layernorm.weight"
        )
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xc0\x7f")
    done = run(folder)
    assert done.code == 4
    assert done.out == ""
    assert "layers.2.post_attention_layernorm.weight: got 1 NaN or Inf" in done.err

"""Input that was made to break inspect and sample: numbers, names and files nobody means to give.

Damage of a checkpoint that inspect, shard and run refuse alike is in the damage suite; here is what
one command alone meets.
"""

import gzip
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.artifact import open_artifact
from k3tool.checkpoint import released_layout, tensor_report
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.regular_file import MOST_BYTES
from k3tool.checkpoint.released_layout import CONFIG_FILE, INDEX_FILE, RELEASED_DATA
from tests.faults.damage.edit import Tensor, add, edit_json

Run = Callable[..., Any]
REPO = Path(__file__).resolve().parents[2]
EMPTY = Tensor("F32", (0, 4), b"")
GB = 10**9


def start(*arguments: object, limit: int | None = None, **more: Any) -> Any:
    """Run one command line in a process of its own, maybe with less address space."""

    def lower() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "stages.cli", *map(str, arguments)], cwd=REPO, preexec_fn=lower,
        capture_output=True, timeout=60, **more,
    )  # fmt: skip


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers", ["0-99999999999", "0-1000000000", "0-1024", "1,2,99999", "9" * 5000, "-5", "\u0663"]
)
def test_ranges_are_not_expanded_before_they_are_checked(
    k3tool: Run, oracle: Run, tmp_path: Path, layers: str
) -> None:
    sample = ("sample", "--layout", "released", tmp_path / "x", "--fill-layers", layers)
    for command in (("inspect", oracle("tiny_tp8"), "--layers", layers), sample):
        done = start(*command, limit=4 * GB, text=True)
        assert done.returncode == 2, done
        assert "need a layer or a range such as 3-5, below 1024" in done.stderr
        assert len(done.stderr) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("jobs", "limit"), [(10**9, None), (3000, 4 * GB)])
def test_more_threads_than_memory(oracle: Run, jobs: int, limit: int | None) -> None:
    done = start("inspect", oracle("tiny_tp8"), "--values", "--jobs", jobs, limit=limit, text=True)
    assert done.returncode == 5, done
    assert f"for {jobs} threads of --values (--jobs)" in done.stderr
    assert done.stdout == ""


def test_more_threads_than_the_system_gives(
    k3tool: Run, oracle: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Few(threading.Thread):
        def start(self) -> None:
            if getattr(self._target, "__name__", "") == "_work":  # others start threads too
                if len(started) == 2:
                    raise RuntimeError("can't start new thread")
                started.append(self)
            super().start()

    monkeypatch.setattr(threading, "Thread", Few)
    done = k3tool("inspect", oracle("tiny_tp8"), "--values", "--jobs", 4)
    assert done.code == 5
    assert "--jobs: got 2 threads, and no more from the system" in done.err
    assert "hint: --jobs 1" in done.err
    assert not any(thread.is_alive() for thread in started)


def test_bench_of_more_threads_than_memory(oracle: Run) -> None:
    bench = ("bench", "inspect", oracle("tiny_tp8"), "--values", "--jobs", 10**9)
    done = start(*bench, text=True)
    assert done.returncode == 5, done
    assert f"for {10**9} threads of --values (--jobs)" in done.stderr


# -- names -------------------------------------------------------------------------------------


def test_a_name_cannot_fake_a_line(k3tool: Run, writable: Run) -> None:
    folder = writable("tiny_tp8")
    add(folder, "x\nwhole: 712 tensors\x1b[1A", EMPTY)
    for more in ((), ("--markdown",), ("-v",), ("--values",)):
        done = k3tool("inspect", folder, *more)
        assert done.code == 3
        assert "\x1b" not in done.out
        assert not [line for line in done.out.splitlines() if line.startswith("whole: 712")]
        assert "x\\nwhole: 712 tensors\\x1b[1A" in done.out
    found = json.loads(k3tool("inspect", folder, "--json").out)["findings"]
    assert found[0]["name"] == "x\nwhole: 712 tensors\x1b[1A"  # a program reads what is there
    asked = k3tool("inspect", folder, "--tensor", "y\nk3tool: well")
    assert (asked.code, len(asked.err.splitlines())) == (3, 2)
    shown = k3tool("inspect", folder, "--tensor", "x\nwhole: 712 tensors\x1b[1A")
    assert shown.code == 0
    assert "x\\nwhole" in shown.out


def test_artifacts_hold_any_name(k3tool: Run, writable: Run, tmp_path: Path) -> None:
    folder = writable("tiny_tp8")
    add(folder, "x\0y", EMPTY._replace(shape=(1,), data=bytes(4)))
    out, record = tmp_path / "coverage.h5", tmp_path / "record.h5"
    done = k3tool("inspect", folder, "--values", "-o", out, "--fingerprint", record)
    assert done.code == 3, done.err
    with open_artifact(out, "coverage", 1) as artifact:
        assert "x\\x00y" in artifact.read("findings/name").tolist()
    again = k3tool("inspect", folder, "--values", "--against", record)
    assert "not recorded" not in again.out
    assert "changed" not in again.out


def test_a_record_against_what_the_index_lacks(k3tool: Run, writable: Run, tmp_path: Path) -> None:
    folder, record = writable("tiny_tp8"), tmp_path / "record.h5"
    assert k3tool("inspect", folder, "--values", "--fingerprint", record).code == 0
    add(folder, "extra", EMPTY._replace(shape=(1,), data=bytes(4)))
    with edit_json(folder / INDEX_NAME) as index:
        del index["weight_map"]["extra"]
    done = k3tool("inspect", folder, "--values", "--against", record)
    assert done.code == 3
    assert "not recorded: extra: got a tensor without a recorded fingerprint" in done.out


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_names_that_a_stream_cannot_encode(writable: Run, tmp_path: Path, encoding: str) -> None:
    folder = writable("tiny_tp8").rename(tmp_path / os.fsdecode(b"caf\xe9"))
    (folder / os.fsdecode(b"\xe9.safetensors")).write_bytes(b"")
    done = start("inspect", folder, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert done.returncode == 3, done
    assert b"Traceback" not in done.stderr
    assert b"\\udce9.safetensors: got a file that is not in the index" in done.stdout
    out = tmp_path / "coverage.h5"
    assert start("inspect", folder, "-o", out).returncode == 3
    assert b"caf\\udce9" in start("provenance", out).stdout
    (folder / INDEX_NAME).unlink()
    done = start("inspect", folder)
    assert done.returncode == 3
    assert b"got a name that is no UTF-8" in done.stderr


def test_a_name_is_likened_to_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An absent name is compared with likely ones, not with all that an index may have."""
    compared: list[str] = []
    close = tensor_report.difflib.get_close_matches

    def counted(word: str, ends: dict[str, str]) -> list[str]:
        compared.extend(ends)
        return close(word, ends)

    monkeypatch.setattr(tensor_report.difflib, "get_close_matches", counted)
    names = [
        "model.norm.weight", "x" * 100_000,
        *("w" + "".join(chr(97 + number // 26**place % 26) for place in range(4))
          for number in range(20_000)),
    ]  # fmt: skip
    assert "model.norm.weight" in tensor_report.nearest_names("model.norm.weigth", names)
    assert 0 < len(compared) < 5000
    assert max(map(len, compared)) <= 200
    assert tensor_report.nearest_names("y" * 100_000, names) == []


# -- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [("inspect", ""), ("inspect", "CKPT", "-o", ""), ("shard", "", "--tp", 2, "-o", "x"),
     ("shard", "CKPT", "--tp", 2, "-o", ""), ("run", "", "--ids", 1), ("sample", ""),
     ("compile-plan", "", "--tp", 1, "-o", "x"), ("bench", "inspect", "")],
)  # fmt: skip
def test_an_empty_path_is_no_folder(k3tool: Run, oracle: Run, command: tuple[object, ...]) -> None:
    words = (oracle("tiny_tp8") if word == "CKPT" else word for word in command)
    done = k3tool(*words)
    assert done.code == 2, done
    assert "got an empty path" in done.err


@pytest.mark.parametrize("command", ["inspect", "shard", "run", "compile-plan"])
def test_a_path_of_300_letters(k3tool: Run, tmp_path: Path, command: str) -> None:
    more = {"shard": ("--tp", 2, "-o", tmp_path / "x"), "run": ("--ids", 1),
            "compile-plan": ("--tp", 2, "-o", tmp_path / "x")}.get(command, ())  # fmt: skip
    done = k3tool(command, "n" * 300, *more)
    assert done.code == 3, done
    assert "hint: " in done.err


# -- sample ------------------------------------------------------------------------------------


def test_data_belongs_to_the_released_layout(k3tool: Run, tmp_path: Path) -> None:
    done = k3tool("sample", tmp_path / "x", "--data", RELEASED_DATA)
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert "--data: got no --layout released, need both" in done.err


def _packed(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(gzip.compress(text))


ODD_INDEXES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "no regular file"),
    "folder": (Path.mkdir, "a folder"),
    "absent": (lambda path: None, "absent"),
    "link to nothing": (lambda path: path.symlink_to("gone"), "a link to nothing"),
    "other bytes": (lambda path: path.write_bytes(b"garbage"), "got other bytes"),
    "cut": (lambda path: path.write_bytes(gzip.compress(b"{}" * 99)[:-9]), "got the start of it"),
    "pointer": (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
                "a git-lfs pointer"),
    "no JSON": (_packed(b"x"), "invalid JSON"),
    "a list": (_packed(b"[]"), "got a JSON list"),
    "a list for a map": (_packed(b'{"weight_map": []}'), "weight_map"),
    "a number for a file": (_packed(b'{"weight_map": {"a": 1}}'), "a plain file name"),
    "out of the folder": (_packed(b'{"weight_map": {"a": "../x"}}'), "a plain file name"),
    "another model's": (_packed(b'{"weight_map": {"a": "x"}}'), "absent"),
    "nested": (_packed(b"[" * 100_000), "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD_INDEXES)
def test_released_index_that_is_none(k3tool: Run, tmp_path: Path, odd: str) -> None:
    make, words = ODD_INDEXES[odd]
    data = tmp_path / "data"
    data.mkdir()
    (data / CONFIG_FILE).write_bytes((RELEASED_DATA / CONFIG_FILE).read_bytes())
    make(data / INDEX_FILE)
    done = k3tool("sample", "--layout", "released", tmp_path / "x", "--data", data)
    assert done.code == 3, done
    assert f"{data / INDEX_FILE}" in done.err
    assert words in done.err
    assert "hint: " in done.err
    assert "Errno" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_an_index_that_unpacks_to_more_than_may_be_read(
    tmp_path: Path, k3tool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(released_layout, "MOST_BYTES", 1000)
    (tmp_path / CONFIG_FILE).write_bytes((RELEASED_DATA / CONFIG_FILE).read_bytes())
    _packed(b" " * 1001)(tmp_path / INDEX_FILE)
    done = k3tool("sample", "--layout", "released", tmp_path / "x", "--data", tmp_path)
    assert done.code == 3
    assert "got more than 1000 bytes" in done.err


# -- the rest ----------------------------------------------------------------------------------


def test_bench_of_a_damaged_checkpoint_says_what_inspect_says(k3tool: Run, writable: Run) -> None:
    folder = writable("tiny_tp8")
    (folder / "model-00002-of-000011.safetensors").unlink()
    for more in ((), ("--values",)):
        done = k3tool("bench", "inspect", folder, *more)
        assert done.code == 3
        assert "model-00002-of-000011.safetensors: got absent, need a file of the index" in done.err


def test_a_file_too_long_to_be_read_whole(k3tool: Run, writable: Run) -> None:
    folder = writable("tiny_tp8")
    os.truncate(folder / "config.json", MOST_BYTES + 1)
    done = k3tool("inspect", folder)
    assert done.code == 3
    assert f"got {MOST_BYTES + 1} bytes" in done.err
    assert "hint: " in done.err

"""doctor: what it finds here, that its next command does what it says, and that it can fail."""

import ctypes
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3tool.checkpoint import shard_space
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.errors import TargetError
from k3tool.model.config import K3Config
from k3tool.runtime import advice, budget, machine, machine_devices, machine_rates
from k3tool.runtime.budget import PRESETS
from k3tool.runtime.options import parse_size
from k3tool.text.byte_pairs import library_json
from tests.unit.text.vocabulary import grown

Run = Callable[..., Any]
CONFIG = Path(__file__).resolve().parents[1] / "data" / "kimi-k3-config.json"
RELEASED = K3Config.load(CONFIG)


def statuses(out: str) -> dict[str, str]:
    """Return the status of each line, by name."""
    rows = [line for line in out.splitlines() if line[:8].strip() in ("PASS", "FAIL", "NOT RUN")]
    return {line[8:].split(":")[0]: line[:8].strip() for line in rows}


def do_next(k3tool: Run, out: str) -> Any:
    """Run the last line that doctor printed, every command of it; return the last outcome."""
    word, _, command = out.splitlines()[-1].partition(": ")
    assert word == "next"
    done = None
    for part in command.split(" && "):
        program, *arguments = shlex.split(part)
        assert program == "k3tool"
        done = k3tool(*arguments)
        assert done.code == 0, f"{part}\n{done.err}"
    return done


# -- the machine ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_machine_alone_and_the_next_command(k3tool: Run) -> None:
    done = k3tool("doctor", "--no-measure")
    assert done.code == 0, done.err
    found = statuses(done.out)
    assert {found[name] for name in ("cpu interpreter", "cores", "memory", "cache")} == {"PASS"}
    assert found["storage rate"] == found["memory rate"] == "NOT RUN"
    assert len(do_next(k3tool, done.out).out.split()) == 16  # tokens of the sample
    again = k3tool("doctor", "--no-measure")
    assert again.out.splitlines()[-1] == "next: k3tool doctor ckpt"


def test_a_checkpoint_that_fits_and_the_next_command(k3tool: Run, oracle: Run) -> None:
    done = k3tool("doctor", oracle("tiny13"), "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["advice"]["fits"]
    assert said["advice"]["preset"] is None
    assert 0 < said["advice"]["least_bytes"] <= said["advice"]["all_bytes"]
    rates = {c["name"]: c for c in said["checks"] if c["name"].endswith(" rate")}
    for key in ("storage_rate", "memory_rate"):  # measured, or said why not
        status = rates[key.replace("_", " ")]["status"]
        assert (said[key] is not None) == (status == "PASS"), rates
    assert len(do_next(k3tool, f"next: {said['next']}").out.split()) >= 1


def test_a_budget_between_least_and_all_is_advised_and_runs(
    k3tool: Run, oracle: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "COMPILE_BYTES", 0)  # or the least of so small a model is all of it
    least, _ = advice.ends(oracle("tiny_tp8"), None)
    monkeypatch.setitem(PRESETS, "laptop", least + 100_000)
    monkeypatch.setattr(advice, "preset_bytes", lambda name: least + 200_000)
    done = k3tool("doctor", oracle("tiny_tp8"), "--no-measure")
    assert done.code == 0, done.err
    assert "fits: --preset laptop" in done.out
    assert statuses(done.out)["preset desktop"] == "NOT RUN"
    do_next(k3tool, done.out)


def test_a_config_alone_is_planned_with_what_was_measured() -> None:
    model = advice.open_model(CONFIG)
    found = advice.Advice(4 * 10**9, 10**12, 9 * 10**9, "laptop", True)
    assert advice.next_command(model, found, 3.25e9, None).endswith(
        "--preset laptop --plan-only --storage-rate 3.25"
    )
    assert "--preset auto" in advice.next_command(
        model, advice.Advice(4 * 10**9, 10**12, 5 * 10**9, "auto", True), None, None
    )


def test_the_next_command_of_a_config_is_done(k3tool: Run, oracle: Run) -> None:
    done = k3tool("doctor", oracle("tiny_tp8") / "config.json", "--no-measure")
    assert done.code == 0, done.err
    assert "no weights here" in done.out
    assert "bytes a token" in do_next(k3tool, done.out).out


def test_too_little_memory_for_a_model_is_five_and_says_how_much(
    k3tool: Run, oracle: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "preset_bytes", lambda name: 50_000_000)
    done = k3tool("doctor", oracle("tiny_tp8"), "--no-measure")
    assert done.code == 5
    assert statuses(done.out)["fits"] == "FAIL"
    assert "k3tool doctor: this machine: got 1 failed check (fits), need none\n" in done.err
    assert "budget" in do_next(k3tool, done.out).out  # the least there is: a byte less is refused
    _, _, words = done.out.splitlines()[-1].partition("--memory ")
    arguments = shlex.split(done.out.splitlines()[-1])[2:]
    arguments[arguments.index("--memory") + 1] = str(parse_size(words.split()[0]) - 1_000_000)
    assert k3tool(*arguments).code == 5


def test_an_interpreter_that_is_stale_is_five(k3tool: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale() -> None:
        raise TargetError("k3-cpu: source_hash", got="12..", need="34..", hint="make build")

    monkeypatch.setattr(machine, "load", stale)
    done = k3tool("doctor")
    assert done.code == 5
    assert done.out.startswith("FAIL    cpu interpreter: k3-cpu: source_hash: got 12..")
    assert done.out.splitlines()[-1].startswith("next: make -C ")
    assert "storage rate: needs the cpu interpreter" in done.out  # and no file was written for it


def test_a_source_that_a_run_refuses_is_refused_alike(k3tool: Run, writable: Run) -> None:
    folder = writable("tiny13")
    (folder / "config.json").write_text("{}")
    told, asked = k3tool("doctor", folder), k3tool("run", folder, "--ids", 1)
    assert told.code == asked.code == 3
    assert told.err.replace("doctor", "run") == asked.err
    assert told.out == ""


def test_shards_are_asked_at_their_own_degree(k3tool: Run, oracle: Run, tmp_path: Path) -> None:
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", tmp_path / "s").code == 0
    done = k3tool("doctor", tmp_path / "s", "--no-measure")
    assert "shown for --tp 2" in done.out
    do_next(k3tool, done.out)


# -- what a run loads beside weights -------------------------------------------------------------


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    write_sample(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def damage(folder: Path, how: str) -> None:
    """Damage a checkpoint's tokenizer."""
    ranks, names = folder / "tiktoken.model", folder / "tokenizer_config.json"
    if how == "cut ranks":
        ranks.write_bytes(ranks.read_bytes()[:-300])
    elif how == "a bad line":
        ranks.write_bytes(ranks.read_bytes().replace(b" 40\n", b" forty\n"))
    elif how == "no names":
        names.unlink()
    else:
        definition = json.loads(library_json(grown(600)))  # the sample's model has 512 ids
        if how == "an unknown part":  # only the library knows
            definition = json.loads(library_json(grown(400)))
            definition["pre_tokenizer"] = {"type": "Nonsense"}
        (folder / "tokenizer.json").write_text(json.dumps(definition))
        ranks.unlink()


@pytest.mark.parametrize(
    "how",
    [
        "cut ranks", "a bad line", "no names", "another vocabulary", "an unknown part",
    ],
)  # fmt: skip
def test_a_tokenizer_at_fault_is_named_as_run_names_it(k3tool: Run, sample: Path, how: str) -> None:
    damage(sample, how)
    done = k3tool("doctor", sample, "--no-measure")
    assert done.code == 3
    assert statuses(done.out)["tokenizer"] == "FAIL"
    assert f"k3tool doctor: {sample}: got 1 failed check (tokenizer), need none\n" in done.err
    refused = k3tool("run", sample, "--prompt", "Hello", "--gen", 2)
    assert refused.code == 3
    said = refused.err.splitlines()[0].removeprefix("k3tool run: ")
    assert said in done.out  # word for word
    assert do_next(k3tool, done.out).out.split()


def test_a_tokenizer_that_is_whole_passes(k3tool: Run, sample: Path) -> None:
    """The control of the one above; and without a tokenizer nothing is at fault."""
    done = k3tool("doctor", sample, "--no-measure")
    assert (done.code, statuses(done.out)["tokenizer"]) == (0, "PASS")
    for name in ("tiktoken.model", "tokenizer_config.json", "special_tokens_map.json"):
        (sample / name).unlink(missing_ok=True)
    done = k3tool("doctor", sample, "--no-measure")
    assert (done.code, statuses(done.out)["tokenizer"]) == (0, "NOT RUN")


def test_a_stand_in_with_holes_is_not_to_be_run(k3tool: Run, tmp_path: Path) -> None:
    write_sample(tmp_path / "wide", "wide")
    whole = k3tool("doctor", tmp_path / "wide", "--no-measure")
    assert "(weights)" in whole.out  # the control
    assert "--plan-only" not in whole.out.splitlines()[-1]
    for file in (tmp_path / "wide").glob("*.safetensors"):
        size, length = file.stat().st_size, int.from_bytes(file.read_bytes()[:8], "little")
        os.truncate(file, 8 + length)
        os.truncate(file, size)
    done = k3tool("doctor", tmp_path / "wide", "--no-measure")
    assert done.code == 0, done.err
    assert "(holes for data: a stand-in)" in done.out
    assert "--plan-only" in done.out.splitlines()[-1]
    do_next(k3tool, done.out)


def test_a_degree_is_asked_for(k3tool: Run, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = k3tool("doctor", sample, "--tp", 2, "--no-measure")
    assert done.code == 0, done.err
    assert "shown for --tp 2" in done.out
    assert "PASS    copy of the weights: " in done.out
    assert " --tp 2 " in done.out.splitlines()[-1]
    for arguments in ((sample, "--tp", 3), ("--tp", 2)):
        assert k3tool("doctor", *arguments, "--no-measure").code == 2
    monkeypatch.setattr(shard_space, "free_bytes", lambda folder: 1000)
    done = k3tool("doctor", sample, "--tp", 2, "--no-measure")
    assert done.code == 5
    assert "FAIL    copy of the weights: " in done.out
    assert "--tp" not in done.out.splitlines()[-1]  # at TP 1 no copy is made
    do_next(k3tool, done.out)


# -- what is asked of the system -----------------------------------------------------------------


def test_a_cpu_quota_is_the_least_of_all_groups(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    (root / "a" / "b").mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    assert machine.cpu_quota(root, membership) is None
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (root / "a" / "cpu.max").write_text("50000 100000\n")
    assert machine.cpu_quota(root, membership) == 0.5
    assert "run --threads 1" in machine.cores_check(root, membership).detail
    (root / "a" / "cpu.max").write_text("what\n")
    assert machine.cpu_quota(root, membership) is None


def test_a_cache_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    assert machine.cache_check(tmp_path / "new" / "cache").status == "PASS"
    (tmp_path / "file").write_text("")
    assert machine.cache_check(tmp_path / "file").status == "NOT RUN"


def test_what_is_not_installed_is_not_run() -> None:
    assert machine.tool_check("gcc", "x", "y").status == "PASS"
    check = machine.tool_check("no-such-program", "make it", "some-package")
    assert (check.status, "apt-get install some-package" in check.detail) == ("NOT RUN", True)


def test_extras_are_those_of_the_package() -> None:
    found = machine.extras()
    assert found["plot"] == ["matplotlib"]
    assert "dev" not in found
    by_name = {check.name: check for check in machine.extra_checks()}
    assert set(by_name) == {f"extra {name}" for name in found}


def cuda_driver(archs: list[tuple[int, int]]) -> Callable[[str], Any]:
    """Return what opens a driver library that counts devices of these versions."""

    def count(pointer: Any) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = len(archs)
        return 0

    def get(pointer: Any, number: int) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = number
        return 0

    def attribute(pointer: Any, which: int, device: Any) -> int:
        value = archs[device.value][which == 76]
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0

    calls = SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGetCount=count, cuDeviceGet=get,
        cuDeviceGetAttribute=attribute,
    )  # fmt: skip

    def load(name: str) -> Any:
        if "cuda" not in name:
            raise OSError(name)
        return calls

    return load


@pytest.mark.parametrize(
    ("archs", "status", "words"),
    [
        ([(9, 0)], "PASS", "sm_90 (driver: NVRM 1): run --target cuda:sm_90a"),
        ([(8, 6), (10, 0)], "PASS", "run --target cuda:sm_100a"),
        ([(8, 6)], "NOT RUN", "sm_86"),
        ([], "NOT RUN", "no device"),
    ],
)
def test_cuda_devices_by_architecture(
    tmp_path: Path, archs: list[tuple[int, int]], status: str, words: str
) -> None:
    (tmp_path / "version").write_text("NVRM 1\nmore\n")
    cuda, hip = machine_devices.device_checks(cuda_driver(archs), tmp_path, tmp_path, tmp_path)
    assert (cuda.status, words in cuda.detail) == (status, True), cuda
    assert hip.status == "NOT RUN"


def test_amd_devices_are_nodes_with_a_version(tmp_path: Path) -> None:
    for number, version in enumerate((0, 90402, 90500, 90010)):
        (tmp_path / str(number)).mkdir()
        text = f"cpu_cores_count 0\ngfx_target_version {version}\n"
        (tmp_path / str(number) / "properties").write_text(text)
    assert machine_devices.amd_archs(tmp_path) == ["gfx942", "gfx950", "gfx90a"]


def test_a_temporary_file_is_bounded_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_rates, "TEMPORARY_BYTES", 32 << 20)
    found = machine_rates.storage_at(tmp_path, advice.RELEASED_EXPERT_BYTES)
    assert (found.value or 0) > 0 or "page cache" in found.detail
    assert not [path for path in tmp_path.iterdir() if "doctor" in path.name]
    assert machine_rates.storage_of(tmp_path, 1 << 20).value is None  # no weights, no rate


def test_an_expert_of_the_release() -> None:
    assert advice.expert_bytes(RELEASED) == advice.RELEASED_EXPERT_BYTES


def test_a_package_of_another_environment_is_named(
    k3tool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object, say: object) -> None:
        raise ModuleNotFoundError("No module named 'h5py'", name="h5py")

    monkeypatch.setattr("stages.doctor.run", fail)
    done = k3tool("doctor")
    assert done.code == 5
    assert done.err.startswith("k3tool doctor: package h5py: got none in ")
    monkeypatch.setattr("stages.doctor.run", lambda options, say: __import__("k3tool.no_such"))
    with pytest.raises(ModuleNotFoundError):  # ours: a bug, which keeps its traceback
        k3tool("doctor")

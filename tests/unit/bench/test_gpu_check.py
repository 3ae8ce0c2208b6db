"""`make gpu` on an emulated device: its cases, its page, and what it says where it did not run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from k3tool.bench import gpu_bits, gpu_check, gpu_parts, gpu_tokens
from k3tool.bench.gpu_bits import Asked, Case, cases, difference
from k3tool.bench.gpu_check import APART, Clock, main
from k3tool.bench.gpu_measures import Product, Sizes
from k3tool.bench.gpu_parts import Scope
from k3tool.errors import TargetError
from k3tool.runtime.engine import StepResult
from k3tool.runtime.options import RunOptions
from tests.kernels.emulated_device import EmulatedDevice
from tests.runtime.test_gpu_group import group_of, program_of, unknown_opcode
from tests.runtime.test_gpu_peers import TARGETS, several

CUDA = "cuda:sm_90a"
MODELS = {name: gpu_check.ROOT / "tests/data/oracle" / name for name in gpu_check.ORACLES}


def test_without_a_device_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(target: str) -> Any:
        raise TargetError(f"--target {target}", got="no driver", need="a device")

    output = tmp_path / "results.md"
    assert main(["-o", str(output)], absent) == 5
    assert capsys.readouterr().out.startswith("NOT RUN: k3tool gpu: --target cuda:sm_90a: got no")
    assert not output.exists()


def test_cases_are_what_models_can_do(tmp_path: Path) -> None:
    asked = Asked("cuda:sm_90a", tuple(MODELS.values()), tmp_path, tmp_path)
    found = list(cases(asked))
    (two,) = (case.given for case in cases(replace(asked, units=132)) if case.given["tp"] == 2)
    assert two["workgroups"] == 66  # of each rank: both are resident at once
    degrees = {(case.model.name, case.given["tp"]) for case in found}
    assert {("tiny13", 1), ("tiny_tp8", 1), ("tiny_tp8", 2), (tmp_path.name, 1)} <= degrees
    assert {case.given.get("prefill") for case in found} == {None, "decode"}
    assert {case.given.get("numerics") for case in found} == {None, "bf16"}


SMALL = Scope(Sizes(2, 1, 1 << 12, 2, 2), (Product("small", 16, 64),), steps=1, repeats=1)


@pytest.fixture(scope="module")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of programs for all runs here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Return what makes everything small: one case of a token, and a toy where time is taken."""

    @contextlib.contextmanager
    def toy_engine(options: RunOptions, device: Any) -> Iterator[Any]:
        isa = program_of(CUDA, 1)
        isa = replace(isa, params=isa.params | {"batch": 2})
        launches = "each" if options.is_launch_per_op else "one"
        with group_of(isa, device, tmp_path, launches=launches) as group:
            group.wait_ready(lambda done, total: None)
            yield group

    monkeypatch.setattr(gpu_tokens, "engine", toy_engine)
    case = Case(MODELS["tiny13"], {"tp": 1, "workgroups": 1})
    monkeypatch.setattr(gpu_check, "cases", lambda asked: iter([case]))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(gpu_bits, "PROMPT", (1,))
    monkeypatch.setattr(gpu_parts, "PROMPT", (1,))

    def one_alone(target: str, n: int) -> Any:
        raise TargetError("--devices", got=n, need="at most 1, which are here")

    sizes = {"gen": 1, "workgroups": 1, "batch": 2, "sizes": SMALL, "open_several": one_alone}
    return sizes | {"models": (MODELS["tiny13"],)}


def test_a_page_of_a_device(
    small: dict[str, Any], small_cache: Path, tmp_path: Path, device_code: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    output = tmp_path / "results.md"
    given = ["-o", str(output), "--cache", str(small_cache), "--seconds", "1000"]

    def device(target: str, **damage: Any) -> EmulatedDevice:
        return EmulatedDevice(device_code("cuda"), **damage)

    assert main(given, device, **small) == 0
    page = output.read_text()
    assert "emulated blocks (sm_90, 32 units, no driver)" in page
    assert "| bits of tiny13, tp 1 workgroups 1 | PASS | 1 tokens and every logit |" in page
    assert "| bits of tiny13, tp 1 batch 2 | PASS | 1 tokens of each sequence and every" in page
    assert f"| {APART} | NOT RUN | --devices: got 2" in page
    assert "| compute-sanitizer memcheck | NOT RUN | no compute-sanitizer |" in page
    for part in ("hand-off", "products", "tokens a second", "several sequences",
                 "anatomy of a token"):  # fmt: skip
        assert f"| {part} | PASS | below |" in page
        assert f"\n## {part[0].upper()}{part[1:]}\n" in page
    for line in (
        r"\| an empty packet in a chain \| +\S+", r"\| a grid-wide barrier \| +\S+",
        r"\| an empty launch in a graph \| +\S+", r"\| small, 16 rows of 64 \| +\S+",
        r"\* (held|MISSED): small of copying \S+, at least 0.85",
        r"\| in one launch \| +\S+", r"\| in one for each op \| +\S+",
        r"\* (held|MISSED): tokens in one launch, of those in a graph of those",
        r"\* tiny13, 2 in a step: \S+ tokens/s", r"\* protocol: .*%", r"\* idle: .*%",
    ):  # fmt: skip
        assert re.search(line, page), line
    assert "7 PASS, 0 FAIL, 4 NOT RUN" in capsys.readouterr().out


def test_a_page_of_a_device_that_computes_wrongly(
    small: dict[str, Any], small_cache: Path, tmp_path: Path, device_code: Any
) -> None:
    output = tmp_path / "results.md"
    given = ["-o", str(output), "--cache", str(small_cache), "--strict"]

    def device(target: str) -> EmulatedDevice:
        return EmulatedDevice(device_code("cuda"), spoil=unknown_opcode)

    assert main(given, device, **small) == 4
    assert "Nothing was measured." in output.read_text()
    assert "| FAIL | rank 0: step 0, position 0, prefill: instruction 3" in output.read_text()


def test_what_there_is_no_time_for_is_not_run(
    small: dict[str, Any], small_cache: Path, tmp_path: Path, device_code: Any
) -> None:
    output = tmp_path / "results.md"
    given = ["-o", str(output), "--cache", str(small_cache), "--seconds", "0"]
    nothing = main(given, lambda target: EmulatedDevice(device_code("cuda")), **small)
    assert nothing == 4  # of which nothing may be claimed
    page = output.read_text()
    for name in ("bits of tiny13, tp 1 workgroups 1", "bits of tiny13, tp 1 batch 2"):
        assert f"| {name} | NOT RUN | 0 s were left of 0 s |" in page
    assert "Nothing was measured." in page
    part = gpu_parts.Part("a part", 20, lambda: ["a line"])
    checks, lines = gpu_check.measure([part], Clock(15), print)
    assert (checks[0].status, checks[0].detail) == ("NOT RUN", "15 s were left of 15 s")
    assert lines == []


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_two_ranks_on_two_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device_code: Any, vendor: str
) -> None:
    devices, driver = several(device_code, 2, vendor)
    monkeypatch.setattr(gpu_bits, "PROMPT", (1,))
    asked = Asked(TARGETS[vendor], (MODELS["tiny_tp8"],), None, tmp_path, gen=1, workgroups=1)
    found = gpu_check._apart(asked, lambda target, n: devices, Clock(1000))
    assert (found.status, found.detail) == ("PASS", "1 tokens of tiny_tp8 and every logit")
    assert all(device.launched for device in driver.devices)
    late = gpu_check._apart(asked, lambda target, n: devices, Clock(0))
    assert late.status == "NOT RUN"


def test_sequences_that_differ_are_placed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def decode(group: Any, prompts: Any, gen: int) -> Any:
        bits = np.zeros((1, 3), "<f4")
        bits[0, 2] = group
        yield StepResult((), bits, bits, 0)

    groups = iter((1.0, 0.0))
    monkeypatch.setattr(gpu_bits, "prepare", lambda *given, **more: None)
    monkeypatch.setattr(gpu_bits, "running", lambda job, say: contextlib.nullcontext(next(groups)))
    monkeypatch.setattr(gpu_bits, "decode", decode)
    asked = Asked(CUDA, (MODELS["tiny13"],), None, tmp_path)
    found = gpu_bits.run_batch(asked, Case(MODELS["tiny13"], {}), EmulatedDevice(b""))
    assert found == "step 0: 1 logits differ, first row and id [0 2]"


def test_a_difference_is_placed() -> None:
    logits = np.arange(12, dtype="<f4").reshape(3, 4)
    run: Any = SimpleNamespace(tokens=(1, 2), prefill=logits, steps=logits)
    assert difference(run, run) == ""
    other = logits.copy()
    other[2, 1] = np.nextafter(other[2, 1], np.float32(0))
    for changed, message in (
        ({"tokens": (1, 3)}, "token 1: got 3, need 2"),
        ({"tokens": (1,)}, "token 1: got none, need 2"),
        ({"steps": other}, "1 of 12 logits differ, first steps 2, id 1"),
        ({"prefill": other}, "1 of 12 logits differ, first prefill 2, id 1"),
    ):
        found: Any = SimpleNamespace(**(vars(run) | changed))
        assert difference(found, run) == message


@pytest.mark.parametrize(("code", "status"), [(0, "PASS"), (9, "FAIL")])
def test_a_sanitizer_is_heard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, status: str
) -> None:
    script = tmp_path / "compute-sanitizer"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\necho 1 error\nexit {code}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    asked = Asked("cuda:sm_90a", (MODELS["tiny13"],), None, tmp_path)
    found = gpu_check.sanitize(asked, "memcheck", Clock(60))
    assert (found.status, "1 error" in found.detail) == (status, status == "FAIL")
    said = (tmp_path / "said").read_text()
    assert said.startswith("--tool memcheck --error-exitcode 9 ")
    assert "--one-run" in said
    hip = gpu_check.sanitize(replace(asked, target="hip:gfx942"), "memcheck", Clock(60))
    assert (hip.status, hip.detail) == ("NOT RUN", "for CUDA alone")
    late = gpu_check.sanitize(asked, "memcheck", Clock(0))
    assert (late.status, late.detail) == ("NOT RUN", "0 s were left of 0 s")

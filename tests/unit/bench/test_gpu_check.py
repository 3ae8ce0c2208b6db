"""`make gpu` on an emulated device: its cases, its page, and what it says where it did not run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from k3tool.bench import gpu_check
from k3tool.bench.gpu_check import NOT_WRITTEN, Asked, Case, cases, difference, main
from k3tool.errors import TargetError
from tests.kernels.emulated_device import EmulatedDevice
from tests.runtime.test_gpu_group import unknown_opcode

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
    degrees = {(case.model.name, case.given["tp"]) for case in found}
    assert {("tiny13", 1), ("tiny_tp8", 1), ("tiny_tp8", 2), (tmp_path.name, 1)} <= degrees
    assert {case.given.get("prefill") for case in found} == {None, "decode"}
    assert {case.given.get("numerics") for case in found} == {None, "bf16"}


def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(MODELS["tiny13"], {"tp": 1, "workgroups": 4})
    monkeypatch.setattr(gpu_check, "cases", lambda asked: iter([case]))


def test_a_page_of_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device_code: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    one_case(monkeypatch)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(gpu_check, "_options", small_options)
    monkeypatch.setattr(gpu_check, "PROMPT", (1,))
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    monkeypatch.setattr(gpu_check, "MEASURED", 1)
    output = tmp_path / "results.md"
    given = ["-o", str(output), "--cache", str(tmp_path / "cache")]

    def device(target: str, **damage: Any) -> EmulatedDevice:
        return EmulatedDevice(device_code("cuda"), **damage)

    small = {"gen": 1, "workgroups": 4, "models": (MODELS["tiny13"],)}
    assert main(given, device, **small) == 0
    page = output.read_text()
    assert "emulated blocks (sm_90, 32 units, no driver)" in page
    assert "| bits of tiny13, tp 1 workgroups 4 | PASS | 1 tokens and every logit |" in page
    for name, _ in NOT_WRITTEN:
        assert f"| {name} | NOT RUN |" in page
    assert "| compute-sanitizer memcheck | NOT RUN | no compute-sanitizer |" in page
    assert f"1 PASS, 0 FAIL, {len(NOT_WRITTEN) + 3} NOT RUN" in capsys.readouterr().out
    assert re.search(
        r"tiny13, one sequence: \S+ .* in one launch, .* for each op: \S+ .* times", page
    )
    damaged = main(
        [*given, "--strict"], lambda target: device(target, spoil=unknown_opcode), **small
    )
    assert damaged == 4
    assert "Nothing was measured." in output.read_text()
    assert "| FAIL | rank 0: step 0, position 0, prefill: instruction 3" in output.read_text()


def small_options(asked: Asked, case: Case) -> Any:
    from k3tool.runtime.options import RunOptions

    fixed = {"cache": asked.cache, "ignore_eos": True, "logits": True}
    return RunOptions(case.model, (1,), 1, **fixed, **case.given)


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
    found = gpu_check._sanitize(asked, "memcheck")
    assert (found.status, "1 error" in found.detail) == (status, status == "FAIL")
    said = (tmp_path / "said").read_text()
    assert said.startswith("--tool memcheck --error-exitcode 9 ")
    assert "--one-run" in said
    hip = gpu_check._sanitize(replace(asked, target="hip:gfx942"), "memcheck")
    assert (hip.status, hip.detail) == ("NOT RUN", "for CUDA alone")

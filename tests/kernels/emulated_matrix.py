"""The long comparison of emulated GPU interpreters with the CPU's: one line a case, for `make`.

Run from the repository: python -m tests.kernels.emulated_matrix. The oracle checkpoints lie beside
it; where they are absent nothing is compared, which is NOT RUN and exit code 5.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.errors import K3Error
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import RunResult, run_model
from tests.kernels.conftest import ROOT
from tests.kernels.emulated import Emulated, build_shared
from tests.kernels.emulated_device import EmulatedDevice, build_object
from tests.kernels.test_simt_leaves import FORWARD, REVERSE, STRIDED, VENDOR_LANES

ORACLE = ROOT.parent / "shared" / "oracle"
MODELS = (("tiny13", 1), ("tiny_tp8", 1), ("tiny_tp8", 2))
FLASH = ("K3_FLASH",)  # as programs that attend by pages are served
LAUNCHED = (
    ("cuda:sm_90a", "sm_90", Emulated("cuda", defines=FLASH)),
    ("hip:gfx942", "gfx942", Emulated("hip", domains=8, order=REVERSE, defines=FLASH)),
)
LONG = 255  # decode goes over the end of a page


def devices() -> Iterator[Emulated]:
    """Yield every emulated device: both vendors, 1 and 8 domains, orders of lanes, segments."""
    orders = (FORWARD, REVERSE, STRIDED)
    for vendor, domains, order in itertools.product(VENDOR_LANES, (1, 8), orders):
        yield Emulated(vendor, domains, 1 + order, order)


def requests() -> Iterator[dict[str, Any]]:
    """Yield what is asked of each device: prefill in chunks, by decode, several workgroups."""
    yield {"workgroups": 9, "threads": 2}
    yield {"workgroups": 5, "threads": 1, "chunk": 3, "numerics": "bf16"}
    yield {"workgroups": 16, "threads": 2, "prefill": "decode"}


def interpreted(folder: Path, ids: tuple[int, ...]) -> Iterator[tuple[str, bool]]:
    """Yield each case of an interpreter in the place of `k3-cpu`, and whether it is the CPU's."""
    (folder / "shared").mkdir()
    build_shared(folder / "shared")
    for device, (model, tp), given in itertools.product(devices(), MODELS, requests()):
        built = folder / f"{device.vendor}-{device.domains}-{device.order}"
        if not built.exists():
            built.mkdir()
            device.build(built, folder / "shared")
        fixed = {"gen": 2, "tp": tp, "ignore_eos": True, "logits": True, "cache": folder}
        want = run_model(RunOptions(ORACLE / model, ids, **fixed, **given))
        on = {"interpreter": built / "emulated", "leaves": "scalar"}
        found = run_model(RunOptions(ORACLE / model, ids, **fixed, **given, **on))
        name = (
            f"{device.vendor}, {device.domains} domains, {device.segments} segments, "
            f"order {device.order}"
        )
        yield f"{name}: {model} tp={tp} {_words(given)}", _same(found, want)


def launched(folder: Path, ids: tuple[int, ...]) -> Iterator[tuple[str, bool]]:
    """Yield each case of a launch from Python, on a device, and whether its bits are the CPU's.

    A program is laid out for its target, so digests, which know it, differ.
    """
    for target, arch, device in LAUNCHED:
        built = folder / f"launched-{device.vendor}"
        built.mkdir()
        code = build_object(device, built)
        for (model, tp), given in itertools.product(MODELS, requests()):
            least = {"workgroups": max(given["workgroups"], device.domains)}  # one a domain
            fixed = {"gen": 2, "tp": tp, "ignore_eos": True, "logits": True, "cache": folder}
            options = RunOptions(ORACLE / model, ids, **fixed, **given | least | {"threads": None})
            on = EmulatedDevice(code, arch=arch, n_domains=device.domains)
            found = run_model(replace(options, target=target), device=on)
            is_same = _same_logits(found, run_model(options))
            yield f"launched on {target}: {model} tp={tp} {_words(given)}", is_same
        given = {"workgroups": device.domains, "gen": 3}
        many = tuple(ids[i % len(ids)] for i in range(LONG))
        options = RunOptions(ORACLE / MODELS[0][0], many, **fixed | given | {"tp": 1})
        on = EmulatedDevice(code, arch=arch, n_domains=device.domains)
        is_same = _same_logits(
            run_model(replace(options, target=target), device=on), run_model(options)
        )
        yield f"launched on {target}: {MODELS[0][0]}, {LONG} tokens and 3 more", is_same


def _words(given: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in given.items())


def _same_logits(found: RunResult, want: RunResult) -> bool:
    pairs = ((found.prefill, want.prefill), (found.steps, want.steps))
    return all(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs)


def _same(found: RunResult, want: RunResult) -> bool:
    digests = zip(found.records, want.records, strict=True)
    return _same_logits(found, want) and all((a["digest"] == b["digest"]).all() for a, b in digests)


def main(arguments: Sequence[str]) -> int:
    """Run the matrix and return its exit code."""
    parser = argparse.ArgumentParser(prog="emulated_matrix", description=__doc__)
    parser.add_argument("--most", type=int, help="stop after so many cases")
    parser.add_argument("--launched", action="store_true", help="only launches from Python")
    options = parser.parse_args(arguments)
    if not ORACLE.is_dir():
        print(f"NOT RUN: no oracle checkpoints (../{ORACLE.parent.name}/{ORACLE.name})")
        return 5
    ids = tuple(json.loads((ORACLE / "prompts.json").read_text())["p7"])
    results = []
    with tempfile.TemporaryDirectory() as name:
        kinds = (launched,) if options.launched else (launched, interpreted)
        found = itertools.chain.from_iterable(kind(Path(name), ids) for kind in kinds)
        for words, is_same in itertools.islice(found, options.most):
            results.append(is_same)
            print(f"{'PASS' if is_same else 'FAIL'} {words}", flush=True)
    print(f"{sum(results)} of {len(results)} cases have the CPU's bits")
    return 0 if all(results) else 4


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except K3Error as error:
        print(error.text("emulate-gpu"), file=sys.stderr)
        sys.exit(error.exit_code)

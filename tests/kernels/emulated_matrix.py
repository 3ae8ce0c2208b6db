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
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.errors import K3Error
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import RunResult, run_model
from tests.kernels.conftest import ROOT
from tests.kernels.emulated import Emulated, build_shared
from tests.kernels.test_simt_leaves import FORWARD, REVERSE, STRIDED, VENDOR_LANES

ORACLE = ROOT.parent / "shared" / "oracle"
MODELS = (("tiny13", 1), ("tiny_tp8", 1), ("tiny_tp8", 2))


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


def _same(found: RunResult, want: RunResult) -> bool:
    pairs = ((found.prefill, want.prefill), (found.steps, want.steps))
    logits = all(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs)
    digests = zip(found.records, want.records, strict=True)
    return logits and all((a["digest"] == b["digest"]).all() for a, b in digests)


def main(arguments: Sequence[str]) -> int:
    """Run the matrix and return its exit code."""
    parser = argparse.ArgumentParser(prog="emulated_matrix", description=__doc__)
    parser.add_argument("--most", type=int, help="stop after so many cases")
    options = parser.parse_args(arguments)
    if not ORACLE.is_dir():
        print(f"NOT RUN: no oracle checkpoints ({ORACLE.name} beside the repository)")
        return 5
    ids = tuple(json.loads((ORACLE / "prompts.json").read_text())["p7"])
    failed = n_cases = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shared").mkdir()
        build_shared(folder / "shared")
        for device, (model, tp), given in itertools.product(devices(), MODELS, requests()):
            if n_cases == options.most:
                break
            built = folder / f"{device.vendor}-{device.domains}-{device.order}"
            if not built.exists():
                built.mkdir()
                device.build(built, folder / "shared")
            fixed = {"gen": 2, "tp": tp, "ignore_eos": True, "logits": True, "cache": folder}
            want = run_model(RunOptions(ORACLE / model, ids, **fixed, **given))
            on = {"interpreter": built / "emulated", "leaves": "scalar"}
            found = run_model(RunOptions(ORACLE / model, ids, **fixed, **given, **on))
            is_same = _same(found, want)
            failed += not is_same
            n_cases += 1
            words = " ".join(f"{key}={value}" for key, value in given.items())
            print(
                f"{'PASS' if is_same else 'FAIL'} {device.vendor}, {device.domains} domains, "
                f"{device.segments} segments, order {device.order}: {model} tp={tp} {words}",
                flush=True,
            )
    print(f"{n_cases - failed} of {n_cases} cases have the CPU's bits")
    return 4 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except K3Error as error:
        print(error.text("emulate-gpu"), file=sys.stderr)
        sys.exit(error.exit_code)

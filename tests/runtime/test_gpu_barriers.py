"""Each barrier of the GPU interpreter's text: without it a run differs, or stops, in some order.

Blocks are emulated; which lanes go first is varied, as tests/kernels/test_barriers.py does for
bodies. Runs are whole, or have a fault that must be found where it is and leave no result. What a
barrier orders in memory beyond lanes, tests/protocol looks at.
"""

from __future__ import annotations

import faulthandler
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.errors import K3Error
from k3tool.isa.windows import build_windows
from k3tool.runtime.gpu_group import GpuGroup
from k3tool.runtime.ranks import Launch
from k3tool.targets import get_target
from tests.kernels.conftest import ROOT
from tests.kernels.emulated import Emulated
from tests.kernels.emulated_device import EmulatedDevice, build_object
from tests.kernels.test_simt_leaves import FORWARD, REVERSE, STRIDED
from tests.runtime import toy
from tests.runtime.test_gpu_group import HIP, double_signal, nan_weight, run

FILE = "simt_interp.h"
ORDERS = (FORWARD, REVERSE, STRIDED)
OPS = ("EMBED_BF16", "ADD", "ALL_REDUCE", "RMSNORM", "GEMV_BF16", "ARGMAX", "ARGMAX_FOLD", "NOP")
DOMAINS, WORKGROUPS = 2, 4  # two blocks meet in each domain
SPOILS = (None, nan_weight, double_signal)
# Which of them: why lanes alone do not need it, as long as others stand where they do.
SPARE = {
    2: "the next one; the acquire must be behind all lanes' polls: tests/protocol",
    3: "the one before; all lanes must be behind the acquire: tests/protocol",
    6: "two more behind the body; stores must have left the block: tests/protocol",
    7: "an entry has one signal, and lane 0 does it",
    8: "traps here are lane 0's too; three more before what the body wrote is published",
    11: "two more before the first body writes scratch",
}


def sites() -> list[tuple[int, int]]:
    """(which barrier, line) of each in the interpreter; the kernels of macros come behind it."""
    text = (ROOT / "kernels_common" / FILE).read_text()
    lines = text[: text.index("/* ---- the object")].split("\n")
    words = ("K3_SYNC(", "K3_RETIRE(")
    met = [n for n, line in enumerate(lines, 1) if line.strip().startswith(words)]
    return list(enumerate(met))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    device = Emulated("hip", defines=("K3_HOST_SPARED",), only=OPS)
    return build_object(device, tmp_path_factory.mktemp("spared"))


def run_without(code: bytes, folder: Path, line: int, order: int, spoil: Any) -> tuple[Any, ...]:
    """Return what a run comes to without the barrier of a line; 0: with all of them."""
    target = replace(get_target(HIP), domains=DOMAINS)
    isa = toy.change_stream(
        replace(toy.toy_isa(1, WORKGROUPS), target=HIP),
        lambda stream: replace(stream, windows=build_windows(stream.queues, target)),
    )
    device = EmulatedDevice(code, arch="gfx942", n_domains=DOMAINS, spoil=spoil)
    launch = Launch(None, toy.images(isa, folder), deadline_seconds=0.3)
    group = GpuGroup(launch, isa, device, folder, lambda text: None)
    device.load(code, "k3_interp")[0].k3_device_spare(FILE.encode(), line, order)
    try:
        found = [(int(row["id"][0]), int(row["digest"][0])) for row in run(group)]
    except K3Error as error:
        found = [str(error)]
    rank, row = group.ranks[0], group.ranks[0].phase_row(1)
    logits = device.download(rank.tensor_address(int(row["logits_handle"])), 4 * toy.VOCAB * 3)
    return (found, logits)


@pytest.fixture(scope="module")
def wanted(code: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Any, ...]]:
    """The control: with every barrier, whatever lanes run first, the same outcomes."""
    folder = tmp_path_factory.mktemp("wanted")
    found = {
        (order, spoil): run_without(code, folder, 0, order, spoil)
        for order in ORDERS
        for spoil in SPOILS
    }
    whole = {(str(records), logits) for (_, spoil), (records, logits) in found.items() if not spoil}
    assert len(whole) == 1
    tokens = [token for token, _ in found[FORWARD, None][0]]
    assert tokens[1:] == toy.expected_tokens(toy.random_weights(), (5,), 6)
    for (_, spoil), (records, logits) in found.items():
        if spoil:
            assert ("a NaN or infinity" if spoil is nan_weight else "ended at") in records[0]
            assert np.isnan(np.frombuffer(logits, "<f4")).all()
    return found


def differs(code: bytes, folder: Path, line: int, want: dict[Any, tuple[Any, ...]]) -> bool:
    """Whether a run without a barrier is another, or stops: in a process of its own."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        changed = 1
        try:
            if all(run_without(code, folder, line, *asked) == want[asked] for asked in want):
                changed = 0
        finally:
            os._exit(changed)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.parametrize(("nth", "line"), sites())
def test_without_a_barrier_a_run_differs(
    code: bytes, wanted: dict[Any, tuple[Any, ...]], tmp_path: Path, nth: int, line: int
) -> None:
    needed = differs(code, tmp_path, line, wanted)
    assert needed != (nth in SPARE), "needed, and in the table of those that are not"


def test_the_table_names_barriers_that_are_there() -> None:
    assert set(SPARE) <= {nth for nth, _ in sites()}
    assert len(sites()) >= 15

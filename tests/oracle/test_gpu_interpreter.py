"""The GPU interpreters' source from prompt to logits on emulated blocks: the CPU's hash.

Blocks of 256 and 512 lanes are fibers, ranks are processes that share peers' memory, the protocol
is the text that nvcc and clang compile. It shows that the text is right where memory is coherent;
what stores may overtake is explored by tests/protocol. No GPU has run it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.errors import K3Error, TargetError, UnsoundError
from k3tool.runtime.run import RunResult
from tests.kernels.emulated import Emulated, build_shared
from tests.kernels.test_simt_leaves import REVERSE, STRIDED
from tests.oracle.conftest import digest

Build = Callable[[Emulated], Path]
Engine = Callable[..., RunResult]

CUDA = Emulated("cuda")
HIP = Emulated("hip", domains=8, order=REVERSE)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return a function that builds an emulated device, each once."""
    made: dict[Emulated, Path] = {}
    shared = tmp_path_factory.mktemp("shared")
    build_shared(shared)

    def build(device: Emulated) -> Path:
        if device not in made:
            made[device] = device.build(tmp_path_factory.mktemp(device.vendor), shared)
        return made[device]

    return build


def run(engine: Engine, emulated: Build, device: Emulated, name: str, **given: Any) -> RunResult:
    return engine(name, "p7", interpreter=emulated(device), leaves="scalar", **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "given"),
    [
        ("tiny13", CUDA, {"tp": 1, "workgroups": 4, "threads": 2, "chunk": 3}),
        ("tiny13", HIP, {"tp": 1, "workgroups": 9, "threads": 2}),
        ("tiny_tp8", replace(CUDA, segments=3), {"tp": 2, "workgroups": 4, "threads": 1}),
        ("tiny_tp8", HIP, {"tp": 2, "workgroups": 9, "threads": 1, "prefill": "decode"}),
    ],
    ids=["cuda-1", "hip-8", "cuda-1-tp2", "hip-8-tp2"],
)
def test_emulated_blocks_give_the_hash(
    engine: Engine, emulated: Build, name: str, device: Emulated, given: dict[str, Any]
) -> None:
    given = {"gen": 2} | given
    found, want = run(engine, emulated, device, name, **given), engine(name, "p7", **given)
    assert digest(found) == digest(want)
    for ours, theirs in zip(found.records, want.records, strict=True):
        assert (ours["digest"] == theirs["digest"]).all()  # of every replicated result, by op


# ---- controls: the text of the interpreter, one statement changed ----

SMALL = {"gen": 3, "tp": 1, "workgroups": 9, "threads": 1, "deadline_seconds": 3.0}
NO_WAIT = ("if (!k3_wait(b, l)) break;", "")
NO_REARM = ("if ((b->entry.flags & K3_ENTRY_REARM) != 0u) k3_rearm(b, l);", "")
ALONE = ("        n = b->party;\n", "")
NO_RELEASE = ("if (K3_LANE0 && b->stopped == 0u) k3_domain_open(&words[K3_OPEN]);", "")
TOO_MANY = ("b->party = l->arrivals[", "b->party = 1u + l->arrivals[")
GUARDED = "    k3_check_scratch(b, l);\n"
OVERRUN = (GUARDED, "    b->ctx.scratch[l->scratch_floats] = 0.0f;\n" + GUARDED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (NO_REARM, "arrivals|ended at|when the deadline passed"),
        (ALONE, "when the deadline passed"),
        (NO_RELEASE, "when the deadline passed"),
        (TOO_MANY, "when the deadline passed"),
        (OVERRUN, "more scratch used"),
    ],
    ids=["no-rearm", "elected-adds-one", "never-opened", "wrong-arrivals", "overrun"],
)
def test_control_a_wrong_protocol_stops(
    engine: Engine, emulated: Build, edit: tuple[str, str], message: str
) -> None:
    device = replace(HIP, domains=2, edits=(edit,))
    with pytest.raises(UnsoundError, match=message):
        run(engine, emulated, device, "tiny13", **SMALL)


@pytest.mark.slow
def test_control_without_waits_the_hash_differs(engine: Engine, emulated: Build) -> None:
    try:
        found = run(engine, emulated, replace(CUDA, edits=(NO_WAIT,)), "tiny13", **SMALL)
    except K3Error:  # what was read too early may as well be refused
        return
    assert digest(found) != digest(engine("tiny13", "p7", **SMALL))


@pytest.mark.slow
def test_a_block_of_a_domain_that_the_stream_lacks_traps(engine: Engine, emulated: Build) -> None:
    device = replace(HIP, domains=2, defines=("K3_HOST_PHYSICAL_DOMAINS=3",))
    with pytest.raises(UnsoundError, match="got 2, need an id, position or expert in range"):
        run(engine, emulated, device, "tiny13", **SMALL)


@pytest.mark.slow
def test_a_trap_of_one_rank_stops_both_and_says_where(engine: Engine, emulated: Build) -> None:
    body = "    switch (inst->op) {\n"
    trap = "    if (K3_LANE0 && c->rank == 1u) k3_trap(c, K3_FAULT_NONFINITE, 7u);\n"
    device = replace(HIP, domains=2, edits=((body, trap + body),))
    with pytest.raises(
        UnsoundError, match=r"rank 1: .*workgroup \d, worker \d: got a NaN or .*row 7"
    ):
        run(engine, emulated, device, "tiny_tp8", **SMALL | {"tp": 2})


@pytest.mark.slow
def test_an_opcode_without_a_body_is_named(engine: Engine, emulated: Build) -> None:
    device = replace(CUDA, order=STRIDED, without="ARGMAX")
    with pytest.raises(TargetError, match=r"instruction \d+ ARGMAX .*workgroup \d"):
        run(engine, emulated, device, "tiny13", **SMALL)

"""What an interpreter's object says of itself, and what is refused before it could be launched.

The object is the emulated interpreter: another machine's code, the same K3_IDENTITY.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.compile import compile_plan
from k3tool.errors import ArtifactError, TargetError
from k3tool.isa.emit import emit
from k3tool.isa.table import SPECS, Op, isa_hash
from k3tool.model.config import K3Config
from k3tool.runtime.gpu_object import (
    COLLECTIVES,
    FLASH,
    LAUNCH_DTYPE,
    SEGMENTS,
    WINDOWS,
    check_build,
    check_object,
    read_identity,
)
from tests.kernels.emulated import Emulated, build_shared

HIP, CUDA = "hip:gfx942", "cuda:sm_90a"


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Return the bytes of an object by vendor: CUDA's blocks of 256 lanes, HIP's of 512."""
    shared, found = tmp_path_factory.mktemp("shared"), {}
    build_shared(shared)
    for vendor in ("cuda", "hip"):
        made = Emulated(vendor, domains=8).build(tmp_path_factory.mktemp(vendor), shared)
        found[vendor] = made.read_bytes()
    return found


@pytest.fixture(scope="module")
def programs():
    """Return a program for a target, at a TP degree."""
    made, config = {}, K3Config.from_dict(preset_config(PRESETS["tiny"]))

    def program(target, tp=1):
        if (target, tp) not in made:
            sizes = {"workgroups": 8, "chunk": 4, "batch": 1, "ctx": 256}
            plan = compile_plan(config, tp=tp, target=target, **sizes)
            made[target, tp] = emit(plan, target, "plan.h5")
        return made[target, tp]

    return program


def test_an_object_says_what_it_is(objects):
    found = read_identity(objects["hip"], "an object")
    served = {int(op) for op, spec in SPECS.items() if "hip" in spec.targets}
    assert (found.isa_hash, found.lanes, found.ops) == (isa_hash(), 512, served)
    assert found.phases == ("decode", "prefill")
    assert found.capability == WINDOWS | COLLECTIVES | SEGMENTS
    assert found.launch[-1] == ("", LAUNCH_DTYPE.itemsize)


@pytest.mark.parametrize(("vendor", "target"), [("hip", HIP), ("cuda", CUDA)])
@pytest.mark.parametrize("tp", [1, 2])
def test_control_a_fitting_object_is_taken(objects, programs, vendor, target, tp):
    found = read_identity(objects[vendor], "an object")
    for phase in ("decode", "prefill"):
        check_object(found, programs(target, tp), phase, n_segments=3)


def test_every_difference_is_refused(objects, programs):
    found, isa = read_identity(objects["hip"], "x.hsaco"), programs(HIP, 2)
    used = Op(min(isa.opcodes()["decode"]))
    for changed, message in (
        ({"isa_hash": "0" * 64}, r"x\.hsaco: isa_hash: got 000000000000\.\."),
        ({"phases": ("prefill",)}, "phase: got prefill, need decode"),
        ({"lanes": 256}, f"lanes: got 256, need 512 for {HIP}"),
        ({"ops": found.ops - {used}}, f"opcodes: got no {SPECS[used].name}, need all"),
        ({"capability": COLLECTIVES | SEGMENTS}, "capability: got no windows"),
        ({"capability": WINDOWS | SEGMENTS}, "capability: got no collectives"),
    ):
        with pytest.raises(TargetError, match=message) as caught:
            check_object(replace(found, **changed), isa, "decode")
        assert "make compile-gpu" in caught.value.hint
    no_segments = replace(found, capability=WINDOWS | COLLECTIVES)
    with pytest.raises(TargetError, match="capability: got no segments"):
        check_object(no_segments, isa, "decode", n_segments=2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"waits\nsignals\n", b"signals\nwaits\n", "got signals at 32, need waits at 32"),
        (b"rank\nn_ranks\n", b"rank\nn_peers\n", "got n_peers at"),
    ],
    ids=["two-changed-places", "another-field"],
)
def test_a_kernel_argument_of_another_layout_is_refused(objects, programs, old, new, message):
    """In the object's own bytes: the offsets alone are what they were."""
    assert objects["cuda"].count(old) == 1
    found = read_identity(objects["cuda"].replace(old, new), "an object")
    with pytest.raises(TargetError, match=f"kernel argument: {message}"):
        check_object(found, programs(CUDA), "decode")


def test_a_field_more_is_refused(objects, programs):
    found = read_identity(objects["cuda"], "an object")
    longer = (*found.launch[:-1], ("more", 264), ("", 272))
    with pytest.raises(TargetError, match="got more at 264, need its end at 264"):
        check_object(replace(found, launch=longer), programs(CUDA), "decode")
    shorter = found.launch[:-1]
    with pytest.raises(TargetError, match="got nothing more, need its end at 264"):
        check_object(replace(found, launch=shorter), programs(CUDA), "decode")


def test_a_build_is_what_was_asked_for(objects):
    found = read_identity(objects["cuda"], "an object")
    names = [SPECS[Op(op)].name for op in sorted(found.ops)]
    with pytest.raises(TargetError, match="capability: got , need pages in shared memory"):
        check_build(found, CUDA, ("decode", "prefill"), names)
    found = replace(found, capability=found.capability | FLASH)
    check_build(found, CUDA, ("decode", "prefill"), names)
    with pytest.raises(TargetError, match="phases"):
        check_build(found, CUDA, ("decode",), names)
    with pytest.raises(TargetError, match="ops"):
        check_build(found, CUDA, ("decode", "prefill"), names[1:])
    with pytest.raises(TargetError, match="lanes: got 256, need 512"):
        check_build(found, HIP, ("decode", "prefill"), names)


def test_what_is_no_object_is_refused(objects):
    for data, message in (
        (b"", "a 64-bit ELF object"),
        (b"\x7fELF\x02\x01" + b"\0" * 58, "no k3_identity"),
        (objects["cuda"][:5000], "damaged"),
        (objects["cuda"].replace(b"K3OBJECT", b"K3OBJEKT"), "need K3OBJECT at its start"),
    ):
        with pytest.raises(ArtifactError, match=message):
            read_identity(data, "an object")


def test_an_older_object_is_refused(objects):
    at = objects["cuda"].index(b"K3OBJECT") + 8
    data = bytearray(objects["cuda"])
    data[at : at + 4] = bytes(ctypes.c_uint32(0))
    with pytest.raises(ArtifactError, match="object version: got 0, need 1"):
        read_identity(bytes(data), "an object")

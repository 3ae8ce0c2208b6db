"""A group on a device: the records of the CPU's ranks, and each way of failing, on the toy program.

The device is emulated (tests/kernels/emulated_device.py). What is damaged is damaged in its memory,
just before a launch, because a program that is wrong on disk is refused long before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from k3tool.errors import K3Error, TargetError, UnsoundError
from k3tool.isa.columns import ENTRY_DTYPE
from k3tool.isa.stream import Isa
from k3tool.isa.table import isa_hash
from k3tool.isa.windows import build_windows
from k3tool.runtime import records
from k3tool.runtime.fault_words import fault_error
from k3tool.runtime.gpu_group import GpuGroup
from k3tool.runtime.gpu_runtime import check_arch
from k3tool.runtime.image import Request, build_image
from k3tool.runtime.ranks import FaultError, Launch, RankGroup
from k3tool.targets import get_target
from tests.kernels.emulated_device import EmulatedDevice
from tests.runtime import toy

CUDA, HIP = "cuda:sm_90a", "hip:gfx942"
SECONDS = 5.0
COMPARED = ("kind", "rank", "step", "phase", "position", "n_tokens", "id", "best", "second",
            "digest", "logits_digest")  # fmt: skip
Code = Callable[[str], bytes]


def program_of(target: str, tp: int, workgroups: int = 4) -> Isa:
    """Return the toy's program for a target, with windows where the target has domains."""
    isa, found = replace(toy.toy_isa(tp, workgroups), target=target), get_target(target)
    return toy.change_stream(
        isa, lambda stream: replace(stream, windows=build_windows(stream.queues, found))
    )


def device_of(code: Code, **given: Any) -> EmulatedDevice:
    return EmulatedDevice(code("cuda"), **given)


def group_of(isa: Isa, device: EmulatedDevice, folder: Any, **given: Any) -> GpuGroup:
    made, seconds = toy.images(isa, folder, **given.pop("request", {})), given.pop("seconds", 5.0)
    is_each = given.pop("launches", "one") == "each"
    launch = Launch(None, made, deadline_seconds=seconds, **given)
    return GpuGroup(launch, isa, device, folder, lambda text: None, is_launch_per_op=is_each)


def run(group: GpuGroup) -> list[Any]:
    """Run to the end; faults in the words of the program, as a run says them."""
    with group:
        try:
            group.wait_ready(lambda done, total: None)
            return list(group.steps())
        except FaultError as stop:
            raise fault_error(group._isa, stop.fault, [], []) from None


@pytest.mark.parametrize(
    ("tp", "launches"), [(1, "one"), (2, "one"), (4, "one"), (1, "each"), (2, "each")]
)
def test_the_records_are_those_of_the_cpu(
    device_code: Code, tmp_path: Any, tp: int, launches: str
) -> None:
    asked = {"request": {"all_logits": True}, "logits_shape": (10, toy.VOCAB)}
    device = device_of(device_code)
    group = group_of(program_of(CUDA, tp), device, tmp_path, launches=launches, **asked)
    found = run(group)
    n_launches = sum(which == 0 for which, _ in device.launched)
    assert n_launches == 7 * tp * (1 if launches == "one" else 7)  # steps, ranks, instructions
    launch = toy.launch(toy.images(toy.toy_isa(tp), tmp_path, all_logits=True),
                        logits_shape=(10, toy.VOCAB))  # fmt: skip
    with RankGroup(launch) as cpu:
        want = list(cpu.steps())
        logits = cpu.logits()
    assert len(found) == len(want) == 7  # two of the prompt, and five tokens more
    for ours, theirs in zip(found, want, strict=True):
        for name in COMPARED:
            assert (ours[name] == theirs[name]).all(), name
    assert np.array_equal(group.logits().view("u4"), logits.view("u4"))


@pytest.mark.parametrize(
    ("tp", "workgroups", "launches"), [(1, 9, "one"), (2, 16, "one"), (2, 9, "each")]
)
def test_a_device_of_eight_domains(
    device_code: Code, tmp_path: Any, tp: int, workgroups: int, launches: str
) -> None:
    device = EmulatedDevice(device_code("hip"), arch="gfx942", n_domains=8, ticks_per_second=1e9)
    rows = run(group_of(program_of(HIP, tp, workgroups), device, tmp_path, launches=launches))
    tokens = [int(row["id"][0]) for row in rows if row["kind"][0] == records.TOKEN]
    assert tokens == toy.expected_tokens(toy.random_weights(), (5,), 6)


def test_it_ends_at_a_stop_id(device_code: Code, tmp_path: Any) -> None:
    isa = program_of(CUDA, 1)
    tokens = toy.expected_tokens(toy.random_weights(), (5,), 6)
    raw: Any = toy.RawWeights.write(tmp_path / "raw.bin", toy.random_weights(), 0, 1)
    image = build_image(isa, 0, raw, Request((5,), 6, (tokens[2],), chunk=3), toy.VOCAB)
    group = GpuGroup(
        Launch(None, [image]), isa, device_of(device_code), tmp_path, lambda text: None
    )
    assert [int(row["id"][0]) for row in run(group)] == tokens[: tokens.index(tokens[2]) + 1]


# ---- what is refused before a launch ------------------------------------------------------------


def test_what_is_unfit_is_refused_before_a_launch(device_code: Code, tmp_path: Any) -> None:
    isa, code = program_of(CUDA, 2), device_code("cuda")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"arch": "sm_80"}, "got emulated blocks, which is sm_80, need sm_90"),
        ({"n_units": 7}, "got 7 resident blocks, need 8, 4 for each of 2 ranks"),
        ({"n_streams": 1}, "launches at once: got 2 ranks, need at most 1: .* same queue"),
        ({"total_bytes": 4096}, r"memory of .*: got [\d.]+ KB free, need [\d.]+ [KM]B for 2 ranks"),
        ({"code": code.replace(isa_hash().encode(), b"0" * 64)}, r"isa_hash: got 0{12}\.\."),
        ({"code": code.replace(b"waits\nsignals\n", b"signals\nwaits\n")}, "kernel argument: got"),
    ]
    for given, message in cases:
        device = replace(device_of(device_code), pieces=[], libraries={}, **given)
        with pytest.raises(TargetError, match=message):
            run(group_of(isa, device, tmp_path))
        assert device.is_closed
        assert 0 not in {which for which, _ in device.launched}, message


def test_an_object_without_an_op_is_refused(tmp_path: Any, device_code: Code) -> None:
    code = bytearray(device_code("cuda"))
    at = code.index(b"K3OBJECT") + 8 + 6 * 4 + 72
    code[at : at + 32] = bytes(32)
    device = EmulatedDevice(bytes(code))
    with pytest.raises(TargetError, match=r"opcodes: got no EMBED_BF16 .*ARGMAX"):
        run(group_of(program_of(CUDA, 1), device, tmp_path))


def test_an_arithmetic_that_is_not_ours_is_refused(device_code: Code, tmp_path: Any) -> None:
    """A device that keeps subnormals: its canary answers what the contract does not."""

    class Odd(EmulatedDevice):
        def download(self, address: int, n_bytes: int) -> bytes:
            data = EmulatedDevice.download(self, address, n_bytes)
            return data if n_bytes != 16 else data[:8] + b"\0\0\x40\0" + data[12:]

    with pytest.raises(TargetError, match="a subnormal result: got 0x00400000, need 0x00000000"):
        run(group_of(program_of(CUDA, 1), Odd(device_code("cuda")), tmp_path))


@pytest.mark.parametrize("target", ["cuda:sm_100a", HIP])
def test_a_target_runs_on_its_own_architecture_alone(device_code: Code, target: str) -> None:
    check_arch(device_of(device_code), CUDA)
    with pytest.raises(TargetError, match="which is sm_90"):
        check_arch(device_of(device_code), target)


# ---- what goes wrong in a launch ----------------------------------------------------------------


def patch(device: EmulatedDevice, address: int, value: np.ndarray) -> None:
    device.upload(int(address), value.tobytes())


def unknown_opcode(device: EmulatedDevice, launch: Any) -> None:
    patch(device, launch["insts"] + 64 * toy.NORM, np.array([250], "<u2"))


def lost_signal(device: EmulatedDevice, launch: Any) -> None:
    """The first entry of block 0 publishes nothing."""
    data = device.download(int(launch["entries"]), ENTRY_DTYPE.itemsize)
    entry = np.frombuffer(data, ENTRY_DTYPE).copy()
    entry["n_signals"] = 0
    patch(device, launch["entries"], entry)


def double_signal(device: EmulatedDevice, launch: Any) -> None:
    bank = int(np.frombuffer(device.download(int(launch["step"]) + 8, 4), "<u4")[0]) & 1
    patch(
        device, launch["counters"] + bank * int(launch["max_counters"]) * 64, np.array([1], "<u4")
    )


def nan_weight(device: EmulatedDevice, launch: Any) -> None:
    table = np.frombuffer(device.download(int(launch["tensor"]), 8), "<u8")[0]
    patch(device, table, np.full(toy.VOCAB * toy.HIDDEN, 0x7FC0, "<u2"))


def only_rank_1(spoil: Any) -> Any:
    def spoil_one(device: EmulatedDevice, launch: Any) -> None:
        if launch["rank"] == 1:
            spoil(device, launch)

    return spoil_one


PLACE = r"step 0, position 0, prefill: instruction \d (\w+)?.*: workgroup \d, worker \d"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (unknown_opcode, TargetError, f"{PLACE}: got opcode 250, no handler"),
        (lost_signal, UnsoundError, f"{PLACE}: got (counter 0 at 3|gate 0 at 4) when the deadline"),
        (double_signal, UnsoundError, "got counter 0 ended at 5, need 4 arrivals"),
        (nan_weight, UnsoundError, rf"{PLACE}: got a NaN or infinity \(row \d\)"),
    ],
    ids=["opcode", "lost-signal", "double-signal", "nan"],
)
def test_a_fault_stops_all_ranks_and_is_named(
    device_code: Code, tmp_path: Any, tp: int, spoil: Any, kind: type[K3Error], message: str
) -> None:
    device = device_of(device_code, spoil=only_rank_1(spoil) if tp == 2 else spoil)
    start = time.monotonic()
    group = group_of(program_of(CUDA, tp), device, tmp_path, seconds=1.0)
    with pytest.raises(kind, match=message) as caught:
        run(group)
    rank = group._ranks[-1]  # whose step must not look like a result
    row = rank.phase_row(1)
    address = rank.tensor_address(int(row["logits_handle"]))
    logits = device.download(address, 16 * int(row["logits_cols"]))
    assert np.isnan(np.frombuffer(logits, "<f4")).all()
    assert time.monotonic() - start < SECONDS * 2
    assert device.is_closed
    assert device.is_idle()
    if spoil in (unknown_opcode, double_signal):  # the others come to ranks that wait, or read
        assert str(caught.value).startswith(f"rank {tp - 1}: ")


def test_a_step_of_several_launches_is_looked_at_when_all_have_ended(
    device_code: Code, tmp_path: Any
) -> None:
    def first(device: EmulatedDevice, launch: Any) -> None:
        if launch["segment"] == 0:
            double_signal(device, launch)

    device = device_of(device_code, spoil=first)
    with pytest.raises(UnsoundError, match="got counter 0 ended at 5, need 4 arrivals"):
        run(group_of(program_of(CUDA, 1), device, tmp_path, launches="each"))


def test_a_rank_that_waits_leaves_when_its_peer_has_a_fault(
    device_code: Code, tmp_path: Any
) -> None:
    """Long before its own deadline: the word that both look at says who stopped."""
    device, start = device_of(device_code, spoil=only_rank_1(unknown_opcode)), time.monotonic()
    group = group_of(program_of(CUDA, 2), device, tmp_path, seconds=120.0)
    with pytest.raises(TargetError, match=r"rank 1: .*got opcode 250"):
        run(group)
    assert time.monotonic() - start < 60.0
    assert device.download(group._abort_word, 4) == (1 + 1).to_bytes(4, "little")


def test_a_block_of_a_domain_that_the_stream_lacks_is_a_fault(
    device_code: Code, tmp_path: Any
) -> None:
    """Never modulo: two domains in one window would share an elected block's cache."""
    device = EmulatedDevice(device_code("hip"), arch="gfx942", n_domains=9)
    with pytest.raises(UnsoundError, match="got 8, need an id, position or expert in range"):
        run(group_of(program_of(HIP, 1, 9), device, tmp_path))


def test_a_bank_that_was_not_cleared_is_no_step(device_code: Code, tmp_path: Any) -> None:
    """All windows are over and all counters as they must end: only cursors tell."""
    kept: list[tuple[int, bytes]] = []

    def not_cleared(device: EmulatedDevice, launch: Any) -> None:
        epoch = np.frombuffer(device.download(int(launch["step"]) + 8, 4), "<u4")[0]
        if epoch == 3:  # bank 0 is what step 2 left, which step 3 clears
            for name in ("counters", "gates", "cursors", "rendezvous"):
                at, n_bytes = int(launch[name]), 64 * int(launch[f"max_{name}"])
                kept.append((at, device.download(at, n_bytes)))
        elif epoch == 4:
            for at, data in kept:
                device.upload(at, data)

    device = EmulatedDevice(
        device_code("hip"), arch="gfx942", n_domains=8, spoil=not_cleared
    )  # fmt: skip
    with pytest.raises(UnsoundError, match=r"counter \d+ ended at \d+, need 9 arrivals"):
        run(group_of(program_of(HIP, 1, 9), device, tmp_path))
    assert kept


def test_a_launch_that_loses_a_block_ends_at_the_deadline(device_code: Code, tmp_path: Any) -> None:
    device = device_of(device_code, blocks_less=1)
    with pytest.raises(UnsoundError, match="counter 0 at 3 when the deadline passed"):
        run(group_of(program_of(CUDA, 1), device, tmp_path, seconds=0.5))


def test_a_launch_that_never_ends_is_given_up(device_code: Code, tmp_path: Any) -> None:
    device = device_of(device_code, blocks_less=0)
    group = group_of(program_of(CUDA, 1), device, tmp_path, seconds=0.2)
    with group:
        group.wait_ready(lambda done, total: None)
        device.never_idle = True
        with pytest.raises(UnsoundError, match=r"emulated blocks: got no progress in 1\.2 s"):
            list(group.steps())
    word = device.download(group._abort_word, 4)
    assert word == b"\xff\xff\xff\xff"  # blocks that still wait leave at their next look


def test_a_chosen_id_that_no_vocabulary_has_is_a_fault(device_code: Code, tmp_path: Any) -> None:
    class Odd(EmulatedDevice):
        def download(self, address: int, n_bytes: int) -> bytes:
            data = EmulatedDevice.download(self, address, n_bytes)
            is_choice = n_bytes == 16 and 0 in {which for which, _ in self.launched}
            return data if not is_choice else data[:4] + b"\x00\x10\0\0" + data[8:]

    with pytest.raises(UnsoundError, match="got 4096, need an id, position or expert in range"):
        run(group_of(program_of(CUDA, 1), Odd(device_code("cuda")), tmp_path))


def test_a_launch_that_fails_stops_the_ranks_that_have_begun(
    device_code: Code, tmp_path: Any
) -> None:
    """They wait for it; until their own deadline they would keep what is freed now."""

    def broken(device: EmulatedDevice, launch: Any) -> None:
        if launch["rank"] == 1:
            raise UnsoundError(device.name, got="a broken launch", need="a launch")

    device = device_of(device_code, spoil=broken)
    group = group_of(program_of(CUDA, 2), device, tmp_path, seconds=60.0)
    with pytest.raises(UnsoundError, match="got a broken launch"):
        run(group)
    assert device.download(group._abort_word, 4) == b"\xff\xff\xff\xff"
    assert device.is_idle()  # rank 0's blocks have left


def test_ranks_that_differ_are_named(device_code: Code, tmp_path: Any) -> None:
    isa = program_of(CUDA, 2)
    other = toy.random_weights() | {"norm": 2 * toy.random_weights()["norm"]}
    group = group_of(isa, device_of(device_code), tmp_path, request={"per_rank": {1: other}})
    with pytest.raises(UnsoundError, match=r"rank 1: step 0, position 2: digest"):
        run(group)


def test_a_file_that_was_cut_is_refused(device_code: Code, tmp_path: Any) -> None:
    group = group_of(program_of(CUDA, 1), device_of(device_code), tmp_path)
    path = tmp_path / "rank0.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(K3Error, match=r"rank0\.bin: got \d+ bytes, need \d+ by its header"):
        run(group)

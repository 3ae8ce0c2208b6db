"""The roofline: known numbers of the release, the same sums from compiled packets, what floors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3tool.bench import measured
from k3tool.bench.devices import DEVICES, Device, get_device, with_figures
from k3tool.bench.page import MARK
from k3tool.bench.roofline import (
    GIB,
    LATENTS,
    STATES,
    Asked,
    Roofline,
    as_dict,
    chosen_experts,
    lines,
    parts_of,
    roofline,
)
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.errors import UsageError
from k3tool.model.config import K3Config
from k3tool.targets import TARGETS

DATA = Path(__file__).parents[2] / "data"
# What the system this one starts from counted of the release, in GiB although it wrote GB.
KNOWN_GIB = {
    "kda": 57.05, "experts": 24.06, "shared": 22.64, "mla": 10.38, "latent": 8.80, "head": 2.19,
    "dense": 1.35, "router": 1.10,
}  # fmt: skip


@pytest.fixture(scope="module")
def released() -> Roofline:
    config = K3Config.load(DATA / "kimi-k3-config.json")
    return roofline(config, Asked(tp=8, ctx=4096), get_device("MI355X"))


@pytest.fixture(scope="module")
def tiny() -> K3Config:
    return K3Config.from_dict(preset_config(PRESETS["tiny"]))


def test_known_numbers_of_the_release(released: Roofline) -> None:
    """127.6 (GiB) a token, 15.95 a rank, 2.76 ms: which bandwidth gives them, and which do not."""
    whole = {part.module: part.whole_bytes / GIB for part in released.parts}
    for module, known in KNOWN_GIB.items():
        assert whole[module] == pytest.approx(known, abs=0.01), module
    assert released.weight_bytes / GIB == pytest.approx(127.6, abs=0.05)
    assert released.weight_bytes / 8 / GIB == pytest.approx(15.95, abs=0.005)
    assert released.device.bandwidth == 6.2e12
    assert released.even_ms == pytest.approx(2.76, abs=0.005)
    decimal_ms, at_peak_ms = 127.6e9 / 8 / 6.2e12 * 1e3, released.weight_bytes / 8 / 8.0e12 * 1e3
    assert decimal_ms == pytest.approx(2.57, abs=0.005), "read as GB they would give another time"
    assert at_peak_ms == pytest.approx(2.14, abs=0.005), "and so would the data sheet's bandwidth"


def test_a_rank_reads_what_it_holds_and_not_an_eighth(released: Roofline) -> None:
    """Replicated matrices are read by every rank: that is in the floor, and not in the known ms."""
    by_module = {part.module: part for part in released.parts}
    assert by_module["router"].rank_bytes == by_module["router"].whole_bytes
    assert by_module["experts"].rank_bytes == by_module["experts"].whole_bytes / 8
    assert released.rank_bytes > released.weight_bytes / 8
    assert released.floors_ms["bytes"] == pytest.approx(released.rank_bytes / 6.2e12 * 1e3)
    assert by_module[STATES].rank_bytes == by_module[STATES].whole_bytes / 8
    assert by_module[LATENTS].rank_bytes == by_module[LATENTS].whole_bytes


def test_hand_offs_are_the_chains(released: Roofline) -> None:
    floors = released.floors_ms
    assert floors["hand-offs"] == pytest.approx(released.handoffs * 3.46e-3)
    assert released.handoffs <= released.packets == sum(op.packets for op in released.ops)
    slow = replace(released, device=replace(released.device, handoff_us=13.2))
    assert (released.bound_by, slow.bound_by) == ("bytes", "hand-offs")
    text = "\n".join(lines(slow))
    assert f"hand-offs    {released.handoffs * 13.2e-3:9.3f} ms" in text
    assert "set by hand-offs" in text
    assert "127.6 GiB" in text
    assert "2.76 ms" in text


@pytest.mark.parametrize("preset", ["tiny", "mid"])
@pytest.mark.parametrize("tp", [1, 2])
def test_modules_add_up_to_what_packets_move_and_compute(preset: str, tp: int) -> None:
    """Two ways to one sum: the weight table and states; the operands of compiled packets."""
    config = K3Config.from_dict(preset_config(PRESETS[preset]))
    found = roofline(config, Asked(tp, 1, 300), get_device("H200"))
    assert sum(op.n_bytes for op in found.ops) == pytest.approx(found.rank_bytes, rel=1e-6)
    assert sum(op.operations for op in found.ops) == pytest.approx(found.operations, rel=1e-6)
    less = roofline(config, Asked(tp, 1, 299), get_device("H200"))
    assert less.rank_bytes < found.rank_bytes
    assert less.operations < found.operations


def test_sequences_share_weights_and_not_states(tiny: K3Config) -> None:
    one, four = (roofline(tiny, Asked(1, batch, 300), get_device("H200")) for batch in (1, 4))
    of_one, of_four = ({part.module: part for part in r.parts} for r in (one, four))
    for module in (STATES, LATENTS, "embed"):
        assert of_four[module].rank_bytes == pytest.approx(4 * of_one[module].rank_bytes), module
    assert of_four["kda"].rank_bytes == of_one["kda"].rank_bytes
    ratio = of_four["experts"].rank_bytes / of_one["experts"].rank_bytes
    assert 1 < ratio < 4
    assert ratio == pytest.approx(chosen_experts(tiny, 4) / chosen_experts(tiny, 1))
    assert four.operations == pytest.approx(4 * one.operations)
    no_experts = [sum(op.n_bytes for op in r.ops if "MOE" not in op.op) for r in (one, four)]
    of_parts = [r.rank_bytes - m["experts"].rank_bytes - m["router"].rank_bytes
                for r, m in ((one, of_one), (four, of_four))]  # fmt: skip
    assert no_experts[1] - no_experts[0] == pytest.approx(of_parts[1] - of_parts[0], rel=1e-6)


def test_one_token_reads_its_experts(tiny: K3Config) -> None:
    assert chosen_experts(tiny, 1) == pytest.approx(tiny.num_experts_per_token)
    assert chosen_experts(tiny, 10_000) == pytest.approx(tiny.num_experts)


def test_the_mode_chooses_the_peak(tiny: K3Config) -> None:
    device = get_device("MI300X")
    assert device.seconds(163.4e12, "f32") == pytest.approx(1.0)
    assert device.seconds(1307.4e12, "bf16") == pytest.approx(1.0)
    assert replace(device, bf16_ops=None).seconds(163.4e12, "bf16") == pytest.approx(1.0)
    f32, bf16 = (roofline(tiny, Asked(1, 1, 8, mode), device) for mode in ("f32", "bf16"))
    assert f32.rank_bytes == bf16.rank_bytes
    assert f32.floors_ms["operations"] > bf16.floors_ms["operations"]


def test_every_device_has_sources_and_a_target() -> None:
    for device in DEVICES:
        assert device.target in TARGETS
        assert device.sources
        assert get_device(device.name.lower()).handoff_us > 0
        assert device.read_bytes < device.peak_bytes
        assert any("read bandwidth" in source for source in device.sources) == bool(
            device.read_bytes
        )
    with pytest.raises(UsageError, match=r"MI355X.*or measured"):
        get_device("MI999X")


def test_figures_given_replace_the_devices() -> None:
    given = with_figures(get_device("H200"), 4e12, 2.0)
    assert (given.bandwidth, given.handoff_us) == (4e12, 2.0)
    for figure in ("read bandwidth:", "hand-off:"):
        (source,) = (source for source in given.sources if source.startswith(figure))
        assert source == f"{figure} as given", "and no longer what it was before"
    assert with_figures(given, None, None) == given


def test_refusals(tiny: K3Config) -> None:
    device = get_device("H200")
    with pytest.raises(UsageError, match="--tp"):
        roofline(tiny, Asked(tp=3), device)
    with pytest.raises(UsageError, match="--ctx"):
        roofline(tiny, Asked(ctx=tiny.max_position_embeddings + 1), device)


def test_the_command(
    k3tool: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: K3Config
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset_config(PRESETS["tiny"])))
    step = ("--ctx", "100", "--batch", "2", "--tp", "2")
    found = k3tool("bench", "roofline", path, *step, "--device", "mi355x", "--json")
    assert found.code == 0
    made = roofline(tiny, Asked(2, 2, 100), get_device("MI355X"))
    said = json.loads(found.out)
    assert said.pop("settings")["device"] == "mi355x"
    assert said == json.loads(json.dumps(as_dict(made)))
    before, page = tmp_path / "before.json", tmp_path / "page.html"
    before.write_text(found.out)
    again = ("bench", "roofline", path, *step, "--device", "mi355x", "--baseline", before)
    same = k3tool(*again, "--report", page)
    assert same.out.endswith("against the baseline: all counts as before\n")
    assert page.read_bytes().startswith(MARK)
    assert k3tool(*again, "--bandwidth", "40").code == 3, "other settings"
    assert k3tool("bench", "roofline", path, "--tp", "3", "--device", "H200").code == 2
    assert k3tool("bench", "roofline", path, "--device", "abacus").code == 2
    assert k3tool("bench", "roofline", tmp_path / "none.json", "--device", "H200").code == 3
    machine = Device("measured", "cpu", 0.0, 5e10, 1e11, None, ("made up",), 0.5)
    monkeypatch.setattr(measured, "this_machine", lambda: machine)
    before.write_text(k3tool("bench", "roofline", path, *step, "--json").out)
    assert k3tool("bench", "roofline", path, *step, "--baseline", before).code == 0
    monkeypatch.setattr("k3tool.bench.baseline.cpu_model", lambda: "another")
    other = k3tool("bench", "roofline", path, *step, "--baseline", before)
    assert (other.code, "machine.cpu" in other.err) == (3, True), "its figures were measured there"
    text = k3tool("bench", "roofline", path, *step, "--bandwidth", "40").out
    assert "device measured (cpu)" in text
    assert "40.0 GB/s read" in text


def test_parts_are_of_known_modules(released: Roofline, tiny: K3Config) -> None:
    assert {part.module for part in parts_of(tiny, Asked())} == {
        part.module for part in released.parts
    }

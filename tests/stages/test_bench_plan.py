"""bench chain and bench simulate: counts that can be checked by hand, keys, refusals."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.bench.chain import measure_chain
from k3tool.bench.simulate import Costs, Timeline, simulate
from k3tool.bench.traffic import reread_bytes
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan, save_plan
from k3tool.errors import UnsoundError
from k3tool.isa.emit import emit
from k3tool.isa.stream import save_isa
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from stages.bench.chain import chain_data, chain_lines
from tests.isa import plans

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> Plan:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    return compile_plan(config, tp=2, target="hip:gfx950", workgroups=16, chunk=4, batch=1, ctx=512)


def test_the_hand_written_plan_has_the_chain_that_can_be_counted() -> None:
    """Eight packets in a row: seven waits, two gates of two ranks, 20 slices."""
    c = measure_chain(plans.plan(), "decode", 1e9)
    assert (c.packets, c.packet_path, c.critical_path, c.waits, c.gates) == (8, 8, 8, 7, 2)
    # x is read by the norm and again by the reduce, which the chain between them implies.
    assert (c.edges, c.transitive) == (8, 1)
    assert c.waits_per_packet == {0: 1, 1: 7}
    assert c.polls == 20 - 4  # every slice but the embedding's polls once
    assert c.bumps == 20 + 4 + 1  # a gate's slices arrive at both ranks
    assert c.mean_width == 1.0
    assert c.live_counters == 1
    assert sum(c.histogram.values()) == 8
    assert c.floor_ms["first"] == pytest.approx(8 * 13.2e-3)


def test_bytes_are_whole_numbers_and_the_median_is_one_that_a_packet_moves() -> None:
    """Of eight packets the mean of the middle two would be bytes that none of them moves."""
    data = chain_data(measure_chain(plans.plan(), "decode", 1e9))
    found = re.findall(r'"bytes_(total|median)": (\d+)[,}]', json.dumps(data))
    assert [name for name, _ in found] == ["total", "median"]


def test_a_path_that_is_not_the_waits_is_refused() -> None:
    plan = plans.plan()
    phase = replace(plan.phases["decode"], critical_path=3)
    with pytest.raises(UnsoundError, match="longest path"):
        measure_chain(replace(plan, phases={"decode": phase}), "decode", 1e9)


def test_a_wait_inside_a_packet_is_a_hand_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op has one, so a made-up row stands in for an op whose slices meet inside."""
    assert not any(spec.inner_waits for spec in SPECS.values())
    plan = plans.plan()
    before = measure_chain(plan, "decode", 1e9)
    n = before.histogram["ALL_REDUCE_ADD"]
    assert n > 0
    row = replace(SPECS[Op.ALL_REDUCE_ADD], inner_waits=2)
    monkeypatch.setitem(SPECS, Op.ALL_REDUCE_ADD, row)
    longer = before.critical_path + 2 * n
    with pytest.raises(UnsoundError, match=f"longest path.*{longer}"):
        measure_chain(plan, "decode", 1e9)
    phase = replace(plan.phases["decode"], critical_path=longer)
    after = measure_chain(replace(plan, phases={"decode": phase}), "decode", 1e9)
    assert (after.critical_path, after.packet_path) == (longer, before.packet_path)
    assert after.floor_ms["first"] == pytest.approx(longer * 13.2e-3)


def test_compile_plan_states_hand_offs_inside_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    options = {"tp": 2, "target": "cpu", "workgroups": 8, "chunk": 4, "batch": 1, "ctx": 512}
    before = compile_plan(config, **options).phases["decode"]
    row = replace(SPECS[Op.ARGMAX_FOLD], inner_waits=3)
    monkeypatch.setitem(SPECS, Op.ARGMAX_FOLD, row)
    plan = compile_plan(config, **options)
    after = plan.phases["decode"]
    assert after.critical_path == before.critical_path + 3
    assert after.packet_path == before.packet_path
    assert measure_chain(plan, "decode", 1e9).critical_path == after.critical_path


def test_no_body_waits() -> None:
    """What makes 0 inner waits true: a body has no counter to wait on, and calls no wait."""
    folder = ROOT / "kernels_common"
    bodies = sorted((folder / "ops").glob("*.h"))
    assert len(bodies) > 40
    for path in bodies:
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        assert not re.search(r"counter|k3_wait|k3_signal|atomic|spin", text), path.name
    header = (folder / "k3.h").read_text()
    context = re.search(r"typedef struct K3Ctx \{(.*?)\} K3Ctx", header, re.DOTALL)
    assert context, "the context that a body sees"
    assert "counter" not in re.sub(r"/\*.*?\*/", "", context[1], flags=re.DOTALL)


def test_what_slices_read_again_is_counted_by_hand(made: Plan) -> None:
    """All slices but one of a product read its input again; a mix reads its prefix thrice."""
    phase, tensors = made.phases["decode"], made.tensors
    seen = set()
    for packet in phase.packets:
        op, slices = Op(int(packet["op"])), int(packet["n_slices"])
        found = reread_bytes(packet, slices, tensors, phase.max_tokens)
        size = {
            o.name: tensors[h].n_bytes
            for o, h in zip(SPECS[op].operands, SPECS[op].handles(packet["handles"]), strict=True)
        }
        if op is Op.GEMV_BF16_BLOCKS:
            assert found == (slices - 1) * size["x"]
        elif op is Op.MIX_LINEARS_6:
            vectors = sum(size[name] for name in ("part", "res_norm", "res_proj", "norm"))
            assert found == (slices - 1) * vectors + (3 * slices - 1) * size["prefix"]
        elif op is Op.ALL_REDUCE:
            assert found == 0
        else:
            continue
        seen.add(op)
    assert seen == {Op.GEMV_BF16_BLOCKS, Op.MIX_LINEARS_6, Op.ALL_REDUCE}
    chain = measure_chain(made, "decode", 1e9)
    assert chain.reread_total == sum(chain.reread_by_op.values()) > 0
    assert "ALL_REDUCE" not in chain.reread_by_op


def test_time_without_work_is_the_chain_times_the_hand_off(made: Plan) -> None:
    stream = emit(made, "hip:gfx950")
    timeline = Timeline(stream, stream.streams["decode"])
    path = made.phases["decode"].critical_path
    free = Costs(1.0, 1.0, 1e30, 1e30, 0.0, 0.0)
    once = simulate(timeline, free, 0)
    assert once.token_us == pytest.approx(path - 1)  # the first packet waits for nothing
    assert once.handoffs == path - 1
    assert 0 < once.gates < once.handoffs
    dear = simulate(timeline, replace(free, gate_us=2.0), 0)
    assert dear.token_us >= once.token_us + once.gates


def test_the_anatomy_adds_up_and_stalls_cost_time(made: Plan) -> None:
    stream = emit(made, "hip:gfx950")
    timeline = Timeline(stream, stream.streams["decode"])
    costs = Costs(3.0, 5.0, 1e9, 1e8, 0.0, 0.0)
    calm = simulate(timeline, costs, 0)
    for r in (calm, simulate(timeline, replace(costs, stall_rate=0.05, stall_us=10.0), 7)):
        parts = r.handoff_us + r.gate_us + r.work_us + r.stall_us
        assert parts == pytest.approx(r.token_us)
        assert sum(r.work_us_by_op.values()) == pytest.approx(r.work_us)
    assert r.token_us > calm.token_us
    assert r.stall_us > 0


def test_counts_stand_beside_the_starting_systems_of_the_same_program_alone() -> None:
    """Decode of the released model at TP 8; not prefill, not another degree, not another model."""
    config = K3Config.load(ROOT / "tests" / "data" / "kimi-k3-config.json")
    text = {"num_hidden_layers": 93, "hidden_size": 7168, "num_experts": 896}
    assert {name: getattr(config, name) for name in text} == text
    plan = plans.plan()
    released = {**plan.params, "config": config.config_dict, "tp": 8, "batch": 1}
    raw = preset_config(PRESETS["tiny"])
    for params, same in (
        (released, True),
        ({**released, "tp": 4}, False),
        ({**released, "config": raw}, False),
        (plan.params, False),
    ):
        c = measure_chain(replace(plan, params=params), "decode", 1e9)
        assert c.has_prior == same
        assert ("2459 first, 1981 later" in "\n".join(chain_lines(c))) == same
        assert bool(chain_data(c)["prior"]) == same
    prefill = replace(plan, params=released, phases={"prefill": plan.phases["decode"]})
    assert not measure_chain(prefill, "prefill", 1e9).has_prior


def test_chain_prints_the_counts(k3tool: Run, made: Plan, tmp_path: Path) -> None:
    save_plan(made, tmp_path / "plan.h5")
    done = k3tool("bench", "chain", tmp_path / "plan.h5")
    assert done.code == 0, done.err
    assert "starting system" not in done.out
    data = json.loads(k3tool("bench", "chain", tmp_path / "plan.h5", "--json").out)
    phase = made.phases["decode"]
    assert data["packets"] == len(phase.packets)
    assert data["critical_path"] == phase.critical_path
    assert data["waits"] == len(phase.waits)
    assert data["prior"] == {}
    assert sum(data["histogram"].values()) == data["packets"]
    assert sum(data["polls_by_width"].values()) == data["polls"]


def test_simulate_executes_every_seed_by_queues_and_by_windows(
    k3tool: Run, made: Plan, tmp_path: Path
) -> None:
    save_isa(emit(made, "hip:gfx950"), tmp_path / "isa.h5")
    done = k3tool("bench", "simulate", tmp_path / "isa.h5", "--seeds", 3)
    assert done.code == 0, done.err
    assert "no deadlock in 3 random orders by queues and by windows" in done.out
    data = json.loads(k3tool("bench", "simulate", tmp_path / "isa.h5", "--seeds", 2, "--json").out)
    assert data["deadlocks"] == 0
    assert [row["seed"] for row in data["seeds"]] == [0, 1]
    assert all("window_rounds" in row for row in data["executed"])


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("command", "option"),
    [("simulate", "--handoff-us"), ("simulate", "--gate-us"), ("simulate", "--stall-us"),
     ("simulate", "--stall-rate"), ("simulate", "--unit-bandwidth"), ("simulate", "--bandwidth"),
     ("chain", "--bandwidth"), ("shard", "--size")],
)  # fmt: skip
def test_numbers_are_finite(
    k3tool: Run, tmp_path: Path, command: str, option: str, number: str
) -> None:
    files = () if command == "shard" else (tmp_path / "absent.h5",)
    done = k3tool("bench", command, *files, option, number)
    assert done.code == 2
    assert option in done.err
    assert "finite" in done.err or "range" in done.err


def test_simulate_refuses_a_plan(k3tool: Run, made: Plan, tmp_path: Path) -> None:
    save_plan(made, tmp_path / "plan.h5")
    assert k3tool("bench", "simulate", tmp_path / "plan.h5").code == 3


@pytest.mark.parametrize(("have", "lacks"), [("decode", "prefill"), ("prefill", "decode")])
def test_the_only_phase_is_the_default_and_one_that_is_lacking_is_refused(
    k3tool: Run, tmp_path: Path, have: str, lacks: str
) -> None:
    only = compile_plan(
        K3Config.from_dict(preset_config(PRESETS["tiny"])),
        tp=2, target="hip:gfx950", workgroups=16, chunk=4, batch=1, ctx=512, phases=(have,),
    )  # fmt: skip
    save_plan(only, tmp_path / "plan.h5")
    save_isa(emit(only, "hip:gfx950"), tmp_path / "isa.h5")
    n_tokens = only.phases[have].max_tokens
    step = f"step of {n_tokens} token{'' if n_tokens == 1 else 's'}"
    for what, name, says in (("chain", "plan.h5", have), ("simulate", "isa.h5", step)):
        done = k3tool("bench", what, tmp_path / name)
        assert done.code == 0, done.err
        assert done.out.startswith(says)
        assert have in done.out.splitlines()[0]
        done = k3tool("bench", what, tmp_path / name, "--phase", lacks)
        assert done.code == 2, done.err
        assert f"--phase: got {lacks}, need {have}" in done.err

"""The assembler is the disassembler's inverse, on random programs and on compiled plans."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Phase, Plan, load_plan, save_plan
from k3tool.errors import ArtifactError
from k3tool.isa import wire
from k3tool.isa.assemble import assemble
from k3tool.isa.columns import Columns
from k3tool.isa.disasm import lines, of_plan
from k3tool.model.config import K3Config
from tests.isa import plans
from tests.isa.programs import programs

Run = Callable[..., Any]


def listing(plan: Plan) -> list[str]:
    out = []
    for name, phase in plan.phases.items():
        size = f"{len(phase.packets)} packets, {phase.max_tokens} tokens"
        out.append(f"; {name}: {size}, TP {plan.tp}")
        out += lines(of_plan(phase, plan.tp), plan.tensors, 0, len(phase.packets))
    return out


def bare(packets: Columns, waits: Columns) -> Plan:
    n = len(packets)
    phase = Phase("decode", 1, packets, waits, ((),) * n, 0, 0, 0, 1, 1)
    return Plan((), {"decode": phase}, {"tp": 2})


@given(programs())
def test_any_program_comes_back_bit_for_bit(program: tuple[Columns, Columns]) -> None:
    packets, waits = program
    again, again_waits = assemble(listing(bare(packets, waits)))["decode"]
    assert wire.encode(again, again_waits) == wire.encode(packets, waits)
    assert (again == packets).all()


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("without", [(), ("norm-linear-fuse",)])
def test_every_sample_plan_comes_back(preset: str, without: tuple[str, ...]) -> None:
    raw = preset_config(PRESETS[preset])
    config = K3Config.from_dict(raw)
    tp = config.legal_tp()[-1]
    plan = compile_plan(
        config, tp=tp, target="cpu", workgroups=8, chunk=4, batch=1, ctx=64, without=without
    )
    found = assemble(listing(plan))
    for name, phase in plan.phases.items():
        assert (found[name][0] == phase.packets).all()
        assert (found[name][1] == phase.waits).all()


def test_what_a_listing_does_not_print_is_not_lost() -> None:
    """A grain that is not the op's, a threshold that its slices do not add up to, a NaN."""
    plan = plans.plan()
    packets = plan.phases["decode"].packets.copy()
    packets["grain"][1], packets["threshold"][3] = 1, 77
    packets["params"][1, 0] = 0x7FC01234
    again, _ = assemble(listing(bare(packets, plan.phases["decode"].waits)))["decode"]
    assert (again == packets).all()
    text = "\n".join(listing(bare(packets, plan.phases["decode"].waits)))
    assert "arrivals=77" in text
    assert "eps=0x7fc01234" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.replace("; decode", "decode", 1), "line 1"),
        (lambda t: t.replace("0003 ", "0004 ", 1), "line 5: number"),
        (lambda t: t.replace("RMSNORM", "NORM", 1), "line 3: op: got NORM"),
        (lambda t: t.replace("RMSNORM", "PART", 1), "line 3: op: got PART"),
        (lambda t: t.replace("x=%0", "z=%0", 1), "line 3: RMSNORM"),
        (lambda t: t.replace("x=%0", "x=0", 1), "line 3: x"),
        (lambda t: t.replace("eps=1e-05", "eps=abc", 1), "line 3: eps"),
        (lambda t: t.replace("vocab=128", "vocab=-1", 1), "line 2: vocab: got -1"),
        (lambda t: t.replace("vocab=128", "vocab=4294967296", 1), "vocab: got 4294967296, need 0"),
        (lambda t: t.replace("width=", "width=4294967296", 1), "line 2: width: got 4294967296"),
        (lambda t: t.replace("x=%0", "x=%99999", 1), "x: got %99999, need %0 to %65534"),
        (lambda t: t.replace(">=4]", ">=4294967296]", 1), "line 3: wait: got 4294967296"),
        (lambda t: t.replace("units=4", "units=0", 1), "line 2: n_units"),
        (lambda t: t.replace("slices=4", "slices=9", 1), "line 2: n_slices"),
        (lambda t: t.replace("slices=4", "pieces=9", 1), "line 2: got pieces"),
        (lambda t: t.replace("wait=[p0>=4]", "wait=[q0>=4]", 1), "line 3: wait: got q0"),
        (lambda t: t.replace("wait=[p0>=4]", "wait=[p0>=0]", 1), "line 3: wait"),
        (lambda t: t.replace("flags=digest", "flags=gone", 1), "line 2: flags"),
        (lambda t: t.replace("signal=p0", "signal=p5", 1), "line 2: counter"),
        (lambda t: t.replace(" signal=p0", "", 1), "line 2"),
        (lambda t: t + "\n" + t, "decode again"),
        (lambda t: "", "no phase"),
    ],
)
def test_a_listing_that_is_none_is_refused_at_its_line(
    change: Callable[[str], str], words: str
) -> None:
    text = "\n".join(listing(plans.plan()))
    altered = change(text)
    assert altered != text
    with pytest.raises(ArtifactError) as caught:
        assemble(altered.splitlines())
    assert words in str(caught.value)


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture(params=["f32", "bf16"])
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    options = {"tp": 2, "target": "cpu", "workgroups": 4, "chunk": 4, "batch": 1, "ctx": 512}
    made = compile_plan(config, **options, numerics=request.param)
    save_plan(made, tmp_path / "plan.h5")
    return tmp_path / "plan.h5"


def test_disassembled_and_assembled_is_the_same_plan(k3tool: Run, plan: Path) -> None:
    text, again = plan.with_suffix(".txt"), plan.with_name("again.h5")
    text.write_text(k3tool("disasm", plan).out)
    done = k3tool("disasm", plan, "--assemble", text, "-o", again)
    assert done.code == 0, done.err
    assert load_plan(again).digest == load_plan(plan).digest
    assert load_plan(plan).digest in done.out


def test_an_edit_that_breaks_the_plan_is_refused(k3tool: Run, plan: Path) -> None:
    text, again = plan.with_suffix(".txt"), plan.with_name("again.h5")
    whole = k3tool("disasm", plan).out
    first = whole.index("wait=[p")
    loose = whole[:first] + "wait=[]" + whole[whole.index("]", first) + 1 :]
    text.write_text(loose)
    done = k3tool("disasm", plan, "--assemble", text, "-o", again)
    assert done.code == 4
    assert "D ordered" in done.err
    n = len(load_plan(plan).tensors)
    for handle, code in ((n, 3), (n - 1, 4)):  # one that is there is another operand's
        text.write_text(re.sub(r"x=%\d+", f"x=%{handle}", whole, count=1))
        done = k3tool("disasm", plan, "--assemble", text, "-o", again)
        assert done.code == code, done
        said = f"x: got %{handle}, need %0 to %{n - 1}, the plan's tensors"
        assert (said in done.err) == (code == 3)
    text.write_text(re.sub(r"eps=\S+", "eps=0.25", loose, count=1))
    done = k3tool("disasm", plan, "--assemble", text, "-o", again)
    assert (done.code, "eps=0.25" in done.err) == (4, True), done
    assert "got FAIL A meaning decode" in done.err
    assert "; and D ordered decode, need" in done.err, "each check that failed is named"
    text.write_text(whole.split("\n; ")[0])
    assert k3tool("disasm", plan, "--assemble", text, "-o", again).code == 3
    assert k3tool("disasm", plan, "--assemble", text).code == 2
    assert k3tool("disasm", plan, "--assemble", plan, "-o", again).code == 3
    assert not again.exists()


def test_listings_of_both_phases_are_distinct(plan: Path) -> None:
    found = assemble(listing(load_plan(plan)))
    decode, prefill = found["decode"][0], found["prefill"][0]
    assert len(decode) != len(prefill) or not np.array_equal(decode, prefill)

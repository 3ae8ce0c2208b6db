"""Single faults of a plan: counters, memory, records, meaning, rewrites."""

from dataclasses import replace
from typing import Any

import numpy as np

from k3tool.compiler.plan import Plan
from k3tool.isa import table
from k3tool.isa.columns import GATE, PACKET_DIGEST, PACKET_REARM, spec_of
from tests.faults.mutations import (
    Broken,
    Mutation,
    eps_name,
    eps_of,
    equal_weights,
    first,
    has,
    outer_buffers,
    packets_of,
    peer_pair,
    read_together,
    set_packet,
    set_param,
    set_tensor,
    set_wait,
    single_linears,
    table_of,
    waiting,
    with_packets,
    with_params,
    with_size,
)

PLAN: list[Mutation] = []
on_plan = table_of(PLAN)


@on_plan("own threshold one more", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 3)
    return Broken(set_packet(plan, at, threshold=int(packets_of(plan)["threshold"][at]) + 1), at)


@on_plan("own threshold one less", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["n_slices"] > 1, 3)
    return Broken(set_packet(plan, at, threshold=int(packets_of(plan)["threshold"][at]) - 1), at)


@on_plan("a gate counts one rank only", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["counter"] & GATE)
    return Broken(set_packet(plan, at, threshold=int(packets_of(plan)["n_slices"][at])), at)


@on_plan("waits for one more", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 5)
    return Broken(set_wait(plan, at, by=1), at)


@on_plan("waits for one less", "D ordered decode")
def _(plan: Plan) -> Broken:
    packets = packets_of(plan)
    waits = plan.phases["decode"].waits
    needs = waits["threshold"]
    at = first(packets, lambda row, _: row["n_waits"] and needs[row["wait_ofs"]] > 1, 5)
    return Broken(set_wait(plan, at, by=-1), at)


@on_plan("a wait is missing", "D ordered decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["n_waits"] == 1, 4)
    return Broken(set_packet(plan, at, n_waits=0), at)


@on_plan("one of several waits is missing", "D ordered decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["n_waits"] > 1)
    return Broken(set_packet(plan, at, n_waits=int(packets_of(plan)["n_waits"][at]) - 1), at)


@on_plan("waits for a later packet", "D acyclic decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 2)
    own = packets_of(plan)["counter"]
    later = next(int(counter) for counter in own[at + 1 :] if not counter & GATE)
    return Broken(set_wait(plan, at, counter=later), at)


@on_plan("waits for itself", "D acyclic decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["n_waits"] and not row["counter"] & GATE, 2)
    return Broken(set_wait(plan, at, counter=at), at)


@on_plan("waits for a gate nobody signals", "D acyclic decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 2)
    return Broken(set_wait(plan, at, counter=GATE | (len(packets_of(plan)) - 1)), at)


@on_plan("a peer's result under a local counter", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["counter"] & GATE)
    return Broken(set_packet(plan, at, counter=at), at)


@on_plan("nobody clears the other bank", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["flags"] & PACKET_REARM)
    flags = int(packets_of(plan)["flags"][at]) & ~PACKET_REARM
    return Broken(set_packet(plan, at, flags=flags), None)


@on_plan("the ranks agree on nothing", "B records decode")
def _(plan: Plan) -> Broken:
    """Every comparison between ranks would be of no values, and pass."""
    packets = packets_of(plan).copy()
    at = int(np.flatnonzero(packets["flags"] & PACKET_DIGEST)[0])
    packets["flags"] &= np.uint16(0xFFFF ^ PACKET_DIGEST)
    return Broken(with_packets(plan, packets), at)


@on_plan("ranks are to agree on what is one's own", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, _: row["op"] == table.Op.KDA_HEADS)
    flags = int(packets_of(plan)["flags"][at]) | PACKET_DIGEST
    return Broken(set_packet(plan, at, flags=flags), at)


@on_plan("two packets clear the other bank", "D thresholds decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), waiting, 3)
    flags = int(packets_of(plan)["flags"][at]) | PACKET_REARM
    return Broken(set_packet(plan, at, flags=flags), None)


@on_plan("buffers overlap", "C memory decode")
def _(plan: Plan) -> Broken:
    at, a, b = read_together(plan, packets_of(plan))
    return Broken(set_tensor(plan, a.name, offset=b.offset), at)


@on_plan("a buffer ends beyond the arena", "C memory decode")
def _(plan: Plan) -> Broken:
    _, high = outer_buffers(plan)
    phase = plan.phases["decode"]
    smaller = replace(phase, arena_bytes=high.offset + high.n_bytes - 4)
    return Broken(replace(plan, phases={**plan.phases, "decode": smaller}), None)


@on_plan("a buffer is of another phase", "C memory decode")
def _(plan: Plan) -> Broken:
    low, _ = outer_buffers(plan)
    return Broken(set_tensor(plan, low.name, phase="prefill"), None)


@on_plan("a tensor's bytes are not its shape's", "C tensors")
def _(plan: Plan) -> Broken:
    low, _ = outer_buffers(plan)
    return Broken(set_tensor(plan, low.name, n_bytes=low.n_bytes + 4), None)


@on_plan("a collective's slot is reused too early", "D ordered decode")
def _(plan: Plan) -> Broken:
    a, b = peer_pair(plan, packets_of(plan))
    return Broken(set_tensor(plan, b.name, offset=a.offset), None)


@on_plan("phases share a peer slot", "D steps")
def _(plan: Plan) -> Broken:
    a, _ = peer_pair(plan, packets_of(plan))
    last = [t for t in plan.tensors if t.role == "peer" and t.phase == "prefill"][-1]
    return Broken(set_tensor(plan, a.name, offset=last.offset), None)


@on_plan("rows are missing", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: s.unit == "row" and row["n_units"] > 16)
    units = int(packets_of(plan)["n_units"][at])
    return Broken(set_packet(plan, at, n_units=units - 8, n_slices=1, threshold=1), at)


@on_plan("a row is too wide", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: s.unit == "token")
    return Broken(set_packet(plan, at, width=int(packets_of(plan)["width"][at]) * 2), at)


@on_plan("columns of a unit are wrong", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: s.unit == "row")
    return Broken(set_packet(plan, at, unit_cols=2), at)


@on_plan("the summed axis is wrong", "B records decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), has(K="param"))
    return Broken(set_param(plan, at, "K", lambda k: k // 2), at)


@on_plan("blocks of a partial sum are wrong", "B records decode")
def _(plan: Plan) -> Broken:
    blocks = has(n_blocks="param")
    at = first(packets_of(plan), lambda row, s: s.placement == "partial" and blocks(row, s))
    return Broken(set_param(plan, at, "n_blocks", lambda n: n * 2), at)


@on_plan("a weight of equal shape in place of another", "A meaning decode")
def _(plan: Plan) -> Broken:
    at, slot, other = equal_weights(packets_of(plan), plan.tensors)
    packets = packets_of(plan).copy()
    packets["handles"][at, slot] = other
    return Broken(with_packets(plan, packets), at)


@on_plan("another eps", "A meaning decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), eps_of, 1)
    return Broken(set_param(plan, at, eps_name(packets_of(plan), at), lambda bits: bits + 1), at)


@on_plan("another constant of the router", "A meaning decode")
def _(plan: Plan) -> Broken:
    at = first(packets_of(plan), lambda row, s: has(bias="weight", scale="param")(row, s))
    return Broken(set_param(plan, at, "scale", lambda bits: bits + 1), at)


@on_plan("the head runs on all tokens", "A meaning decode")
def _(plan: Plan) -> Broken:
    def head(row: Any, spec: Any) -> bool:
        words = dict(zip((p.name for p in spec.params), row["params"].tolist(), strict=False))
        return words.get("head_only") == 1

    at = first(packets_of(plan), head)
    return Broken(set_param(plan, at, "head_only", lambda _: 0), at)


@on_plan("a weight's dtype", "A weights")
def _(plan: Plan) -> Broken:
    tensor = next(t for t in plan.tensors if t.role == "weight" and t.dtype == "bf16")
    return Broken(set_tensor(plan, tensor.name, dtype="f32", n_bytes=tensor.n_bytes * 2), None)


@on_plan("a weight's split", "A weights")
def _(plan: Plan) -> Broken:
    tensor = next(t for t in plan.tensors if t.split == "rows")
    return Broken(set_tensor(plan, tensor.name, split="cols"), None)


@on_plan("two weights' stored names", "A weights")
def _(plan: Plan) -> Broken:
    a, b = [t for t in plan.tensors if t.role == "weight" and t.split == "rows"][:2]
    swapped = set_tensor(plan, a.name, source=b.source)
    return Broken(swapped, None)


@on_plan("the recorded eps of a site", "A meaning decode")
def _(plan: Plan) -> Broken:
    eps = dict(plan.params["eps"], o_norm=0.5)
    return Broken(replace(plan, params={**plan.params, "eps": eps}), None)


@on_plan("another model's config", "A meaning decode")
def _(plan: Plan) -> Broken:
    config = dict(plan.params["config"])
    text = dict(config.get("text_config", config), routed_scaling_factor=3.5)
    config = {**config, "text_config": text} if "text_config" in config else text
    return Broken(replace(plan, params={**plan.params, "config": config}), None)


@on_plan("an operand of a role that it has not", "D ordered decode")
def _(plan: Plan) -> Broken:
    rows = packets_of(plan)
    at = single_linears(rows)[0]
    spec = spec_of(int(rows["op"][at]))
    assert spec is not None
    packets = rows.copy()
    packets["handles"][at, spec.slot("y")] = packets["handles"][at, spec.slot("w")]
    return Broken(with_packets(plan, packets), at)


@on_plan("an input of equal width in place of another", "A meaning decode")
def _(plan: Plan) -> Broken:
    """The residual of a late packet is an early one's: written, live or not, of the right width."""
    rows = packets_of(plan)
    found = [i for i, row in enumerate(rows) if has(residual="in")(row, spec_of(int(row["op"])))]
    early, late = found[0], found[-1]
    spec = spec_of(int(rows["op"][late]))
    assert spec is not None
    packets = rows.copy()
    source = spec_of(int(rows["op"][early]))
    assert source is not None
    other = rows["handles"][early, source.slot("residual")]
    packets["handles"][late, spec.slot("residual")] = other
    return Broken(with_packets(plan, packets), late)


@on_plan("a fused op that no rewrite made", "A rewrites")
def _(plan: Plan) -> Broken:
    phase = plan.phases["decode"]
    at = next(i for i, rows in enumerate(phase.made_by) if rows)
    made_by = (*phase.made_by[:at], (), *phase.made_by[at + 1 :])
    phase = replace(phase, made_by=made_by)
    return Broken(replace(plan, phases={**plan.phases, "decode": phase}), at)


@on_plan("a rewrite by a rule that is none", "A rewrites")
def _(plan: Plan) -> Broken:
    at = next(i for i, row in enumerate(plan.fired) if row.used)
    row = plan.fired[at]._replace(rule="magic-fuse")
    return Broken(replace(plan, fired=(*plan.fired[:at], row, *plan.fired[at + 1 :])), None)


@on_plan("a rewrite that a theorem of another statement allowed", "A rewrites")
def _(plan: Plan) -> Broken:
    theorems = dict.fromkeys(plan.params["theorems"], "0" * 64)
    return Broken(replace(plan, params={**plan.params, "theorems": theorems}), None)


@on_plan("a weight is a value that the step has made", "A meaning decode")
def _(plan: Plan) -> Broken:
    packets = packets_of(plan).copy()
    at = single_linears(packets)[0]
    spec = spec_of(int(packets["op"][at]))
    assert spec is not None
    packets["handles"][at, spec.slot("w")] = packets["handles"][at, spec.slot("x")]
    return Broken(with_packets(plan, packets), at)


# -- what it says of itself ------------------------------------------------------------------------


@on_plan("an arena of a byte more", "C memory decode")
def _(plan: Plan) -> Broken:
    return Broken(with_size(plan, "arena_bytes", 1), None)


@on_plan("a peer segment of a byte more", "C memory decode")
def _(plan: Plan) -> Broken:
    return Broken(with_size(plan, "peer_bytes", 1), None)


@on_plan("a rule that it rests on is not said", "A params")
def _(plan: Plan) -> Broken:
    return Broken(with_params(plan, rules=plan.params["rules"][1:]), None)


@on_plan("a theorem of a rule that it does not rest on", "A params")
def _(plan: Plan) -> Broken:
    return Broken(with_params(plan, theorems={**plan.params["theorems"], "zero-fuse": "0"}), None)

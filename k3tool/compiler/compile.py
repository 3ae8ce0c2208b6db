"""The one lowering: config → operator graph → fused graph → packets of both phases → plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3tool.artifact import InputRef
from k3tool.compiler.dag import Dag, packet_dag, runs_of
from k3tool.compiler.egraph import saturate
from k3tool.compiler.extract import Extracted, extract
from k3tool.compiler.handles import Handles
from k3tool.compiler.plan import NUMERICS_VERSION, Fired, Phase, Plan
from k3tool.compiler.prices import Costs
from k3tool.compiler.rules import rules_without
from k3tool.compiler.schedule import Layout, build_phase
from k3tool.compiler.theorems import read_stamp, require_theorems
from k3tool.errors import UsageError
from k3tool.isa.table import ALL_PHASES, PAGE_TOKENS
from k3tool.model.config import K3Config
from k3tool.model.graph import MODES, build_graph
from k3tool.model.nodes import Graph, Leaf
from k3tool.targets import check_layout, get_target


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is compiled for. Units: tokens, sequences, positions."""

    tp: int
    target: str
    workgroups: int
    chunk: int  # tokens in a prefill step
    batch: int  # sequences, so tokens in a decode step
    ctx: int  # positions a sequence may reach
    without: tuple[str, ...] = ()  # rules that may not fire
    phases: tuple[str, ...] = ALL_PHASES
    numerics: str = "f32"  # mode of the arithmetic contract: one of MODES

    @property
    def pages(self) -> int:
        """Return the pages of latent cache that one sequence needs."""
        return -(-self.ctx // PAGE_TOKENS)


def compile_plan(
    config: K3Config,
    *,
    tp: int,
    target: str,
    workgroups: int,
    chunk: int,
    batch: int,
    ctx: int,
    without: Sequence[str] = (),
    phases: Sequence[str] = ALL_PHASES,
    numerics: str = "f32",
    inputs: Sequence[InputRef] = (),
    checkpoint_identity: str = "",
    stamp: Mapping[str, str] | None = None,
    graph: Graph | None = None,
) -> Plan:
    """Compile a model for one target and TP degree.

    `inputs` and `checkpoint_identity` say what the config came with; a plan made from a config
    alone has neither. `phases` are those to compile. `ctx` is rounded up to whole pages where the
    model's limit allows it. `numerics` is what activations are between ops. `stamp` holds the
    proved theorems' hashes, by default this build's. `graph` is another than the whole model's, for
    these options: one layer of it.
    Raises: UsageError naming an option that does not fit the model; ArtifactError naming a rule
    that has no proved theorem.
    """
    options = PlanOptions(
        tp, target, workgroups, chunk, batch, ctx, tuple(sorted(set(without))), tuple(phases),
        numerics,
    )  # fmt: skip
    _check_options(config, options)
    rules = rules_without(options.without)
    theorems = require_theorems(rules, read_stamp() if stamp is None else stamp)
    built = graph or build_graph(config, tp, numerics, options.pages)
    saturated = saturate(built, rules)
    tokens = {"decode": batch, "prefill": chunk}
    costs = Costs.of(get_target(target), workgroups)
    chosen = {
        phase: extract(built, saturated, n, tp, costs)
        for phase, n in tokens.items()
        if phase in phases
    }
    handles, compiled = _build_phases(chosen, options, tokens)
    fired = _fired(list(chosen.values()))
    used = sorted({row.rule for row in fired if row.used})
    params = _params(config, options) | {
        "checkpoint_identity": checkpoint_identity,
        "rules": used,
        "theorems": {name: theorems[name] for name in used},
    }
    return Plan(tuple(handles.tensors), compiled, params, fired, tuple(inputs))


def _build_phases(
    chosen: Mapping[str, Extracted], options: PlanOptions, tokens: Mapping[str, int]
) -> tuple[Handles, dict[str, Phase]]:
    """Return the handles of all phases' tensors, and the phases, of steps of so many tokens.

    Phases share weights and states, so operands that need neighbouring handles in one have them in
    all; peer buffers lie behind each other, so that a fast rank's next step spoils none of this.
    """
    dags: dict[str, Dag] = {}
    taken: dict[str, tuple[str, ...]] = {}
    for phase, extracted in chosen.items():
        dags[phase] = packet_dag(extracted.graph, taken)
        taken |= {leaf: run for run in _leaf_runs(extracted.graph, dags[phase]) for leaf in run}
    graphs = [extracted.graph for extracted in chosen.values()]
    leaf_runs = list(dict.fromkeys(taken.values()))
    n_pages = options.batch * options.pages
    handles = Handles(graphs, options.tp, options.batch, n_pages, leaf_runs)
    compiled: dict[str, Phase] = {}
    peer_bytes = 0
    for phase, extracted in chosen.items():
        layout = Layout(options.tp, options.workgroups, tokens[phase])
        compiled[phase] = build_phase(
            phase, extracted.graph, dags[phase], layout, handles, extracted.made_by, peer_bytes
        )
        peer_bytes = compiled[phase].peer_bytes
    return handles, compiled


def _leaf_runs(graph: Graph, dag: Dag) -> list[tuple[str, ...]]:
    """Return the names of weights and states that need consecutive handles."""
    runs = [run for packet in dag.packets for run in runs_of(packet)]
    return [
        tuple(graph.names[leaf] for leaf in run)
        for run in runs
        if isinstance(graph.nodes[run[0]].op, Leaf)
    ]


def _fired(chosen: Sequence[Extracted]) -> tuple[Fired, ...]:
    """Return the rule applications, and whether any phase rests on them."""
    rows = zip(*(extracted.fired for extracted in chosen), strict=True)
    return tuple(row[0]._replace(used=any(entry.used for entry in row)) for row in rows)


def _params(config: K3Config, options: PlanOptions) -> dict[str, Any]:
    """Return what went into a plan, and the sizes that a runtime needs."""
    return {
        "tp": options.tp,
        "target": options.target,
        "workgroups": options.workgroups,
        "chunk": options.chunk,
        "batch": options.batch,
        "ctx": min(options.pages * PAGE_TOKENS, config.max_position_embeddings),
        "pages_per_slot": options.pages,
        "numerics": {"mode": options.numerics, "version": NUMERICS_VERSION},
        "eps": dict(sorted(config.eps.items())),
        "rules_off": list(options.without),
        "config": dict(config.config_dict),
    }


def _check_options(config: K3Config, options: PlanOptions) -> None:
    config.check_tp(options.tp)
    if options.numerics not in MODES:
        raise UsageError("--numerics", got=options.numerics, need=" or ".join(MODES))
    for name in ("workgroups", "chunk", "batch", "ctx"):
        check_layout(name, getattr(options, name))
    limit = config.max_position_embeddings
    if options.ctx > limit:
        raise UsageError(
            "--ctx", got=options.ctx, need=f"at most max_position_embeddings = {limit}"
        )

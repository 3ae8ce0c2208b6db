"""Whether what a plan or stream says of itself is what its packets are: checks A params, F params.

Parameters steer readers that index without looking (pages per slot) and say what a program rests on
(rules, their theorems). Here they are compared with each other, with this build's rules, and with
the ops that the program executes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from k3tool.compiler.dag import PACKINGS
from k3tool.compiler.meaning import model_of
from k3tool.compiler.plan import Plan, require_params
from k3tool.compiler.residency import budget_faults
from k3tool.compiler.rules import FUSIONS, RULES
from k3tool.compiler.theorems import makers, theorem_hash
from k3tool.errors import ArtifactError, K3Error
from k3tool.fields import Fields
from k3tool.isa.columns import spec_of
from k3tool.isa.device import unpack
from k3tool.isa.stream import Isa
from k3tool.isa.table import PAGE_TOKENS, RESERVED, Op
from k3tool.verdict import Check, outcome

# All that a program says of itself. A reader of another build may take a further key for an option.
_ALWAYS = frozenset({
    "tp", "target", "workgroups", "chunk", "batch", "ctx", "pages_per_slot", "numerics", "eps",
    "rules_off", "rules", "theorems", "checkpoint_identity",
})  # fmt: skip
_SOMETIMES = frozenset({"config", "residency"})
_NUMERICS = frozenset({"mode", "version"})
_TOKENS = {"decode": "batch", "prefill": "chunk"}


def check_plan_params(plan: Plan) -> list[Check]:
    """Check a plan's parameters and opcodes. What fails here keeps other checks from running."""
    columns = {name: phase.packets["op"].tolist() for name, phase in plan.phases.items()}
    unknown = list(_opcode_faults(columns))
    used = sorted({row.rule for row in plan.fired if row.used})
    lack = readable(plan.params)
    faults = [lack] if lack else list(_param_faults(plan.params, used))
    if not lack and not unknown:
        faults += _unmade(plan.params, {op for column in columns.values() for op in column})
        rows = {name: (phase.max_tokens, phase.packets) for name, phase in plan.phases.items()}
        faults += budget_faults(plan.params, plan.tensors, rows)
        faults += _step_faults(plan.params, {name: most for name, (most, _) in rows.items()})
    n = sum(map(len, columns.values()))
    return [
        outcome("A params", (f"{len(plan.params)} parameters", faults)),
        outcome("B opcodes", (f"{n} packets of known ops", unknown)),
    ]


def check_stream_params(isa: Isa) -> Check:
    """Check a stream's parameters; its tables are sound, its parameters readable."""
    faults = list(_param_faults(isa.params, None))
    if isa.target != isa.params["target"]:
        faults.append(f"target {isa.params['target']} of a stream for {isa.target}")
    rows = (row for s in isa.streams.values() for row in s.instructions[0][:, 0].tolist())
    faults += _unmade(isa.params, {row & 0xFFFF for row in rows})
    records = {n: (s.max_tokens, unpack(s.instructions[0])) for n, s in isa.streams.items()}
    faults += budget_faults(isa.params, isa.tensors, records)
    faults += _step_faults(isa.params, {name: most for name, (most, _) in records.items()})
    return outcome("F params", (f"{len(isa.params)} parameters", faults))


def readable(params: Mapping[str, Any]) -> str | None:
    """Return what a program's parameters lack that checks read, None if nothing."""
    try:
        require_params(Fields(params, "params"))
    except ArtifactError as error:
        return f"{error.object.removeprefix('params: ')}: got {error.got}, need {error.need}"
    return None


def _opcode_faults(columns: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for phase, column in columns.items():
        for index, op in enumerate(column):
            if spec_of(op) is None:
                name = Op(op).name if op in set(Op) else RESERVED.get(op, "unknown")
                yield f"{phase} packet {index}: opcode {op} ({name}) is no instruction"


def _param_faults(params: Mapping[str, Any], used: list[str] | None) -> Iterator[str]:
    pages = -(-params["ctx"] // PAGE_TOKENS)
    if params["pages_per_slot"] != pages:
        yield f"pages_per_slot {params['pages_per_slot']}, a context of {params['ctx']} has {pages}"
    yield from _foreign_keys(params)
    yield from _model_faults(params, pages)
    rules, off, theorems = params["rules"], params["rules_off"], params["theorems"]
    if used is not None and rules != used:
        yield f"rules {_names(rules)}, its packets rest on {_names(used)}"
    if rules != sorted(set(rules)):
        yield f"rules {_names(rules)} are not each once, in order"
    known = {rule.name: rule for rule in RULES}
    for name in rules:
        if name not in known:
            yield f"rule {name}: not a rule of this build"
        elif theorems.get(name) != theorem_hash(known[name]):
            yield f"rule {name}: its theorem is another than this build's"
    if spare := set(theorems) - set(rules):
        yield f"theorems of {_names(sorted(spare))}, which it does not rest on"
    if off != sorted(set(off)):
        yield f"rules_off {_names(off)} are not each once, in order"
    for name in off:
        if name not in FUSIONS:
            yield f"rules_off {name}: no rule that a plan can be without"
        elif name in rules:
            yield f"rule {name} is off, and the program rests on it"


def _step_faults(params: Mapping[str, Any], tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield phases whose steps are laid out for other tokens than the parameters say."""
    for phase, most in tokens.items():
        name = _TOKENS[phase]
        if params[name] != most:
            yield f"{name} {params[name]}, a step of {phase} is laid out for {most} tokens"


def _foreign_keys(params: Mapping[str, Any]) -> Iterator[str]:
    if foreign := set(params) - _ALWAYS - _SOMETIMES:
        yield f"parameters {_names(sorted(map(str, foreign)))}, which no build records"
    numerics = params["numerics"]
    if not isinstance(numerics, Mapping) or set(numerics) != _NUMERICS:
        got = _names(sorted(map(str, numerics))) if isinstance(numerics, Mapping) else numerics
        yield f"numerics {got}, need {_names(sorted(_NUMERICS))}"
    elif type(numerics["version"]) is not int:  # 1.0 and true are equal to 1, and not its bytes
        yield f"numerics version {numerics['version']!r}, need an integer"


def _model_faults(params: Mapping[str, Any], pages: int) -> Iterator[str]:
    """Yield what a config fills in by itself and the parameters leave out or have otherwise."""
    try:
        config = model_of(params)
    except K3Error:
        return  # check A or F meaning says why
    if config is None:
        return
    need = min(pages * PAGE_TOKENS, config.max_position_embeddings)
    if params["ctx"] != need:
        yield f"ctx {params['ctx']}, its {pages} pages hold {need} positions of the model"
    if missing := set(config.eps) - set(params["eps"]):
        yield f"eps of {_names(sorted(missing))} not recorded"


def _unmade(params: Mapping[str, Any], ops: Iterable[int]) -> Iterator[str]:
    """Yield ops that only rules make, where none of the program's rules does."""
    for op in map(Op, sorted(ops)):
        own = makers().get(PACKINGS.get(op, op), frozenset())
        if own and not own & set(params["rules"]):
            yield f"{op.name} is made by {_names(sorted(own))}, of which the program rests on none"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"

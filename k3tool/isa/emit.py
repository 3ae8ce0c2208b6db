"""Emission: a plan's packets become records per rank and one set of workgroup queues per phase.

It decides nothing: what a plan says is what is emitted. No file is touched here.
"""

from k3tool.artifact import InputRef
from k3tool.compiler.plan import Phase, Plan
from k3tool.errors import ArtifactError, UsageError
from k3tool.isa import device, queues
from k3tool.isa.stream import Isa, Stream, check_isa
from k3tool.isa.windows import build_windows
from k3tool.targets import get_target


def emit(plan: Plan, target: str, plan_name: str = "plan.h5") -> Isa:
    """Return the program of a loaded plan.

    Raises: UsageError if `target` is not the plan's; ArtifactError naming the packet if the plan
    does not fit the device form.
    """
    planned = str(plan.params["target"])
    if target != planned:
        hint = f"pass --target {planned}, or compile the plan for {target}"
        raise UsageError("--target", got=target, need=f"{planned}, the plan's", hint=hint)
    if not plan.phases:
        raise ArtifactError(plan_name, got="no phase", need="at least one")
    streams = {name: _emit_phase(plan, phase, plan_name) for name, phase in plan.phases.items()}
    ancestry = (InputRef("plan", "plan", plan_name, plan.digest), *plan.inputs)
    isa = Isa(target, plan.tensors, streams, dict(plan.params), ancestry)
    check_isa(isa, plan_name)
    return isa


def _emit_phase(plan: Plan, phase: Phase, plan_name: str) -> Stream:
    try:
        built = queues.build(phase.packets, phase.waits, queues.crew_of(plan.params), plan.tp)
    except ArtifactError as error:
        where = f"{plan_name}: {phase.name}: {error.object}"
        raise ArtifactError(where, got=error.got, need=error.need, hint=error.hint) from None
    return Stream(
        name=phase.name,
        max_tokens=phase.max_tokens,
        scratch_floats=queues.scratch_floats(phase.packets, phase.max_tokens),
        arena_bytes=phase.arena_bytes,
        peer_bytes=phase.peer_bytes,
        instructions=tuple(device.pack(phase.packets, rank) for rank in range(plan.tp)),
        queues=built,
        windows=build_windows(built, get_target(str(plan.params["target"]))),
    )

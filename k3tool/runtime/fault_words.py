"""Put a rank's fault into words: what its instruction writes, and which weight it refused."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from k3tool.checkpoint.findings import Finding
from k3tool.compiler.plan import EXPERT_ROLES, Tensor
from k3tool.errors import K3Error, UnsoundError
from k3tool.isa import device
from k3tool.isa.columns import spec_of
from k3tool.isa.op_spec import OpSpec
from k3tool.isa.stream import Isa
from k3tool.isa.table import ALL_PHASES
from k3tool.ref.formats import SCALE_LIMIT
from k3tool.runtime import records
from k3tool.runtime.weights import RankWeights

_UPSTREAM = (
    "it came with a sum over ranks, from any rank's part; "
    "k3tool inspect --values looks at the weights of all"
)


def fault_error(
    isa: Isa, fault: records.Fault, weights: Sequence[RankWeights], paths: Sequence[str]
) -> K3Error:
    """Return the error that a user sees; `paths` are the files of the rank's image.

    A refused scale is named as inspect and shard name it: file, tensor, row, group, value.
    """
    operands = dict(_operands(isa, fault))
    if fault.code == records.IO and fault.io is not None:
        lost = " ".join(t.name for t in operands.values() if t.role in ("ring", "slots"))
        who = f"{lost} for rank {fault.rank}" if lost else f"rank {fault.rank} as they were"
        at = f"{who}, position {fault.position}"
        return fault.io.error(paths[fault.io.file], at)
    if fault.code == records.SCALE and fault.rank < len(weights):
        for tensor in operands.values():
            if tensor.role in EXPERT_ROLES:
                found = _refused_scale(weights[fault.rank], tensor, fault)
                if found is not None:
                    return found
    spec = spec_of(fault.opcode)
    if spec is None or spec.output.name not in operands:
        return fault.error()
    error = fault.error(f"{spec.output.name}={operands[spec.output.name].name}")
    if fault.code == records.NONFINITE and isa.tp > 1 and _is_on_all_ranks(spec, operands):
        error.hint = f"every rank read this value, rank {fault.rank} said so first: {_UPSTREAM}"
    return error


def _is_on_all_ranks(spec: OpSpec, operands: Mapping[str, Tensor]) -> bool:
    """Return whether all that the instruction read, but weights, is held whole by every rank.

    Then the rank that trapped is as innocent as the others: a sum over ranks has carried to all
    what one of them put in.
    """
    names = [operand.name for operand in spec.operands if operand.role not in ("weight", "out")]
    read = [operands[name] for name in names if name in operands]
    return bool(read) and all(
        tensor.role in ("arena", "output", "state") and tensor.logical == tensor.local
        for tensor in read
    )


def _operands(isa: Isa, fault: records.Fault) -> Iterator[tuple[str, Tensor]]:
    """Yield operand names and tensors of the instruction, none where it is not known."""
    phase = isa.streams.get(ALL_PHASES[fault.phase]) if fault.phase < len(ALL_PHASES) else None
    spec = spec_of(fault.opcode)
    if phase is None or spec is None or fault.inst >= len(phase.instructions[0]):
        return
    row = device.unpack(phase.instructions[0][fault.inst : fault.inst + 1])[0]
    for operand in spec.operands:
        handle = spec.handle(operand.name, row["handles"])
        if handle < len(isa.tensors):
            yield operand.name, isa.tensors[handle]


def _refused_scale(rank: RankWeights, tensor: Tensor, fault: records.Fault) -> UnsoundError | None:
    folder = rank.folder
    name = f"{tensor.source.replace('{E}', str(fault.detail))}.weight_scale"
    scales = folder.read(name)
    if scales.max(initial=0) < SCALE_LIMIT:
        return None
    row, group = (int(axis[0]) for axis in np.nonzero(scales >= SCALE_LIMIT))
    place = f"{name}: row {row}, group {group}"
    got, need = f"scale byte {scales[row, group]}", f"at most {SCALE_LIMIT - 1}"
    error = Finding("scale byte", folder.tensor_info(name).file, place, got, need).error(
        folder.path
    )
    hint = f"{error.hint} (met by {records.op_name(fault.opcode)} on rank {fault.rank})"
    return UnsoundError(error.object, got=error.got, need=error.need, hint=hint)

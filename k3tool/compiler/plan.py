"""The plan: what every rank executes, as tensors, packets and waits, and its file plan.h5.

A plan is made by `compiler.compile` and read by emit-isa, run and verify. It does not hold the
device's 64-byte records (isa does) and no weights. What varies per step (tokens, positions, slots)
is not in it. Quantities in packets are per rank; one plan serves all ranks.

Letters: P packets, W waits of one phase, N tensors; handle = row of `Plan.tensors`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3tool.artifact import Dataset, InputRef, open_artifact, write_artifact
from k3tool.errors import ArtifactError
from k3tool.isa import wire
from k3tool.isa.columns import GATE, PACKET_DTYPE, WAIT_DTYPE
from k3tool.isa.table import ALL_PHASES as PHASES
from k3tool.isa.table import NO_HANDLE, SPECS, Op, isa_hash

__all__ = ["GATE", "PACKET_DTYPE", "PHASES", "WAIT_DTYPE"]  # re-exported

PLAN_SCHEMA = 2
NUMERICS_VERSION = 1

Records = npt.NDArray[Any]


class Tensor(NamedTuple):
    """One row of the handle table.

    `logical` is the shape over all ranks, `local` of one rank's part, `n_bytes` the size of that
    part. `offset` is in bytes: of the phase's arena (role arena), of the peer segment (role peer),
    else 0. `phase` is set for what belongs to one phase. A weight has its `leaf` name, the stored
    tensor's full name (`source`; an expert leaf's holds `{E}` and ends before `.weight_packed`) and
    the table's split rule (`split`).
    """

    name: str
    role: str
    dtype: str
    logical: tuple[int, ...]
    local: tuple[int, ...]
    n_bytes: int
    offset: int = 0
    phase: str = ""
    leaf: str = ""
    source: str = ""
    split: str = ""

    @property
    def is_replicated(self) -> bool:
        """Whether it is a value that every rank holds whole: peer buffers hold partial sums."""
        return self.role in ("arena", "output") and self.logical == self.local


@dataclass(frozen=True, slots=True)
class Phase:
    """The packets of one phase in topological order, and what they need.

    `packets` has PACKET_DTYPE, `waits` WAIT_DTYPE. `made_by` says for each packet which rows of
    `Plan.fired` its op rests on; none for an op that the graph builder wrote.
    """

    name: str
    max_tokens: int
    packets: Records
    waits: Records
    made_by: tuple[tuple[int, ...], ...]
    n_gates: int
    arena_bytes: int
    peer_bytes: int
    packet_path: int  # packets on the longest chain
    critical_path: int  # hand-offs on it: every packet gate and every wait inside a packet

    def waits_of(self, index: int) -> Records:
        """Return the waits of one packet."""
        packet = self.packets[index]
        return self.waits[packet["wait_ofs"] : packet["wait_ofs"] + packet["n_waits"]]


class Fired(NamedTuple):
    """One application of a rewrite rule: at which graph value, and whether the plan uses it.

    `binding` is the substitution as `variable=value` words: graph values by name, numbers as such.
    """

    rule: str
    root: str
    binding: str
    used: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled model: handle table, phases, and where it all came from.

    `params` holds every option that changed the content (tp, target, workgroups, chunk, batch, ctx,
    numerics, eps sites, rules used and off) and sizes that a runtime wants. `digest` is empty until
    the plan has been saved or loaded.
    """

    tensors: tuple[Tensor, ...]
    phases: Mapping[str, Phase]
    params: Mapping[str, Any]
    fired: tuple[Fired, ...] = ()
    inputs: tuple[InputRef, ...] = ()
    digest: str = ""
    handles: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the tensors by name."""
        index = {tensor.name: handle for handle, tensor in enumerate(self.tensors)}
        assert len(index) == len(self.tensors), "two tensors of one name"
        assert len(index) < NO_HANDLE, f"{len(index)} handles do not fit 16 bits"
        object.__setattr__(self, "handles", index)

    def rules_of(self, phase: str, packet: int) -> tuple[str, ...]:
        """Return the names of the rules that a packet's op rests on, each once, sorted."""
        return tuple(sorted({self.fired[row].rule for row in self.phases[phase].made_by[packet]}))

    @property
    def tp(self) -> int:
        """Return the number of ranks."""
        return int(self.params["tp"])

    def operand(self, phase: str, packet: int, name: str) -> Tensor:
        """Return the tensor of an operand, by its name in the op table."""
        record = self.phases[phase].packets[packet]
        return self.tensors[SPECS[Op(int(record["op"]))].handle(name, record["handles"])]


# -- slices ------------------------------------------------------------------------------------


def n_slices(n_units: int, grain: int, workgroups: int) -> int:
    """Return into how many slices a packet is cut: at most one per workgroup and per tile."""
    return min(workgroups, max(1, -(-n_units // grain)))


def slice_bounds(n_units: int, grain: int, slices: int) -> npt.NDArray[np.int64]:
    """Return the slices + 1 unit boundaries: slice i covers tiles [tiles*i//n, tiles*(i+1)//n)."""
    tiles = -(-n_units // grain)
    bounds = np.arange(slices + 1, dtype=np.int64) * tiles // slices * grain
    return np.minimum(bounds, n_units)


# -- file --------------------------------------------------------------------------------------


def save_plan(plan: Plan, path: str | Path) -> Plan:
    """Write plan.h5 atomically and return the plan with its content digest.

    Raises: K3Error when the file cannot be written.
    """
    datasets = tensor_datasets(plan.tensors) | _fired_datasets(plan.fired)
    for phase in plan.phases.values():
        datasets |= _phase_datasets(phase)
    digest = write_artifact(
        path,
        "plan",
        PLAN_SCHEMA,
        datasets,
        attrs=_attrs(plan),
        inputs=plan.inputs,
        params=plan.params,
        target=str(plan.params["target"]),
        isa_hash=isa_hash(),
    )
    return Plan(
        plan.tensors, plan.phases, plan.params, plan.fired, plan.inputs, digest
    )


def load_plan(path: str | Path) -> Plan:
    """Read and check plan.h5. Raises: ArtifactError naming the file and what differs."""
    with open_artifact(path, "plan", PLAN_SCHEMA, isa_hash=isa_hash()) as file:
        found = phases_in(file.names(), "phases/")
        needed = {*tensor_datasets(()), *_fired_datasets(())}
        needed |= {f"phases/{name}/{part}" for name in found for part in ("wire", "made_by")}
        data = {name: file.read(name) for name in needed}  # one that is absent is refused by name
        params, inputs, digest = file.params, tuple(file.inputs), file.digest
        attrs = dict(file.attrs)
    for name in (f"{phase}.{word}" for phase in found for word in _PHASE_NUMBERS):
        if name not in attrs:
            raise ArtifactError(f"{path}: {name}", got="absent", need="an attribute of a plan")
    phases = {name: _read_phase(name, data, attrs, str(path)) for name in found}
    tensors = read_tensors(data)
    require_phases(tensors, found, str(path))
    return Plan(tensors, phases, params, _read_fired(data), inputs, digest)


def phases_in(datasets: Sequence[str], root: str = "") -> tuple[str, ...]:
    """Return the phases that an artifact's datasets belong to; a plan may have only one."""
    return tuple(p for p in PHASES if any(name.startswith(f"{root}{p}/") for name in datasets))


def require_phases(tensors: Sequence[Tensor], found: Sequence[str], where: str) -> None:
    """Refuse an artifact without a phase, or without one that has buffers (ArtifactError)."""
    missing = sorted({tensor.phase for tensor in tensors} - {"", *found})
    if missing or not found:
        got = " and ".join(found) or "none"
        need = " and ".join(missing) or " or ".join(PHASES)
        raise ArtifactError(f"{where}: phases", got=got, need=need)


_MAX_DIMS = 4
_TENSOR_TEXTS = ("name", "role", "dtype", "phase", "leaf", "source", "split")
_PHASE_NUMBERS = (
    "max_tokens", "n_gates", "arena_bytes", "peer_bytes", "packet_path", "critical_path",
)  # fmt: skip


def tensor_datasets(tensors: Sequence[Tensor]) -> dict[str, Dataset]:
    """Return the handle table as datasets; a plan and the stream emitted from it hold the same."""
    texts = {
        f"tensors/{text}": Dataset([str(getattr(t, text)) for t in tensors], ("handle",))
        for text in _TENSOR_TEXTS
    }
    shapes = {}
    for kind in ("logical", "local"):
        rows = [(getattr(t, kind) + (0,) * _MAX_DIMS)[:_MAX_DIMS] for t in tensors]
        shapes[f"tensors/{kind}"] = Dataset(
            np.array(rows, dtype=np.int64).reshape(-1, _MAX_DIMS), ("handle", "axis"), "elements"
        )
    numbers = {
        f"tensors/{kind}": Dataset(
            np.array([getattr(t, kind) for t in tensors], dtype=np.int64), ("handle",), "bytes"
        )
        for kind in ("n_bytes", "offset")
    }
    dims = np.array([len(t.local) for t in tensors], dtype=np.int64)
    return texts | shapes | numbers | {"tensors/n_axes": Dataset(dims, ("handle",), "axes")}


def read_tensors(data: Mapping[str, Records]) -> tuple[Tensor, ...]:
    """Return the handle table of datasets that `tensor_datasets` made."""
    column = {name.removeprefix("tensors/"): data[name] for name in data if "tensors/" in name}
    out = []
    for row in range(len(column["name"])):
        text = {name: str(column[name][row]) for name in _TENSOR_TEXTS}
        logical, local = (
            tuple(column[kind][row][: column["n_axes"][row]].tolist())
            for kind in ("logical", "local")
        )
        n_bytes, offset = (int(column[kind][row]) for kind in ("n_bytes", "offset"))
        out.append(Tensor(logical=logical, local=local, n_bytes=n_bytes, offset=offset, **text))
    return tuple(out)


def _phase_datasets(phase: Phase) -> dict[str, Dataset]:
    root = f"phases/{phase.name}"
    packed = np.frombuffer(wire.encode(phase.packets, phase.waits), dtype=np.uint8)
    return {
        f"{root}/wire": Dataset(packed, ("byte",), "bytes"),
        f"{root}/made_by": Dataset([" ".join(map(str, n)) for n in phase.made_by], ("packet",)),
    }


def _attrs(plan: Plan) -> dict[str, str | int | float | bool]:
    attrs: dict[str, str | int | float | bool] = {}
    for phase in plan.phases.values():
        attrs |= {f"{phase.name}.{name}": int(getattr(phase, name)) for name in _PHASE_NUMBERS}
    return attrs


def _read_phase(
    name: str, data: Mapping[str, Records], attrs: Mapping[str, object], where: str
) -> Phase:
    root = f"phases/{name}"
    packets, waits = wire.decode(data[f"{root}/wire"].tobytes(), f"{where}: {name}")
    numbers = {key: int(str(attrs[f"{name}.{key}"])) for key in _PHASE_NUMBERS}
    made_by = tuple(_numbers(str(text), f"{where}: {root}") for text in data[f"{root}/made_by"])
    if len(made_by) != len(packets):
        got, need = len(made_by), f"{len(packets)} rows"
        raise ArtifactError(f"{where}: {root}/made_by", got=got, need=need)
    return Phase(name=name, packets=packets, waits=waits, made_by=made_by, **numbers)


def _numbers(text: str, where: str) -> tuple[int, ...]:
    words = text.split()
    if not all(word.isdecimal() for word in words):
        raise ArtifactError(f"{where}/made_by", got=repr(text), need="row numbers")
    return tuple(map(int, words))


def _fired_datasets(fired: Sequence[Fired]) -> dict[str, Dataset]:
    out = {
        f"fired/{text}": Dataset([str(getattr(row, text)) for row in fired], ("application",))
        for text in ("rule", "root", "binding")
    }
    used = np.array([row.used for row in fired], dtype=np.uint8)
    return out | {"fired/used": Dataset(used, ("application",), "flag")}


def _read_fired(data: Mapping[str, Records]) -> tuple[Fired, ...]:
    columns = (data["fired/rule"], data["fired/root"], data["fired/binding"], data["fired/used"])
    return tuple(
        Fired(str(rule), str(root), str(binding), bool(used))
        for rule, root, binding, used in zip(*columns, strict=True)
    )

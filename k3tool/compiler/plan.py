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

from k3tool.artifact import Artifact, Dataset, InputRef, open_artifact, write_artifact
from k3tool.errors import ArtifactError, quoted
from k3tool.fields import Fields, attrs_of, column, params_of, texts
from k3tool.isa import wire
from k3tool.isa.op_spec import NO_HANDLE
from k3tool.isa.table import ALL_PHASES, MOST_IO_QUEUES, SPECS, Op, isa_hash
from k3tool.targets import MOST, MOST_RANKS, TARGETS

PLAN_SCHEMA = 2
NUMERICS_VERSION = 1

# Whole in memory or mapped, or arriving: one matrix, or a matrix of every expert.
WEIGHT_ROLES = ("weight", "ring", "experts", "slots")
EXPERT_ROLES = ("experts", "slots")

Records = npt.NDArray[Any]


class Tensor(NamedTuple):
    """One row of the handle table.

    `logical` is the shape over all ranks, `local` of one rank's part, `n_bytes` the size of that
    part. `offset` is in bytes: of the phase's arena (role arena), of the peer segment (role peer),
    else 0. `phase` is set for what belongs to one phase. A weight has its `leaf` name, the stored
    tensor's full name (`source`; an expert leaf's holds `{E}` and ends before `.weight_packed`) and
    the table's split rule (`split`). Under a memory budget a weight that comes by LOAD has role
    "ring" and `offset` in the ring of weights, experts that come by EXPERT_FETCH role "slots" and
    as `offset` which of a slot's matrices they are.
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
    def is_weight(self) -> bool:
        """Whether it is stored in the checkpoint, wherever it lies when it is read."""
        return self.role in WEIGHT_ROLES

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
    return Plan(plan.tensors, plan.phases, plan.params, plan.fired, plan.inputs, digest)


def load_plan(path: str | Path) -> Plan:
    """Read and check plan.h5. Raises: ArtifactError naming the file and what differs."""
    with open_artifact(path, "plan", PLAN_SCHEMA, isa_hash=isa_hash()) as file:
        found = phases_in(file.names(), "phases/")
        params = program_params(file)
        tensors, fired = read_tensors(file), _read_fired(file)
        require_phases(tensors, found, str(path))
        phases = {name: _read_phase(file, name, len(fired)) for name in found}
        return Plan(tensors, phases, params, fired, tuple(file.inputs), file.digest)


def program_params(file: Artifact) -> dict[str, Any]:
    """Return the params of a plan or stream: all that a reader takes from them is there and typed.

    `config` may be absent (a check then is NOT RUN) and is the model reader's to refuse.
    Raises: ArtifactError naming file and field.
    """
    require_params(params_of(file))
    return file.params


def require_params(fields: Fields) -> None:
    """Refuse a program's parameters unless all that a reader takes from them is there and typed.

    Raises: ArtifactError naming the field.
    """
    fields.count("tp", least=1, most=MOST_RANKS)
    for name in ("workgroups", "chunk", "batch", "ctx"):
        fields.count(name, least=1, most=MOST.get(name, _MOST_POSITIONS))
    if fields.text("target") not in TARGETS:
        fields.refuse("target", fields.text("target"), " or ".join(sorted(TARGETS)))
    fields.text("checkpoint_identity")
    fields.present("numerics")
    fields.text_table("theorems")
    fields.number_table("eps")
    fields.texts("rules_off")
    fields.texts("rules")
    fields.count("pages_per_slot", least=1, most=_MOST_POSITIONS)
    if "residency" in fields.values:
        _require_residency(fields, fields.values["residency"])


def _require_residency(fields: Fields, found: object) -> None:
    """Refuse a memory budget's params that are not counts, or name no I/O worker."""
    bytes_, queues = (0, _MOST_BYTES), (1, MOST_IO_QUEUES)
    bounds = {"ring_bytes": bytes_, "slots": (0, _MOST_POSITIONS), "slot_bytes": bytes_,
              "load_queues": queues, "fetch_queues": queues}  # fmt: skip
    if not isinstance(found, dict) or set(found) != set(bounds):
        fields.refuse("residency", found, f"counts of {', '.join(bounds)}")
    for name, (least, most) in bounds.items():
        if type(found[name]) is not int or not least <= found[name] <= most:
            need = f"{name} an integer from {least} to {most}"
            fields.refuse("residency", f"{name} {found[name]}", need)


def phases_in(datasets: Sequence[str], root: str = "") -> tuple[str, ...]:
    """Return the phases that an artifact's datasets belong to; a plan may have only one."""
    return tuple(p for p in ALL_PHASES if any(name.startswith(f"{root}{p}/") for name in datasets))


def require_phases(tensors: Sequence[Tensor], found: Sequence[str], where: str) -> None:
    """Refuse an artifact without a phase, or without one that has buffers (ArtifactError)."""
    missing = sorted({tensor.phase for tensor in tensors} - {"", *found})
    if missing or not found:
        got = " and ".join(found) or "none"
        need = " and ".join(missing) or " or ".join(ALL_PHASES)
        raise ArtifactError(f"{where}: phases", got=got, need=need)


ROLES = ("arena", "peer", "state", "output", "logits", *WEIGHT_ROLES)
DTYPES = ("bf16", "f32", "u32", "mxfp4")
_MOST_POSITIONS = 1 << 31  # as the interpreters count them
_MAX_DIMS = 4
_MOST_BYTES = 1 << 48  # of anything in a plan: sums of such numbers stay far from 64 bits
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


def read_tensors(file: Artifact) -> tuple[Tensor, ...]:
    """Return the handle table of a plan or stream.

    Raises: ArtifactError naming the dataset, or the tensor that no builder would make.
    """
    names = texts(file, "tensors/name")
    n = len(names)
    words = {kind: texts(file, f"tensors/{kind}", n) for kind in _TENSOR_TEXTS}
    shapes = {
        kind: column(file, f"tensors/{kind}", "<i8", _MAX_DIMS, n_rows=n)
        for kind in ("logical", "local")
    }
    numbers = {
        kind: column(file, f"tensors/{kind}", "<i8", n_rows=n).tolist()
        for kind in ("n_bytes", "offset", "n_axes")
    }
    out = []
    for row in range(n):
        n_axes = numbers["n_axes"][row]
        logical, local = (tuple(shapes[kind][row][:n_axes].tolist()) for kind in shapes)
        tensor = Tensor(
            logical=logical, local=local, n_bytes=numbers["n_bytes"][row],
            offset=numbers["offset"][row], **{kind: words[kind][row] for kind in _TENSOR_TEXTS},
        )  # fmt: skip
        _require_tensor(tensor, n_axes, f"{file.path}: tensors: row {row} ({tensor.name})")
        out.append(tensor)
    if len(set(names)) != n or n >= NO_HANDLE:
        got = f"{n} rows, {len(set(names))} names"
        need = f"a name of its own for each of at most {NO_HANDLE - 1}"
        raise ArtifactError(f"{file.path}: tensors/name", got=got, need=need)
    return tuple(out)


def _require_tensor(tensor: Tensor, n_axes: int, where: str) -> None:
    """Refuse what a layout could not be made of; whether it is the right one the checks say."""
    rules = (
        ("role", tensor.role in ROLES, tensor.role, " or ".join(ROLES)),
        ("dtype", tensor.dtype in DTYPES, tensor.dtype, " or ".join(DTYPES)),
        ("phase", tensor.phase in ("", *ALL_PHASES), tensor.phase, " or ".join(ALL_PHASES)),
        ("n_axes", 1 <= n_axes <= _MAX_DIMS, n_axes, f"1 to {_MAX_DIMS}"),
        ("logical", all(0 < x < _MOST_BYTES for x in tensor.logical), tensor.logical, "above 0"),
        ("local", all(0 < x < _MOST_BYTES for x in tensor.local), tensor.local, "above 0"),
        ("n_bytes", 0 < tensor.n_bytes < _MOST_BYTES, tensor.n_bytes, "above 0"),
        ("offset", 0 <= tensor.offset < _MOST_BYTES, tensor.offset, "at least 0"),
    )
    for name, good, got, need in rules:
        if not good:
            raise ArtifactError(f"{where}: {name}", got=quoted(got), need=need)


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


def _read_phase(file: Artifact, name: str, n_fired: int) -> Phase:
    root, where = f"phases/{name}", str(file.path)
    fields = attrs_of(file)
    numbers = {key: fields.count(f"{name}.{key}", most=_MOST_BYTES) for key in _PHASE_NUMBERS}
    packed = column(file, f"{root}/wire", "u1")
    packets, waits = wire.decode(packed.tobytes(), f"{where}: {name}")
    rows = texts(file, f"{root}/made_by", len(packets))
    made_by = tuple(_numbers(text, n_fired, f"{where}: {root}") for text in rows)
    return Phase(name=name, packets=packets, waits=waits, made_by=made_by, **numbers)


def _numbers(text: str, n_rows: int, where: str) -> tuple[int, ...]:
    words = text.split()
    # Not isdecimal alone: digits of other scripts, and int() fails at some thousands of them.
    if not all(w.isascii() and w.isdecimal() and len(w) < 10 and int(w) < n_rows for w in words):
        raise ArtifactError(f"{where}/made_by", got=quoted(text), need=f"rows below {n_rows}")
    return tuple(map(int, words))


def _fired_datasets(fired: Sequence[Fired]) -> dict[str, Dataset]:
    out = {
        f"fired/{text}": Dataset([str(getattr(row, text)) for row in fired], ("application",))
        for text in ("rule", "root", "binding")
    }
    used = np.array([row.used for row in fired], dtype=np.uint8)
    return out | {"fired/used": Dataset(used, ("application",), "flag")}


def _read_fired(file: Artifact) -> tuple[Fired, ...]:
    rules = texts(file, "fired/rule")
    rest = [texts(file, f"fired/{name}", len(rules)) for name in ("root", "binding")]
    used = column(file, "fired/used", "u1", n_rows=len(rules)).astype(bool).tolist()
    for row, flag in enumerate(column(file, "fired/used", "u1").tolist()):
        if flag > 1:
            raise ArtifactError(f"{file.path}: fired/used: row {row}", got=flag, need="0 or 1")
    return tuple(Fired(*row) for row in zip(rules, *rest, used, strict=True))

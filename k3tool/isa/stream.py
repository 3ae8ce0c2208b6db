"""isa.h5: what the interpreters execute, per phase and rank, and the checks a loader makes on it.

Entries, waits, signals and counts are the same on every rank; instructions differ only in per-rank
parameters. A loaded stream is in range everywhere (an interpreter indexes without looking); whether
it is ordered soundly is ``k3tool.compiler.checks``.

Letters: P instructions, E entries, W workgroups, R ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.artifact import Artifact, Dataset, InputRef, open_artifact, write_artifact
from k3tool.compiler.plan import (
    Tensor,
    phases_in,
    program_params,
    read_tensors,
    require_phases,
    tensor_datasets,
)
from k3tool.fields import column
from k3tool.isa import op_spec, table
from k3tool.isa.columns import ENTRY_DTYPE, WAIT_DTYPE, Columns
from k3tool.isa.queues import Crew, Queues, crew_of
from k3tool.isa.stream_checks import check_tables, refuse
from k3tool.isa.windows import Windows
from k3tool.targets import TARGETS

ISA_SCHEMA = 1
_MOST_NUMBER = 1 << 48  # of bytes, floats or tokens
_NUMBERS = ("max_tokens", "scratch_floats", "arena_bytes", "peer_bytes")


@dataclass(frozen=True, slots=True)
class Stream:
    """One phase of a program.

    `instructions[rank]` is (P, 16) u4; `queues` says who executes what. `scratch_floats` is the
    most any instruction asks a workgroup for. `windows` are None where the target has one domain.
    """

    name: str
    max_tokens: int
    scratch_floats: int
    arena_bytes: int
    peer_bytes: int
    instructions: tuple[Columns, ...]
    queues: Queues
    windows: Windows | None = None

    @property
    def n_gates(self) -> int:
        """Return the number of gates in the peer segment."""
        return len(self.queues.gate_counts)

    @property
    def n_workgroups(self) -> int:
        """Return the number of queues."""
        return len(self.queues.queue_ofs) - 1


@dataclass(frozen=True, slots=True)
class Isa:
    """A program for one target: the handle table (as in the plan), streams, and where it came from.

    `params` are the plan's. `inputs` are the plan itself (role ``plan``) and what the plan was made
    from, so that a reader can check a common ancestor. `digest` is empty until saved or loaded.
    """

    target: str
    tensors: tuple[Tensor, ...]
    streams: Mapping[str, Stream]
    params: Mapping[str, Any]
    inputs: tuple[InputRef, ...]
    digest: str = ""

    @property
    def tp(self) -> int:
        """Return the number of ranks."""
        return int(self.params["tp"])

    @property
    def n_workgroups(self) -> int:
        """Return the number of workgroups, the same in every phase; I/O queues come last."""
        return sum(self.crew)

    @property
    def residency(self) -> Mapping[str, Any] | None:
        """Return what a memory budget decided, None where weights simply lie in memory."""
        found: Mapping[str, Any] | None = self.params.get("residency")
        return found

    @property
    def crew(self) -> Crew:
        """Return how many queues of each kind there are."""
        return crew_of(self.params)

    def opcodes(self) -> dict[str, set[int]]:
        """Return the opcodes of each phase's instructions."""
        return {
            name: {int(op) for rank in stream.instructions for op in np.unique(rank[:, 0] & 0xFFFF)}
            for name, stream in self.streams.items()
        }


def save_isa(isa: Isa, path: str | Path) -> str:
    """Write isa.h5 atomically and return its content digest.

    Raises: K3Error when the file cannot be written.
    """
    datasets = tensor_datasets(isa.tensors)
    for stream in isa.streams.values():
        datasets |= _stream_datasets(stream)
    return write_artifact(
        path,
        "isa",
        ISA_SCHEMA,
        datasets,
        inputs=isa.inputs,
        params=isa.params,
        target=isa.target,
        isa_hash=table.isa_hash(),
    )


def load_isa(path: str | Path) -> Isa:
    """Read isa.h5 and check every index in it.

    Raises: ArtifactError naming the file, the phase and what is out of range.
    """
    isa = read_isa(path)
    check_isa(isa, str(path))
    return isa


def read_isa(path: str | Path) -> Isa:
    """Read isa.h5 without looking at what its tables hold: for a checker that reports on them.

    Raises: ArtifactError naming the file and what is absent or of another form.
    """
    with open_artifact(path, "isa", ISA_SCHEMA, isa_hash=table.isa_hash()) as file:
        params = program_params(file)
        if file.target != params["target"]:
            refuse(f"{path}: target", file.target, params["target"])
        tensors = read_tensors(file)
        found = phases_in(file.names())
        require_phases(tensors, found, str(path))
        streams = {phase: _read_stream(file, phase) for phase in found}
        return Isa(params["target"], tensors, streams, params, tuple(file.inputs), file.digest)


def check_isa(isa: Isa, where: str) -> None:
    """Check every table of a program. Raises: ArtifactError naming the phase and what is wrong."""
    for name, stream in isa.streams.items():
        check_tables(
            stream.instructions,
            stream.queues,
            n_tensors=len(isa.tensors),
            n_ranks=isa.tp,
            crew=isa.crew,
            at=f"{where}: {name}",
        )


# -- file ----------------------------------------------------------------------------------------


def _stream_datasets(stream: Stream) -> dict[str, Dataset]:
    root, queues = stream.name, stream.queues
    numbers = np.array([getattr(stream, name) for name in _NUMBERS], np.int64)
    entries = np.ascontiguousarray(queues.entries).view("<u4").reshape(-1, 8)
    waits = np.ascontiguousarray(queues.waits).view("<u4").reshape(-1, 2)
    out = {
        f"{root}/numbers": Dataset(numbers, ("field",), " ".join(_NUMBERS)),
        f"{root}/entries": Dataset(entries, ("entry", "word"), "K3Entry"),
        f"{root}/queue_ofs": Dataset(queues.queue_ofs, ("workgroup",), "entries"),
        f"{root}/waits": Dataset(waits, ("wait", "word"), "K3Wait"),
        f"{root}/signals": Dataset(queues.signals, ("signal",), "counter"),
        f"{root}/local_counts": Dataset(queues.local_counts, ("counter",), "arrivals"),
        f"{root}/gate_counts": Dataset(queues.gate_counts, ("gate",), "arrivals"),
    }
    if stream.windows is not None:
        out |= {
            f"{root}/windows": Dataset(stream.windows.order, ("entry",), "entry"),
            f"{root}/window_ofs": Dataset(stream.windows.window_ofs, ("domain",), "entries"),
            f"{root}/arrivals": Dataset(
                stream.windows.arrivals, ("instruction", "domain"), "arrivals"
            ),
        }
    for rank, records in enumerate(stream.instructions):
        out[f"{root}/rank-{rank:02d}/instructions"] = Dataset(
            records, ("instruction", "word"), "K3Inst"
        )
    return out


def _read_stream(file: Artifact, phase: str) -> Stream:
    where = f"{file.path}: {phase}"

    def words(name: str, *widths: int) -> Columns:
        return column(file, f"{phase}/{name}", "<u4", *widths)

    numbers = column(file, f"{phase}/numbers", "<i8", n_rows=len(_NUMBERS)).tolist()
    for number in numbers:
        if not 0 <= number <= _MOST_NUMBER:
            refuse(f"{where}/numbers", number, f"0 to {_MOST_NUMBER}")
    ranks = sorted(name for name in file.names() if name.startswith(f"{phase}/rank-"))
    records = tuple(words(name.removeprefix(f"{phase}/"), op_spec.RECORD_WORDS) for name in ranks)
    queues = Queues(
        entries=words("entries", 8).view(ENTRY_DTYPE).reshape(-1),
        queue_ofs=words("queue_ofs"),
        waits=words("waits", 2).view(WAIT_DTYPE).reshape(-1),
        signals=words("signals"),
        local_counts=words("local_counts"),
        gate_counts=words("gate_counts"),
    )
    windows = None
    domains = TARGETS[str(file.target)].domains
    if domains > 1:
        windows = Windows(words("windows"), words("window_ofs"), words("arrivals", domains))
    fields = dict(zip(_NUMBERS, numbers, strict=True))
    return Stream(phase, instructions=records, queues=queues, windows=windows, **fields)

"""Whether a run reads its weights into memory of its own first, or uses them as files are mapped.

Mapped weights lie on 4 KiB pages wherever the file system keeps its cache so, and a token that
walks all of them once misses the TLB at every page; a copy lies on 2 MiB pages. It is worth its
time where a run is long, and its room where there is plenty. It decides; `k3-cpu` copies.

Measured (2026-11, two cores, 33 GB/s, mid of 3 GB, mode bf16): a token takes 58 ms copied and 64 ms
mapped; the copy itself takes 0.4 s a gigabyte from the page cache, more beside other work.
"""

from collections.abc import Sequence

from k3tool.bench.anatomy import packet_bytes
from k3tool.errors import UsageError
from k3tool.isa.device import unpack
from k3tool.isa.stream import Isa
from k3tool.memory import require_room, rooms
from k3tool.runtime.weights import RankWeights

CHOICES = ("auto", "mapped", "copied")
# A run that reads the bytes of all weights so often has gained twice the time that copying takes:
# 0.4 s a gigabyte against a tenth of what reading one takes, at 33 GB/s.
PAYS_FROM = 256
# Of what limits leave: two runs that start together both fit.
MOST_SHARE = 0.5


def weight_bytes(ranks: Sequence[RankWeights]) -> int:
    """Return the bytes of all ranks' files."""
    return sum(rank.folder.header(file).size for rank in ranks for file in rank.folder.index.files)


def has_room(n_bytes: int) -> bool:
    """Return whether a copy of so many bytes leaves as much again free."""
    least = min(rooms(), default=None)
    return least is None or n_bytes <= least.n_bytes * MOST_SHARE


def has_copy(choice: str, ranks: Sequence[RankWeights]) -> bool:
    """Return whether weights are copied by a run long enough. Raises: TargetError as `copies`."""
    n_bytes = weight_bytes(ranks)
    if choice == "copied":
        require_room(n_bytes, "a copy of the weights")
    return choice == "copied" or (choice == "auto" and has_room(n_bytes))


def copies(choice: str, isa: Isa, ranks: Sequence[RankWeights], n_gen: int) -> bool:
    """Return whether to copy. `auto` does where there is room and `n_gen` tokens gain by it.

    Raises: TargetError if `copied` is asked for and does not fit; UsageError if under a budget,
    whose weights are read as the budget says.
    """
    if isa.residency is not None and choice != "auto":
        need = "auto under --memory, which decides"
        raise UsageError("--weights", got=choice, need=need, hint="leave out --weights")
    if isa.residency is not None or choice == "mapped":
        return False
    if choice == "auto" and not pays(isa, weight_bytes(ranks), n_gen):
        return False
    return has_copy(choice, ranks)


def pays(isa: Isa, n_bytes: int, n_gen: int) -> bool:
    """Return whether `n_gen` tokens of one sequence read enough to gain what copying takes."""
    packets = unpack(isa.streams["decode"].instructions[0])
    a_token = int(packet_bytes(packets, isa.tensors, 0).sum()) * isa.tp
    return n_gen * a_token >= PAYS_FROM * n_bytes

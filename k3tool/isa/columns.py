"""NumPy columns of packets, waits and stream entries: the only in-memory form of a program.

A K3 stream has hundreds of thousands of entries, so there is no object per packet or entry; every
pass is array arithmetic over these columns. It does not know any file format (wire, device).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.isa.op_spec import N_HANDLES, N_PARAMS, NO_HANDLE, OpSpec
from k3tool.isa.table import SPECS, Op

Columns = npt.NDArray[Any]

# A counter id with this bit is a gate: it lives in the peer segment and every rank arrives at it
# (K3_SYSTEM in kernels_common/k3.h).
GATE = 0x80000000

PACKET_DIGEST = 1  # the result is the same on every rank: its bits go into the step's digest
PACKET_REARM = 2  # arrives at the argmax fold: clears the counters' other bank first

# One row a packet, in topological order; quantities are one rank's. `handles` has NO_HANDLE in
# slots, and `params` 0 in words, that the op's row does not have. `counter` is the packet's index,
# or a gate's number | GATE; `threshold` its arrivals when the packet is done (all ranks' for a
# gate). Waits wait_ofs .. wait_ofs + n_waits hold for every slice.
PACKET_DTYPE = np.dtype(
    [
        ("op", "<u2"),
        ("flags", "<u2"),
        ("handles", "<u2", (N_HANDLES,)),
        ("n_units", "<u4"),
        ("width", "<u4"),
        ("unit_cols", "<u4"),
        ("params", "<u4", (N_PARAMS,)),
        ("grain", "<u4"),
        ("n_slices", "<u4"),
        ("counter", "<u4"),
        ("threshold", "<u4"),
        ("wait_ofs", "<u4"),
        ("n_waits", "<u4"),
    ]
)

WAIT_DTYPE = np.dtype([("counter", "<u4"), ("threshold", "<u4")])

# K3Entry of kernels_common/k3.h: one slice of one instruction in a workgroup's queue.
ENTRY_DTYPE = np.dtype(
    [
        ("inst", "<u4"),
        ("unit0", "<u4"),
        ("unit1", "<u4"),
        ("wait_ofs", "<u4"),
        ("signal_ofs", "<u4"),
        ("n_waits", "<u2"),
        ("n_signals", "<u2"),
        ("slice", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u4"),
    ]
)
assert ENTRY_DTYPE.itemsize == 32


def empty_packets(n_packets: int) -> Columns:
    """Return `n_packets` rows that use no handle and no parameter."""
    packets = np.zeros(n_packets, PACKET_DTYPE)
    packets["handles"] = NO_HANDLE
    return packets


def spec_of(op: int) -> OpSpec | None:
    """Return the table row of an instruction's opcode, None where the table has none."""
    try:
        spec = SPECS[Op(op)]
    except ValueError:
        return None
    return spec if spec.is_emitted else None

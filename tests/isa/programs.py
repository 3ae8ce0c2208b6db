"""Random and hand-made programs that several tests of the instruction set share."""

import numpy as np
from hypothesis import strategies as st

from k3tool.isa import op_spec, table, wire
from k3tool.isa.columns import GATE, WAIT_DTYPE, Columns, empty_packets

EMITTED = sorted(op for op, spec in table.SPECS.items() if spec.is_emitted)
U32 = st.integers(0, 0xFFFFFFFF)


@st.composite
def programs(draw: st.DrawFn, max_units: int = 0xFFFFFFFF) -> tuple[Columns, Columns]:
    """Any well-formed program: it need not mean anything."""
    ops = draw(st.lists(st.sampled_from(EMITTED), max_size=6))
    packets, waits = empty_packets(len(ops)), []
    for index, op in enumerate(ops):
        row, spec = packets[index : index + 1], table.SPECS[op]
        row["op"], row["flags"] = op, draw(st.integers(0, 3))
        last = op_spec.NO_HANDLE - len(spec.operands)  # a slot's operands have neighbouring handles
        for slot in range(spec.n_slots):
            row["handles"][0, slot] = draw(st.integers(0, last))
        for word in range(len(spec.params)):
            row["params"][0, word] = draw(U32)
        row["n_units"] = draw(st.integers(1, max_units))
        row["width"], row["unit_cols"] = draw(st.integers(1, 0xFFFFFFFF)), draw(U32)
        row["grain"] = draw(st.integers(1, 64))
        tiles = -(-int(row["n_units"][0]) // int(row["grain"][0]))
        row["n_slices"] = draw(st.integers(1, min(tiles, wire.MAX_SLICES)))
        gate = draw(st.booleans())
        row["counter"] = GATE | draw(st.integers(0, len(ops) - 1)) if gate else index
        row["threshold"] = draw(st.integers(1, 0xFFFFFFFF))
        row["wait_ofs"], row["n_waits"] = len(waits), draw(st.integers(0, 4))
        for _ in range(int(row["n_waits"][0])):
            counter = draw(st.integers(0, len(ops) - 1)) | (GATE if draw(st.booleans()) else 0)
            waits.append((counter, draw(st.integers(1, 0xFFFFFFFF))))
    return packets, np.array(waits, WAIT_DTYPE)


def one_packet() -> tuple[Columns, Columns]:
    """A norm that waits on a gate."""
    packets = empty_packets(1)
    packets["op"], packets["handles"][0, :3] = table.Op.RMSNORM, (4, 5, 6)
    packets["n_units"], packets["width"], packets["grain"] = 1, 8, 1
    packets["n_slices"], packets["threshold"], packets["n_waits"] = 1, 1, 1
    return packets, np.array([(GATE, 8)], WAIT_DTYPE)

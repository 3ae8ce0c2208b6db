"""The device form of an instruction: 64-byte records packed from packet columns, and back.

A record holds what an op body sees. Slices, waits and signals are of the stream entry
(``k3tool.isa.queues``), so they are not here; word positions are the op table's.
"""

import numpy as np

from k3tool.isa import op_spec
from k3tool.isa.columns import Columns, empty_packets, spec_of

RECORD_FIELDS = ("op", "flags", "handles", "n_units", "width", "unit_cols", "params")


def pack(packets: Columns, rank: int) -> Columns:
    """Return one rank's records, (P, 16) u4, of (P,) PACKET_DTYPE packets.

    A parameter of kind ``u32_per_rank`` is a stride in the packet and stride * rank in the record.
    """
    records = np.zeros((len(packets), op_spec.RECORD_WORDS), "<u4")
    records[:, 0] = packets["op"].astype("<u4") | packets["flags"].astype("<u4") << 16
    handles = np.ascontiguousarray(packets["handles"]).view("<u4")
    records[:, op_spec.WORD_HANDLES : op_spec.WORD_UNITS] = handles
    records[:, op_spec.WORD_UNITS] = packets["n_units"]
    records[:, op_spec.WORD_WIDTH] = packets["width"]
    records[:, op_spec.WORD_UNIT_COLS] = packets["unit_cols"]
    params = packets["params"].astype(np.int64) * _factors(packets["op"], rank)
    assert (params < 1 << 32).all(), "a per-rank parameter does not fit its word"
    records[:, op_spec.WORD_PARAMS :] = params
    return records


def unpack(records: Columns) -> Columns:
    """Return packets of which only RECORD_FIELDS are filled; parameters are the record's rank's."""
    assert records.ndim == 2, records.shape
    assert records.shape[1] == op_spec.RECORD_WORDS, records.shape
    packets = empty_packets(len(records))
    packets["op"] = records[:, 0] & 0xFFFF
    packets["flags"] = records[:, 0] >> 16
    words = np.ascontiguousarray(records[:, op_spec.WORD_HANDLES : op_spec.WORD_UNITS], "<u4")
    packets["handles"] = words.view("<u2")
    packets["n_units"] = records[:, op_spec.WORD_UNITS]
    packets["width"] = records[:, op_spec.WORD_WIDTH]
    packets["unit_cols"] = records[:, op_spec.WORD_UNIT_COLS]
    packets["params"] = records[:, op_spec.WORD_PARAMS :]
    return packets


def _factors(ops: Columns, rank: int) -> Columns:
    """Return what each parameter word is multiplied by: the rank for per-rank ones, else 1."""
    factors = np.ones((len(ops), op_spec.N_PARAMS), np.int64)
    for op in np.unique(ops):
        spec = spec_of(int(op))
        assert spec is not None, op
        for word, param in enumerate(spec.params):
            if param.kind == "u32_per_rank":
                factors[ops == op, word] = rank
    return factors

"""Multiplications and additions of a step's packets: what cannot be left out of its products.

A matrix costs two operations an element and token, an expert's for each token that chose it; a
state of the delta rule two sums and an update an element and token; attention what `attention.py`
counts. Norms, activations, softmax and convolutions of four taps are little beside them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.bench.attention import attention_work
from k3tool.compiler.plan import EXPERT_ROLES, Tensor
from k3tool.compiler.record_checks import handles_of
from k3tool.isa.columns import spec_of
from k3tool.isa.op_spec import OpSpec
from k3tool.isa.table import ROW_LOOKUPS, Op

Array = npt.NDArray[Any]
_KEY_HALF = frozenset({Op.MLA_QLAT, Op.MLA_QUERY})  # of kv_b; the others that name it: values
_VALUE_HALF = frozenset({Op.MLA_UV, Op.MLA_UV_GATE, Op.MLA_MERGE})
_DELTA_STATE = "s"  # the operand's name in every op of the delta rule
DELTA_OPERATIONS = 6  # an element of it and token


def packet_operations(
    packets: Array, tensors: Sequence[Tensor], first: int, n_tokens: int
) -> Array:
    """Return each packet's operations in a step of tokens from position `first` on, (P, 2) i8.

    Column 0: on binary32; column 1: on pairs of bf16, where the leaves multiply such (x holds bf16
    values, and weights are rows of bf16 or MXFP4). The head is taken to run on one token.
    """
    found = np.zeros((len(packets), 2), np.int64)
    reach = sum(range(first + 1, first + n_tokens + 1))  # positions that all tokens look at
    for index, packet in enumerate(packets):
        spec = spec_of(int(packet["op"]))
        assert spec is not None, packet["op"]
        words = dict(zip((p.name for p in spec.params), packet["params"].tolist(), strict=False))
        handles = handles_of(spec, packet["handles"].tolist())
        flags = spec.flag_values(int(packet["flags"]))
        is_pairs = flags.get("x_bf16", flags.get("norm_round", flags.get("round", 0)))
        tokens = 1 if words.get("head_only") else n_tokens
        for operand in spec.operands:
            tensor = tensors[handles[operand.name]]
            if operand.role == "weight":
                on_f32, on_rows = _products(spec, operand.name, tensor, words)
                found[index, 0] += tokens * on_f32
                found[index, is_pairs] += tokens * on_rows
            elif operand.role == "state" and operand.name == _DELTA_STATE:
                found[index, 0] += DELTA_OPERATIONS * n_tokens * int(np.prod(tensor.local[1:]))
        found[index, 0] += reach * attention_work(packets[index : index + 1], 0).operations
    return found


def _products(spec: OpSpec, name: str, tensor: Tensor, words: Mapping[str, int]) -> tuple[int, int]:
    """Return a token's operations with a weight: those always on binary32, those on its rows."""
    elements = int(np.prod(tensor.local))
    if tensor.role in EXPERT_ROLES:
        return 0, 2 * elements // tensor.local[0] * words["top_k"]
    if tensor.dtype != "bf16" or len(tensor.local) < 2 or tensor.local[0] == 1:
        return 0, 0  # norms, projections to one number, taps
    if spec.op in ROW_LOOKUPS:
        return 0, 0
    if name != "kv_b":
        return 0, 2 * elements
    key = 2 * elements * words["nope"] // (words["nope"] + words["v"])  # by columns
    return (0 if spec.op in _VALUE_HALF else key), (
        0 if spec.op in _KEY_HALF else 2 * elements - key
    )

"""What the ops of a layer's program should have given: float64, from the engine's own inputs.

The host VM runs the same stream. Behind each instruction its result is compared with what the
engine wrote and then replaced by it, so an error is seen where it is made and goes no further.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from k3tool.blocks.weights import Experts, Source, numbers
from k3tool.compiler.plan import Tensor
from k3tool.isa.columns import spec_of
from k3tool.isa.stream import Isa
from k3tool.isa.table import Op
from k3tool.ref.formats import Array
from k3tool.ref.vm import Vm
from k3tool.trace.recorder import Recorder
from k3tool.trace.results import Result

# phase, result, rank, what it should be and what it was, both (positions, columns); first position
OnResult = Callable[[str, Result, int, Array, Array, int], None]


def _weight(source: Source, rank: int, tensor: Tensor) -> Any:
    """Return a rank's weight, read whenever an instruction asks for it, and not kept."""
    if tensor.dtype == "mxfp4":
        return Experts(source, tensor.source, rank)
    return numbers(source.read(tensor.source, rank)[: tensor.local[0]])


class Meaning:
    """Runs the steps that the engine has run, and hands over each result with the engine's."""

    def __init__(
        self, isa: Isa, source: Source, recorder: Recorder, constants: Mapping[int, float],
        on_result: OnResult,
    ) -> None:  # fmt: skip
        """Take the engine's program and what it recorded."""
        self._isa, self._recorder, self._on_result = isa, recorder, on_result
        weights = [partial(_weight, source, rank) for rank in range(isa.tp)]
        self._vm = Vm(isa, weights, constants, self._take)
        self._n_tokens = 0
        self._numbers = {
            phase: _by_instruction(found.results) for phase, found in recorder.results.items()
        }

    def step(self, phase: str, ids: list[int]) -> None:
        """Run the next tokens through a phase's program."""
        self._n_tokens = len(ids)
        self._vm.step(phase, ids)

    def _take(self, phase: str, index: int, rank: int, value: Array) -> None:
        first, n = self._vm.position, self._n_tokens
        spec = spec_of(int(self._isa.streams[phase].instructions[rank][index][0]) & 0xFFFF)
        assert spec is not None
        if spec.output.role == "inout":
            value = value[-1]  # of the stack the block that is new
        value, at = value[-n:], 0
        for number in self._numbers[phase].get(index, ()):
            result = self._recorder.results[phase].results[number]
            want = value[:, at : at + result.words]
            at += result.words
            rows = slice(first, first + n) if result.rows != "head" else slice(
                first + n - 1, first + n)  # fmt: skip
            got = numbers_of(result, self._recorder.kept_values(phase, number)[rank][rows])
            want = want[-len(got) :]
            self._on_result(phase, result, rank, want, got, rows.start)
            self._replace(result, rank, got, first)

    def _replace(self, result: Result, rank: int, got: Array, first: int) -> None:
        """Put what the engine wrote where the VM's own result is."""
        kept = self._vm.memories[rank][result.handle]
        if result.rows == "cache":
            kept.reshape(-1, kept.shape[-1])[first : first + len(got)] = got
        elif kept.ndim == 3:
            kept[result.base // (kept.shape[1] * kept.shape[2]), : len(got)] = got
        else:
            kept[self._n_tokens - len(got) : self._n_tokens] = got


def _by_instruction(results: tuple[Result, ...]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, result in enumerate(results):
        found.setdefault(result.inst, []).append(number)
    return found


def numbers_of(result: Result, bits: Array) -> Array:
    """Return a result's bits as float64; a route has expert ids in front of their weights.

    Shapes: bits (rows, words) u4 -> (rows, words).
    """
    values = np.ascontiguousarray(bits).view("<f4").astype(np.float64)
    half = bits.shape[1] // 2
    if result.op == Op.ROUTER_TOPK.name:
        values[:, :half] = bits[:, :half]
    elif result.op in (Op.ARGMAX.name, Op.ARGMAX_FOLD.name):
        values[:, 1] = bits[:, 1]
    return values

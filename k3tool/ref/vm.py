"""A host VM: runs the encoded stream of a rank group in float64, one instruction at a time.

It reads only what an interpreter reads (64-byte records, the handle table, one rank's weights), so
it tells a wrong program from a wrong body. All ranks run in lockstep in record order; slices and
counters are not modelled (``k3tool.compiler.checks`` is for those) and bits are not reproduced. One
sequence at a time, in slot 0 and pages 0, 1, ...
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from k3tool.checkpoint.reader import Checkpoint
from k3tool.compiler.handles import F32_BYTES
from k3tool.compiler.plan import EXPERT_ROLES, Tensor
from k3tool.isa import op_spec, table
from k3tool.isa.columns import spec_of
from k3tool.isa.op_spec import OpSpec
from k3tool.isa.stream import Isa, Stream
from k3tool.ref.formats import Array, Step, decode_bf16, decode_mxfp4
from k3tool.ref.forward import f32_value
from k3tool.ref.ops import REFERENCE, keyword_names, operand_names, split_result
from k3tool.ref.weights import ExpertLeaf

OnResult = Callable[[str, int, int, Array], None]  # phase, instruction, rank, the result's tokens
# Where one rank's weights come from: of a tensor its float64 array, or a leaf of experts by id.
WeightOf = Callable[[Tensor], Any]


class FolderWeights:
    """One rank's weights of an open folder, decoded when first asked for and then kept."""

    def __init__(self, folder: Checkpoint) -> None:
        """Take a rank's shards, or at TP 1 the checkpoint; nothing is read."""
        self._folder = folder
        self._values: dict[str, Any] = {}

    def __call__(self, tensor: Tensor) -> Any:
        """Return a weight. Raises: ArtifactError where the folder has not the tensor."""
        if tensor.name not in self._values:
            is_experts = tensor.role in EXPERT_ROLES
            self._values[tensor.name] = (self._leaf if is_experts else self._array)(tensor)
        return self._values[tensor.name]

    def _array(self, tensor: Tensor) -> Array:
        bits = self._folder.read(tensor.source)[: tensor.local[0]]
        return decode_bf16(bits) if tensor.dtype == "bf16" else bits.astype(np.float64)

    def _leaf(self, tensor: Tensor) -> ExpertLeaf:
        leaf = ExpertLeaf(self._folder, decode_mxfp4)
        for expert in range(tensor.local[0]):
            name = tensor.source.replace("{E}", str(expert))
            for part in ("weight_packed", "weight_scale"):
                leaf.name(expert, part, f"{name}.{part}")
        return leaf


class Memory:
    """One rank's tensors by handle; an arena or peer tensor is a view of its bytes' place.

    A word of an interpreter's memory is one float64 here, so tensors that share bytes share them
    here as well.
    """

    def __init__(self, isa: Isa, weight_of: WeightOf) -> None:
        """Lay out one rank; weights are asked for whenever an instruction reads them."""
        self._isa, self._weight_of = isa, weight_of
        self._arena = {
            name: np.empty(stream.arena_bytes // F32_BYTES) for name, stream in isa.streams.items()
        }
        words = max(stream.peer_bytes for stream in isa.streams.values()) // F32_BYTES
        self._peer = np.full(words, np.nan)
        self._values: dict[int, Array] = {}

    def poison(self, phase: str) -> None:
        """Fill the arena with NaN: nothing in it may outlive a step."""
        self._arena[phase].fill(np.nan)

    def __getitem__(self, handle: int) -> Any:
        """Return a tensor: an array to read or write, or a leaf of experts."""
        tensor = self._isa.tensors[handle]
        if tensor.is_weight:
            return self._weight_of(tensor)
        if handle not in self._values:
            self._values[handle] = self._make(tensor)
        return self._values[handle]

    def _make(self, tensor: Tensor) -> Array:
        if tensor.role not in ("arena", "peer"):  # state, output, logits
            return np.full(tensor.local, np.nan)
        words = self._peer if tensor.role == "peer" else self._arena[tensor.phase]
        first, size = tensor.offset // F32_BYTES, tensor.n_bytes // F32_BYTES
        return words[first : first + size].reshape(tensor.local)


class Vm:
    """A rank group with one sequence on its way. ``memories[rank][handle]`` can be looked at."""

    def __init__(
        self,
        isa: Isa,
        weights: Sequence[WeightOf],
        constants: Mapping[int, float] | None = None,
        on_result: OnResult | None = None,
    ) -> None:
        """Take a program and every rank's weights; `constants` as in `forward.exact_constants`."""
        assert len(weights) == isa.tp, (len(weights), isa.tp)
        self.isa = isa
        self.memories = [Memory(isa, weight_of) for weight_of in weights]
        self.position = 0
        self._constants = constants or {}
        self._on_result = on_result

    def step(self, phase: str, ids: Sequence[int]) -> Array:
        """Run the next tokens through one phase's program; return their logits, all ranks' columns.

        Shapes: ids (T,), at most the phase's max_tokens -> (T, V).
        """
        stream = self.isa.streams[phase]
        assert 0 < len(ids) <= stream.max_tokens, (len(ids), stream.max_tokens)
        step = Step(np.asarray(ids, dtype=np.int64), self.position)
        for memory in self.memories:
            memory.poison(phase)
        for index in range(len(stream.instructions[0])):
            for rank in range(self.isa.tp):
                self._execute(stream, index, rank, step)
        self.position += len(step.ids)
        return np.concatenate(
            [memory[_logits_handle(stream)][: len(step.ids)] for memory in self.memories], axis=1
        )

    def _execute(self, stream: Stream, index: int, rank: int, step: Step) -> None:
        record = stream.instructions[rank][index]
        spec = spec_of(int(record[0]) & 0xFFFF)
        assert spec is not None, f"{stream.name}: instruction {index}: opcode {record[0] & 0xFFFF}"
        if spec.is_load:
            return  # here every weight is whole in memory
        reference = REFERENCE[spec.op]
        operands = [self._operand(spec, record, name, rank, step) for name in operand_names(spec)]
        keywords = self._keywords(spec, record) | {"step": step}
        result = reference(*operands, **{name: keywords[name] for name in keyword_names(reference)})
        self._store(spec, record, rank, step, result)
        if self._on_result is not None:
            value, _ = split_result(spec, result)
            parts = value if isinstance(value, tuple) else (value,)
            self._on_result(stream.name, index, rank, np.concatenate(parts, axis=-1))

    def _operand(self, spec: OpSpec, record: Array, name: str, rank: int, step: Step) -> Any:
        handle, tokens = handle_of(spec, record, name), len(step.ids)
        match spec.operand(name).role:
            case "peer":
                return np.stack([memory[handle][:tokens] for memory in self.memories])
            case "weight":
                return self.memories[rank][handle]
            case "state":
                if not _is_paged(spec, name):
                    return self.memories[rank][handle][0]
                # Rows behind this step's are nobody's: leave them out rather than multiply by 0.
                return _rows(self.memories[rank][handle])[: self.position + tokens]
            case _:
                buffer = self.memories[rank][handle]
                return buffer[:, :tokens] if buffer.ndim == 3 else buffer[:tokens]

    def _keywords(self, spec: OpSpec, record: Array) -> dict[str, Any]:
        keywords: dict[str, Any] = {"unit_cols": int(record[op_spec.WORD_UNIT_COLS])}
        for param in spec.params:
            bits = int(record[spec.word(param.name)])
            is_f32 = param.kind == "f32"
            value = self._constants.get(bits, f32_value(bits)) if is_f32 else bits
            keywords[param.name] = value
        return keywords | spec.flag_values(int(record[0]) >> 16)

    def _store(self, spec: OpSpec, record: Array, rank: int, step: Step, result: Any) -> None:
        memory, tokens = self.memories[rank], len(step.ids)
        result, states = split_result(spec, result)
        for state, new in states.items():
            kept = memory[handle_of(spec, record, state)]
            kept = _rows(kept) if _is_paged(spec, state) else kept[0]
            kept[: len(new)] = new
        output = spec.output
        if output.role == "inout":  # the stack of blocks: the last one is new
            memory[handle_of(spec, record, output.name)][len(result) - 1, :tokens] = result[-1]
        values = result if isinstance(result, tuple) else (result,)
        for operand, value in zip(spec.outputs, values, strict=bool(spec.outputs)):
            memory[handle_of(spec, record, operand.name)][:tokens] = value


def handle_of(spec: OpSpec, record: Array, name: str) -> int:
    """Return the handle of an operand in a record. Shapes: record (16,) u4."""
    operand = spec.operand(name)
    word = int(record[op_spec.WORD_HANDLES + operand.slot // 2])
    return (word >> 16 * (operand.slot % 2) & 0xFFFF) + operand.run


def _is_paged(spec: OpSpec, name: str) -> bool:
    """Return whether a state is rows of pages rather than one row a slot."""
    return spec.operand(name).name == "cache"


def _rows(pages: Array) -> Array:
    """Return pages end to end, by position: a view, so that it can be written."""
    return pages.reshape(-1, pages.shape[-1])


def _logits_handle(stream: Stream) -> int:
    """Return the handle of what ARGMAX reads."""
    for record in stream.instructions[0]:
        if int(record[0]) & 0xFFFF == table.Op.ARGMAX:
            return handle_of(table.SPECS[table.Op.ARGMAX], record, "logits")
    raise AssertionError(f"{stream.name}: no ARGMAX")

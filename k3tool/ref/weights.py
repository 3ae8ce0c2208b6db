"""A checkpoint's tensors as float64, by the leaf names that the operator graph uses.

Leaves are decoded when first asked for and then kept; a matrix of experts is decoded expert by
expert, because a token touches few of them.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.reader import Checkpoint
from k3tool.model.weights import TensorSpec, expected_tensors
from k3tool.ref.formats import Array, decode_bf16, decode_mxfp4

Bytes = npt.NDArray[np.uint8]
ExpertDecoder = Callable[[Bytes, Bytes], Array]


class ExpertLeaf:
    """One matrix of every expert of a layer; indexing decodes one expert, (R, K)."""

    def __init__(self, checkpoint: Checkpoint, decode: ExpertDecoder) -> None:
        """Start with no expert named; `name` adds them."""
        self._checkpoint = checkpoint
        self._decode = decode
        self._names: dict[int, dict[str, str]] = {}
        self._values: dict[int, Array] = {}

    def name(self, expert: int, part: str, tensor: str) -> None:
        """Say which stored tensor is an expert's ``weight_packed`` or ``weight_scale``."""
        self._names.setdefault(expert, {})[part] = tensor

    def __getitem__(self, expert: int) -> Array:
        """Return the (R, K) matrix of one expert."""
        if expert not in self._values:
            parts = self._names[expert]
            packed, scale = (
                self._checkpoint.read(parts[part]) for part in ("weight_packed", "weight_scale")
            )
            self._values[expert] = self._decode(packed, scale)
        return self._values[expert]

    def __len__(self) -> int:
        """Return the number of experts."""
        return len(self._names)


class Weights(Mapping[str, "Array | ExpertLeaf"]):
    """Every leaf of a checkpoint by name, in its stored shape."""

    def __init__(self, checkpoint: Checkpoint, decode_expert: ExpertDecoder = decode_mxfp4) -> None:
        """Find the leaves; nothing is read yet."""
        self._checkpoint = checkpoint
        self._specs: dict[str, TensorSpec] = {}
        self._values: dict[str, Array | ExpertLeaf] = {}
        for spec in expected_tensors(checkpoint.config):
            if spec.expert is None:
                self._specs[spec.leaf] = spec
            else:
                leaf = self._values.setdefault(spec.leaf, ExpertLeaf(checkpoint, decode_expert))
                assert isinstance(leaf, ExpertLeaf)
                leaf.name(spec.expert, spec.name.rsplit(".", 1)[1], spec.name)

    def __getitem__(self, leaf: str) -> "Array | ExpertLeaf":
        """Return one leaf. Raises: KeyError for a name the weight table does not have."""
        if leaf not in self._values:
            bits = self._checkpoint.read(self._specs[leaf].name)
            is_bf16 = self._specs[leaf].dtype == "BF16"
            self._values[leaf] = decode_bf16(bits) if is_bf16 else bits.astype(np.float64)
        return self._values[leaf]

    def __iter__(self) -> Iterator[str]:
        """Yield every leaf name."""
        yield from dict.fromkeys([*self._specs, *self._values])

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(set(self._specs) | set(self._values))

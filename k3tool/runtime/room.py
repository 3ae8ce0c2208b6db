"""Whether the ranks of a run fit: their own memory into the machine, their mappings into limits."""

from collections.abc import Sequence

import numpy as np

from k3tool.memory import address_limit, require_room, too_little
from k3tool.runtime.image_layout import HEADER_DTYPE
from k3tool.runtime.weights import RankWeights
from k3tool.tables import bytes_text

_OWN = ("arena_bytes", "private_bytes", "peer_bytes")


def check_room(images: Sequence[bytes], weights: Sequence[RankWeights]) -> None:
    """Refuse ranks that do not fit, before one is started. Raises: TargetError saying the need.

    Weights are mapped and may leave memory again, so only a limit on address space counts them.
    """
    headers = [np.frombuffer(image, HEADER_DTYPE, count=1)[0] for image in images]
    own = [sum(int(header[name]) for name in _OWN) for header in headers]
    require_room(sum(own), f"activations and state of {len(images)} ranks")
    limit = address_limit()
    if limit is None:
        return
    for n_bytes, rank in zip(own, weights, strict=True):
        files = rank.folder.index.files
        need = n_bytes + sum(rank.folder.header(file).size for file in files)
        if need > limit:
            words = f"the address space limit of {bytes_text(limit)}"
            raise too_little(limit, words, need, "one rank's weights, activations and state")

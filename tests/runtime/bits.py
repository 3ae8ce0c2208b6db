"""One hash of all logits that a run kept."""

import hashlib

from k3tool.runtime.run import RunResult


def bits(result: RunResult) -> str:
    assert result.prefill is not None
    assert result.steps is not None
    return hashlib.sha256(result.prefill.tobytes() + result.steps.tobytes()).hexdigest()

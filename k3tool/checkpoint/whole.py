"""The one question shard and run ask before they read a weight: is this checkpoint whole?

It is inspect's comparison, so that what inspect calls whole is never refused later, and what shard
or run refuse is in inspect's report in the same words.
"""

from k3tool.checkpoint.coverage import coverage_of
from k3tool.checkpoint.findings import first_error
from k3tool.checkpoint.reader import Checkpoint
from k3tool.model.graph import weight_leaves


def require_whole(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that inspect would not call whole.

    Raises: ArtifactError with the first finding: file, tensor, found, needed, next step.
    """
    coverage = coverage_of(checkpoint, weight_leaves(checkpoint.config))
    error = first_error(checkpoint.path, coverage.findings)
    if error is not None:
        raise error

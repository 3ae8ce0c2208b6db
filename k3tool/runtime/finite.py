"""Look for NaN and Inf in a run's weights before the first of them is used.

The traps in norms, router and argmax are not enough: an Inf that a sigmoid or a soft cap saturates
stays inside and changes tokens without a sound. Experts are not looked at here: MXFP4 codes have no
NaN, and their scales are checked when an expert is first read. A folder found finite is remembered
in the cache by its files' names, sizes and times.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from k3tool.atomic import atomic_path
from k3tool.canonical import canonical_json
from k3tool.checkpoint.findings import first_error
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.value_targets import BF16, F32, Targets
from k3tool.checkpoint.values import ValueScan
from k3tool.errors import K3Error, UnsoundError
from k3tool.progress import progress_of

Say = Callable[[str], None]
_MOST_THREADS = 8  # a disk gives no more


def require_finite(folder: Checkpoint, cache: Path, say: Say) -> None:
    """Refuse a folder with a non-finite weight. Raises: UnsoundError naming file and tensor."""
    mark = cache / f"finite-{_key(folder)}"
    if mark.is_file():
        return
    say(f"looking for NaN and Inf: {folder.path}")
    jobs = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    read = (target for target in Targets(folder) if target.kind in (BF16, F32))
    used = [target for target in read if target.place[1] != "vision"]
    total = sum(target.info.n_bytes for target in used)
    with progress_of("looking for NaN and Inf") as progress:
        values = ValueScan(folder, used, n_bytes=total, jobs=jobs).run(
            lambda done: progress(done, total)
        )
    wrong = [finding for finding in values.findings if finding.kind == "non-finite"]
    error = first_error(folder.path, wrong, "inspect --values")
    if error is not None:
        raise UnsoundError(error.object, got=error.got, need=error.need, hint=error.hint)
    try:
        with atomic_path(mark) as temporary:
            temporary.touch()
    except K3Error as refused:  # a cache that only reads: the next run looks again
        say(f"not remembered: {refused}")


def _key(folder: Checkpoint) -> str:
    text = canonical_json([str(folder.path.resolve()), state_key(folder)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def state_key(folder: Checkpoint) -> str:
    """Return a name for what lies in a folder now, wherever it is.

    By sizes and times too: the identity only samples large files.
    """
    states = []
    for file in folder.index.files:
        stat = folder.file_path(file).stat()
        states.append([file, stat.st_size, stat.st_mtime_ns])
    text = canonical_json([folder.identity, states])
    return hashlib.sha256(text.encode()).hexdigest()[:24]

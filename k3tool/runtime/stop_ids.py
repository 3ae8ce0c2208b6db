"""The token ids that end a run: all that the checkpoint's own files name."""

import json
import os
from pathlib import Path

from k3tool.checkpoint.regular_file import json_fault, read_regular
from k3tool.errors import ArtifactError, quoted
from k3tool.model.config import K3Config

GENERATION_CONFIG = "generation_config.json"


def stop_ids(folder: Path, config: K3Config) -> tuple[int, ...]:
    """Return the end ids of config.json and, where it exists, generation_config.json, sorted.

    The two files may name different ids (end of text, end of turn); stopping at only one of them
    runs on past an answer's end. Raises: ArtifactError naming the file and field.
    """
    path = folder / GENERATION_CONFIG
    if not os.path.lexists(path):  # a link to nothing is a file that was lost, with its end ids
        return tuple(sorted(config.eos_token_ids))
    try:
        parsed = json.loads(read_regular(path, "JSON"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            str(path), got=f"invalid JSON ({json_fault(error)})", need="JSON"
        ) from None
    value = parsed.get("eos_token_id") if isinstance(parsed, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise ArtifactError(
            f"{path}: eos_token_id", got=quoted(value), need="a token id or a list of them"
        )
    return tuple(sorted({*config.eos_token_ids, *ids}))

"""The names that a folder's files are read by, as part of a checkpoint or of shards.

An output under one of them would make a whole checkpoint a damaged one.
"""

import os
import re
from pathlib import Path

from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.side_files import SIDE_FILES
from k3tool.errors import UsageError

SHARDS_NAME = "shards.h5"
RANK_NAME = "rank.h5"
_ARTIFACTS = (SHARDS_NAME, RANK_NAME)
_READ = {"config.json", INDEX_NAME, *SIDE_FILES, *_ARTIFACTS}
RANK_FOLDER = re.compile(r"rank-(\d{2,})-of-(\d{2,})")
WEIGHTS_FILE = re.compile(r"model-\d{5,}-of-\d{6,}\.safetensors")


def weights_name(number: int, total: int) -> str:
    """Return the release's name of a weight file, counted from 1."""
    return f"model-{number:05d}-of-{total:06d}.safetensors"


def refuse_read_name(path: Path, place: str) -> None:
    """Refuse an output that its folder's readers would take for a part. Raises: UsageError.

    `*.safetensors` and, for marks of unfinished downloads, anything with that in its name.
    """
    name, folder = path.name, path.parent
    if not (name in _READ or ".safetensors" in name or RANK_FOLDER.fullmatch(name)):
        return
    if any(os.path.lexists(folder / mark) for mark in ("config.json", INDEX_NAME, *_ARTIFACTS)):
        raise UsageError(
            place, got="a name that the checkpoint in that folder would be read by",
            need="another name", hint=f"write outside {folder}",
        )  # fmt: skip

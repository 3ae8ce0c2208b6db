"""Find what a download leaves beside files it has not finished.

The mark is looked at, not the file: some programs reserve the full length first, so that a file
with holes has its right size and a sound header.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from k3tool.checkpoint.findings import Finding

# What programs put behind the file's name, or behind that of what they know about it: aria2, axel,
# lftp; the hub's client; browsers; managers of downloads and torrents; copies over the network.
_SUFFIXES = (
    "aria2", "st", "lftp-pget-status", "incomplete", "part", "crdownload", "download",
    "opdownload", "fdmdownload", "xltd", "!qB", "!ut", "bc!", "partial", "filepart", "gstmp", "tmp",
    "temp",
)  # fmt: skip
_AFTER = re.compile(rf"\.safetensors.*[._](?:{'|'.join(map(re.escape, _SUFFIXES))})$", re.I)
# rsync adds a dot before and six random characters after, an object store's client eight; eight
# digits are a date, and a person's.
_RANDOM = re.compile(
    r"^\..*\.safetensors\.[A-Za-z0-9]{6}$|\.safetensors\.(?![0-9]*$)[0-9A-Fa-f]{8}$"
)
_HUB_FOLDER = Path(".cache", "huggingface", "download")
_READABLE = "a folder that can be listed, for marks of unfinished files"


def unfinished_downloads(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each mark of an unfinished safetensors file."""
    for place in (folder, folder / _HUB_FOLDER):
        try:
            names = sorted(os.listdir(place))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            name, got = str(place.relative_to(folder)), (error.strerror or str(error)).lower()
            hint = f"give the user who runs this the right to read {place}"
            yield Finding("unfinished download", name, "", got, _READABLE, hint)
            continue
        for entry in names:
            if _AFTER.search(entry) or _RANDOM.search(entry):
                name = str((place / entry).relative_to(folder))
                yield Finding(
                    "unfinished download", name, "", "a leftover of it", "a finished download"
                )

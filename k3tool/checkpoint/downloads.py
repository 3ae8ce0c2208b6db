"""Find what a download leaves beside files it has not finished.

The mark is looked at, not the file: some programs reserve the full length first, so that a file
with holes has its right size and a sound header.
"""

from collections.abc import Iterator
from pathlib import Path

from k3tool.checkpoint.findings import Finding

# aria2; the hub's client; browsers; wget and rsync wrappers
_SUFFIXES = (".aria2", ".incomplete", ".part", ".crdownload", ".download", ".partial", ".tmp")
_HUB_FOLDER = Path(".cache", "huggingface", "download")


def unfinished_downloads(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each mark of an unfinished safetensors file."""
    for place in (folder, folder / _HUB_FOLDER):
        if not place.is_dir():
            continue
        for path in sorted(place.iterdir()):
            if path.suffix in _SUFFIXES and ".safetensors" in path.name.removesuffix(path.suffix):
                name = str(path.relative_to(folder))
                yield Finding(
                    "unfinished download", name, "", "a leftover of it", "a finished download"
                )

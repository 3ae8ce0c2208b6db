"""Keep the encoder's definition in the cache: of the release's vocabulary it takes seconds to make.

An entry is named by the rank file's bytes and by the code that makes it; its first line is the
digest of the rest, and an entry that does not match it is made again.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from k3tool.atomic import atomic_path
from k3tool.errors import K3Error
from k3tool.text import byte_pairs


def kept(cache: Path, ranks: bytes, make: Callable[[], str]) -> str:
    """Return what `make` gives for these ranks, from the cache where it is there and whole.

    Where the cache cannot be written it is made each time: that is slower, and nothing else.
    """
    code = Path(byte_pairs.__file__).read_bytes()
    key = hashlib.sha256(hashlib.sha256(ranks).digest() + hashlib.sha256(code).digest())
    path = cache / f"tokenizer-{key.hexdigest()[:32]}.json"
    found = _read(path)
    if found is not None:
        return found
    text = make()
    body = text.encode()
    with contextlib.suppress(OSError, K3Error):
        cache.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(_digest(body) + b"\n" + body)
    return text


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        digest, _, body = path.read_bytes().partition(b"\n")
        if digest == _digest(body):
            return body.decode()
    return None

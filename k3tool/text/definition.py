"""Read a `tokenizer.json` of byte-pair encoding over bytes, without what it adds to text.

Its control tokens, templates, cuts and padding are left out of the encoder: they are how other
programs would change a text, and a text that holds a control token's name is still only text.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.checkpoint.json_text import json_fault, parse_json
from k3tool.errors import ArtifactError, quoted
from k3tool.text.byte_pairs import bytes_of
from k3tool.text.rank_file import require_bytes

TOKENIZER_JSON = "tokenizer.json"
_HINT = "give token ids (--ids), or the model's own tokenizer"


class Definition(NamedTuple):
    """Tokens' bytes by id, control tokens' names by id, and what makes the encoder."""

    tokens: Mapping[int, bytes]
    added: Mapping[int, str]
    load: Callable[[], Any]


def read_definition(raw: bytes, path: Path) -> Definition:
    """Read the file. Raises: ArtifactError naming the field that is not as needed."""
    try:
        parsed = parse_json(raw)
    except ValueError as error:
        got = f"invalid JSON ({json_fault(error)})"
        raise ArtifactError(str(path), got=got, need="JSON", hint=_HINT) from None
    model = parsed.get("model") if isinstance(parsed, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vocab, dict) or not vocab:
        raise _unfit(path, "model", quoted(model), "a vocabulary of byte-pair encoding")
    if model.get("type", "BPE") != "BPE":
        raise _unfit(path, "model: type", quoted(model.get("type")), "BPE")
    added = _added(parsed.get("added_tokens") or [], path)
    plain = {
        letters: token
        for letters, token in vocab.items()
        if type(token) is not int or token not in added
    }
    tokens = _tokens(plain, path)
    require_bytes(list(tokens.values()), path)
    bare = {
        **parsed, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None,
        "model": {**model, "vocab": plain},
    }  # fmt: skip

    def load() -> Any:
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_str(json.dumps(bare, ensure_ascii=False))
        except Exception as error:  # the library has no class of its own for what it refuses
            got = quoted(str(error).splitlines()[0] if str(error) else "no reason")
            raise _unfit(path, "definition", got, "one that the library takes") from None

    return Definition(tokens, added, load)


def _added(entries: object, path: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        token, name = (
            (entry.get("id"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        )
        if type(token) is not int or token < 0 or token in found or not isinstance(name, str):
            raise _unfit(path, "added_tokens", quoted(entry), "ids and their texts, each once")
        found[token] = name
    return found


def _tokens(vocab: Mapping[str, object], path: Path) -> dict[int, bytes]:
    tokens: dict[int, bytes] = {}
    for letters, token in vocab.items():
        data = bytes_of(letters)
        if type(token) is not int or token < 0 or token in tokens or data is None:
            need = "bytes, spelled as byte-level vocabularies spell them, and an id of their own"
            raise _unfit(path, f"vocab: {quoted(letters)}", quoted(token), need)
        tokens[token] = data
    return tokens


def _unfit(path: Path, field: str, got: str, need: str) -> ArtifactError:
    return ArtifactError(f"{path}: {field}", got=got, need=need, hint=_HINT)

"""Files beside the weights that a run may want: end tokens and the tokenizer.

A checkpoint does without them. One that stands there is copied into shards and may say where a run
ends, so it has to be readable, whatever is asked of the checkpoint.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3tool.checkpoint.findings import Finding, file_finding
from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.checkpoint.regular_file import read_regular
from k3tool.errors import ArtifactError, quoted
from k3tool.model.config_fields import MOST_ID, MOST_IDS

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
NAMING_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json")  # that may name the end of a text
SIDE_FILES = (
    GENERATION_CONFIG,
    "tiktoken.model",
    "tokenizer.json",
    *NAMING_FILES,
    "chat_template.jinja",
)
_NEED = "a side file"
_NEXT_STEP = "fetch the file again, or remove it: then config.json alone says where a run ends"


def read_side_file(folder: Path, name: str) -> bytes | None:
    """Return a side file's bytes; None where there is none. Raises: ArtifactError.

    Not is_file(): a link to nothing or a pipe would be left out, and its end ids with it.
    """
    return read_regular(folder / name, _NEED) if os.path.lexists(folder / name) else None


def generation_ids(folder: Path) -> tuple[int, ...]:
    """Return the end ids that generation_config.json names; none where there is no such file.

    Raises: ArtifactError naming file and field.
    """
    path = folder / GENERATION_CONFIG
    parsed = json_object(folder, GENERATION_CONFIG)
    if parsed is None:
        return ()
    value = parsed.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MOST_IDS or not all(type(item) is int and 0 <= item <= MOST_ID for item in ids):
        raise ArtifactError(
            f"{path}: eos_token_id", got=quoted(value), hint=_NEXT_STEP,
            need=f"a token id up to {MOST_ID}, or a list of at most {MOST_IDS} of them",
        )  # fmt: skip
    return tuple(ids)


def json_object(folder: Path, name: str) -> dict[str, Any] | None:
    """Return a side file's JSON object; None where there is no file. Raises: ArtifactError."""
    raw = read_side_file(folder, name)
    if raw is None:
        return None
    path = str(folder / name)
    try:
        parsed = parse_json(raw)
    except ValueError as error:
        got = f"invalid JSON ({json_fault(error)})"
        raise ArtifactError(path, got=got, need="JSON", hint=_NEXT_STEP) from None
    if not isinstance(parsed, dict):
        raise ArtifactError(path, got=json_kind(parsed), need="a JSON object", hint=_NEXT_STEP)
    return parsed


def token_names(folder: Path) -> dict[int, str] | None:
    """Return the control tokens that tokenizer_config.json names; None where there is no such file.

    Raises: ArtifactError naming file and field.
    """
    path = folder / TOKENIZER_CONFIG
    parsed = json_object(folder, TOKENIZER_CONFIG)
    if parsed is None:
        return None
    listed = parsed.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise _not_named(path, "added_tokens_decoder", listed)
    names: dict[int, str] = {}
    for key, entry in listed.items():
        name = _content(entry)
        digits = key.isascii() and key.isdigit() and len(key) <= len(str(MOST_ID))
        if not digits or int(key) > MOST_ID or not name or name in names.values():
            raise _not_named(path, f"added_tokens_decoder: {quoted(key)}", entry)
        names[int(key)] = name
    return names


def _content(entry: object) -> str | None:
    """Return a token's text: written as such, or as an object with more beside it."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _not_named(path: Path, field: str, value: object) -> ArtifactError:
    return ArtifactError(
        f"{path}: {field}", got=quoted(value), need="a token id and its text, each once",
        hint="fetch the file again",
    )  # fmt: skip


def end_of_text_ids(folder: Path, name: str) -> tuple[int, ...]:
    """Return the id of the `eos_token` that one of NAMING_FILES names; none where it names none.

    It may be another than the model's own config names: the release's is. Raises: ArtifactError.
    """
    path, named = folder / name, token_names(folder) or {}
    eos = (json_object(folder, name) or {}).get("eos_token")
    if eos is None:
        return ()
    text = _content(eos)
    if not text:
        raise _not_named(path, "eos_token", eos)
    if text not in named.values():
        named = _added_names(folder)
    ids = tuple(token for token, found in named.items() if found == text)
    if not ids:
        raise ArtifactError(
            f"{path}: eos_token", got=quoted(text),
            need="a name in added_tokens_decoder, or in tokenizer.json's added_tokens",
            hint="fetch the file again",
        )  # fmt: skip
    return ids


def _added_names(folder: Path) -> dict[int, str]:
    """Return the tokens that tokenizer.json adds to its vocabulary."""
    added = (json_object(folder, "tokenizer.json") or {}).get("added_tokens")
    entries = added if isinstance(added, list) else []
    return {
        entry["id"]: entry["content"]
        for entry in entries
        if isinstance(entry, dict)
        and type(entry.get("id")) is int
        and 0 <= entry["id"] <= MOST_ID
        and isinstance(entry.get("content"), str)
    }


def side_file_findings(folder: Path) -> Iterator[Finding]:
    """Yield what a run or a copy of the folder's side files would stop at, each fault once.

    A file that names an end token is read together with the one that says its id.
    """
    said: set[str] = set()
    for name in SIDE_FILES:
        try:
            read_side_file(folder, name)
            if name == GENERATION_CONFIG:
                generation_ids(folder)
            elif name in NAMING_FILES:
                end_of_text_ids(folder, name)
        except ArtifactError as error:
            of = (each for each in SIDE_FILES if error.object.startswith(str(folder / each)))
            if error.object not in said:
                yield file_finding("damaged file", folder, next(of, name), error)
            said.add(error.object)

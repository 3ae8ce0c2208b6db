"""Files beside the weights that a run may want: end tokens and the tokenizer.

A checkpoint does without them. One that stands there is copied into shards and may say where a run
ends, so it has to be readable, whatever is asked of the checkpoint.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from k3tool.checkpoint.findings import Finding, file_finding
from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.checkpoint.regular_file import read_regular
from k3tool.errors import ArtifactError, quoted
from k3tool.model.config_fields import MOST_ID, MOST_IDS

GENERATION_CONFIG = "generation_config.json"
SIDE_FILES = (
    GENERATION_CONFIG, "tiktoken.model", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
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
    raw = read_side_file(folder, GENERATION_CONFIG)
    if raw is None:
        return ()
    try:
        parsed = parse_json(raw)
    except ValueError as error:
        got = f"invalid JSON ({json_fault(error)})"
        raise ArtifactError(str(path), got=got, need="JSON", hint=_NEXT_STEP) from None
    if not isinstance(parsed, dict):
        raise ArtifactError(str(path), got=json_kind(parsed), need="a JSON object", hint=_NEXT_STEP)
    value = parsed.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MOST_IDS or not all(type(item) is int and 0 <= item <= MOST_ID for item in ids):
        raise ArtifactError(
            f"{path}: eos_token_id", got=quoted(value), hint=_NEXT_STEP,
            need=f"a token id up to {MOST_ID}, or a list of at most {MOST_IDS} of them",
        )  # fmt: skip
    return tuple(ids)


def side_file_findings(folder: Path) -> Iterator[Finding]:
    """Yield what a run or a copy of the folder's side files would stop at."""
    for name in SIDE_FILES:
        try:
            read_side_file(folder, name)
            if name == GENERATION_CONFIG:
                generation_ids(folder)
        except ArtifactError as error:
            yield file_finding("damaged file", folder, name, error)

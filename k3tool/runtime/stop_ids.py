"""The token ids that end a run: all that the checkpoint's own files name."""

from pathlib import Path

from k3tool.checkpoint.side_files import NAMING_FILES, end_of_text_ids, generation_ids
from k3tool.model.config import K3Config


def stop_ids(folder: Path, config: K3Config) -> tuple[int, ...]:
    """Return the end ids of config.json and, where they exist, generation_config.json,
    tokenizer_config.json and special_tokens_map.json, sorted.

    The files may name different ids (end of text, end of turn), and the release's do; stopping at
    only one of them runs on past an answer's end. Raises: ArtifactError naming the file and field.
    """
    ids = {*config.eos_token_ids, *generation_ids(folder)}
    ids.update(*(end_of_text_ids(folder, name) for name in NAMING_FILES))
    return tuple(sorted(ids))

"""Whether `run` could load a model's tokenizer, and so take a text.

It asks the same loader, without what only encoding needs. A definition that another program wrote
is tried: its fault may show only then. End tokens are no matter of this: a folder whose files say
them wrongly is not whole.
"""

import os
from pathlib import Path

from k3tool.errors import K3Error
from k3tool.model.config import K3Config
from k3tool.runtime.machine import sentence
from k3tool.tables import count_text
from k3tool.text.rank_file import RANK_FILE
from k3tool.text.tokenizer import has_tokenizer, open_tokenizer
from k3tool.verdict import Check, failed, not_run, passed

TOKENIZER = "tokenizer"  # the check without which `run --ids` still works


def tokenizer_check(folder: Path, config: K3Config, cache: Path) -> Check:
    """Return whether a model's folder has a tokenizer; a fault is in the words of `run`'s."""
    if not has_tokenizer(folder):
        return not_run(TOKENIZER, "none beside the weights: run --ids, no --prompt")
    try:
        tokenizer = open_tokenizer(folder, config.vocab_size, cache)
        if not os.path.lexists(folder / RANK_FILE):
            tokenizer.encode("a")
    except K3Error as error:
        return failed(TOKENIZER, f"{sentence(error)}; run --ids does without")
    n_control = len(tokenizer.control_tokens)
    n_text = count_text(config.vocab_size - n_control, "token")
    return passed(TOKENIZER, f"{n_text} of text, {n_control} of control")

"""Synthetic vocabularies, files of them, and mixed-script texts: the release's own is not here."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from k3tool.text.rank_file import write_ranks

_PLAIN = """
Hello world it's the quick brown Fox's jumping over 12345 dogs WE'LL they've def return
你好世界 今天天气很好 機器学习 Привет мир café naïve 한국어 テスト \u017fchön İstanbul ñandú हिन्दी
العربية ไทย 🙂😀 👩\u200d👩\u200d👧 ½ⅷ٣٤٥ ///--== <|open|> [EOS] ...!? \u0301e\u0301
"""
WORDS = (*_PLAIN.split(), "\u3000\u00a0\u2028", "\r\n", "\n\n", "\t", "  ", "")
CHARACTERS = sorted(
    {c for word in WORDS for c in word} | set(" \n\r\tabcXYZ'019.,_\u200d\U0002000b")
)
N_CONTROL = 256


def grown(n_tokens: int, seed: int = 0) -> list[bytes]:
    """Return a byte-complete vocabulary in which every token is two earlier ones, in id order."""
    rng = random.Random(seed)
    single = [bytes([value]) for value in range(256)]
    rng.shuffle(single)  # the release's bytes are not in their own order either
    tokens, have = list(single), set(single)
    while len(tokens) < n_tokens:
        text = rng.choice(["", " "]) + "".join(rng.choice(WORDS) for _ in range(2))
        parts = _some_parts(text.encode(), have, rng)
        at = rng.randrange(len(parts) - 1) if len(parts) > 1 else 0
        new = b"".join(parts[at : at + 2])
        if new not in have and 1 < len(new) <= 16:
            have.add(new)
            tokens.append(new)
    return tokens


def _some_parts(data: bytes, have: set[bytes], rng: random.Random) -> list[bytes]:
    """Cut bytes into known tokens, each as long as a random limit allows."""
    parts = []
    while data:
        most = rng.randint(1, 8)
        size = next(n for n in range(min(most, len(data)), 0, -1) if data[:n] in have)
        parts.append(data[:size])
        data = data[size:]
    return parts


def texts(n: int, seed: int = 0) -> Iterator[str]:
    """Yield random texts: words, and characters of all scripts beside each other."""
    rng = random.Random(seed)
    for _ in range(n):
        if rng.random() < 0.5:
            yield "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(1, 40)))
        else:
            yield rng.choice(["", " "]).join(rng.choice(WORDS) for _ in range(rng.randint(1, 9)))


def control_names(n_base: int, n_control: int = N_CONTROL) -> dict[int, str]:
    """Return the names of the release's control tokens, as far from the first as they are there."""
    named = {
        0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
        6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>",
        65: "<osagent_mode>", n_control - 2: "[UNK]", n_control - 1: "[PAD]",
    }  # fmt: skip
    return {n_base + at: name for at, name in named.items()}


def write_tokenizer(folder: Path, tokens: list[bytes], n_control: int = N_CONTROL) -> int:
    """Write tiktoken.model and tokenizer_config.json; return the number of ids."""
    (folder / "tiktoken.model").write_bytes(write_ranks(tokens))
    names = control_names(len(tokens), n_control)
    # Some stand there as not special: a library that goes by that word would read them in a text.
    listed = {str(i): {"content": name, "special": name[:2] != "<|"} for i, name in names.items()}
    config = {"added_tokens_decoder": listed, "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(tokens) + n_control

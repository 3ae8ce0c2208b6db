"""A sample speaks text: its tokenizer fits its vocabulary, its end ids are control tokens."""

import json
from pathlib import Path

import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config
from k3tool.runtime.stop_ids import stop_ids
from k3tool.text.sample_tokenizer import sample_config, sample_ranks
from k3tool.text.tokenizer import open_tokenizer


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_it_fits_every_preset(preset: str, tmp_path: Path) -> None:
    raw = preset_config(PRESETS[preset])
    config = K3Config.from_dict(raw)
    first = raw["bos_token_id"]
    (tmp_path / "tiktoken.model").write_bytes(sample_ranks(first))
    (tmp_path / "tokenizer_config.json").write_text(sample_config(first, config.vocab_size))
    tokenizer = open_tokenizer(tmp_path, config.vocab_size, tmp_path)
    names = tokenizer.control_tokens
    assert list(names) == list(range(first, config.vocab_size))
    assert names[first] == "[BOS]"
    assert names[raw["eos_token_id"]] == "<|end_of_msg|>"
    assert names[raw["pad_token_id"]] == "[PAD]"
    text = "banana 你好 \U0001f642 kotaro"
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode()
    assert len(tokenizer.encode("banana")) < len("banana")


def test_a_sample_stops_at_both_end_ids(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    write_sample(folder)
    config = K3Config.load(folder / "config.json")
    assert stop_ids(folder, config) == (501, 502)
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text())
    path.write_text(json.dumps(named | {"eos_token": {"content": "[PAD]"}}))
    assert stop_ids(folder, config) == (502, 511)
    path.write_text(json.dumps(named | {"eos_token": None}))
    assert stop_ids(folder, config) == (502,)
    path.write_text(json.dumps(named | {"eos_token": "<|im_end|>"}))
    with pytest.raises(ArtifactError, match="eos_token: got"):
        stop_ids(folder, config)


def test_an_end_token_that_the_map_of_special_tokens_names(tmp_path: Path) -> None:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    (tmp_path / "tokenizer_config.json").write_text(sample_config(500, 512))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "[PAD]"}}')
    assert stop_ids(tmp_path, config) == (501, 502, 511)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "[END]"}')
    with pytest.raises(ArtifactError, match=r"special_tokens_map.json: eos_token: got"):
        stop_ids(tmp_path, config)


def test_an_end_token_that_only_tokenizer_json_knows(tmp_path: Path) -> None:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    added = [{"id": 505, "content": "[END]"}, {"id": 506, "content": "[OTHER]"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert stop_ids(tmp_path, config) == (502, 505)

"""Damage to files: absent, cut, longer, of another sort, elsewhere, or too many."""

import os
import shutil
from pathlib import Path

from k3tool.checkpoint.side_files import SIDE_FILES
from k3tool.checkpoint.side_files import TOKENIZER_CONFIG as TOKENIZER
from tests.faults.damage.case import Case, legal, refused
from tests.faults.damage.edit import (
    INDEX,
    Raw,
    all_files,
    edit_json,
    file_of,
    load,
    save,
    shard_name,
)

FIRST, MIDDLE, LAST = shard_name(1), shard_name(6), shard_name(11)
EMBED = "language_model.model.embed_tokens.weight"
GENERATION = "generation_config.json"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 16300000\n"
)


def _unlink(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def _marker(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"partial")


def _cut_to(path: Path, n_bytes: int) -> None:
    os.truncate(path, n_bytes)


def _cut_at_data(path: Path) -> None:
    os.truncate(path, 8 + len(Raw.read(path).header))


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _replace_by(path: Path, make: str, target: str = "") -> None:
    path.unlink()
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)


# -- layouts -----------------------------------------------------------------------------------


def _hub_layout(folder: Path) -> tuple[Path, Path]:
    """Turn a folder into a download cache; return (outer folder, snapshot)."""
    outer = folder.parent / "models--org--name"
    snapshot = outer / "snapshots" / "0123456789abcdef"
    for part in (outer / "blobs", outer / "refs", snapshot):
        part.mkdir(parents=True)
    (outer / "refs" / "main").write_text(snapshot.name)
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = outer / "blobs" / f"{number:064x}"
        shutil.move(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return outer, snapshot


def _dangling_snapshot(folder: Path) -> Path:
    _, snapshot = _hub_layout(folder)
    (snapshot / MIDDLE).resolve().unlink()
    return snapshot


def _relative(folder: Path) -> Path:
    return Path(os.path.relpath(folder))


def _folder_link(folder: Path) -> Path:
    link = folder.parent / "link"
    link.symlink_to(folder.name)
    return link


def _named(folder: Path, name: str) -> Path:
    return folder.rename(folder.parent / name)


def _file_named(folder: Path, name: str) -> None:
    (folder / FIRST).rename(folder / name)
    with edit_json(folder / INDEX) as index:
        places = index["weight_map"]
        index["weight_map"] = {k: name if v == FIRST else v for k, v in places.items()}


def _climb(folder: Path, entry: str) -> None:
    """Let the index name a file elsewhere; a sound one lies there, so only the rule refuses it."""
    outside = folder.parent / "outside.safetensors"
    shutil.copy(file_of(folder, EMBED), outside)
    (folder / "inside").mkdir()
    shutil.copy(outside, folder / "inside")
    with edit_json(folder / INDEX) as index:
        index["weight_map"][EMBED] = entry.replace("HERE", str(folder.parent))


# -- beside the indexed files ------------------------------------------------------------------


def _copy(folder: Path, name: str) -> None:
    shutil.copy(folder / FIRST, folder / name)


def _old_shard(folder: Path) -> None:
    _copy(folder, "model-00001-of-000009.safetensors")


def _twin(folder: Path, name: str) -> None:
    save(folder / name, {n: t for path in all_files(folder) for n, t in load(path).items()})


def _only_twin(folder: Path) -> None:
    files = all_files(folder)
    _twin(folder, "model.safetensors")
    _unlink(folder, INDEX, *(path.name for path in files))


def _only_twin_with_index(folder: Path) -> None:
    index = (folder / INDEX).read_bytes()
    _only_twin(folder)
    (folder / INDEX).write_bytes(index)
    with edit_json(folder / INDEX) as named:
        named["weight_map"] = dict.fromkeys(named["weight_map"], "model.safetensors")


def _other_files(folder: Path) -> None:
    for name in ("pytorch_model.bin", "README.md", "model.gguf", ".gitattributes"):
        (folder / name).write_bytes(b"not ours")
    (folder / "figures").mkdir()


def _no_marks(folder: Path) -> None:
    """A date, a checksum, a listing: what people and tools leave beside whole files."""
    for name in (f"{FIRST}.20260101", f"{FIRST}.sha256", f"{FIRST}.md5", "download.log", "a.part"):
        (folder / name).write_bytes(b"not ours")


def _side(folder: Path, name: str, make: str) -> None:
    (folder / name).write_bytes(POINTER)
    if make != "pointer":
        _replace_by(folder / name, make, "gone")


def _generation(folder: Path, text: str) -> None:
    (folder / GENERATION).write_text(text)


def _tokenizer(folder: Path, text: str) -> None:
    (folder / TOKENIZER).write_text(text)


def _all_side_files(folder: Path) -> None:
    for name in SIDE_FILES:
        (folder / name).write_text("{}")


ABSENT = ("absent", "need a file")
FILES: tuple[Case, ...] = (
    refused("missing file", "first", lambda f: _unlink(f, FIRST), FIRST, *ABSENT),
    refused("missing file", "middle", lambda f: _unlink(f, MIDDLE), MIDDLE, *ABSENT),
    refused("missing file", "last", lambda f: _unlink(f, LAST), LAST, *ABSENT),
    refused("missing file", "two, the first is named", lambda f: _unlink(f, MIDDLE, LAST),
            MIDDLE, *ABSENT),
    refused("missing file", "one, and the index as well", lambda f: _unlink(f, MIDDLE, INDEX),
            "layers.5.", "absent"),
    refused("missing file", "all", lambda f: _unlink(f, *(p.name for p in all_files(f))), FIRST,
            *ABSENT),
    refused("unfinished download", "aria2 beside a file of full length",
            lambda f: _marker(f, f"{MIDDLE}.aria2"), f"{MIDDLE}.aria2", "finished download"),
    refused("unfinished download", "hub cache, incomplete",
            lambda f: _marker(f, f".cache/huggingface/download/{MIDDLE}.ab12.incomplete"),
            f"{MIDDLE}.ab12.incomplete", "finished download"),
    refused("unfinished download", "browser part file", lambda f: _marker(f, f"{LAST}.part"),
            f"{LAST}.part", "finished download"),
    refused("unfinished download", "browser, crdownload",
            lambda f: _marker(f, f"{FIRST}.crdownload"), f"{FIRST}.crdownload",
            "finished download"),
    *(refused("unfinished download", program, lambda f, name=name: _marker(f, name), name,
              "finished download")
      for program, name in (
          ("axel's state", f"{FIRST}.st"), ("lftp's state", f"{FIRST}.lftp-pget-status"),
          ("a torrent's part", f"{MIDDLE}.!qB"), ("copy over ssh", f"{MIDDLE}.filepart"),
          ("browser, opdownload", f"{LAST}.opdownload"), ("rsync's", f".{LAST}.a1B2c3"),
          ("an object store's client", f"{LAST}.6eF3bA12"),
          ("of the index alone", f"{INDEX}.part"),
      )),
    legal("unfinished download", "names that are no marks", _no_marks),
    *(refused("side file", f"{name}, {make}", lambda f, name=name, make=make: _side(f, name, make),
              name, words)
      for name, make, words in (
          (GENERATION, "pipe", "no regular file"), (GENERATION, "link", "a link to nothing"),
          ("tokenizer.json", "pipe", "no regular file"), ("tiktoken.model", "folder", "a folder"),
          ("chat_template.jinja", "pointer", "git-lfs pointer"),
          (GENERATION, "pointer", "git-lfs pointer"),
      )),
    refused("side file", "generation_config.json, no JSON", lambda f: _generation(f, "{"),
            GENERATION, "JSON"),
    refused("side file", "generation_config.json, a list", lambda f: _generation(f, "[]"),
            GENERATION, "got a JSON list", "object"),
    refused("side file", "generation_config.json, a key twice",
            lambda f: _generation(f, '{"eos_token_id": 1, "eos_token_id": 2}'), GENERATION,
            "eos_token_id twice"),
    refused("side file", "generation_config.json, end ids of text",
            lambda f: _generation(f, '{"eos_token_id": ["x"]}'), GENERATION, "eos_token_id",
            "token id"),
    refused("side file", "generation_config.json, an end id of 33 bits",
            lambda f: _generation(f, '{"eos_token_id": 4294967296}'), GENERATION, "eos_token_id",
            "4294967295"),
    legal("side file", "generation_config.json, no end ids", lambda f: _generation(f, "{}")),
    refused("side file", "tokenizer_config.json, no JSON", lambda f: _tokenizer(f, "{"),
            TOKENIZER, "JSON"),
    refused("side file", "tokenizer_config.json, an end token that no id has",
            lambda f: _tokenizer(f, '{"eos_token": "[END]"}'), TOKENIZER, "eos_token",
            "a name in added_tokens_decoder"),
    refused("side file", "tokenizer_config.json, an end token that is no text",
            lambda f: _tokenizer(f, '{"eos_token": 5}'), TOKENIZER, "eos_token", "got 5"),
    refused("side file", "tokenizer_config.json, two tokens of one name",
            lambda f: _tokenizer(f, '{"added_tokens_decoder": {"500": "a", "501": "a"}}'),
            TOKENIZER, "added_tokens_decoder", "each once"),
    legal("side file", "tokenizer_config.json, no end token",
          lambda f: _tokenizer(f, '{"added_tokens_decoder": {"500": {"content": "[BOS]"}}}')),
    legal("side file", "all of them", _all_side_files),
    refused("zero-length file", "first", lambda f: _cut_to(f / FIRST, 0), FIRST, "0 bytes"),
    refused("zero-length file", "middle", lambda f: _cut_to(f / MIDDLE, 0), MIDDLE, "0 bytes"),
    refused("zero-length file", "last", lambda f: _cut_to(f / LAST, 0), LAST, "0 bytes"),
    refused("cut file", "inside the length word", lambda f: _cut_to(f / MIDDLE, 5), MIDDLE,
            "5 bytes", never="longer"),
    refused("cut file", "inside the header", lambda f: _cut_to(f / MIDDLE, 1000), MIDDLE,
            "1000 bytes", never="longer"),
    refused("cut file", "behind the header", lambda f: _cut_at_data(f / MIDDLE), MIDDLE, "bytes",
            "need 1088584", never="longer"),
    refused("cut file", "inside the data", lambda f: _cut_to(f / MIDDLE, 700_000), MIDDLE,
            "700000 bytes", "need 1088584", never="longer"),
    refused("cut file", "one byte short", lambda f: _cut_to(f / MIDDLE, 1_088_583), MIDDLE,
            "1088583 bytes", "need 1088584", never="longer"),
    refused("longer file", "one byte", lambda f: _append(f / MIDDLE, b"x"), MIDDLE,
            "1088585 bytes", "need 1088584", "longer", never="cut truncated early"),
    refused("longer file", "a page of zeros", lambda f: _append(f / FIRST, bytes(4096)), FIRST,
            "477928 bytes", "need 473832", "longer", never="cut truncated early"),
    refused("longer file", "its own bytes twice",
            lambda f: _append(f / LAST, (f / LAST).read_bytes()), LAST, "157664 bytes",
            "need 78832", "longer", never="cut truncated early"),
    refused("git-lfs pointer", "one file", lambda f: (f / MIDDLE).write_bytes(POINTER), MIDDLE,
            "git-lfs pointer", "git lfs pull"),
    refused("git-lfs pointer", "all files",
            lambda f: [p.write_bytes(POINTER) for p in all_files(f)], FIRST, "git-lfs pointer",
            "git lfs pull"),
    refused("git-lfs pointer", "index", lambda f: (f / INDEX).write_bytes(POINTER), INDEX,
            "git-lfs pointer", "git lfs pull"),
    refused("git-lfs pointer", "config", lambda f: (f / "config.json").write_bytes(POINTER),
            "config.json", "git-lfs pointer", "git lfs pull"),
    refused("no file", "folder", lambda f: _replace_by(f / MIDDLE, "folder"), MIDDLE, "a folder"),
    refused("no file", "dangling link", lambda f: _replace_by(f / MIDDLE, "link", "gone"), MIDDLE,
            "a link to nothing", "gone"),
    refused("no file", "link to itself", lambda f: _replace_by(f / MIDDLE, "link", MIDDLE), MIDDLE,
            "link"),
    refused("no file", "named pipe", lambda f: _replace_by(f / MIDDLE, "pipe"), MIDDLE,
            "no regular file"),
    refused("no file", "device", lambda f: _replace_by(f / MIDDLE, "link", "/dev/zero"), MIDDLE,
            "no regular file"),
    refused("no file", "index is a folder", lambda f: _replace_by(f / INDEX, "folder"), INDEX,
            "a folder"),
    refused("no file", "config is a link to nothing",
            lambda f: _replace_by(f / "config.json", "link", "gone"), "config.json", "link"),
    refused("no file", "a file as the checkpoint", lambda f: f / MIDDLE, "got a file",
            "need a checkpoint folder"),
    refused("no file", "no such folder", lambda f: f / "nothing", "got no such folder",
            "need a checkpoint folder"),
    refused("no file", "a name of 300 letters", lambda f: f.parent / ("n" * 300),
            "name too long", "need a checkpoint folder"),
    refused("stray file", "a name that no stream can encode",
            lambda f: _copy(f, os.fsdecode(b"caf\xe9.safetensors")),
            "caf\\udce9.safetensors", "not in the index"),
    refused("stray file", "a name with a line break and an escape",
            lambda f: _copy(f, "a\nk3tool: all is well\x1b[2K.safetensors"),
            "a\\nk3tool: all is well\\x1b[2K.safetensors", "not in the index"),
    refused("no file", "empty folder", lambda f: _emptied(f), "config.json"),
    legal("hub cache", "snapshot of links into blobs", lambda f: _hub_layout(f)[1]),
    refused("hub cache", "outer folder", lambda f: _hub_layout(f)[0], "config.json",
            "snapshots/0123456789abcdef"),
    refused("hub cache", "folder of snapshots", lambda f: _hub_layout(f)[0] / "snapshots",
            "config.json", "0123456789abcdef"),
    refused("hub cache", "a blob is gone", _dangling_snapshot, MIDDLE, "a link to nothing"),
    legal("path", "relative", _relative),
    legal("path", "link to the folder", _folder_link),
    legal("path", "spaces", lambda f: _named(f, "my check point ")),
    legal("path", "brackets", lambda f: _named(f, "ckpt [a-z]* {x}")),
    legal("path", "accents", lambda f: _named(f, "modèle-模型")),
    legal("path", "a percent sign and quotes", lambda f: _named(f, "100%s \"of\" it's")),
    legal("path", "file names with spaces, brackets, accents",
          lambda f: _file_named(f, "é [1] of 11.safetensors")),
    refused("index leads outside", "parent folder", lambda f: _climb(f, "../outside.safetensors"),
            INDEX, EMBED, "../outside.safetensors", "plain file name"),
    refused("index leads outside", "absolute", lambda f: _climb(f, "HERE/outside.safetensors"),
            INDEX, EMBED, "/outside.safetensors", "plain file name"),
    refused("index leads outside", "subfolder", lambda f: _climb(f, "inside/outside.safetensors"),
            INDEX, EMBED, "inside/outside.safetensors", "plain file name"),
    refused("index leads outside", "dots", lambda f: _climb(f, ".."), INDEX, EMBED, "..",
            "plain file name"),
    refused("index leads outside", "empty name", lambda f: _climb(f, ""), INDEX, EMBED,
            "plain file name"),
    refused("index leads outside", "zero byte", lambda f: _climb(f, "a\0b"), INDEX, EMBED,
            "plain file name"),
    refused("stray file", "shard of an older split", _old_shard,
            "model-00001-of-000009.safetensors", "not in the index"),
    refused("stray file", "consolidated twin", lambda f: _twin(f, "consolidated.safetensors"),
            "consolidated.safetensors", "not in the index"),
    refused("stray file", "twin of one file's name", lambda f: _twin(f, "model.safetensors"),
            "model.safetensors", "not in the index"),
    refused("stray file", "a damaged one",
            lambda f: (f / "old.safetensors").write_bytes(b"x" * 99), "old.safetensors"),
    legal("stray file", "other files", _other_files),
    legal("one file", "consolidated alone, no index", _only_twin),
    legal("one file", "consolidated alone, with an index", _only_twin_with_index),
)  # fmt: skip


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()

"""What is no record of tokens is refused, and in its place: the file and the line."""

import os
from pathlib import Path

import pytest

from k3tool.compare.records import read_records
from k3tool.errors import ArtifactError

# -- text that is no record ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"1,,2", "a comma with no id before it"),
        (b"1, ,2", "a comma with no id before it"),
        (b",1", "a comma with no id before it"),
        (b"1,2,", "a comma at the end"),
        (b"1 -2", 'got "-" at byte 2'),
        (b"\xef\xbb\xbf1 x", 'got "x" at byte 5'),
        (b"1 2.5", 'got "." at byte 3'),
        (b"1 \xff", "got byte 0xff at byte 2"),
        (b"1\x002", r'got "\u0000" at byte 1'),
        (b"4294967296", "id at step 0: got 4294967296, need 0 to 4294967295"),
        (b"9" * 30, "a number of more than 20 digits"),
        (b"1" * 21 + b" 2", "a number of 21 digits"),
        (b"\xff\xfe1\x00", "got UTF-16"),
        (b"PK\x03\x04....", "got a zip or npz archive"),
        (b"\x89HDF\r\n\x1a\n", "got HDF5 that this tool did not write"),
        (b"\x1f\x8b\x08", "got a gzip file"),
        (b"version https://git-lfs", 'got "v" at byte 0'),
        (b'{"id": 5}\n{"id": 6', "line 2: got "),
        (b'{"id": 5}\n5', "line 2: got a JSON number, need a JSON object or a list of ids"),
        (b'{"id": 5, "id": 6}', "line 1: got invalid JSON (id twice)"),
        (b'{"id": true}', "line 1: got id true, need a token id, 0 to 4294967295"),
        (b'{"id": 5.0}', "line 1: got id 5.0"),
        (b'{"id": "cmpl-1"}', 'line 1: got id "cmpl-1"'),
        (b'{"id": -1}', "line 1: got id -1"),
        (b'{"id": 4294967296}', "line 1: got id 4294967296"),
        (b'{"text": "a"}', "line 1: got keys text, need one of token_id, token, id, or"),
        (b'{"id": 5, "token_id": 6}', "got token_id, id, which differ"),
        (b'{"token": "5"}', 'line 1: got token "5", need a token id'),
        (b'{"tokens": ["a"]}', 'line 1: got tokens[0] "a", need a token id'),
        (b'{"ids": 5}', "got ids: a JSON number, need a list of ids"),
        (b'[5, "6"]', 'got ids[1] "6", need a token id'),
        (b'{"ids": [5], "step": 0}', "got a step beside a list"),
        (b'{"id": 5, "step": 0}\n{"id": 5}', "line 2: got keys id, need the same of step, rank"),
        (b'{"id": 5, "rank": -1}', "got rank -1"),
        (b'{"id": 5, "request": null}', "got request null, need a text or an integer"),
        (b'{"id": 5, "request": "a"}\n{"id": 5}', "line 2: got keys id, need the same of step"),
        (b'{"event": "finished", "ids": [], "prompt_tokens": 1}', "got finished without request"),
        (
            b'{"event": "start", "tp": 1, "requests": 2}\n'
            b'{"event": "finished", "request": 0, "ids": [], "prompt_tokens": 1}\n'
            b'{"event": "end", "tokens": 0}',
            "got 1 request with tokens, need 2, as start says",
        ),
        (b'{"id": 5, "step": 0.5}', "got step 0.5"),
        (b'{"id": 5, "margin": "x"}', 'got margin "x", need margin, a number'),
        (b'{"id": 5}\n{"event": "end"}', "line 2: got an event of run"),
        (b'{"event": "start"}', "line 1: got tp null"),
        (b'{"event": "token", "id": 1, "position": 0}', "got a token without step"),
        (b'{"event": "end"}', "line 1: got tokens: a JSON null, need a list of ids"),
        (b'{"event": "end", "tokens": []}\n{"event": "start", "tp": 1}', "got start behind end"),
        (b'{"event": "stop", "tokens": []}', 'line 1: got "stop", need an event that is start'),
        (b'{"event": "start", "tp": 1}\n{"event": "start", "tp": 1}', "start behind other events"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused_in_its_place(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    with pytest.raises(ArtifactError) as refusal:
        read_records(path)
    assert said in refusal.value.text()
    assert str(path) in refusal.value.text()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "pipe", "."):
        with pytest.raises(ArtifactError):
            read_records(tmp_path / name)

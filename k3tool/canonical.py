"""The one JSON text of a value: what is hashed, compared or stamped into a file is written so."""

import json


def canonical_json(value: object) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, so that equal means equal.

    Bytes of a path that are no UTF-8 become escapes, which JSON reads back as what they were.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()

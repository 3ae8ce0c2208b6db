"""Bytes to characters as tokens come: no character is shown before it is whole."""

import codecs


class StreamDecoder:
    """Take the bytes of one token after another, give the characters that are whole.

    Bytes that can no longer become a character are U+FFFD each time one is certain, by the rule of
    the Unicode standard (one for each maximal part of a character); what may still become one is
    held back, at most three bytes.
    """

    def __init__(self) -> None:
        """Begin between two characters."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Return the characters that these bytes complete; often one, or none."""
        return self._decoder.decode(data)

    @property
    def is_within_character(self) -> bool:
        """Return whether bytes are held back."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was begun."""
        return self._decoder.decode(b"", final=True)

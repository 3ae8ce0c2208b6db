"""Token after token of an answer, made into the text that may be shown."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from k3tool.text.chat import RESPONSE, ChannelReader
from k3tool.text.stop_text import StopText
from k3tool.text.stream import StreamDecoder
from k3tool.text.tokenizer import Tokenizer
from k3tool.text.tools import Tag


class Part(NamedTuple):
    """Text of one channel; a reply without channels has only ""."""

    channel: str
    text: str


class Reply:
    """Characters as they become whole, up to the first of `stops` in the answer itself.

    With `first_channel` the tokens are in the message format, and that channel is open; stops are
    then looked for in the response alone. All parts of all tokens, one behind the other, are the
    reply, whatever the tokens' boundaries.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), first_channel: str | None = None
    ) -> None:
        """Begin a reply."""
        self._tokenizer = tokenizer
        self._reader = None if first_channel is None else ChannelReader(tokenizer, first_channel)
        self._answer = "" if first_channel is None else RESPONSE  # the channel that may be stopped
        self._channel = first_channel or ""
        self._decoder = StreamDecoder()
        self._stops, self._stop = stops, StopText(stops)
        self._texts: dict[str, list[str]] = {}
        self._is_cut = False  # within a character of which an earlier run has shown U+FFFD

    def go_on(self, before: Iterable[int]) -> None:
        """Take tokens that an earlier run has said, and shown: they are no part of this reply, but
        a channel, a character or a stop may have begun in them.
        """
        for token in before:
            self.feed(token)
            if self._stop.found is not None:  # where the earlier run ended, and this one goes on
                self._stop = StopText(self._stops)
        self._is_cut = self._decoder.is_within_character
        self._stop.tell()
        self._texts.clear()

    @property
    def stopped_by(self) -> str | None:
        """Return the stop that ended the reply; no part follows it."""
        return self._stop.found

    @property
    def ended_tag(self) -> Tag | None:
        """Return the tag that the last token ended: it stands behind that token's parts."""
        return None if self._reader is None else self._reader.ended

    @property
    def text(self) -> str:
        """Return the answer so far, as it was shown."""
        return self.channels.get(self._answer, "")

    @property
    def channels(self) -> dict[str, str]:
        """Return the text of each channel so far."""
        return {name: "".join(texts) for name, texts in self._texts.items()}

    def feed(self, token: int, is_last: bool = False) -> list[Part]:
        """Take a token; return what can be shown now, and after the last one all that is left."""
        if self._reader is None:
            channel, data = "", self._tokenizer.token_bytes(token)
        else:
            channel, data = self._reader.feed(token)
        parts: list[Part] = []
        if channel != self._channel:
            self._show(parts, self._decoder.finish())
            self._decoder, self._channel = StreamDecoder(), channel
        self._show(parts, self._decoder.feed(data))
        if is_last:
            self._show(parts, self._decoder.finish())
            self._add(parts, self._answer, self._stop.finish())
        return parts

    def _show(self, parts: list[Part], text: str) -> None:
        if self._is_cut and text:
            text, self._is_cut = text.removeprefix("\ufffd"), False
        is_answer = self._channel == self._answer
        self._add(parts, self._channel, self._stop.feed(text) if is_answer else text)

    def _add(self, parts: list[Part], channel: str, text: str) -> None:
        if text:
            parts.append(Part(channel, text))
            self._texts.setdefault(channel, []).append(text)

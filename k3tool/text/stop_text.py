"""End a text before a phrase, wherever tokens divide it."""

from collections.abc import Sequence

from k3tool.errors import UsageError


class StopText:
    """Let characters through that can no longer be the start of a phrase.

    The phrase that is complete first ends the text, of those that end together the longest. It does
    not depend on how the text is cut into tokens.
    """

    def __init__(self, phrases: Sequence[str]) -> None:
        """Take the phrases. Raises: UsageError for an empty one, which would end any text."""
        if not all(phrases):
            raise UsageError("--stop", got="an empty text", need="a text to stop before")
        self._phrases = sorted(set(phrases), key=len, reverse=True)
        self._held = ""
        self._n_told = 0  # of what is held, how much was shown by whoever went before
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return what may be shown now; nothing more once a phrase was found."""
        shown = []
        for character in text:
            if self.found is not None:
                break
            self._held += character
            self.found = next((p for p in self._phrases if self._held.endswith(p)), None)
            keep = len(self.found) if self.found is not None else self._start_of_phrase()
            cut = len(self._held) - keep
            shown.append(self._held[self._n_told : cut])
            self._held, self._n_told = self._held[cut:], max(0, self._n_told - cut)
        return "".join(shown)

    def tell(self) -> None:
        """Take what is held back as shown: a run that ended here has shown it at its end."""
        self._n_told = len(self._held)

    def finish(self) -> str:
        """Return what was held back at the end of a text without a phrase."""
        held, self._held = self._held[self._n_told :], ""
        return "" if self.found is not None else held

    def _start_of_phrase(self) -> int:
        """Return how many of the last characters may become a phrase."""
        for size in range(len(self._held), 0, -1):
            if any(phrase.startswith(self._held[-size:]) for phrase in self._phrases):
                return size
        return 0

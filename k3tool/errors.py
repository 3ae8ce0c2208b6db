"""Every error a user can meet, one class per exit code, built from named fields.

The text is `k3tool <stage>: <object>: got <x>, need <y>` and an optional `hint` line; the stage is
added by the command line, because the library does not know which command called it. A value goes
into a message as it is, or through `listed` or `quoted`: a user reads no Python literals.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

# The next step where a file that a user names is not there, and no command is known to make it.
CHECK_PATH = "check the path: it is read from the current folder"
_MOST_QUOTED = 60
_MOST_SHOWN = 8192  # of one field of a message: the longest path, and no list of a million numbers


def printable(text: str) -> str:
    """Return text in one line of characters that a terminal shows and a stream can encode.

    Names come from files: a line break in one could fake a line of ours, an escape sequence hides
    what stands before it, and half of a surrogate pair has no encoding.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def bounded(text: str, most: int = _MOST_SHOWN) -> str:
    """Return text that fits one message, without its middle where it is longer."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def listed(values: Iterable[object]) -> str:
    """Return values side by side, `1, 2, 4`; "none" where there are none. Sets come sorted."""
    ordered = sorted(map(shown, values)) if isinstance(values, set | frozenset) else values
    return ", ".join(shown(value) for value in ordered) or "none"


def quoted(value: object, most: int = _MOST_QUOTED) -> str:
    """Return what a file or an option holds as JSON writes it, cut where it is long."""
    text = printable(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: object) -> str:
    """Return a field of a message as text."""
    if value is None or isinstance(value, bool):
        return quoted(value)
    if isinstance(value, Mapping):
        return listed(f"{key} {shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return listed(value)
    return str(value)


def install_extra(extra: str) -> str:
    """Return what installs the packages of one of k3tool's extras.

    By the folder, never by the name `k3tool[...]`: an index may have another package of that name.
    """
    return f"pip install -e '.[{extra}]' in k3tool's folder"


class K3Error(Exception):
    """Report a failure that is the fault of neither usage, input nor target: exit code 1.

    `object` names the thing at fault (a file, a tensor, a field, an option), `got` what was found,
    `need` what would have been accepted, `hint` one action the user can take.
    """

    exit_code = 1

    def __init__(self, object: str, *, got: object, need: object, hint: str | None = None) -> None:
        """Keep the fields; the text is derived from them so that it is the same everywhere."""
        super().__init__(object, got, need, hint)
        self.object = object
        self.got = got
        self.need = need
        self.hint = hint

    def text(self, stage: str | None = None) -> str:
        """Return the message as the user sees it: one line, and a hint line where there is one.

        `stage` is the command with its subcommand; of k3tool itself it is an empty text.
        """
        prefix = "" if stage is None else f"k3tool {stage}: " if stage else "k3tool: "
        fields = (self.object, shown(self.got), shown(self.need), self.hint or "")
        place, got, need, hint = (printable(bounded(field)) for field in fields)
        line = f"{prefix}{place}: got {got}, need {need}"
        return f"{line}\n  hint: {hint}" if hint else line

    def __str__(self) -> str:
        """Return the message without a stage."""
        return self.text()


@contextmanager
def hinted(hint: str) -> Iterator[None]:
    """Give refusals that arise inside a next step, where they have none of their own."""
    try:
        yield
    except K3Error as error:
        error.hint = error.hint or hint
        raise


class UsageError(K3Error):
    """Report a bad option or argument, before any weight is read: exit code 2."""

    exit_code = 2


def excluded(option: str, other: str, why: str = "") -> UsageError:
    """Return the refusal of an option that was given with another that excludes it."""
    need = f"one of the two: {why}" if why else "one of the two"
    return UsageError(option, got=f"also {other}", need=need, hint=f"leave out {option} or {other}")


def incomplete(option: str, other: str, why: str = "") -> UsageError:
    """Return the refusal of an option that was given without another that it needs."""
    need = f"both: {why}" if why else "both"
    return UsageError(
        option, got=f"no {other}", need=need, hint=f"give {other}, or leave out {option}"
    )


class ArtifactError(K3Error):
    """Report an input or artifact that is missing, damaged, mismatched or stale: exit code 3."""

    exit_code = 3


class UnsoundError(K3Error):
    """Report a result that must not be trusted, or a check that found a difference: exit code 4."""

    exit_code = 4


class TargetError(K3Error):
    """Report a device, driver, compiler or memory that is absent or unfit: exit code 5."""

    exit_code = 5

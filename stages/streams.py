"""stdout and stderr of a command: words that cannot reach anybody do not decide how it ends.

A stdout whose reader has gone takes what comes and drops it, so that a check still comes to its
verdict; a command that prints as it goes asks `flush_or_stop` whether to go on. What else stdout
refuses, as a full disk, is an error. stderr drops whatever it cannot write.
"""

import errno
import io
import os
import signal
import sys
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

HUNG_UP = 128 + signal.SIGHUP


class NobodyReads(BrokenPipeError):
    """The reader of stdout has gone; `exit_code` is that of a command which stops for it."""

    def __init__(self, exit_code: int) -> None:
        """Keep the exit code: 0, or that of SIGHUP where the reader was a terminal."""
        super().__init__(errno.EPIPE, os.strerror(errno.EPIPE))
        self.exit_code = exit_code


class _Stdout(io.FileIO):
    """stdout, or nothing from when its reader has gone."""

    def __init__(self) -> None:
        super().__init__(1, "w", closefd=False)
        self.reader_gone: NobodyReads | None = None

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, or drop what nobody reads. Raises: OSError for all other faults."""
        if self.reader_gone is None:
            try:
                return super().write(data)
            except (BrokenPipeError, ConnectionResetError):
                self.reader_gone = NobodyReads(0)
            except OSError as error:
                if error.errno != errno.EIO or not _has_hung_up():
                    raise
                # Its SIGHUP comes a moment later than its first error, and under nohup not at all.
                is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
                self.reader_gone = NobodyReads(0 if is_ignored else HUNG_UP)
        return memoryview(data).nbytes


def _has_hung_up() -> bool:
    """Return whether stdout is a terminal that is gone: a disk that fails has the same error, and
    so has a terminal that denies a background job's words.
    """
    try:
        termios.tcgetattr(1)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False


class _Stderr(io.FileIO):
    """stderr, dropping what cannot be written now: later words may find room."""

    def __init__(self) -> None:
        super().__init__(2, "w", closefd=False)

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write what can be written."""
        n_bytes = memoryview(data).nbytes
        try:
            return super().write(data) or n_bytes  # None where a pipe that does not wait is full
        except OSError:
            return n_bytes


def open_standard_streams() -> None:
    """Let stdout and stderr outlive their readers, and open a closed stdin, stdout or stderr on
    nothing: else the next file opened takes its number, and what is printed lands in that file.

    stdout is opened for reading, so that a result that is printed fails as if it were still closed;
    on stderr nothing is lost but words.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    # A path may hold what the stream has no bytes for; the rest of the report is worth printing.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _text(_Stdout(), sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _text(_Stderr(), sys.stderr)


def _text(raw: io.FileIO, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a text stream over a file, with another's name, encoding and way of buffering."""
    raw.name = like.name
    return io.TextIOWrapper(
        io.BufferedWriter(raw), like.encoding, "backslashreplace",
        line_buffering=like.line_buffering, write_through=like.write_through,
    )  # fmt: skip


def flush_or_stop() -> None:
    """Send what was printed to its reader. Raises: NobodyReads where there is none any more."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stdout) and raw.reader_gone is not None:
        raise raw.reader_gone


def silence_stdout() -> None:
    """Point stdout elsewhere: the interpreter's last flush must not meet its error again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)

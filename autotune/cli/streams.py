"""Standard output and error that fail in order: a reader that went away, a full disk, none at all.

Results that cannot be written are an error, and one that Python itself would report as a traceback
or swallow. Progress that cannot be written is no reason to end a search.

Names of models, columns, files and cards are other people's. Whatever of them a terminal would
obey is replaced here, on the way out, and so is what the stream's encoding does not have.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from autotune.errors import AutotuneError, UsageError

_OBEYED = re.compile(
    # Controls, but for tab and line feed; what ends a line elsewhere; what turns the direction of
    # writing; halves of characters, which undecodable file names hold.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_PICTURES = 0x2400
"""Where the pictures of the first controls begin, such as that of escape."""

_PLAIN = {
    **{"±": "+-", "·": ".", "─": "-", "│": "|", "┤": "|", "└": "+", "┬": "+", "▼": "v"},
    **{"█": "#", "≡": "=", "▒": "%", "▓": "&", "▪": "o", "░": ":", "▚": "x"},
}
"""What stands for our own characters where the encoding does not have them."""


def harmless(text: str) -> str:
    """Return ``text`` with a visible character for each that a terminal would obey."""
    return _OBEYED.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    return chr(_PICTURES + code) if code < 0x20 else "\ufffd"


def encodable(text: str, encoding: str | None) -> str:
    """Return ``text`` without the characters that ``encoding`` does not have."""
    name = encoding or "utf-8"
    try:
        text.encode(name)
    except UnicodeEncodeError:
        return text.encode(name, _HANDLER).decode(name)
    return text


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(char, "?") for char in lacking), error.end


_HANDLER = "autotune.stand_in"
codecs.register_error(_HANDLER, _stand_in)


class OutputError(AutotuneError):
    """Standard output cannot be written."""


class ReaderGoneError(Exception):
    """Whoever read standard output went away, as ``head`` does."""


class _Stream(ABC):
    """A text stream whose failures are known from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OSError | None = None
        self.has_written = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, harmless."""
        return self.write_styled(harmless(text))

    def write_styled(self, text: str) -> int:
        """Write ``text`` with the styles that are in it, which are obeyed."""
        with self._guarded():
            self._stream.write(encodable(text, self._stream.encoding))
        self.has_written = self.has_written or bool(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all ``lines``."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is kept back."""
        with self._guarded():
            self._stream.flush()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = error
            _discard(self._stream)
        if self._error is not None:
            # Again at every use: typer tries the stream out first, and swallows what that raises.
            self.failed(self._error)

    @abstractmethod
    def failed(self, error: OSError) -> None:
        """Do what a failure means for this stream."""


class Styled:
    """A stream as rich writes to it, whose text has been made harmless and was styled then."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text`` with its styles."""
        write = getattr(self._stream, "write_styled", self._stream.write)
        return int(write(text))


class _Output(_Stream):
    def failed(self, error: OSError) -> None:
        # Not an OSError any more: libraries have ideas of their own about those.
        if isinstance(error, BrokenPipeError):
            raise ReaderGoneError from error
        raise OutputError(
            f"standard output cannot be written: {error.strerror or error}.",
            hint="Free space where it goes to, or send it elsewhere; `autotune report` shows the "
            "result of a search again.",
        ) from error


class _Progress(_Stream):
    def failed(self, error: OSError) -> None:
        pass  # the next lines go nowhere, and the search goes on


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guard standard output and error inside the block.

    Raises:
        UsageError: If standard output is closed.
    """
    if sys.stderr is None:
        # Its number must not become that of some file, which children would then write to.
        sys.stderr = os.fdopen(_hold(2), "w", buffering=1)
    if sys.stdout is None:
        raise UsageError(
            "standard output is closed, so that the result would be lost.",
            hint="Send it to a file, or to /dev/null if it is not wanted.",
        )
    output: Any = _Output(sys.stdout)
    progress: Any = _Progress(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(progress):
        yield
        output.flush()


def has_written(stream: object) -> bool:
    """Whether anything went to a guarded stream."""
    return isinstance(stream, _Stream) and stream.has_written


def _hold(number: int) -> int:
    opened = os.open(os.devnull, os.O_RDWR)
    while opened < number:
        opened = os.open(os.devnull, os.O_RDWR)
    return opened


def _discard(stream: TextIO) -> None:
    """Let what is left in the stream's buffer go nowhere, or Python trips over it at its end."""
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        stream.flush()

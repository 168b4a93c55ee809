"""Standard output and error that fail in order: a reader that went away, a full disk, none at all.

Results that cannot be written are an error, and one that Python itself would report as a traceback
or swallow. Progress that cannot be written is no reason to end a search.
"""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from autotune.errors import AutotuneError, UsageError


class OutputError(AutotuneError):
    """Standard output cannot be written."""


class ReaderGoneError(Exception):
    """Whoever read standard output went away, as ``head`` does."""


class _Stream(ABC):
    """A text stream whose failures are known from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``."""
        with self._guarded():
            self._stream.write(text)
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

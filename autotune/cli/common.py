"""What all commands share: errors to messages and exit codes, units, tables of key and value."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import typer

from autotune import units
from autotune.cli import interrupts, streams
from autotune.errors import AutotuneError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

INTERRUPTED = interrupts.INTERRUPTED
READER_GONE = 128 + 13
"""What a shell says of a program that ended for want of a reader, by SIGPIPE."""

T = TypeVar("T")


def guarded(app: typer.Typer, arguments: Sequence[str] | None) -> int:
    """Run ``app`` and return its exit code; every expected failure is one clear message.

    With ``--json`` it is one object on standard output as well, unless a result is there already.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with streams.guarded():
            failure, code = _run(app, words)
            if failure is not None and "--json" in words and not streams.has_written(sys.stdout):
                show_json({"error": failure, "exit_code": code})
            return code
    except streams.ReaderGoneError:
        return READER_GONE
    except AutotuneError as error:  # of the streams themselves
        return _told(error)[1]


def _run(app: typer.Typer, words: Sequence[str]) -> tuple[dict[str, str] | None, int]:
    """Run ``app``; return what failed, None if nothing did, and the exit code."""
    try:
        # What typer raises of a command line that it cannot read is ours to tell, too.
        code = app(args=list(words), standalone_mode=False)
    except (streams.OutputError, streams.ReaderGoneError):
        raise
    except AutotuneError as error:
        return _told(error)
    except Exception as error:
        show, message = getattr(error, "show", None), getattr(error, "format_message", None)
        if show is None or message is None:
            raise
        show()
        hint = "The command with --help says what it takes."
        return _failure("UsageError", message(), hint), int(getattr(error, "exit_code", 2))
    if code == INTERRUPTED:
        return _failure("Interrupted", "interrupted", ""), code
    return None, int(code or 0)


def _told(error: AutotuneError) -> tuple[dict[str, str], int]:
    say(f"error: {error.message}")
    if error.hint:
        say(f"  hint: {error.hint}")
    return _failure(type(error).__name__, error.message, error.hint), error.exit_code


def _failure(kind: str, message: str, hint: str) -> dict[str, str]:
    return {"type": kind, "message": message, "hint": hint}


def command(
    app: typer.Typer, function: Callable[..., int], *, imports: Sequence[str] = ()
) -> None:
    """Add ``function`` to ``app``; what it returns is the exit code.

    Args:
        app: Where to add it.
        function: The command.
        imports: Modules to import while a signal still ends the program at once.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        for name in imports:
            importlib.import_module(name)
        try:
            interrupts.end_in_order()
            code = function(*args, **kwargs)
        except KeyboardInterrupt:
            say("interrupted")
            code = INTERRUPTED
        raise typer.Exit(code)

    app.command()(run)


def say(text: str) -> None:
    """Write a line for people to standard error, if it can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def show_json(value: object) -> None:
    """Write one JSON object to standard output."""
    print(json.dumps(value, indent=2, allow_nan=False))


def stdout_console() -> Console:
    """Return rich's console for results."""
    # Without a terminal rich would take 80 columns; it reads COLUMNS itself.
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return _console(sys.stdout, width=None if has_width else 120)


def stderr_console() -> Console:
    """Return rich's console for progress."""
    return _console(sys.stderr)


def _console(stream: Any, **options: Any) -> Console:
    from rich.console import Console
    from rich.text import Text

    def harmless(item: Any) -> Any:
        if isinstance(item, str):
            return streams.harmless(item)
        if isinstance(item, Text):
            item = item.copy()
            item.plain = streams.harmless(item.plain)  # of the same length, so that styles stay
        return item

    class Harmless(Console):
        """Makes texts harmless before it styles them; its styles would not be told from theirs."""

        def print(self, *objects: Any, **kwargs: Any) -> None:
            super().print(*map(harmless, objects), **kwargs)

    return Harmless(file=cast(IO[str], streams.Styled(stream)), highlight=False, **options)


def parsed(read: Callable[[str], T], text: str | None, option: str) -> T | None:
    """Return ``read(text)``, None if there is no text.

    Raises:
        UsageError: Naming the option, if the text cannot be read.
    """
    if text is None:
        return None
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}.") from error


def size(text: str | None, option: str) -> int | None:
    """Return bytes for an option such as ``--memory-budget 22GiB``.

    Raises:
        UsageError: If it is no size, or so small that its unit was forgotten.
    """
    from autotune import membudget

    found = parsed(units.parse_bytes, text, option)
    membudget.check_asked(found)
    return found


def duration_s(text: str | None, option: str) -> float | None:
    """Return seconds for an option such as ``--time-budget 30m``."""
    return parsed(units.parse_duration_s, text, option)


def program(name: str) -> str:
    """Return how ``name`` can be typed in any folder, if it came with the Python that runs us.

    Without an activated environment the bare name would not be found; then it is the absolute
    path, since a command is copied into other terminals and kept in run folders.
    """
    if shutil.which(name) is not None:
        return name
    # Not resolved: the interpreter of an environment is a link to one outside of it.
    beside = Path(sys.executable).absolute().with_name(name)
    return str(beside) if beside.exists() else name


def print_wrapped(text: str, width: int, *, indent: int) -> None:
    """Write a long text in lines of at most ``width`` columns, as far as its words allow."""
    print(
        textwrap.fill(
            text,
            max(width, 20 + indent),
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def check_file(path: Path, option: str) -> None:
    """Refuse a file that could not be written, before any work is done for it.

    A missing folder is not made: more often than not its name is a slip.

    Raises:
        UsageError: If it is there and no regular file, which would be replaced by one; or its own
            folder is missing or may not be written.
    """
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder.", hint="Give the name of a file.")
    if path.exists() and not path.is_file():
        raise UsageError(f"{option}: {path} is no file.", hint="Give the name of a file.")
    if not path.parent.is_dir():
        raise UsageError(
            f"{option}: there is no folder {path.parent}.",
            hint=f"Make it first, or give another name: mkdir -p {shlex.quote(str(path.parent))}",
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option}: {path} may not be written.", hint="Give another name.")


def show_text(text: Text, console: Console) -> None:
    """Print a rendered text, without its styles where colours are not wanted."""
    plain = text.plain if console.no_color else text
    console.print(plain, markup=False, highlight=False, soft_wrap=True)


def make_folder(path: Path, option: str) -> None:
    """Make a folder, with those above it, unless it is there and can be written.

    Raises:
        UsageError: If it cannot be made or may not be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        reason = "it is a file" if error.errno == errno.EEXIST else error.strerror or str(error)
        raise UsageError(
            f"{option}: {path} cannot be used as a folder: {reason}.",
            hint="Name a folder that you may write to, or a new one.",
        ) from error


def pins(pairs: Sequence[str]) -> dict[str, Any]:
    """Return ``KNOB=VALUE`` pairs as a mapping.

    Raises:
        UsageError: If a pair has no ``=`` or a knob is given twice with different values.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UsageError(f"--pin takes KNOB=VALUE, not {pair!r}.")
        name, value = name.strip(), value.strip()
        if found.get(name, value) != value:
            raise UsageError(f"--pin sets {name} twice: {found[name]} and {value}.")
        found[name] = value
    return found

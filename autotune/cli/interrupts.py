"""What Ctrl-C, SIGTERM and a closing terminal do, from the first line of the program on.

Imports nothing but the standard library's lightest parts: it is there before anything else is.
"""

from __future__ import annotations

import contextlib
import os
import signal

INTERRUPTED = 130

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_at_once() -> None:
    """Let a signal end the program with a word; for the time before there is anything to end.

    An exception would not do: raised inside an import, it may be swallowed or turned into another.
    """
    for number in _heard():
        signal.signal(number, _leave)


def end_in_order(words: str = "") -> None:
    """Let the first signal raise ``KeyboardInterrupt``, and the second one end the program.

    Args:
        words: What to say at the first one; nothing if empty.
    """
    import threading

    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may; whoever runs us in another one has handlers of its own
    count = 0

    def handle(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(INTERRUPTED)
        if words:
            _say(words)
        raise KeyboardInterrupt

    for number in _heard():
        signal.signal(number, handle)


def _heard() -> list[signal.Signals]:
    # nohup has a terminal's end ignored, and means it.
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _SIGNALS if number != signal.SIGHUP or not is_ignored]


def _leave(number: int, frame: object) -> None:
    _say("interrupted")
    os._exit(INTERRUPTED)


def _say(words: str) -> None:
    # Straight to the descriptor: the stream may be in the middle of a write.
    with contextlib.suppress(OSError):
        os.write(2, f"{words}\n".encode())

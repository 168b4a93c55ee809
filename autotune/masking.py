"""Passwords in the addresses that users give: they go where they are meant to, and nowhere else.

What is recorded or said is read by others: run folders are shared, messages end up in logs.
"""

from __future__ import annotations

import re
import shlex

MASK = "***"

# Up to the last @ of the word: a password may hold one, and must not be shown for it.
_IN_ADDRESS = re.compile(r"(\w[\w+.-]*://[^\s:/@]*:)[^\s]+(?=@)")
_IN_QUERY = re.compile(r"([?&;][^\s=&;]*(?:pass|pwd|secret|token)[^\s=&;]*=)[^\s&;]+", re.I)


def masked(text: str) -> str:
    """Return ``text`` with ``***`` for each password in an address in it."""
    return _IN_QUERY.sub(rf"\1{MASK}", _IN_ADDRESS.sub(rf"\1{MASK}", text))


def masked_command(line: str) -> str:
    """Return a command line with its passwords masked, word by word: one may hold blanks."""
    try:
        words = shlex.split(line)
    except ValueError:  # no command line, whatever a script has given
        return masked(line)
    shown = [masked_address(word) for word in words]
    return line if shown == words else shlex.join(shown)


def masked_address(word: str) -> str:
    """Return an address, or any one word of a command line, whose blanks are part of it."""
    blank = "\ue000"  # for private use: not in any command line
    found = masked(re.sub(r"\s", blank, word))
    return word if MASK not in found else found.replace(blank, " ")

"""The ``autotune`` command: where it starts, and its exit codes.

0: a recommendation was written; 1: the search broke, or the output could not be written; 2: wrong
request or set-up; 3: nothing fits; 130: interrupted; 141: the reader of the output went away.
Results go to standard output, progress and warnings to standard error.

This module imports next to nothing, so that signals are handled from the start on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autotune.cli import interrupts


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    interrupts.leave_at_once()
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from autotune.cli import common
    from autotune.cli.app import app

    return common.guarded(app, arguments)

"""``python -m autotune.worker``: the server that starts probes, or one probe by itself."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

from autotune.worker.preload import ENVIRONMENT


def main() -> None:
    """Read the command line and run until there is nothing left to do."""
    parser = argparse.ArgumentParser(prog="python -m autotune.worker")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start probes on request, until the socket closes")
    serve.add_argument("--fd", type=int, required=True, help="socket to the search")
    serve.add_argument("--launch", choices=("fork", "spawn"), required=True)
    serve.add_argument("--preload", default="", help="modules to import, with commas between")
    run = commands.add_parser("run", help="run one task in this process")
    run.add_argument("task")
    run.add_argument("folder", type=Path)
    run.add_argument("--parent", type=int, default=None, help="process to die with")
    rank = commands.add_parser("rank", help="run this process's part of a probe; see ranks.py")
    rank.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if arguments.command == "run":
        from autotune.worker.child import run_to_exit

        parent = os.getppid() if arguments.parent is None else arguments.parent
        run_to_exit(arguments.task, arguments.folder, parent_pid=parent)
    if arguments.command == "rank":
        from autotune.worker.ranks import run_rank

        run_rank(arguments.folder)
    from autotune.worker.server import Server

    Server(
        socket.socket(fileno=arguments.fd),
        launch=arguments.launch,
        preload=tuple(filter(None, arguments.preload.split(","))),
    ).serve()
    # The libraries' exit handlers have nothing to tidy: nothing was ever run here.
    os._exit(0)


if __name__ == "__main__":
    main()

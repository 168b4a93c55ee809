"""The command line as a process of its own: what it imports, and signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_kit import AUTOTUNE


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options
    )


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "trl", "datasets", "optuna", "numpy", "rich.progress")
    script = (
        "import sys\n"
        "from autotune.cli.main import main\n"
        f"heavy = {heavy!r}\n"
        "code = main(['--help'])\n"
        "print([name for name in heavy if name in sys.modules], code, file=sys.stderr)\n"
    )
    done = run_python("-c", script)
    assert done.stderr.strip() == "[] 0"


@pytest.mark.parametrize("command", ["spaces", "report"])
def test_looking_needs_no_optuna_and_no_torch(command: str, found: Path) -> None:
    script = (
        "import sys\n"
        "from autotune.cli.main import main\n"
        f"code = main({[command] if command == 'spaces' else [command, str(found)]!r})\n"
        "heavy = [name for name in ('torch', 'transformers', 'trl') if name in sys.modules]\n"
        "print(heavy, code, file=sys.stderr)\n"
    )
    done = run_python("-c", script)
    assert done.stderr.strip() == "[] 0", done.stderr


def test_the_module_and_the_script_are_the_same(found: Path) -> None:
    module = run_python("-m", "autotune", "report", str(found), "--json")
    assert module.returncode == 0
    assert module.stderr == ""
    script = Path(sys.executable).parent / "autotune"
    if not script.exists():
        pytest.skip("the package is not installed here")
    done = subprocess.run(
        [str(script), "report", str(found), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == module.stdout
    assert run_python("-m", "autotune", "report", "nowhere").returncode == 2


SLOW_IMPORT = """
import os, signal, sys
from autotune.cli import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})
            raise ImportError("turned into another error")

sys.meta_path.insert(0, Finder())
main.run({arguments!r})
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["report", "nowhere"]),
        ("autotune.cli.search", ["search", "a/b", "c/d"]),
        ("optuna", ["search", "a/b", "c/d"]),
        ("rich.console", ["report", "nowhere"]),
        ("autotune.doctor", ["doctor"]),
    ],
)
def test_a_signal_while_importing_is_130(number: str, module: str, arguments: list[str]) -> None:
    script = SLOW_IMPORT.format(module=module, signal=number, arguments=arguments)
    done = run_python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_first_moments_of_a_search(number: signal.Signals) -> None:
    Path("model").mkdir()
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    process = subprocess.Popen(
        [*AUTOTUNE, "search", "model", "rows.jsonl", "--run-dir", "here"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    status = Path(f"/proc/{process.pid}/status")
    while time.monotonic() < deadline:
        (caught,) = [line for line in status.read_text().splitlines() if "SigCgt" in line]
        mask = int(caught.split()[1], 16)
        # Python itself handles SIGINT; ours is there as soon as SIGTERM is caught as well.
        if mask & (1 << (signal.SIGTERM - 1)):
            break
        time.sleep(0.001)
    else:
        pytest.fail("the signals were never caught")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert out == ""
    assert not Path("here").exists()


def test_nohup_is_respected() -> None:
    script = (
        "import os, signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from autotune.cli import interrupts\n"
        "interrupts.leave_at_once()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "interrupts.end_in_order()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('goes on')\n"
    )
    assert run_python("-c", script).stdout == "goes on\n"

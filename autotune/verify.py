"""Running exported configurations under the real ``trl`` command, each in a fresh process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import UsageError
from autotune.space.bounds import find_excess
from autotune.units import format_duration, format_gib

_RUN_TRL = "import sys; from trl.cli import main; sys.argv[0] = 'trl'; main()"
_COMMENT = re.compile(r"trl (\w+) --config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How one configuration ran under ``trl``.

    Attributes:
        file: The YAML file.
        passed: Whether all steps ran and the command ended with 0.
        num_steps: Optimizer steps asked for.
        wall_time_s: Imports, loading and steps.
        peak_resident_bytes: Largest resident size of any process of the run; None if unknown.
        detail: The last line of the error; empty if it passed.
    """

    file: str
    passed: bool
    num_steps: int
    wall_time_s: float
    peak_resident_bytes: int | None
    detail: str = ""

    def line(self) -> str:
        """Return one line for people."""
        verdict = "ran" if self.passed else "FAILED"
        peak = format_gib(self.peak_resident_bytes)
        text = f"{Path(self.file).name}: {verdict} {self.num_steps} steps in "
        text += f"{format_duration(self.wall_time_s)}, resident peak {peak} (measured)"
        return f"{text}: {self.detail}" if self.detail else text

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def verify_files(
    files: Sequence[Path], *, num_steps: int = 3, timeout_s: float = 600.0
) -> Iterator[Check]:
    """Run each file for ``num_steps`` optimizer steps under ``trl`` and yield how it went.

    Nothing is saved or reported; the output folder is temporary.

    Raises:
        UsageError: If a file is no YAML mapping.
    """
    for file in files:
        yield _verify(file, num_steps=num_steps, timeout_s=timeout_s)


def _verify(file: Path, *, num_steps: int, timeout_s: float) -> Check:
    trainer = _trainer(file)
    with tempfile.TemporaryDirectory(prefix="autotune-verify-") as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-c",
            _RUN_TRL,
            trainer,
            "--config",
            str(file.resolve()),
            "--max_steps",
            str(num_steps),
            "--output_dir",
            str(folder / "output"),
            "--save_strategy",
            "no",
            "--report_to",
            "none",
        ]
        log = folder / "log"
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )
            code, peak = _wait(process, timeout_s)
        detail = "" if code == 0 else _reason(code, log, timeout_s)
        return Check(
            file=str(file),
            passed=code == 0,
            num_steps=num_steps,
            wall_time_s=time.monotonic() - started,
            peak_resident_bytes=peak,
            detail=detail,
        )


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[int | None, int | None]:
    """Wait for the run; return its exit code (None: out of time) and its tree's peak resident."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    code: int | None
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # The counter is a running maximum; a smaller run does not move it.
    return code, after * 1024 if after > before else None


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _trainer(file: Path) -> str:
    """Return the ``trl`` command that a file's comment names; ``sft`` if it names none.

    Raises:
        UsageError: If the file is no YAML mapping.
    """
    try:
        text = file.read_text()
        excess = find_excess(text)
        if excess is not None:
            raise UsageError(f"{file}, line {excess[0]}: {excess[1]}.")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds no mapping of TRL keys.")
    found = _COMMENT.search(text)
    return found.group(1) if found else "sft"


def _reason(code: int | None, log: Path, timeout_s: float) -> str:
    if code is None:
        return f"did not end within {format_duration(timeout_s)}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if re.match(r"^[\w.]*(Error|Exception)\b", line)]
    last = errors[0] if errors else next((line for line in reversed(lines) if line), "")
    return f"exit code {code}: {last[:300]}"

"""Running exported configurations under the real ``trl`` command, each in a fresh process.

What such a run takes and how fast it is, is set against what the report says of the trial. The
resident size is that of the largest process; the rate is read from the lines that the trainer
logs, as they arrive, from the first to the last, so that start-up and the first step are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import UsageError
from autotune.executors.disk import temporary_folder
from autotune.objectives import tokens_per_s
from autotune.probe.result import Interval
from autotune.report.trial import Trial
from autotune.space.bounds import find_excess
from autotune.units import format_duration, format_gib, format_rate

_RUN_TRL = "import sys; from trl.cli import main; sys.argv[0] = 'trl'; main()"
_COMMENT = re.compile(r"trl (\w+) --config")
_NUM_TOKENS = re.compile(r"'num_tokens': '?([0-9.e+]+)")
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of a run against the same of the report.

    Attributes:
        name: ``resident peak`` (bytes) or ``rate`` (tokens/s).
        found: What this run had.
        reported: The report's figure with its spread: peaks of the probes, quartiles of the steps.
        difference_ratio: ``found`` over the report's figure, less 1.
        is_outside: Whether it lies outside the spread, by more than can be told apart.
    """

    name: str
    found: float
    reported: Interval
    difference_ratio: float
    is_outside: bool

    @classmethod
    def of(cls, name: str, found: float, reported: Interval) -> Comparison:
        """Compare ``found`` with what the report says."""
        slack = tokens_per_s().resolution_ratio
        return cls(
            name=name,
            found=found,
            reported=reported,
            difference_ratio=found / reported.median - 1.0,
            is_outside=not (
                reported.low * (1.0 - slack) <= found <= reported.high * (1.0 + slack)
            ),
        )

    def text(self) -> str:
        """Return it in words."""
        show = format_rate if self.name == "rate" else format_gib
        unit = " tokens/s" if self.name == "rate" else ""
        low, high = show(self.reported.low), show(self.reported.high)
        reported = low if low == high else f"{low} to {high}"
        place = "outside" if self.is_outside else "within"
        return (
            f"{self.name} {show(self.found)}{unit}, {self.difference_ratio:+.1%} against the"
            f" report's {show(self.reported.median)}, {place} its spread ({reported})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How one configuration ran under ``trl``.

    Attributes:
        file: The YAML file.
        passed: Whether all steps ran and the command ended with 0.
        num_steps: Optimizer steps asked for.
        wall_time_s: Imports, loading and steps.
        peak_resident_bytes: Largest resident size of any process of the run; None if unknown.
        tokens_per_s: Tokens per second after the first step; None if there was but one.
        comparisons: Against the report's figures; empty if there are none to compare with.
        detail: The last line of the error; empty if it passed.
    """

    file: str
    passed: bool
    num_steps: int
    wall_time_s: float
    peak_resident_bytes: int | None
    tokens_per_s: float | None = None
    comparisons: tuple[Comparison, ...] = ()
    detail: str = ""

    def line(self) -> str:
        """Return one line for people, and one for each comparison."""
        verdict = "ran" if self.passed else "FAILED"
        text = f"{Path(self.file).name}: {verdict} {self.num_steps} steps in "
        text += format_duration(self.wall_time_s)
        if not self.comparisons:
            text += f", resident peak {format_gib(self.peak_resident_bytes)} (measured)"
        text = f"{text}: {self.detail}" if self.detail else text
        return "\n".join([text, *(f"  {item.text()}" for item in self.comparisons)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def verify_files(
    files: Sequence[Path],
    *,
    num_steps: int = 3,
    timeout_s: float = 600.0,
    trials: Mapping[Path, Trial] | None = None,
) -> Iterator[Check]:
    """Run each file for ``num_steps`` optimizer steps under ``trl`` and yield how it went.

    Nothing is saved or reported; the output folder is temporary.

    Args:
        files: Configurations.
        num_steps: Optimizer steps of each.
        timeout_s: Limit of each run.
        trials: The trials that files were exported from, to compare with.

    Raises:
        UsageError: If a file is no YAML mapping.
    """
    for file in files:
        trial = (trials or {}).get(file)
        yield _verify(file, num_steps=num_steps, timeout_s=timeout_s, trial=trial)


def _verify(file: Path, *, num_steps: int, timeout_s: float, trial: Trial | None) -> Check:
    trainer = _trainer(file)
    with temporary_folder("autotune-verify-") as folder:
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
            "--logging_strategy",
            "steps",
            "--logging_steps",
            "1",
        ]
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            # Lines are timed as they arrive.
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        code, peak, lines = _watch(process, timeout_s)
        rate = _rate(lines)
        passed = code == 0
        return Check(
            file=str(file),
            passed=passed,
            num_steps=num_steps,
            wall_time_s=time.monotonic() - started,
            peak_resident_bytes=peak,
            tokens_per_s=rate,
            comparisons=_compare(trial, peak, rate) if passed and trial is not None else (),
            detail="" if passed else _reason(code, [line for _, line in lines], timeout_s),
        )


def _compare(trial: Trial, peak: int | None, rate: float | None) -> tuple[Comparison, ...]:
    found = []
    known = [item.peak_of("resident_bytes") for item in trial.measurements]
    resident = sorted(value for value in known if value is not None)
    if peak is not None and resident:
        # The greatest is what the report calls the peak.
        reported = Interval(median=resident[-1], low=resident[0], high=resident[-1])
        found.append(Comparison.of("resident peak", peak, reported))
    if rate is not None and trial.tokens_per_s is not None:
        found.append(Comparison.of("rate", rate, trial.tokens_per_s))
    return tuple(found)


def _rate(lines: Sequence[tuple[float, str]]) -> float | None:
    """Return tokens per second between the first and the last line that tells a count."""
    seen = []
    for at_s, line in lines:
        match = _NUM_TOKENS.search(line)
        if match:
            seen.append((at_s, float(match.group(1))))
    if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
        return None
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def _watch(
    process: subprocess.Popen[bytes], timeout_s: float
) -> tuple[int | None, int | None, list[tuple[float, str]]]:
    """Wait for the run.

    Returns:
        Its exit code (None: out of time), the largest resident size of its processes in bytes,
        and its lines with the moments at which they came.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    lines: list[tuple[float, str]] = []
    rest, is_open = b"", True
    code = peak = None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if is_open and selector.select(_POLL_S):
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    is_open = bool(chunk)
                    *whole, rest = (rest + chunk).split(b"\n")
                    now = time.monotonic()
                    lines += [(now, line.decode(errors="replace")) for line in whole]
                    if chunk:
                        continue
                # Whoever was left behind may hold the pipe open; the command itself decides.
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if not pid and not is_open:
                    time.sleep(0.02)
                if pid:
                    code = process.returncode = os.waitstatus_to_exitcode(status)
                    # A child counts the size of its parent from before it became trl.
                    is_known = usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                    peak = usage.ru_maxrss * 1024 if is_known else None
                    break
    finally:
        _end(process)
        process.stdout.close()
    return code, peak, [*lines, (time.monotonic(), rest.decode(errors="replace"))]


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


def _reason(code: int | None, lines: Sequence[str], timeout_s: float) -> str:
    if code is None:
        return f"did not end within {format_duration(timeout_s)}"
    lines = [line.strip() for line in lines]
    errors = [line for line in lines if re.match(r"^[\w.]*(Error|Exception)\b", line)]
    last = errors[0] if errors else next((line for line in reversed(lines) if line), "")
    return f"exit code {code}: {last[:300]}"

"""Running exported configurations under the real ``trl`` command, each in a fresh process.

Scripts, for trainers that it does not have, run as they are.

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

from autotune.errors import PrerequisiteError, UsageError
from autotune.executors import device_peak
from autotune.executors.disk import temporary_folder
from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import describe
from autotune.probe import (
    accelerate_config,
    prediction,
    sources,
    trl_file,
    trl_script,
    trl_yaml,
    trust,
)
from autotune.probe.trl_file import TrlFile
from autotune.report.comparison import Comparison, compare
from autotune.report.trial import Trial
from autotune.space.context import DeviceInfo
from autotune.units import format_duration, format_gib

__all__ = ["Check", "Comparison", "check_card", "check_code", "verify_files"]

_RUN_TRL = "import sys; from trl.cli import main; sys.argv[0] = 'trl'; main()"
_NUM_TOKENS = re.compile(r"'num_tokens': '?([0-9.e+]+)")
_NEEDS_GPU = "Your setup doesn't support bf16/gpu"
_POLL_S = 0.5


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
        peak_allocated_bytes: Device memory allocated at most; None if it was not looked at.
        peak_reserved_bytes: Device memory reserved at most; None if it was not looked at.
        comparisons: Against the report's figures; empty if there are none to compare with.
        detail: The last line of the error; empty if it passed.
    """

    file: str
    passed: bool
    num_steps: int
    wall_time_s: float
    peak_resident_bytes: int | None
    tokens_per_s: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
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
    model: str | None = None,
    dataset: str | None = None,
    trainer: str | None = None,
) -> Iterator[Check]:
    """Run each file for ``num_steps`` optimizer steps under ``trl`` and yield how it went.

    Nothing is saved or reported; the output folder is temporary.

    Args:
        files: Configurations.
        num_steps: Optimizer steps of each.
        timeout_s: Limit of each run.
        trials: The trials that files were exported from, to compare with.
        model: Where the files' model lies on this machine; None if where they say.
        dataset: Where the files' data lies on this machine; None if where they say.
        trainer: That the files are for; None if they say so, or their keys do.

    Raises:
        PrerequisiteError: If a file is gone, or what it names is not on this machine.
        UsageError: If a file is no YAML mapping, or ``trl`` cannot run it.
    """
    for file in files:
        trial = (trials or {}).get(file)
        with temporary_folder("autotune-verify-") as folder:
            run = _moved(trl_file.read(file, trainer), folder, model, dataset)
            command = _command(file, run, trainer)
            yield _verify(
                file, command, folder, num_steps=num_steps, timeout_s=timeout_s, trial=trial
            )


def _moved(read: TrlFile, folder: Path, model: str | None, dataset: str | None) -> Path:
    """Return the file to run: a copy that names model and data where they lie here, if asked.

    Raises:
        PrerequisiteError: If what it names is not on this machine.
    """
    file = read.path
    config = sources.moved(read.config, model, dataset)
    sources.check_present(config)
    if model is None and dataset is None:
        return file
    copy = folder / file.name
    is_script = file.suffix == trl_script.SUFFIX
    text = (
        trl_script.with_config(file.read_text(), config) if is_script else yaml.safe_dump(config)
    )
    trl_yaml.write_text(copy, text)
    return copy


def _command(file: Path, run: Path, trainer: str | None) -> list[str]:
    """Return the command line that runs a file.

    Raises:
        UsageError: If ``trl`` has no command for it, and it is no script.
    """
    if file.suffix == trl_script.SUFFIX:
        launched = accelerate_config.beside(file)
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(launched.resolve())]
        return [sys.executable, *(launch if launched.exists() else []), str(run.resolve())]
    name = trl_file.read(file, trainer).trainer
    if name not in trl_yaml.TRL_COMMANDS:
        raise UsageError(
            f"{file} is for the trainer {name!r}, which the trl command does not have.",
            hint="Verify the script that a search exports for it: a file that ends in .py.",
        )
    return [sys.executable, "-c", _RUN_TRL, name, "--config", str(run.resolve())]


def check_code(files: Sequence[Path], *, trusted: bool, trainer: str | None = None) -> None:
    """Refuse files that ask for code of others to run, unless the user trusts it.

    Args:
        files: Configurations.
        trusted: Whether ``--trust-remote-code`` was given.
        trainer: That they are for; None if they say so, or their keys do.

    Raises:
        PrerequisiteError: If a file is gone.
        UsageError: If one asks for such code, or is no YAML mapping.
    """
    for file in files:
        trust.check_code(trl_file.read(file, trainer).config, str(file), trusted=trusted)


def check_card(files: Sequence[Path], trainer: str | None = None) -> str:
    """Check that this machine has a GPU to run predicted configurations on.

    Args:
        files: Configurations, whose comments say if they are predicted.
        trainer: That they are for; None if they say so, or their keys do.

    Returns:
        What to know if it is not the card that they were predicted for; else nothing.

    Raises:
        PrerequisiteError: If PyTorch sees none, or a file is gone.
        UsageError: If a file is no YAML mapping.
    """
    read = [trl_file.read(file, trainer) for file in files]
    labels = [file.card for file in read if file.card is not None]
    if not labels:
        return ""
    here = _device_here()
    if here.kind != "cuda":
        raise PrerequisiteError(
            f"these configurations are predicted for {labels[0]}, and PyTorch sees no GPU here.",
            hint="Copy the run folder to a machine with that card, and verify it there.",
        )
    if here.label != labels[0]:
        return f"predicted for {labels[0]}, run here on {here.label}: peaks and rates differ"
    return ""


def _device_here() -> DeviceInfo:
    """Return what PyTorch trains on here, seen from a process of its own."""
    executor = SubprocessExecutor(preload=("torch",))
    try:
        return DeviceInfo.from_dict(describe("auto", executor)["device"])
    finally:
        executor.shutdown()


def _verify(
    file: Path,
    start: Sequence[str],
    folder: Path,
    *,
    num_steps: int,
    timeout_s: float,
    trial: Trial | None,
) -> Check:
    command = [
        *start,
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
    launched = accelerate_config.beside(file)
    if launched.exists() and file.suffix != trl_script.SUFFIX:
        command += ["--accelerate_config", str(launched.resolve())]
    is_predicted = trial is not None and trial.source == prediction.SOURCE
    watched = device_peak.environment(folder / "hook") if is_predicted else {}
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=folder,
        # Lines are timed as they arrive.
        env={**os.environ, **watched, "PYTHONUNBUFFERED": "1"},
    )
    code, peak, lines = _watch(process, timeout_s)
    rate = _rate(lines)
    allocated, reserved = device_peak.read(line for _, line in lines)
    passed = code == 0
    compared: tuple[Comparison, ...] = ()
    if passed and trial is not None:
        compared = compare(trial, resident=peak, allocated=allocated, reserved=reserved, rate=rate)
    return Check(
        file=str(file),
        passed=passed,
        num_steps=num_steps,
        wall_time_s=time.monotonic() - started,
        peak_resident_bytes=peak,
        tokens_per_s=rate,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        comparisons=compared,
        detail="" if passed else _explained(_reason(code, [line for _, line in lines], timeout_s)),
    )


def _explained(reason: str) -> str:
    """Return why a run failed, and what to do where it is for want of a GPU.

    What transformers says of bfloat16 names no device.
    """
    if _NEEDS_GPU not in reason or _device_here().kind != "cpu":
        return reason
    return (
        f"{reason} (PyTorch sees no GPU here. Verify it on the machine with the card; to try it on"
        " the CPU, add use_cpu: true and bf16: false to the file.)"
    )


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


def _reason(code: int | None, lines: Sequence[str], timeout_s: float) -> str:
    if code is None:
        return f"did not end within {format_duration(timeout_s)}"
    lines = [line.strip() for line in lines]
    errors = [line for line in lines if re.match(r"^[\w.]*(Error|Exception)\b", line)]
    last = errors[0] if errors else next((line for line in reversed(lines) if line), "")
    return f"exit code {code}: {last[:300]}"

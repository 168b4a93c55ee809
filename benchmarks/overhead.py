"""What the search costs on top of its probes, on the embedded default, on the CPU.

    python benchmarks/overhead.py [--trials 20]

Measured in one run: the start of later probes, wall time over the probes' own work, the time of
`autotune --help`, the parent's peak resident size, and how far five probes of one candidate
differ in peak memory. Timings on a machine that does other work are of no use; run it alone.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import Request, make_plan
from autotune.probe.result import Measurement
from autotune.probe.spec import ProbeSpec
from autotune.report.model import Report
from autotune.runfolder import RunFolder
from autotune.space.space import SearchSpace

AUTOTUNE = [sys.executable, "-m", "autotune"]


def help_time_s(repeats: int = 7) -> float:
    """Return the median wall time of ``autotune --help``, interpreter included, in seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([*AUTOTUNE, "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def run_search(folder: Path, trials: int) -> tuple[Report, float, int]:
    """Run the demo's search; return its report, wall time and the parent's peak resident bytes."""
    command = [*AUTOTUNE, "demo", "--folder", str(folder), "--trials", str(trials), "--json"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    status = Path(f"/proc/{process.pid}/status")
    peak = 0
    while process.poll() is None:
        try:
            for line in status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
        except OSError:
            break
        time.sleep(0.2)
    if process.wait() != 0:
        raise SystemExit(f"the search ended with exit code {process.returncode}")
    wall_s = time.perf_counter() - started
    return Report.load(folder / "run" / "report.json"), wall_s, peak


def probe_baseline(folder: Path, name: str, *, repeats: int = 5) -> list[Measurement]:
    """Return the measurements of ``repeats`` probes of the demo's baseline."""
    request = Request(
        model=str(folder / "tiny-llama"),
        dataset=str(folder / "chat.jsonl"),
        space=SearchSpace.load("demo"),
        device="cpu",
        global_batch=4,
    )
    run = RunFolder(folder / name)
    run.work.mkdir(parents=True)
    executor = SubprocessExecutor(devices=("cpu",))
    try:
        plan = make_plan(request, run, executor)
        config = plan.config(plan.space.baseline)
        found = []
        for number in range(repeats):
            probe = run.probe_folder(f"{number:04d}")
            probe.mkdir(parents=True)
            result = executor.submit(
                ProbeSpec(
                    probe_id=probe.name,
                    folder=str(probe),
                    trainer="sft",
                    config=config,
                    device="cpu",
                    data_folder=plan.data_folder,
                    memory_budget_bytes=plan.budget_bytes,
                    accumulation_steps=config["gradient_accumulation_steps"],
                    process_env=config.get("env", {}),
                )
            ).result()
            if result.measurement is None:
                raise SystemExit(f"the baseline ended {result.outcome}: {result.detail}")
            found.append(result.measurement)
            print(
                f"{name} {number}: peak {found[-1].peak_bytes:,} bytes resident, "
                f"{found[-1].tokens_per_s.median:,.0f} tokens/s (measured)",
                flush=True,
            )
    finally:
        executor.shutdown()
    return found


def spread_pct(peaks: list[int]) -> float:
    """Return greatest less least over the median, in percent."""
    return round(100 * (max(peaks) - min(peaks)) / statistics.median(peaks), 2)


def main() -> None:
    """Measure, print what was measured, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    trials = parser.parse_args().trials
    folder = Path(tempfile.mkdtemp(prefix="autotune-overhead-"))
    try:
        help_s = help_time_s()
        print(f"autotune --help: {help_s:.3f} s")
        report, wall_s, parent_peak = run_search(folder, trials)
        starts = [
            result.timeline.start_s
            for trial in report.trials
            for result in trial.results
            if result.timeline.start_s is not None
        ]
        later = starts[1:]
        work_s = report.probe_work_s
        print(f"probes: {len(starts)}, first start {starts[0]:.3f} s")
        print(f"later starts: median {statistics.median(later):.3f} s, most {max(later):.3f} s")
        print(f"search: {wall_s:.1f} s wall, {work_s:.1f} s of it loading and training")
        peaks = [found.peak_bytes for found in probe_baseline(folder, "repeat")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures = {
        "later_start_s": round(max(later), 3),
        "wall_over_work": round(wall_s / work_s, 3),
        "help_s": round(help_s, 3),
        "parent_rss_mb": round(parent_peak / 1e6, 1),
        "peak_spread_pct": spread_pct(peaks),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

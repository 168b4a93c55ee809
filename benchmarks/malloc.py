"""What fixing glibc's malloc thresholds does to the peak resident size and the rate, on the CPU.

    python benchmarks/malloc.py

Probes the demo's baseline with the settings that every CPU configuration carries
(autotune.devices.host.MALLOC_ENV), with other thresholds, and with glibc's own. A machine's speed
drifts, so each is probed three times in each of two rounds. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from overhead import probe_baseline, spread_pct

from autotune import SubprocessExecutor
from autotune.devices.host import MALLOC_ENV
from autotune.probe.result import Measurement

THRESHOLDS = {"128KiB": 1 << 17, "512KiB": 1 << 19, "1MiB": 1 << 20}


def probe(folder: Path, name: str, environment: dict[str, str]) -> list[Measurement]:
    """Return three probes' measurements with ``environment`` in the place of ours."""
    os.environ.update(environment)
    try:
        return probe_baseline(folder, name, repeats=3)
    finally:
        for variable in environment:
            del os.environ[variable]


def main() -> None:
    """Measure all ways and end with one line of JSON."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-malloc-"))
    executor = SubprocessExecutor(devices=("cpu",))
    ways = {
        name: {**MALLOC_ENV, "MALLOC_MMAP_THRESHOLD_": str(threshold)}
        for name, threshold in THRESHOLDS.items()
    }
    # Any MALLOC_ variable of the user's own keeps ours away; this one changes nothing.
    ways["glibc-default"] = {"MALLOC_PERTURB_": "0"}
    found: dict[str, list[Measurement]] = {name: [] for name in ways}
    try:
        executor.run_task("demo", {"folder": str(folder)}, timeout_s=300)
        executor.shutdown()
        for number in (1, 2):
            for name, environment in ways.items():
                found[name] += probe(folder, f"{name}-{number}", environment)
    finally:
        executor.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    figures = {
        name: {
            "peak_spread_pct": spread_pct([item.peak_bytes for item in items]),
            "peak_bytes": int(statistics.median(item.peak_bytes for item in items)),
            "tokens_per_s": round(statistics.median(i.tokens_per_s.median for i in items)),
        }
        for name, items in found.items()
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

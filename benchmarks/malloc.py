"""What fixing glibc's malloc thresholds does to the peak resident size and the rate, on the CPU.

    python benchmarks/malloc.py

Probes the demo's baseline five times with the settings that every CPU configuration carries
(autotune.devices.host.MALLOC_ENV) and five times without. The last line is one JSON object.
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


def main() -> None:
    """Measure both ways and end with one line of JSON."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-malloc-"))
    executor = SubprocessExecutor(devices=("cpu",))
    figures = {}
    try:
        executor.run_task("demo", {"folder": str(folder)}, timeout_s=300)
        executor.shutdown()
        for name in ("fixed", "glibc-default"):
            if name == "glibc-default":
                # Any MALLOC_ variable of the user's own keeps ours away; this one changes nothing.
                os.environ["MALLOC_PERTURB_"] = "0"
            found = probe_baseline(folder, name)
            peaks = [item.peak_bytes for item in found]
            figures[name] = {
                "peak_spread_pct": spread_pct(peaks),
                "peak_bytes": int(statistics.median(peaks)),
                "tokens_per_s": round(statistics.median(i.tokens_per_s.median for i in found)),
            }
    finally:
        executor.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""How much of a GPU a program took that we started and that does not know us.

``trl`` trains in a process that ``accelerate`` starts. A ``sitecustomize`` on ``PYTHONPATH`` is
imported by every Python among them as it starts; ours prints PyTorch's own peaks as it ends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_PEAK = re.compile(r"^autotune-device-peak (\d+) (\d+)\s*$")

_HOOK = """
import atexit
import importlib.machinery
import importlib.util
import os
import sys


def _tell():
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            allocated = torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved()
            print(f"\\nautotune-device-peak {allocated} {reserved}", flush=True)
    except Exception:
        pass


atexit.register(_tell)
# The one that this hides.
_here = os.path.dirname(os.path.abspath(__file__))
_path = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _path)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
"""


def environment(folder: Path) -> dict[str, str]:
    """Return what to set for a program that shall print its peaks; ``folder`` takes the hook."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HOOK)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


def read(lines: Iterable[str]) -> tuple[int | None, int | None]:
    """Return the greatest bytes allocated and reserved that were printed; None if none were."""
    found = [match for line in lines if (match := _PEAK.match(line.strip()))]
    if not found:
        return None, None
    return max(int(item[1]) for item in found), max(int(item[2]) for item in found)

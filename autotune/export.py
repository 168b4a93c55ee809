"""The configurations that a search recommends, as files that can be run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from autotune.probe import accelerate_config, trl_yaml

_OURS = re.compile(r"^(trial-\d+|best)(\.accelerate)?\.(yaml|py)$")


class ExportableTrial(Protocol):
    """A trial that knows its number and can write its configuration."""

    @property
    def number(self) -> int:
        """Return the trial's number."""
        ...

    @property
    def suffix(self) -> str:
        """Return how a file that can be run is called."""
        ...

    def export(self, path: str | Path) -> Path:
        """Write the trial's configuration."""
        ...


class ExportableReport(Protocol):
    """A report with a Pareto set."""

    @property
    def pareto(self) -> tuple[ExportableTrial, ...]:
        """Return the Pareto set."""
        ...

    def pick(self, which: str | int) -> ExportableTrial:
        """Return a trial by name or number."""
        ...


def export(config: Mapping[str, Any], header: Mapping[str, Any], path: str | Path) -> Path:
    """Write one configuration and return its path.

    Args:
        config: The mapping that the probes ran, without their overlay.
        header: Facts for the comment; see :func:`autotune.probe.trl_yaml.header_lines`.
        path: Where to write; an existing file is replaced as a whole.

    Raises:
        UsageError: If ``config`` holds something that YAML cannot give back unchanged.
    """
    target = Path(path)
    trl_yaml.write_text(target, trl_yaml.render(config, header, file_name=target.name))
    return target


def write_configs(report: ExportableReport, folder: str | Path) -> tuple[Path, ...]:
    """Write each Pareto member as ``trial-0007.yaml`` and the balanced one as ``best.yaml`` too.

    For trainers that ``trl`` has no command for, they are scripts that end in ``.py``.

    Files of members that are no longer in the set are removed, if they were written by this
    function; any other file in the folder is left alone.

    Returns:
        The files written; none if nothing is feasible.
    """
    target = Path(folder)
    members = report.pareto
    written = [
        member.export(target / f"trial-{member.number:04d}{member.suffix}") for member in members
    ]
    if members:
        best = report.pick("balanced")
        written.append(best.export(target / f"best{best.suffix}"))
    kept = {*written, *map(accelerate_config.beside, written)}
    if target.is_dir():
        for path in target.iterdir():
            is_ours = _OURS.match(path.name)
            if is_ours and path not in kept and path.is_file() and _carries_mark(path):
                path.unlink()
    return tuple(written)


def _carries_mark(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(len(trl_yaml.MARK)) == trl_yaml.MARK

"""The page: its template, style, script and plotly.js in one file.

Everything from a run is text to the template, which escapes it. A content security policy in the
page lets only the two scripts written here run, by their digests, and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from autotune.errors import PrerequisiteError
from autotune.probe import prediction, sources, trl_yaml
from autotune.report.effects import effects
from autotune.report.html import captions, charts, picture, sections
from autotune.report.html.predictions import PredictedPoint
from autotune.report.model import Report
from autotune.report.terminal import baseline_line, outcome_line

PACKAGES = ("plotly.offline", "jinja2")
_MARK = b'<meta name="generator" content="autotune">'
_HEAD_BYTES = 4096
HINT = "Install it with: pip install 'trl-autotune[html]'"


def check() -> None:
    """Raise if a page cannot be made here.

    Raises:
        PrerequisiteError: If plotly or jinja2 is missing.
    """
    for name in PACKAGES:
        _package(name)


def is_page(path: Path) -> bool:
    """Whether a file is a page that :func:`write` wrote, so that another one may replace it."""
    try:
        with path.open("rb") as file:
            return _MARK in file.read(_HEAD_BYTES)
    except OSError:
        return False


def write(report: Report, path: Path, predicted: Sequence[PredictedPoint] = ()) -> Path:
    """Write the page, about 5 MB of which is plotly.js, and return its path.

    Args:
        report: Any, also of a search that is under way or found nothing.
        path: Where to write; the file there is replaced as a whole.
        predicted: Candidates that were predicted beside a measured run, for its picture.

    Raises:
        PrerequisiteError: If plotly or jinja2 is missing.
        JournalError: If it cannot be written, such as on a full disk.
    """
    trl_yaml.write_text(path, render(report, predicted))
    return path


def render(report: Report, predicted: Sequence[PredictedPoint] = ()) -> str:
    """Return the page's text; see :func:`write`."""
    jinja = _package("jinja2")
    environment = jinja.Environment(
        loader=jinja.FunctionLoader(_read),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja.StrictUndefined,
    )
    environment.filters["pct"] = lambda share: f"{100 * share:.3f}%"
    drawing = picture.figure(report, predicted)
    own = _read("page.js")
    plotly = _package("plotly.offline").get_plotlyjs() if drawing is not None else ""
    safe = environment.filters["safe"]
    text: str = environment.get_template("page.html").render(
        **_context(report),
        figure=drawing,
        caption=captions.caption(report, predicted),
        style=safe(_read("page.css")),
        script=safe(own),
        plotly=safe(plotly),
        digests=" ".join(_digest(script) for script in (plotly, own) if script),
    )
    return text


def _context(report: Report) -> dict[str, Any]:
    found = effects(report)
    return {
        "report": report,
        "title": sources.short_name(report.model),
        "data_name": sources.short_name(report.dataset),
        "state": sections.state(report),
        "facts": sections.facts(report),
        "picks": sections.picks(report),
        "notes": sections.notes(report),
        "baseline": baseline_line(report) if report.trials else "",
        "outcomes": outcome_line(report.trials) if report.trials else "",
        "trust": prediction.trust(str(report.device.get("label", "")))
        if report.is_predicted
        else "",
        "effects": charts.effect_rows(found.first),
        "further": charts.effect_rows([i for i in found.paired if i not in found.first]),
        "unpaired": [item.sentence for item in found.unpaired],
        "failed": [item.sentence for item in found.failed],
        "makeups": charts.makeups(report),
        "phases": charts.peaks_by_phase(report),
        "peak_of": sections.peak_of(report),
        "lengths": charts.lengths(report),
        "columns": sections.COLUMNS,
        "rows": sections.trial_rows(report),
        "configurations": sections.configurations(report),
        "about": sections.about(report),
        "endings": sections.endings(report.trials),
        "left_out": [*report.inactive_knobs, *report.removed_values],
    }


def _read(name: str) -> str:
    return files("autotune.report.html").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """Return a script's name in the policy; only what has it is run."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise PrerequisiteError(
            f"an HTML report needs {package}, which is not installed.", hint=HINT
        ) from error

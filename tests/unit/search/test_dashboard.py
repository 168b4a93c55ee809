"""A search's study in optuna-dashboard, which reads the journal in the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from optuna.storages.journal import JournalFileBackend, JournalStorage

from autotune.runfolder import RunFolder
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_answers, make_loop
from autotune.units import GIB

dashboard = pytest.importorskip("optuna_dashboard")


def ask(app: Any, path: str) -> Any:
    """Return the JSON that a WSGI application answers to a request with."""
    status: list[str] = []
    environment = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
    }
    body = b"".join(app(environment, lambda line, headers, *_: status.append(line)))
    assert status == ["200 OK"]
    return json.loads(body)


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_the_dashboard_opens_the_study_of_a_run(run: Path) -> None:
    wall = MemoryWall(capacity_bytes=14 * GIB)
    make_loop(run, FakeExecutor(wall=wall, answers=make_answers())).run(6, None)
    storage = JournalStorage(JournalFileBackend(str(RunFolder(run).study_file)))
    app = dashboard.wsgi(storage)
    (study,) = ask(app, "/api/studies")["study_summaries"]
    assert study["study_name"] == "search"
    detail = ask(app, f"/api/studies/{study['study_id']}")
    assert detail["directions"] == ["minimize", "maximize"]
    first = detail["trials"][0]
    attributes = {item["key"]: item["value"] for item in first["user_attrs"]}
    assert len(detail["trials"]) >= 6
    assert first["state"] == "Complete"
    assert len(first["values"]) == 2
    assert "ok" in attributes["outcome"]
    assert "candidate" in attributes

"""Ctrl-C that lands inside the storage's own clean-up is still Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from autotune import Budget, Tuner
from autotune.errors import JournalError
from autotune.probe.spec import ProbeSpec
from autotune.testing.fakes import FakeExecutor
from autotune.testing.searches import make_answers


def broken_by_an_interrupt(spec: ProbeSpec) -> None:
    try:
        try:
            raise KeyboardInterrupt
        finally:
            Path(spec.folder, "no such lock").unlink()
    except OSError as error:
        raise JournalError("the study cannot be read or written") from error


def test_an_error_that_an_interrupt_caused_ends_as_the_interrupt(tmp_path: Path) -> None:
    executor = FakeExecutor(fault=broken_by_an_interrupt, answers=make_answers())
    tuner = Tuner("some/model", "some/rows", space="quick", executor=executor, run_dir=tmp_path)
    assert tuner.search(Budget(trials=3)).interrupted

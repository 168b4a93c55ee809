"""Worker servers, one tiny model and its rows for all tests with the real TRL."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from autotune.executors.subprocess import SubprocessExecutor
from autotune.worker import demo


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SubprocessExecutor]:
    """Return an executor whose server imports the training stack once."""
    executor = SubprocessExecutor(("cpu",), log_folder=tmp_path_factory.mktemp("logs"))
    yield executor
    executor.shutdown()


@pytest.fixture(scope="session")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SubprocessExecutor]:
    """Return an executor whose one slot takes any virtual card."""
    executor = SubprocessExecutor(("virtual",), log_folder=tmp_path_factory.mktemp("logs"))
    yield executor
    executor.shutdown()


@pytest.fixture(scope="session")
def made(executor: SubprocessExecutor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the demo's model and data set."""
    folder = tmp_path_factory.mktemp("demo")
    return executor.run_task("demo", {"folder": str(folder)}, timeout_s=120)


@pytest.fixture(scope="session")
def model(made: dict[str, str]) -> str:
    return made["model"]


@pytest.fixture(scope="session")
def chats() -> list[dict]:
    """Return a few short conversations."""
    rows = demo.conversations(80)
    return sorted(rows, key=lambda row: len(str(row)))[:24]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def prepare_rows(
    executor: SubprocessExecutor, model: str, tmp_path: Path, work: Path
) -> Callable[..., dict[str, Any]]:
    """Return a function that writes rows into a file and has the worker prepare it."""
    from trl_kit import keys_for, prepare, write_jsonl

    def run(
        rows: Sequence[Mapping[str, Any]],
        *,
        of: object = model,
        split: str | None = None,
        **fixed: Any,
    ) -> dict[str, Any]:
        dataset = write_jsonl(tmp_path / "rows.jsonl", rows)
        return prepare(executor, work, {**keys_for(str(of), dataset, split=split), **fixed})

    return run


@pytest.fixture(scope="session")
def varied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return tokenised rows of several lengths, for batches of four."""
    import agreement_kit as kit
    from copies_kit import VARIED

    return kit.write_rows(tmp_path_factory.mktemp("varied"), VARIED)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny model with so many layers that few of them are run."""
    import agreement_kit as kit
    from copies_kit import DEEP

    return kit.write_model(tmp_path_factory.mktemp("deep"), num_hidden_layers=DEEP)


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Spare the collector, which trainers call, the many objects that are there already."""
    import agreement_kit as kit

    gc.collect()
    gc.freeze()
    with kit.quiet():
        yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the configuration and tokenizer of a tiny model."""
    import agreement_kit as kit

    return kit.write_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def filled_caches(
    tmp_path_factory: pytest.TempPathFactory, deep: str, varied: str
) -> Iterator[None]:
    """Let libraries fill what a process keeps, and say errors only while the tests run."""
    import agreement_kit as kit
    from copies_kit import fill_caches

    with kit.quiet():
        fill_caches(tmp_path_factory.mktemp("caches"), deep, varied)
        yield

"""Whole searches without a training stack: the worker's answers, made from a context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune import objectives
from autotune.loop import SearchLoop
from autotune.plan import Plan, Request, make_plan
from autotune.runfolder import RunFolder
from autotune.search.pool import pool
from autotune.search.study import Study
from autotune.space.context import Context
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context
from autotune.testing.fakes import FakeExecutor
from autotune.virtual import cards

ENVIRONMENT: Mapping[str, Any] = {"packages": {"torch": "2.13.0"}, "python": "3.11.7"}


def make_answers(context: Context | None = None) -> dict[str, Any]:
    """Return what the worker answers where ``context`` holds: ``describe``, ``prepare`` ..."""
    context = context or make_context()
    return {
        "describe": {
            "device": context.device.to_dict(),
            "packages": dict(context.packages),
            "environment": dict(ENVIRONMENT),
            "trainer_keys": {"use_cpu": True} if context.device.kind == "cpu" else {},
            "broken_plugins": {},
        },
        "prepare": {
            "model": context.model.to_dict(),
            "data": context.data.to_dict(),
            "data_folder": "/no/such/folder",
        },
        "rates": {"fp32": 0.1, "bf16": 0.2, "bandwidth_bytes_per_s": 2e10},
    }


def make_card_answers(context: Context | None = None) -> dict[str, Any]:
    """Return what the tasks answer where every virtual card is as the catalogue has it."""
    context = context or make_context()

    def describe(request: Mapping[str, Any]) -> dict[str, Any]:
        device = str(request["device"])
        card = cards.device_info(cards.find(device.partition(":")[2]), device)
        answer: dict[str, Any] = make_answers(replace(context, device=card))["describe"]
        return answer

    return {**make_answers(context), "describe": describe}


def make_fake_plan(
    folder: Path,
    *,
    space: str | SearchSpace = "quick",
    context: Context | None = None,
    answers: Mapping[str, Any] | None = None,
    **asked: Any,
) -> Plan:
    """Return the plan of a search that a :class:`FakeExecutor` can run, made in ``folder``.

    ``answers`` are those of the worker's tasks; by default they say what ``context`` holds.
    """
    run = RunFolder(folder)
    run.work.mkdir(parents=True, exist_ok=True)
    found = SearchSpace.load(space) if isinstance(space, str) else space
    values: dict[str, Any] = {"min_coverage": 0.0, **asked}  # the rows of a context are few
    request = Request(model="some/model", dataset="some/rows", space=found, **values)
    return make_plan(request, run, FakeExecutor(answers=answers or make_answers(context)))


def make_loop(
    folder: Path,
    executor: FakeExecutor,
    *,
    plan: Plan | None = None,
    sampler: str = "tpe",
    num_trials: int | None = 30,
    owner: str = "me",
    storage: str | None = None,
    **options: Any,
) -> SearchLoop:
    """Return the loop of a search in ``folder``, with the limits that a tuner would set."""
    plan = plan or make_fake_plan(folder)
    chosen = (objectives.peak_memory(), objectives.tokens_per_s())
    run = RunFolder(folder)
    study = Study(
        plan.space.draw,
        directions=[item.direction for item in chosen],
        storage=storage or str(run.study_file),
        name="search",
        sampler=sampler,
        seed=plan.request.seed,
        num_trials=num_trials,
        identity=plan.identity(),
        owner=owner,
        candidates=lambda: pool(plan.space, seed=plan.request.seed),
    )
    return SearchLoop(
        plan,
        study,
        executor,
        run,
        objectives=chosen,
        constraints=(objectives.memory_budget(),),
        **options,
    )

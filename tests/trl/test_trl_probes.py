"""Real probes of a tiny model: every knob works, limits hold, neutral knobs change nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from datasets import load_from_disk
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_kit import (
    ON_CPU,
    keys_for,
    num_loss_tokens,
    parse,
    plan_of,
    prepare,
    prepared,
    probe,
    spec_of,
    write_jsonl,
)

from autotune import objectives
from autotune.errors import UsageError
from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import Plan, describe
from autotune.probe import trl_yaml
from autotune.probe.result import Outcome
from autotune.space.space import ResolvedSpace
from autotune.testing.contexts import PACKAGES, make_context, make_gpu
from autotune.trainers.hf import probe_overlay
from autotune.trainers.sft import trained_tokens
from autotune.verify import verify_files
from autotune.worker import demo

pytestmark = pytest.mark.trl

Candidate = dict[str, Any]
MIB = 1 << 20


def one_at_a_time(space: ResolvedSpace) -> dict[tuple[str, Any], Candidate]:
    """Return, for every value of every knob that can be drawn, a candidate near the baseline."""
    found: dict[tuple[str, Any], Candidate] = {}
    waiting: list[dict[str, Any]] = [dict(space.baseline)]
    while waiting:
        wanted = waiting.pop(0)
        offered: dict[str, Sequence[Any]] = {}

        def answer(name: str, values: Sequence[Any], ordered: bool) -> Any:
            knob = name.partition("@")[0]
            offered[knob] = values  # noqa: B023  used up before the next round
            preferred = wanted.get(knob, values[0])  # noqa: B023
            return preferred if preferred in values else values[0]

        candidate = space.draw(answer)
        for name, values in offered.items():
            found.setdefault((name, candidate[name]), candidate)
            for value in values:
                if (name, value) not in found:
                    found[name, value] = candidate  # a place for it; replaced when it is drawn
                    waiting.append({**candidate, name: value})
        for name, value in wanted.items():
            if candidate.get(name) == value and found.get((name, value), {}).get(name) != value:
                found[name, value] = candidate
    return {pair: item for pair, item in found.items() if item[pair[0]] == pair[1]}


@pytest.fixture(scope="module")
def short_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 200 conversations of 60 tokens or so: enough to fill a batch when packed."""
    rows = sorted(demo.conversations(500), key=lambda row: len(str(row)))[:200]
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def plan(
    executor: SubprocessExecutor,
    model: str,
    short_rows: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    return plan_of(executor, folder, model, short_rows, pins={"max_length": "64"}, global_batch=4)


# --- every value of every knob ------------------------------------------------------------------


def test_every_value_of_every_knob_can_be_probed(
    plan: Plan, executor: SubprocessExecutor, tmp_path: Path
) -> None:
    candidates = one_at_a_time(plan.space)
    unique = {plan.space.digest(item): item for item in candidates.values()}
    futures = {
        digest: executor.submit(spec_of(plan, tmp_path / digest, candidate))
        for digest, candidate in unique.items()
    }
    lines, failed = [], []
    for (name, value), candidate in candidates.items():
        result = futures[plan.space.digest(candidate)].result(timeout=300)
        line = f"{name}={value}: {result.outcome.value} {result.detail}"
        if result.measurement is not None:
            line += f"{result.measurement.peak_bytes / MIB:,.0f} MiB"
            line += f" {result.measurement.tokens_per_s.median:,.0f} tokens/s"
        lines.append(line)
        if result.outcome is not Outcome.OK:
            failed.append(line)
    sys.stdout.write("\n".join(lines) + "\n")
    assert failed == []
    names = {name for name, _ in candidates}
    assert {"batching", "adaptation", "lora_r", "checkpointing", "optim", "dtype"} <= names
    assert len(candidates) > 30


@pytest.mark.parametrize("length", [24, 48])
@pytest.mark.parametrize("layout", ["padded", "bfd", "bfd_split", "wrapped"])
def test_lengths_can_be_probed(
    layout: str,
    length: int,
    executor: SubprocessExecutor,
    model: str,
    short_rows: Path,
    tmp_path: Path,
) -> None:
    pins = {"max_length": str(length), "batching": layout}
    plan = plan_of(executor, tmp_path / "plan", model, short_rows, pins=pins, global_batch=2)
    result = probe(executor, plan, tmp_path / "probe", plan.space.baseline)
    assert result.outcome is Outcome.OK, result.detail
    assert result.measurement is not None
    rows, longest = result.measurement.worst_batch
    assert (rows, longest) == (2, length)


@pytest.mark.parametrize("phases", [("eval",), ("save",), ("eval", "save")])
@pytest.mark.parametrize("weights", ["random", "real"])
def test_further_phases_and_real_weights(
    phases: tuple[str, ...],
    weights: str,
    plan: Plan,
    executor: SubprocessExecutor,
    tmp_path: Path,
) -> None:
    result = probe(
        executor, plan, tmp_path / "probe", plan.space.baseline, phases=phases, weights=weights
    )
    assert result.outcome is Outcome.OK, result.detail
    assert result.measurement is not None
    expected = {"load", "first_step", "later_steps", *phases}
    assert set(result.measurement.phases) == expected


# --- what is exported is what was probed --------------------------------------------------------


def exported(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    text = trl_yaml.render(config, {"trainer": "sft"}, file_name="config.yaml")
    (folder / "config.yaml").write_text(text)
    return yaml.safe_load(text)


def flat_keys(parsed: Sequence[Any]) -> dict[str, Any]:
    return {key: value for item in parsed for key, value in vars(item).items()}


def test_trl_reads_every_exported_value(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for (name, value), candidate in one_at_a_time(plan.space).items():
        config = plan.config(candidate)
        for key in config.get("env", {}):
            monkeypatch.setenv(key, "")  # TRL sets it when it parses; put back afterwards
        mapping = exported(tmp_path, config)
        assert mapping == config, (name, value)
        read = flat_keys(parse(tmp_path, mapping))
        for key, wanted in mapping.items():
            if key in ("env", "datasets"):
                continue
            assert read[key] == wanted, (name, value, key)


def test_trl_knows_every_key_for_an_accelerator(tmp_path: Path) -> None:
    from dataclasses import fields

    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

    from autotune.space.space import SearchSpace

    classes = (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
    known = {item.name for kind in classes for item in fields(kind)} | {"env"}
    context = make_context(
        device=make_gpu(), packages={**PACKAGES, "flash-attn": "2.8.3", "kernels": "0.12"}
    )
    space = SearchSpace.load("sft").resolve(context)
    for pair, candidate in one_at_a_time(space).items():
        assert set(space.config(candidate)) <= known, pair


def test_a_probe_runs_the_exported_mapping(
    plan: Plan, executor: SubprocessExecutor, tmp_path: Path
) -> None:
    from autotune.devices import base as devices

    candidate = dict(plan.space.baseline)
    spec = spec_of(plan, tmp_path / "probe", candidate)
    assert executor.submit(spec).result(timeout=120).outcome is Outcome.OK
    ran = yaml.safe_load((tmp_path / "probe" / "config.yaml").read_text())
    overlay = probe_overlay(spec, devices.load("cpu"))
    mapping = exported(tmp_path, plan.config(candidate))
    assert {key: ran[key] for key in overlay} == overlay
    assert {k: v for k, v in ran.items() if k not in overlay} == {
        k: v for k, v in mapping.items() if k not in overlay
    }
    assert mapping == dict(spec.config)


# --- which tokens are trained on ----------------------------------------------------------------


def prompts(rows: list[dict]) -> list[dict]:
    return [{"prompt": row["messages"][:1], "completion": row["messages"][1:2]} for row in rows]


@pytest.mark.parametrize("masked", [False, True])
def test_coverage_is_what_trl_keeps(
    masked: bool, executor: SubprocessExecutor, model: str, tmp_path: Path, work: Path
) -> None:
    rows = demo.conversations(60)
    keys = keys_for(model, write_jsonl(tmp_path / "a.jsonl", prompts(rows) if masked else rows))
    lengths = (8, 17, 40, 64, 100, 256)
    answer = prepare(executor, work, keys, max_lengths=lengths)
    profile, _ = prepared(answer)
    data = load_from_disk(answer["data_folder"]).select_columns(["input_ids", "labels"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    for length in (*lengths, profile.longest):
        for layout in ("padded", "bfd", "bfd_split", "wrapped"):
            packing = {} if layout == "padded" else {"packing": True, "packing_strategy": layout}
            args = SFTConfig(
                output_dir=str(tmp_path / "out"), max_length=length, **ON_CPU, **packing
            )
            trainer = SFTTrainer(
                model=model, args=args, train_dataset=data, processing_class=tokenizer
            )
            share = num_loss_tokens(trainer.train_dataset) / profile.num_loss_tokens
            expected = profile.coverage(length) if layout in ("padded", "bfd") else 1.0
            assert share == pytest.approx(expected, abs=1e-12), (layout, length)
            if layout == "padded":
                index = profile.max_lengths.index(length)
                dropped = profile.num_rows - len(trainer.train_dataset)
                assert dropped == profile.rows_dropped[index]


# --- knobs that change nothing ------------------------------------------------------------------

LOSSES = "autotune.testing.losses:run"
NEUTRAL: dict[str, dict[str, str]] = {
    "checkpointing-full": {"checkpointing": "full"},
    "checkpointing-full-reentrant": {"checkpointing": "full_reentrant"},
    "checkpointing-selective": {"checkpointing": "selective"},
    "checkpointing-every-2-layers": {"checkpointing": "every_2_layers"},
    "micro-batch-1": {"per_device_train_batch_size": "1"},
    "micro-batch-2": {"per_device_train_batch_size": "2"},
    "micro-batch-4": {"per_device_train_batch_size": "4"},
    "pad-to-8": {"pad_to_multiple_of": "8"},
    "pad-to-64": {"pad_to_multiple_of": "64"},
    "eager": {"attn_implementation": "eager"},
    "adamw-torch": {"optim": "adamw_torch"},
}
PLAIN = {
    "max_length": "60",  # no multiple of what is padded to
    "batching": "padded",
    "adaptation": "full",
    "dtype": "float32",
    "optim": "adamw_torch_fused",
    "checkpointing": "none",
    "attn_implementation": "sdpa",
    "per_device_train_batch_size": "8",
    "pad_to_multiple_of": "none",
}


def losses(
    executor: SubprocessExecutor, folder: Path, model: str, rows: Path, pins: dict[str, str]
) -> list[float]:
    plan = plan_of(executor, folder / "plan", model, rows, pins=pins, global_batch=8)
    spec = spec_of(plan, folder / "run", plan.space.baseline)
    for name, value in pins.items():
        assert str(plan.space.baseline[name]) == value
    answer = executor.run_task(LOSSES, {"spec": spec.to_dict()}, timeout_s=120)
    return answer["losses"]


@pytest.fixture(scope="module")
def plain_losses(
    executor: SubprocessExecutor,
    model: str,
    short_rows: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    return losses(executor, folder, model, short_rows, PLAIN)


def test_training_makes_progress(plain_losses: list[float]) -> None:
    assert len(plain_losses) == 4
    assert plain_losses[-1] < plain_losses[0] - 0.1


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_knob_gives_the_same_losses(
    name: str,
    executor: SubprocessExecutor,
    model: str,
    short_rows: Path,
    plain_losses: list[float],
    tmp_path: Path,
) -> None:
    found = losses(executor, tmp_path, model, short_rows, {**PLAIN, **NEUTRAL[name]})
    assert found == pytest.approx(plain_losses, rel=2e-4)


def test_a_knob_that_changes_tokens_gives_other_losses(
    executor: SubprocessExecutor,
    model: str,
    short_rows: Path,
    plain_losses: list[float],
    tmp_path: Path,
) -> None:
    found = losses(executor, tmp_path, model, short_rows, {**PLAIN, "max_length": "32"})
    assert found != pytest.approx(plain_losses, rel=2e-4)


# --- memory -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(
    executor: SubprocessExecutor,
    made: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Plan:
    """Return a plan whose baseline takes several hundred MiB."""
    pins = {"checkpointing": "none", "batching": "padded", "dtype": "float32"}
    folder = tmp_path_factory.mktemp("large")
    return plan_of(executor, folder, made["model"], made["dataset"], pins=pins, global_batch=8)


def test_a_budget_is_a_wall(large: Plan, executor: SubprocessExecutor, tmp_path: Path) -> None:
    candidate = {**large.space.baseline, "per_device_train_batch_size": 8}
    free = probe(executor, large, tmp_path / "free", candidate)
    assert free.outcome is Outcome.OK, free.detail
    assert free.measurement is not None
    peak = free.measurement.peak_bytes
    loaded = free.measurement.phases["load"].resident_bytes
    assert loaded is not None
    assert peak - loaded > 100 * MIB
    small = loaded + (peak - loaded) // 3
    refused = probe(executor, large, tmp_path / "small", candidate, memory_budget_bytes=small)
    assert refused.outcome is Outcome.DEVICE_OOM
    assert refused.phase == "first_step"
    # Whoever asks for the byte too many: PyTorch, Python or oneDNN.
    detail = refused.detail.lower()
    assert any(word in detail for word in ("allocate", "memory", "could not create a primitive"))
    assert refused.measurement is None
    roomy = round(peak * 1.3)
    # The next probe starts with all its memory.
    fits = probe(executor, large, tmp_path / "roomy", candidate, memory_budget_bytes=roomy)
    assert fits.outcome is Outcome.OK, fits.detail
    assert fits.measurement is not None
    assert fits.measurement.peak_bytes <= roomy + 8 * MIB
    assert objectives.memory_budget(roomy).read(fits.measurement, {}) <= 0.02


def test_a_candidate_that_fits_its_budget_is_not_refused(
    large: Plan, executor: SubprocessExecutor, tmp_path: Path
) -> None:
    """The limit counts reserved memory; a tight one refused candidates 19 % below the budget."""
    candidate = {**large.space.baseline, "per_device_train_batch_size": 8}
    free = probe(executor, large, tmp_path / "free", candidate)
    assert free.measurement is not None
    budget = round(free.measurement.peak_bytes * 1.05)
    result = probe(executor, large, tmp_path / "tight", candidate, memory_budget_bytes=budget)
    assert result.outcome is Outcome.OK, result.detail


def test_a_budget_below_the_imports_is_refused_at_once(
    plan: Plan, executor: SubprocessExecutor, tmp_path: Path
) -> None:
    result = probe(
        executor, plan, tmp_path / "probe", plan.space.baseline, memory_budget_bytes=50 * MIB
    )
    assert result.outcome is Outcome.DEVICE_OOM
    assert result.phase == "load"
    assert "below what PyTorch" in result.detail


def test_a_budget_below_the_imports_is_refused_while_planning(
    executor: SubprocessExecutor, model: str, made: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="below what PyTorch"):
        plan_of(executor, tmp_path, model, made["dataset"], memory_budget_bytes=50 * MIB)


def test_what_a_worker_takes_is_less_than_any_probe_s_peak(
    plan: Plan, executor: SubprocessExecutor, tmp_path: Path
) -> None:
    occupied = describe("cpu", executor)["occupied_bytes"]
    result = probe(executor, plan, tmp_path / "probe", plan.space.baseline)
    assert result.measurement is not None
    assert 100 * MIB < occupied < result.measurement.peak_bytes
    # Below it, a probe ends before it has loaded anything.
    budget = occupied - 8 * MIB
    refused = probe(
        executor, plan, tmp_path / "below", plan.space.baseline, memory_budget_bytes=budget
    )
    assert refused.phase == "load"
    assert "below what PyTorch" in refused.detail


@pytest.mark.parametrize("batch", [4, 8])
def test_the_worst_batch_comes_first_and_again(
    batch: int, executor: SubprocessExecutor, model: str, chats: list[dict], tmp_path: Path
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", chats)
    pins = {"batching": "padded", "per_device_train_batch_size": str(batch)}
    plan = plan_of(executor, tmp_path / "plan", model, rows, pins=pins, global_batch=batch)
    result = probe(
        executor, plan, tmp_path / "probe", plan.space.baseline, warmup_steps=1, measured_steps=3
    )
    assert result.outcome is Outcome.OK, result.detail
    measured = result.measurement
    assert measured is not None
    longest = plan.context.data.longest
    assert measured.worst_batch == (batch, longest)
    assert len(measured.warmup_steps) == 3
    assert len(measured.steps) == 3
    first, second, warm = measured.warmup_steps
    assert first.num_positions == second.num_positions == batch * longest
    assert first.num_tokens == second.num_tokens
    assert {step.num_rows for step in (*measured.steps, first, second, warm)} == {batch}
    assert all(step.num_positions <= first.num_positions for step in measured.steps)
    assert measured.rows_per_epoch == len(chats)
    limit = plan.config(plan.space.baseline)["max_length"]
    lengths = plan.context.data.length_counts.items()
    cut = sum(count * min(length, limit) for length, count in lengths)
    assert measured.tokens_per_epoch == cut


@pytest.mark.parametrize(
    ("strategy", "packing", "max_length", "tokens"),
    [
        ("bfd", False, 8, 19),
        ("bfd", True, 8, 19),
        ("bfd_split", True, 8, 23),
        ("wrapped", True, 8, 23),
        ("bfd", False, None, 23),
        ("bfd_split", False, 8, 19),
    ],
)
def test_tokens_of_rows_are_counted_as_trl_cuts_them(
    strategy: str, packing: bool, max_length: int | None, tokens: int
) -> None:
    args = SimpleNamespace(packing=packing, packing_strategy=strategy, max_length=max_length)
    assert trained_tokens([3, 8, 12], args) == tokens


# --- the trl command itself ---------------------------------------------------------------------


def test_verify_runs_an_exported_file(plan: Plan, tmp_path: Path) -> None:
    exported(tmp_path, {**plan.config(plan.space.baseline)})
    (check,) = verify_files([tmp_path / "config.yaml"], num_steps=1, timeout_s=180)
    assert check.passed, check.detail
    assert check.num_steps == 1
    assert check.wall_time_s > 0
    assert "ran 1 steps" in check.line()


def test_verify_says_why_a_file_fails(plan: Plan, tmp_path: Path) -> None:
    exported(tmp_path, {**plan.config(plan.space.baseline), "optim": "no_such_optimizer"})
    (check,) = verify_files([tmp_path / "config.yaml"], num_steps=1, timeout_s=180)
    assert not check.passed
    assert "no_such_optimizer" in check.detail
    assert "FAILED" in check.line()

"""What a plan adds to a candidate: the environment it was measured in, and what to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.devices import host
from autotune.errors import UsageError
from autotune.testing.contexts import make_context, make_cpu, make_gpu, make_model, make_profile
from autotune.testing.searches import make_answers, make_fake_plan
from autotune.units import MIB


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*host.MALLOC_ENV, *host.ONEDNN_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


THREADS = {"OMP_NUM_THREADS": "3"}


def test_the_cpu_s_configuration_carries_the_malloc_settings_it_was_measured_with(
    tmp_path: Path,
) -> None:
    plan = make_fake_plan(tmp_path, context=make_context(device=make_cpu()))
    assert plan.config(plan.space.baseline)["env"] == {
        **host.MALLOC_ENV,
        **host.ONEDNN_ENV,
        **THREADS,
    }


def test_an_accelerator_s_baseline_has_no_environment(tmp_path: Path) -> None:
    plan = make_fake_plan(tmp_path, context=make_context(device=make_gpu()))
    assert "env" not in plan.config(plan.space.baseline)


def test_a_user_s_own_malloc_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert host.process_env("cpu") == {**host.ONEDNN_ENV, **THREADS}


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", {**host.MALLOC_ENV, **host.ONEDNN_ENV, **THREADS}), ("cuda:0", {}), ("mps", {})],
)
def test_only_the_cpu_needs_an_environment(device: str, expected: dict[str, str]) -> None:
    assert host.process_env(device) == expected


def test_the_exported_run_gets_as_many_threads_as_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without, ``trl`` on a CPU trains with one thread, whatever was measured."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {0, 1, 4, 5})
    monkeypatch.setattr(host, "_CPUS", tmp_path)
    for number in (0, 1, 4):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("4\n" if number == 4 else "0-1\n")
    assert host.process_env("cpu")["OMP_NUM_THREADS"] == "3"  # 0 and 1 are one core


def test_empty_rows_are_told_since_trl_fails_on_them(tmp_path: Path) -> None:
    context = make_context(data=make_profile([100, 200, 300], num_empty_rows=3))
    notices = make_fake_plan(tmp_path, context=context).notices
    assert any("3 rows of the data are null or empty" in notice for notice in notices)


def test_no_notice_without_empty_rows(tmp_path: Path) -> None:
    assert not any("empty" in notice for notice in make_fake_plan(tmp_path).notices)


def test_a_global_batch_beyond_the_data_is_told(tmp_path: Path) -> None:
    context = make_context(lengths=[10, 20, 30], global_batch=8)
    notices = make_fake_plan(tmp_path, context=context, global_batch=8).notices
    assert any("more than the data's 3 rows" in notice for notice in notices)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_no_sampler_takes_is_refused_at_once(tmp_path: Path, seed: int) -> None:
    with pytest.raises(UsageError, match="seed"):
        make_fake_plan(tmp_path, seed=seed)


@pytest.mark.parametrize("weights", [1, 10**9])
def test_a_budget_below_the_imports_is_refused_before_the_data_is_read(
    weights: int, tmp_path: Path
) -> None:
    context = make_context(model=make_model(num_parameters=weights))
    answers = make_answers(context)
    answers["describe"]["occupied_bytes"] = 500 * MIB
    del answers["prepare"]
    with pytest.raises(UsageError, match=r"below what PyTorch .* 0\.488 GiB") as caught:
        make_fake_plan(tmp_path, answers=answers, memory_budget_bytes=50 * MIB)
    assert "--memory-budget" in caught.value.hint


def test_a_budget_must_hold_the_weights_beside_the_imports(tmp_path: Path) -> None:
    context = make_context(model=make_model(num_parameters=400 * MIB))  # 200 MiB in 4 bits
    answers = make_answers(context)
    answers["describe"]["occupied_bytes"] = 500 * MIB
    with pytest.raises(UsageError, match="below the weights") as caught:
        make_fake_plan(tmp_path, answers=answers, memory_budget_bytes=600 * MIB)
    assert "0.488 GiB" in caught.value.message
    plan = make_fake_plan(tmp_path, answers=answers, memory_budget_bytes=701 * MIB)
    assert plan.budget_bytes == 701 * MIB


def test_an_architecture_that_trl_replaces_is_told(tmp_path: Path) -> None:
    context = make_context(model=make_model(declared_architecture="LLaMAForCausalLM"))
    notices = make_fake_plan(tmp_path, context=context).notices
    assert any("LLaMAForCausalLM" in notice for notice in notices)
    assert not any("architecture" in notice for notice in make_fake_plan(tmp_path / "2").notices)


def test_flattening_is_refused_where_isolation_could_not_be_tested(tmp_path: Path) -> None:
    context = make_context(model=make_model(keeps_documents_apart={}))
    plan = make_fake_plan(tmp_path, context=context)
    removed = {value for knob, value, _ in plan.space.removed if knob == "batching"}
    assert "bfd" in removed

"""The table of outcomes against the real Optuna, for every sampler."""

from __future__ import annotations

import importlib.util
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import PrerequisiteError, StudyMismatchError, UnknownNameError
from autotune.probe.result import Outcome
from autotune.search import samplers
from autotune.search.study import Study
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

REFUSALS = [Outcome.DEVICE_OOM, Outcome.HOST_OOM, Outcome.TIMEOUT, Outcome.DIVERGED]
REFUSALS.append(Outcome.UNSUPPORTED)
FAILURES = [Outcome.CRASHED, Outcome.LOST]
has_gp = all(importlib.util.find_spec(name) for name in ("scipy", "torch"))
SAMPLERS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "gp" and not has_gp, reason="no scipy"))
    for name in samplers.NAMES
    if name != "auto"
]
SPACE = SearchSpace.load("quick").resolve(make_context())


def few(sampler: str, number: int) -> int:
    """Return fewer trials for the sampler that takes seconds for each."""
    return number // 4 if sampler == "gp" else number


def make_study(storage: Path | str, **changes: Any) -> Study:
    values: dict[str, Any] = {
        "draw": SPACE.draw,
        "directions": ["minimize", "maximize"],
        "storage": str(storage),
        "name": "search",
        "sampler": "tpe",
        "seed": 3,
        "num_trials": 30,
        "identity": {"model": "a", "space": "b"},
        "owner": "me",
        "candidates": lambda: list(SPACE.enumerate()),
    }
    return Study(**{**values, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def told(file: Path) -> list[FrozenTrial]:
    """Return Optuna's own view of the trials, read from the disk."""
    storage = JournalStorage(JournalFileBackend(str(file)))
    return optuna.load_study(study_name="search", storage=storage).get_trials()


def tell(study: Study, proposal: Any, outcome: Outcome, number: int = 0) -> None:
    attributes = {"trial": number, "digest": f"d{number}"}
    if outcome is Outcome.OK:
        batch = proposal.candidate["per_device_train_batch_size"]
        values = [1e9 * batch, 100.0 * batch]
        limits = {"memory_budget": batch / 8 - 1, "coverage": -0.5}
        study.tell_ok(proposal, values, limits, attributes)
    else:
        study.tell_refused(proposal, outcome, attributes)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_ok_is_complete_with_its_values_and_every_constraint(sampler: str, file: Path) -> None:
    study = make_study(file, sampler=sampler)
    proposal = study.ask()
    study.tell_ok(proposal, [5.0, 7.0], {"memory_budget": -0.25}, {"trial": 0, "digest": "abc"})
    (trial,) = told(file)
    assert trial.state is TrialState.COMPLETE
    assert trial.values == [5.0, 7.0]
    assert trial.constraints == {
        "memory_budget": -0.25,
        **{outcome.value: 0.0 for outcome in REFUSALS},
    }
    assert trial.user_attrs["outcome"] == "ok"
    assert trial.user_attrs["digest"] == "abc"
    assert trial.user_attrs["owner"] == "me"


@pytest.mark.parametrize("outcome", REFUSALS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_refusal_is_pruned_with_exactly_its_constraint(
    sampler: str, outcome: Outcome, file: Path
) -> None:
    study = make_study(file, sampler=sampler)
    tell(study, study.ask(), outcome)
    (trial,) = told(file)
    assert trial.state is TrialState.PRUNED
    assert trial.constraints == {outcome.value: 1.0}
    assert trial.values is None
    assert trial.user_attrs["outcome"] == outcome.value


@pytest.mark.parametrize("outcome", FAILURES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_says_nothing_about_the_candidate_is_fail(
    sampler: str, outcome: Outcome, file: Path
) -> None:
    study = make_study(file, sampler=sampler)
    tell(study, study.ask(), outcome)
    (trial,) = told(file)
    assert trial.state is TrialState.FAIL
    assert trial.constraints == {}
    assert trial.values is None


def test_every_outcome_is_in_the_table() -> None:
    assert {Outcome.OK, *REFUSALS, *FAILURES} == set(Outcome)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_candidate_known_already_is_fail(sampler: str, file: Path) -> None:
    study = make_study(file, sampler=sampler)
    study.tell_known(study.ask(), 4)
    (trial,) = told(file)
    assert trial.state is TrialState.FAIL
    assert trial.user_attrs["same_as"] == 4


@pytest.mark.parametrize("space", ["quick", "sft"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_go_on_after_every_mix_of_outcomes(sampler: str, space: str, file: Path) -> None:
    found = SearchSpace.load(space).resolve(make_context())
    num_trials = few(sampler, 40)
    study = make_study(file, sampler=sampler, draw=found.draw, num_trials=num_trials - 10)
    endings = [Outcome.OK, *REFUSALS, Outcome.OK, *FAILURES, Outcome.OK]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        study.enqueue(found.baseline)
        for number in range(num_trials):
            proposal = study.ask()
            assert found.params(proposal.candidate) is not None  # it can be drawn
            tell(study, proposal, endings[number % len(endings)], number)
    assert len(told(file)) == num_trials


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("ending", list(Outcome))
def test_samplers_go_on_where_every_trial_ends_alike(
    sampler: str, ending: Outcome, file: Path
) -> None:
    study = make_study(file, sampler=sampler, num_trials=9)
    for number in range(few(sampler, 16)):
        tell(study, study.ask(), ending, number)
    assert len(told(file)) == few(sampler, 16)


def test_the_default_sampler_learns_a_memory_wall(file: Path) -> None:
    study = make_study(file, num_trials=60)
    sizes = []
    for number in range(60):
        proposal = study.ask()
        batch = proposal.candidate["per_device_train_batch_size"]
        sizes.append(batch)
        tell(study, proposal, Outcome.DEVICE_OOM if batch > 1 else Outcome.OK, number)
    over = [size > 1 for size in sizes]
    assert sum(over[-30:]) < sum(over[:30])


def test_grid_walks_the_whole_space_once_and_goes_on(file: Path) -> None:
    context = make_context(lengths=(100, 200), global_batch=2)
    space = SearchSpace.load("quick").resolve(context, {"adaptation": "full"})
    study = make_study(file, sampler="grid", draw=space.draw)
    size = space.size()
    seen = set()
    for number in range(size):
        proposal = study.ask()
        seen.add(space.digest(proposal.candidate))
        tell(study, proposal, (Outcome.OK, *REFUSALS, *FAILURES)[number % 8], number)
    assert len(seen) == len({space.digest(item) for item in space.enumerate()})
    study.tell_known(study.ask(), 0)
    tell(study, study.ask(), Outcome.OK)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_next_ask_returns_what_was_enqueued(sampler: str, file: Path) -> None:
    study = make_study(file, sampler=sampler)
    assert study.enqueue(SPACE.baseline)
    assert study.ask().candidate == SPACE.baseline
    other = list(SPACE.enumerate())[17]
    assert study.enqueue(other)
    assert study.ask().candidate == other


@pytest.mark.parametrize("space", ["quick", "sft"])
def test_every_candidate_can_be_enqueued(space: str, file: Path) -> None:
    found = SearchSpace.load(space).resolve(make_context())
    every = list(found.enumerate(20_000))
    study = make_study(file, draw=found.draw, sampler="random")
    for candidate in random.Random(0).sample(every, 40):
        assert study.enqueue(candidate)
        assert study.ask().candidate == candidate


@pytest.mark.parametrize(
    "change",
    [
        {"per_device_train_batch_size": 3},
        {"batching": None},
        {"no_such_knob": 1},
        {"lora_r": 16},
    ],
)
def test_what_the_space_cannot_draw_is_not_enqueued(change: dict[str, Any], file: Path) -> None:
    study = make_study(file)
    assert not study.enqueue({**SPACE.baseline, **change})
    assert not study.enqueue({})
    assert told(file) == []


def test_the_study_of_another_search_is_refused(file: Path) -> None:
    make_study(file)
    make_study(file)
    with pytest.raises(StudyMismatchError, match="space") as caught:
        make_study(file, identity={"model": "a", "space": "other"})
    assert "--run-dir" in caught.value.hint


def test_an_identity_survives_the_storage(file: Path) -> None:
    identity = {"model": None, "phases": ["eval"], "min_coverage": 0.25, "pins": {"a": "1"}}
    make_study(file, identity=identity)
    make_study(file, identity=identity)


def test_two_owners_share_a_study_by_url(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    mine, theirs = make_study(url), make_study(url, owner="they")
    proposal = mine.ask()
    mine.mark_digest(proposal, "first")
    assert theirs.known_elsewhere() == {"first"}
    assert mine.known_elsewhere() == set()
    tell(mine, proposal, Outcome.OK)
    other = theirs.ask()
    assert other.handle.number == 1
    tell(theirs, other, Outcome.DEVICE_OOM, 1)
    assert mine.known_elsewhere() == {"d1"}
    assert theirs.known_elsewhere() == {"d0"}


def test_only_own_abandoned_trials_are_closed(file: Path) -> None:
    mine, theirs = make_study(file), make_study(file, owner="they")
    mine.ask(), mine.ask(), theirs.ask()
    done = mine.ask()
    tell(mine, done, Outcome.OK)
    again = make_study(file)
    assert again.close_abandoned() == 2
    states = [trial.state for trial in told(file)]
    expected = [TrialState.FAIL, TrialState.FAIL, TrialState.RUNNING, TrialState.COMPLETE]
    assert states == expected
    assert again.close_abandoned() == 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_do_not_depend_on_the_global_generators(sampler: str, tmp_path: Path) -> None:
    def run(name: str, reseed: bool) -> list[dict[str, Any]]:
        study = make_study(tmp_path / name, sampler=sampler, num_trials=9)
        drawn = []
        for number in range(few(sampler, 16)):
            if reseed:
                random.seed(number)
                numpy.random.seed(number)
            proposal = study.ask()
            drawn.append(proposal.candidate)
            tell(study, proposal, [Outcome.OK, Outcome.DEVICE_OOM][number % 2], number)
        return drawn

    assert run("a", reseed=False) == run("b", reseed=True)


def test_another_seed_draws_other_candidates(tmp_path: Path) -> None:
    first, second = make_study(tmp_path / "a"), make_study(tmp_path / "b", seed=4)
    assert [first.ask().candidate for _ in range(8)] != [second.ask().candidate for _ in range(8)]


def test_a_resumed_study_does_not_repeat_its_draws(file: Path) -> None:
    def draws(study: Study) -> list[dict[str, Any]]:
        found = []
        for _ in range(6):
            proposal = study.ask()
            found.append(proposal.candidate)
            tell(study, proposal, Outcome.DEVICE_OOM)
        return found

    assert draws(make_study(file, sampler="random")) != draws(make_study(file, sampler="random"))


@pytest.mark.parametrize("url", ["nonsense://x", "sqlite:////no/such/folder/study.db"])
def test_a_storage_that_cannot_be_opened_says_so(url: str) -> None:
    with pytest.raises(PrerequisiteError, match="cannot be opened") as caught:
        make_study(url)
    assert caught.value.hint


def test_sampler_names() -> None:
    assert samplers.resolve("auto", num_trials=40, space_size=40) == "grid"
    assert samplers.resolve("auto", num_trials=40, space_size=41) == "learned"
    assert samplers.resolve("auto", num_trials=None, space_size=4) == "learned"
    assert samplers.resolve("nsgaii", num_trials=1, space_size=1) == "nsgaii"
    with pytest.raises(UnknownNameError, match="tpe"):
        samplers.resolve("tpee", num_trials=1, space_size=1)


def test_a_sampler_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "find_spec", lambda name: None)
    with pytest.raises(PrerequisiteError, match="scipy") as caught:
        samplers.resolve("gp", num_trials=1, space_size=1)
    assert "pip install" in caught.value.hint

"""The learned sampler through Study, on a space whose every candidate is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
import pytest

from autotune.probe.result import Outcome
from autotune.search.guess import Guess, Lesson
from autotune.search.study import Proposal, Study
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context

SPACE = SearchSpace.load("quick").resolve(make_context())
CANDIDATES = list(SPACE.enumerate())
BUDGET = 10e9


def peak(candidate: Mapping[str, Any]) -> float:
    batch = int(candidate["per_device_train_batch_size"])
    kept = {"none": 1.0, "every_2_layers": 0.6, "full": 0.3}[str(candidate["checkpointing"])]
    weights = {"full": 4.0, "lora": 1.5, "lora_4bit": 0.8}[str(candidate["adaptation"])]
    return 1e9 * (weights * (1.0 if candidate["dtype"] == "float32" else 0.6) + batch * kept)


def rate(candidate: Mapping[str, Any]) -> float:
    batch = int(candidate["per_device_train_batch_size"])
    again = {"none": 1.0, "every_2_layers": 0.9, "full": 0.78}[str(candidate["checkpointing"])]
    method = {"full": 0.9, "lora": 1.0, "lora_4bit": 0.7}[str(candidate["adaptation"])]
    packed = 1.3 if candidate["batching"] == "bfd" else 1.0
    return 1000.0 * again * method * packed * batch / (batch + 2.0)


def guessed(candidate: Mapping[str, Any]) -> Guess:
    """Return a prediction that is off as a whole, and more so for one value of two knobs."""
    memory = peak(candidate) * (0.9 if candidate["checkpointing"] == "none" else 1.0) * 0.95
    speed = rate(candidate) * (1.25 if candidate["batching"] == "bfd" else 1.0) * 1.6
    return Guess(candidate=candidate, values=(memory, speed), load=memory / BUDGET)


def make_study(seed: int = 0, *, storage: Any = None, owner: str = "me", **changes: Any) -> Study:
    values: dict[str, Any] = {
        "directions": ["minimize", "maximize"],
        "storage": storage or optuna.storages.InMemoryStorage(),
        "name": "search",
        "sampler": "learned",
        "seed": seed,
        "num_trials": 30,
        "identity": {},
        "owner": owner,
        "candidates": lambda: CANDIDATES,
    }
    return Study(SPACE.draw, **{**values, **changes})


def tell(study: Study, proposal: Proposal, number: int = 0) -> bool:
    """Tell what a probe of the candidate would have found; return whether it ran."""
    found = peak(proposal.candidate)
    attributes = {"trial": number}
    if found > BUDGET:
        study.tell_refused(proposal, Outcome.DEVICE_OOM, attributes)
        return False
    over = {"memory_budget": found / BUDGET - 1.0}
    study.tell_ok(proposal, [found, rate(proposal.candidate)], over, attributes)
    return True


def front() -> set[str]:
    fitting = [item for item in CANDIDATES if peak(item) <= BUDGET]
    return {
        SPACE.digest(item)
        for item in fitting
        if not any(
            (peak(other) <= peak(item) and rate(other) > rate(item))
            or (peak(other) < peak(item) and rate(other) >= rate(item))
            for other in fitting
        )
    }


def search(study: Study, num: int) -> tuple[list[str], int]:
    """Return the digests of what was probed, and how many ran out of memory."""
    study.enqueue(SPACE.baseline)
    probed, failed = [], 0
    for number in range(num):
        proposal = study.ask()
        probed.append(SPACE.digest(proposal.candidate))
        failed += not tell(study, proposal, number)
    return probed, failed


def best_volume(digests: Sequence[str]) -> float:
    """Return the greatest (budget - peak) * rate of any."""
    known = {SPACE.digest(item): item for item in CANDIDATES}
    return max(max(BUDGET - peak(known[d]), 0.0) * rate(known[d]) for d in digests)


@pytest.mark.parametrize("seed", range(4))
def test_predictions_that_are_off_are_corrected_within_a_few_probes(seed: int) -> None:
    study = make_study(seed)
    study.inform([guessed(item) for item in CANDIDATES])
    probed, failed = search(study, 14)
    assert len(set(probed)) == len(probed), "none is proposed twice"
    assert failed <= 2
    assert len(front() & set(probed)) >= 0.6 * len(front())


def test_predictions_are_worth_having() -> None:
    ends = {}
    for is_informed in (True, False):
        study = make_study(1)
        if is_informed:
            study.inform([guessed(item) for item in CANDIDATES])
        ends[is_informed] = len(front() & set(search(study, 10)[0]))
    assert ends[True] > ends[False]


def test_without_predictions_it_learns_from_measurements_alone() -> None:
    probed, _ = search(make_study(2), 25)
    assert len(set(probed)) == 25
    every = [SPACE.digest(item) for item in CANDIDATES]
    assert best_volume(probed) >= 0.97 * best_volume(every)


def test_it_goes_on_from_the_study_alone() -> None:
    """A resumed run, or another host's, knows what was told and proposes none of it again."""
    storage = optuna.storages.InMemoryStorage()
    first = make_study(storage=storage)
    first.inform([guessed(item) for item in CANDIDATES])
    before, _ = search(first, 6)
    later = make_study(storage=storage, owner="other")
    later.inform([guessed(item) for item in CANDIDATES])
    proposals = [later.ask() for _ in range(4)]  # at once, as several devices ask
    asked = [SPACE.digest(item.candidate) for item in proposals]
    assert len(set(asked)) == 4
    assert not set(asked) & set(before)


def test_what_is_said_to_be_gained_shrinks_as_the_front_is_found() -> None:
    study = make_study()
    study.inform([guessed(item) for item in CANDIDATES])
    assert study.expected_gain is None
    search(study, 3)
    early = study.expected_gain
    search(study, 25)
    late = study.expected_gain
    assert early is not None
    assert late is not None
    assert late < early / 10


def test_what_is_refused_keeps_its_likes_away() -> None:
    """Every candidate with four bits is unsupported; it is not tried over and over."""
    study = make_study(3)
    study.inform([guessed(item) for item in CANDIDATES])
    refused = 0
    for number in range(15):
        proposal = study.ask()
        if proposal.candidate["adaptation"] == "lora_4bit":
            refused += 1
            study.tell_refused(proposal, Outcome.UNSUPPORTED, {"trial": number})
        else:
            tell(study, proposal, number)
    assert refused <= 4


def test_a_used_up_space_still_answers() -> None:
    few = CANDIDATES[:3]
    study = make_study(candidates=lambda: few)
    for number in range(3):
        tell(study, study.ask(), number)
    assert study.ask().candidate in CANDIDATES


@pytest.mark.parametrize("number", [1, 3])
def test_any_number_of_objectives_is_searched(number: int) -> None:
    directions = ["maximize", "minimize", "maximize"][:number]
    study = make_study(directions=directions)
    for index in range(12):
        proposal = study.ask()
        found = peak(proposal.candidate)
        values = [rate(proposal.candidate), found, math.sqrt(found)][:number]
        over = {"memory_budget": found / BUDGET - 1.0}
        study.tell_ok(proposal, values, over, {"trial": index})
    best = max(rate(item) for item in CANDIDATES)
    told = [trial.values[0] for trial in study._study.get_trials(deepcopy=False)]
    assert max(told) >= 0.85 * best


def test_objectives_may_be_negative() -> None:
    study = make_study(directions=["maximize"])
    for index in range(10):
        proposal = study.ask()
        value = rate(proposal.candidate) - 700.0
        study.tell_ok(proposal, [value], {"memory_budget": -0.5}, {"trial": index})
    told = [trial.values[0] for trial in study._study.get_trials(deepcopy=False)]
    assert max(told) > 0


def test_lessons_of_an_earlier_run_count_before_anything_is_measured() -> None:
    """Four bits are predicted to be five times as fast as they are, and were in that run too."""
    factors = {"lora_4bit": 5.0}
    wrong = [
        Guess(
            candidate=item,
            values=(peak(item), rate(item) * factors.get(str(item["adaptation"]), 1.0)),
            load=peak(item) / BUDGET,
        )
        for item in CANDIDATES
    ]
    lessons = [
        Lesson(
            candidate=item,
            ratios=(1.0, 1.0 / factors.get(str(item["adaptation"]), 1.0)),
            load_ratio=1.0,
        )
        for item in CANDIDATES[::12]
    ]
    first = {}
    for is_taught in (False, True):
        study = make_study(5)
        study.inform(wrong, lessons if is_taught else ())
        first[is_taught] = study.ask().candidate["adaptation"]
    assert first[False] == "lora_4bit"
    assert first[True] != "lora_4bit"


def test_guesses_of_candidates_that_cannot_be_chosen_are_passed_over() -> None:
    study = make_study()
    strange = Guess(candidate={"no such knob": 1}, values=(1.0, 1.0), load=0.1)
    study.inform([strange, *(guessed(item) for item in CANDIDATES[:50])])
    assert study.ask().candidate in CANDIDATES


def test_other_samplers_take_no_guesses() -> None:
    study = make_study(sampler="random")
    assert not study.wants_guesses
    study.inform([guessed(CANDIDATES[0])])
    assert study.expected_gain is None
    assert make_study().wants_guesses

"""How many probes samplers need to find the Pareto front, replayed on measured search spaces.

    python benchmarks/search_efficiency.py [--seeds 20] [--samplers ours,gp] [--tables gemma3]

Each table in benchmarks/data/search_tables holds every candidate of a space: peak memory and rate
as probes on a CPU measured them (search_tables.py), and as virtual probes predicted them before.
A replayed search is the real one (Study, the loop's rules for repeated draws and for too large a
baseline), but that a probe is a look into the table. The memory budget is the median of all peaks,
so that half of the candidates run out of memory.

Reported per space, as medians over the seeds: probes, the baseline's included, until the front
that was found dominates 95 and 99 % of the hypervolume of the true front (reference: the memory
budget and a rate of zero); probes out of memory per probe, until 99 %; the share of the true
front's members that were probed within 20 probes. Each of Optuna's samplers is told of an
out-of-memory in the way that suits it best, of three, found on the first seeds. A search that does
not get there within --most probes counts as needing one more than that.

The last line is one JSON object: per space, and as medians over all spaces and seeds under "all",
per sampler these four figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from autotune.devices import host
from autotune.probe.result import Outcome
from autotune.search import samplers
from autotune.search.guess import Guess
from autotune.search.hypervolume import as_gains, front_of, hypervolume
from autotune.search.study import Proposal, Study
from autotune.space.context import Context, DataProfile, DeviceInfo, ModelFacts
from autotune.space.space import ResolvedSpace, SearchSpace

DATA = Path(__file__).resolve().parent / "data" / "search_tables"
DIRECTIONS = ("minimize", "maximize")  # peak memory, tokens/s: the search's default
SAMPLERS = ("ours", "unaided", "random", "tpe", "nsgaii", "gp", "grid")
"""``unaided`` is ours without predictions: what the model of the knobs alone is worth."""

MANNERS = ("pruned", "failed", "penalty")
"""An out-of-memory is told as PRUNED with a violated constraint, as FAIL, or as COMPLETE with
worse values than any candidate has and the memory budget as the violated constraint."""

SEEDS_TO_CHOOSE = 4
MAX_REPEATED_DRAWS = 25
FIGURES = ("probes_to_95", "probes_to_99", "ooms_per_probe", "front_found_at_20")


@dataclass(frozen=True)
class Row:
    """One candidate: measured and predicted peak in bytes and rate in tokens/s."""

    candidate: Mapping[str, Any]
    peak: float
    rate: float
    predicted_peak: float | None
    predicted_rate: float | None
    time_shares: Mapping[str, float]
    memory_shares: Mapping[str, float]


class Table:
    """A space with all its measurements."""

    def __init__(self, name: str) -> None:
        data = json.loads((DATA / f"{name}.json").read_text())
        facts = data["context"]
        context = Context(
            **{
                **facts,
                "device": DeviceInfo.from_dict(facts["device"]),
                "model": ModelFacts.from_dict(facts["model"]),
                "data": DataProfile.from_dict(facts["data"]),
            }
        )
        self.name = name
        self.space: ResolvedSpace = SearchSpace.load(DATA / f"{name}.yaml").resolve(context)
        names = Row.__dataclass_fields__
        rows = [
            Row(**{key: value for key, value in row.items() if key in names})
            for row in data["rows"]
        ]
        self.rows = {self.space.digest(row.candidate): row for row in rows}
        self.budget = statistics.median(row.peak for row in rows)
        self.reference = (self.budget, 0.0)
        self.scale = (self.budget, max(row.rate for row in rows))
        fitting = self.gains([row for row in rows if row.peak <= self.budget])
        self.volume = hypervolume(fitting)
        front = {tuple(point) for point in front_of(fitting)}
        self.front = {
            digest for digest, row in self.rows.items() if tuple(self.gains([row])[0]) in front
        }

    def gains(self, rows: Sequence[Row]) -> Any:
        """Return candidates as gains over the reference point. Shape (N, 2)."""
        values = np.array([[row.peak, row.rate] for row in rows], dtype=float).reshape(-1, 2)
        return as_gains(values, self.reference, DIRECTIONS, self.scale)

    def guesses(self) -> list[Guess]:
        """Return what was predicted."""
        return [
            Guess(
                candidate=row.candidate,
                values=(row.predicted_peak, row.predicted_rate),
                load=None if row.predicted_peak is None else row.predicted_peak / self.budget,
                time_shares=row.time_shares,
                memory_shares=row.memory_shares,
            )
            for row in self.rows.values()
        ]


@cache
def table_of(name: str) -> Table:
    """Return a table, read once per process."""
    return Table(name)


@dataclass(frozen=True)
class Replay:
    """What one replayed search came to."""

    probes_to_95: int
    probes_to_99: int
    ooms_per_probe: float
    front_found_at_20: float


def replay(name: str, sampler: str, seed: int, manner: str, most: int) -> Replay:
    """Replay one search until it has 99 % and has made 20 probes, or has made ``most`` probes."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    table = table_of(name)
    is_ours = sampler in ("ours", "unaided")
    study = Study(
        table.space.draw,
        directions=DIRECTIONS,
        storage=optuna.storages.InMemoryStorage(),
        name="replay",
        sampler=samplers.LEARNED if is_ours else sampler,
        seed=seed,
        num_trials=most,
        identity={},
        owner="replay",
        candidates=lambda: [row.candidate for row in table.rows.values()],
    )
    if sampler == "ours":
        study.inform(table.guesses())
    study.enqueue(table.space.baseline)
    rest = list(table.rows)
    np.random.default_rng(seed).shuffle(rest)
    probed: dict[str, Row] = {}
    ooms, repeated, tried_leanest = 0, 0, False
    reached: dict[float, int] = {}
    at_99 = found_at_20 = 0.0
    while len(probed) < min(most, len(table.rows)):
        if len(probed) == 1 and ooms and not tried_leanest and not study.is_informed:
            tried_leanest = True
            study.enqueue(table.space.leanest)
        if repeated >= MAX_REPEATED_DRAWS:
            while rest[-1] in probed:
                rest.pop()
            study.enqueue(table.rows[rest[-1]].candidate)
        proposal = study.ask()
        digest = table.space.digest(proposal.candidate)
        if digest in probed:
            study.tell_known(proposal, 0)
            repeated += 1
            continue
        row = table.rows[digest]
        probed[digest] = row
        is_oom = row.peak > table.budget
        ooms += is_oom
        tell(study, proposal, row, table, "pruned" if is_ours else manner, len(probed))
        fitting = [item for item in probed.values() if item.peak <= table.budget]
        share = hypervolume(table.gains(fitting)) / table.volume
        for goal in (0.95, 0.99):
            if goal not in reached and share >= goal - 1e-9:
                reached[goal] = len(probed)
                at_99 = ooms / len(probed)
        if len(probed) == 20:
            found_at_20 = len(table.front & set(probed)) / len(table.front)
        if 0.99 in reached and len(probed) >= 20:
            break
    if 0.99 not in reached:
        at_99 = ooms / len(probed)
    return Replay(
        probes_to_95=reached.get(0.95, most + 1),
        probes_to_99=reached.get(0.99, most + 1),
        ooms_per_probe=at_99,
        front_found_at_20=found_at_20,
    )


def tell(
    study: Study, proposal: Proposal, row: Row, table: Table, manner: str, number: int
) -> None:
    """Tell what the table says of a candidate, an out-of-memory in the manner given."""
    attributes = {"trial": number}
    over = {"memory_budget": row.peak / table.budget - 1.0}
    if row.peak <= table.budget:
        study.tell_ok(proposal, [row.peak, row.rate], over, attributes)
    elif manner == "pruned":
        study.tell_refused(proposal, Outcome.DEVICE_OOM, attributes)
    elif manner == "failed":
        study.tell_refused(proposal, Outcome.LOST, attributes)
    else:
        worst = max(item.peak for item in table.rows.values())
        study.tell_ok(proposal, [worst, 0.0], {"memory_budget": 1.0}, attributes)


def _replay(arguments: tuple[str, str, int, str, int]) -> Replay:
    return replay(*arguments)


def summary(replays: Sequence[Replay]) -> dict[str, float]:
    """Return the medians of the four figures."""
    return {
        name: round(float(statistics.median(getattr(item, name) for item in replays)), 3)
        for name in FIGURES
    }


def main() -> None:
    """Replay, print a table per space, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--most", type=int, default=80, help="probes of one search")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--tables", default="")
    options = parser.parse_args()
    known = sorted(path.stem for path in DATA.glob("*.json"))
    names = [name for name in options.tables.split(",") if name] or known
    found: dict[str, dict[str, list[Replay]]] = {"all": {}}
    started = time.monotonic()
    with ProcessPoolExecutor(host.usable_cpus()) as pool:

        def run(jobs: Sequence[tuple[str, str, int, str, int]]) -> list[Replay]:
            return list(pool.map(_replay, jobs))

        for name in names:
            table = table_of(name)
            print(
                f"{name}: {len(table.rows)} candidates, {len(table.front)} on the front, budget"
                f" {table.budget / 2**30:.2f} GiB",
                flush=True,
            )
            found[name] = {}
            for sampler in options.samplers.split(","):
                manner = best_manner(name, sampler, options, run)
                jobs = [
                    (name, sampler, seed, manner, options.most) for seed in range(options.seeds)
                ]
                replays = run(jobs)
                found[name][sampler] = replays
                found["all"].setdefault(sampler, []).extend(replays)
                told = "" if sampler in ("ours", "unaided") else f" (out of memory is {manner})"
                print(f"  {sampler:8} {summary(replays)}{told}", flush=True)
    print(f"{time.monotonic() - started:.0f} s")
    print(json.dumps({n: {s: summary(r) for s, r in of.items()} for n, of in found.items()}))


def best_manner(
    name: str, sampler: str, options: argparse.Namespace, run: Callable[..., list[Replay]]
) -> str:
    """Return the manner in which a sampler reaches 99 % with the fewest probes."""
    if sampler in ("ours", "unaided", "random", "grid"):
        return MANNERS[0]  # ours is told as the product tells it, the others do not listen
    seeds = range(1000, 1000 + min(options.seeds, SEEDS_TO_CHOOSE))
    scores = {}
    for manner in MANNERS:
        replays = run([(name, sampler, seed, manner, options.most) for seed in seeds])
        scores[manner] = statistics.mean(item.probes_to_99 for item in replays)
    return min(scores, key=lambda manner: scores[manner])


if __name__ == "__main__":
    main()

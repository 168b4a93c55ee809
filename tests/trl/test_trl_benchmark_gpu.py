"""The benchmark of predictions against a card, end to end on a virtual card."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import gpu_tasks
import predicted_vs_measured as benchmark

from autotune.executors.subprocess import SubprocessExecutor
from autotune.probe.result import ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.units import MIB
from autotune.virtual import cards

pytestmark = pytest.mark.trl

CHOSEN = ["full-fp32", "qlora-2048", "full-expandable-2048"]
HISTORY = [
    {"action": "segment_alloc", "addr": 0, "size": 20 * MIB, "stream": 0},
    {"action": "alloc", "addr": 0, "size": 4 * MIB, "stream": 0},
    {"action": "free_completed", "addr": 0, "size": 4 * MIB, "stream": 0},
]
CARD = ["--model", "tiny", "--slots", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def record(folder: Path) -> Iterator[dict[str, Any]]:
    out = folder / "dry.json"
    measure_on = ["--measure-on", "virtual:a100-80gb", "--out", str(out)]
    assert benchmark.main([*CARD, *measure_on, "--configs", *CHOSEN]) == 0
    return json.loads(out.read_text())


def test_a_dry_run_predicts_both_sides(record: dict[str, Any]) -> None:
    assert record["is_measurement"] is False
    assert record["card"]["predicted_as"]["id"] == "a100-80gb"
    assert [row["name"] for row in record["configurations"]] == CHOSEN
    for row in record["configurations"]:
        for name in ("measured", "predicted", "predicted_same_steps"):
            assert row[name]["outcome"] == "ok", row[name]["detail"]
            assert row[name]["source"] == "predicted"
        assert set(row["measured"]["phases_bytes"]) == {"load", "first_step", "later_steps"}
        assert len(row["measured"]["steps"]) == 5
        # With the same steps, both sides are one and the same.
        assert set(row["same_steps_errors_pct"].values()) == {0.0}
        assert row["outcomes_agree"] is True
    totals = record["totals"]
    assert totals["num_compared"] == len(CHOSEN)
    assert totals["same_steps_reserved_max_abs_error_pct"] == 0.0
    assert totals["rate_rank_correlation"] is not None
    (snapshot,) = record["snapshots"]
    assert "CUDA" in snapshot["skipped"]


def test_knobs_reach_the_probes(record: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in record["configurations"]}
    trained = {name: row["measured"]["num_trainable_parameters"] for name, row in rows.items()}
    assert trained["qlora-2048"] < trained["full-fp32"] == record["model"]["num_parameters"]
    assert rows["full-fp32"]["measured"]["worst_batch"] == [4, 1024]
    assert rows["qlora-2048"]["measured"]["worst_batch"] == [4, 2048]


def test_nothing_tells_of_this_machine(record: dict[str, Any]) -> None:
    text = json.dumps(record)
    assert str(Path(__file__).parents[2]) not in text
    assert "/tmp/" not in text
    assert "host" not in record["environment"]


def test_an_earlier_measurement_is_predicted_anew(
    record: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As a card that the catalogue does not have would be recorded.
    facts = {"name": "NVIDIA A100 odd", "total_bytes": 40 << 30, "capability": [8, 0]}
    facts |= {"multiprocessors": 108, "vendor": "nvidia"}
    card = {**record["card"], "name": facts["name"], "facts": facts}
    earlier = folder / "earlier.json"
    missing = {**record["configurations"][1], "measured": None}
    rows = [record["configurations"][0], missing]
    whole = {**record, "is_measurement": True, "card": card, "configurations": rows}
    earlier.write_text(json.dumps(whole))
    assert benchmark.main(["--measured", str(earlier), "--folder", str(folder)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["file"].startswith("nvidia-a100-odd-")
    assert last["file"].endswith("-predicted-anew.json")
    again = json.loads((folder / last["file"]).read_text())
    assert again["card"]["predicted_as"]["memory_bytes"] == 40 << 30
    assert again["measured_date"] == record["date"]
    first, second = again["configurations"]
    assert first["measured"] == record["configurations"][0]["measured"]
    assert first["predicted"]["allocated_bytes"] > 0
    assert second["skipped"] == "it was not measured"


def test_what_runs_out_of_time_or_is_impossible_is_skipped(folder: Path) -> None:
    out = folder / "late.json"
    # A T4 has no bfloat16.
    wanted = ["--configs", "full-none", "full-fp32"]
    where = ["--measure-on", "virtual:t4", "--minutes", "0", "--out", str(out)]
    assert benchmark.main([*CARD, *where, *wanted]) == 0
    reasons = {
        row["name"]: row["skipped"] for row in json.loads(out.read_text())["configurations"]
    }
    assert "bfloat16" in reasons["full-none"]
    assert reasons["full-fp32"] == "no time was left to measure it"


def test_a_machine_without_a_card_is_told_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert benchmark.main([*CARD, "--out", str(folder / "none.json")]) == 2
    assert "there is no cuda device here" in capsys.readouterr().err


class CardStandIn:
    """An executor that says it has a card, and probes on a virtual one in its place."""

    def __init__(self, devices: tuple[str, ...], **options: Any) -> None:
        self._is_card = devices == ("cuda:0",)
        self._inner = SubprocessExecutor(
            ("virtual:a100-40gb",) if self._is_card else devices, **options
        )

    def run_task(self, name: str, request: dict[str, Any], **options: Any) -> dict[str, Any]:
        if name == "gpu_tasks:card_facts":
            facts = {"name": "NVIDIA A100-SXM4-40GB", "capability": [8, 0], "vendor": "nvidia"}
            card = cards.find("a100-40gb")
            return {
                **facts,
                "total_bytes": card.memory_bytes,
                "multiprocessors": card.multiprocessors,
            }
        if name == "gpu_tasks:record_probe":
            spec = ProbeSpec.from_dict(request["spec"])
            assert spec.device == "cuda:0"
            result = self._inner.submit(spec).result().to_dict()
            return {"result": result, "replay": gpu_tasks.replayed(HISTORY, request["settings"])}
        answer = self._inner.run_task(name, request, **options)
        if name == "describe":
            answer["device"] |= {"name": "cuda:0", "driver": "600.1"}
        return answer

    def submit(self, spec: ProbeSpec) -> Future[ProbeResult]:
        assert spec.device == "cuda:0" or not self._is_card
        return self._inner.submit(spec)

    def shutdown(self) -> None:
        self._inner.shutdown()


def test_on_a_card_it_measures_and_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SubprocessExecutor", CardStandIn)
    wanted = ["--configs", "full-expandable-2048"]
    assert benchmark.main([*CARD, *wanted, "--folder", str(folder)]) == 0
    (out,) = folder.glob("nvidia-a100-sxm4-40gb-*.json")
    found = json.loads(out.read_text())
    assert found["is_measurement"] is True
    assert found["card"]["driver"] == "600.1"
    assert found["card"]["predicted_as"]["how"] == "in the catalogue by name"
    assert found["totals"]["num_compared"] == 1
    assert found["totals"]["reserved_max_abs_error_pct"] < 10
    (snapshot,) = found["snapshots"]
    assert snapshot["outcome"] == "ok"
    assert snapshot["reserved_bytes"] > 0
    assert found["totals"]["num_snapshots"] == 1


def test_a_history_is_replayed() -> None:
    found = gpu_tasks.replayed(HISTORY, "")
    assert found["recorded_peak_reserved_bytes"] == 20 * MIB
    assert found["reserved_error_pct"] == 0.0
    assert gpu_tasks.replayed([], "expandable_segments:True")["reserved_error_pct"] is None

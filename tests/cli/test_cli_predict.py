"""Commands about cards that are not there, as a user and as a script sees them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_kit import CARD, CONFIG, GIB, Done, clean_process, on_a_virtual_card

from autotune import doctor, verify
from autotune.errors import PrerequisiteError
from autotune.plan import predicted_steps
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.model import Report
from autotune.testing.contexts import make_context, make_cpu, make_gpu
from autotune.testing.fakes import MemoryWall
from autotune.testing.searches import make_answers
from autotune.verify import Check
from autotune.virtual import cards


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Work in a folder with one configuration, and put the signal handlers back."""
    with clean_process(monkeypatch, tmp_path):
        Path("good.yaml").write_text(CONFIG)
        yield


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the processes that probes run in; the options may be changed by a test."""
    return on_a_virtual_card(monkeypatch)


@pytest.fixture
def found(machine: dict[str, Any], cli: Callable[..., Done]) -> Path:
    """Return the folder of a finished search on a card that is not there."""
    search = ("search", "some/model", "some/rows", "--space", "quick", "--device", CARD)
    done = cli(*search, "--trials", 8, "--run-dir", "found")
    assert done.code == 0, done.err
    return Path("found")


# --- gpus ---------------------------------------------------------------------------------------


def test_every_known_card_is_listed(cli: Callable[..., Done]) -> None:
    done = cli("gpus")
    assert done.code == 0
    head, *lines = done.out.splitlines()
    assert head.split()[:4] == ["card", "GiB", "driver", "MiB"]
    assert {line.split()[0] for line in lines} >= set(cards.catalogue())
    assert "24564" in next(line for line in lines if line.startswith("rtx-4090 "))
    listed = cli("gpus", "--json").json["cards"]
    assert [card["id"] for card in listed] == list(cards.catalogue())


@pytest.mark.parametrize("name", ["rtx-4090", "4090", "virtual:rtx-4090", "RTX-4090"])
def test_a_card_is_shown_with_its_sources(name: str, cli: Callable[..., Done]) -> None:
    done = cli("gpus", name)
    assert done.code == 0
    for text in ("NVIDIA GeForce RTX 4090", "8.9", "23.52 GiB", "1,008.0 GB/s", "bf16 165.2"):
        assert text in done.out
    assert done.out.count("source: ") == len(cards.SOURCE_OF)
    assert "not stated" not in done.out
    (card,) = cli("gpus", name, "--json").json["cards"]
    assert card["units"]["bandwidth_bytes_per_s"] == "bytes/s"
    assert card["sources"]["memory"]


def test_a_card_of_a_size_or_a_file_says_what_is_from_where(cli: Callable[..., Done]) -> None:
    done = cli("gpus", "24GiB")
    assert done.code == 0
    assert "25,769,803,776 bytes (24.00 GiB)" in done.out
    assert "the size that was asked for" in done.out
    assert "taken from a100-80gb" in done.out
    Path("mine.toml").write_text('base = "4090"\nmemory_bytes = 9_000_000_000\n')
    done = cli("gpus", "mine.toml")
    assert done.code == 0
    assert "given in mine.toml" in done.out
    assert "taken from rtx-4090" in done.out


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("rtx-409", "rtx-4090"),
        ("gone.toml", "gone.toml"),
        ("broken.toml", "cannot be read"),
        ("strange.toml", "unknown card field"),
        ("few.toml", "lacks"),
        ("wrong.toml", "bandwidth_bytes_per_s"),
        ("odd.toml", "compute_capability"),
    ],
)
def test_a_wrong_card_is_refused(name: str, named: str, cli: Callable[..., Done]) -> None:
    Path("broken.toml").write_text("base = \n")
    Path("strange.toml").write_text('base = "4090"\nmemory = 3\n')
    Path("few.toml").write_text('name = "mine"\n')
    Path("wrong.toml").write_text('base = "4090"\nbandwidth_bytes_per_s = "fast"\n')
    Path("odd.toml").write_text('base = "4090"\ncompute_capability = "new"\n')
    done = cli("gpus", name)
    assert done.code == 2
    assert named in done.err
    assert done.out == ""


def test_cards_are_listed_without_torch() -> None:
    code = "import sys; from autotune.cli.main import main; main(['gpus', 't4']);"
    code += "assert not {'torch', 'transformers', 'trl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- estimate -----------------------------------------------------------------------------------


def test_one_configuration_is_predicted(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    done = cli("estimate", "good.yaml", "--device", CARD)
    assert done.code == 0, done.err
    assert done.out.startswith("Predicted, not measured: good.yaml (trl sft) on NVIDIA GeForce")
    for text in (
        "FITS",
        "less 5%",
        "allocated",
        "fragmentation",
        "tokens/s predicted, ±25%",
        "step time",
        "of the tokens with loss",
        "on the host",
        "Predicted peak in forward",
        "parameters",
        "Predicted memory allocated",
        "none is measured",
        "autotune verify",
    ):
        assert text in done.out
    assert "predicting on NVIDIA GeForce RTX 4090" in done.err
    (executor,) = machine["made"]
    (spec,) = executor.submitted
    # As a search probes it: TRL fills in the rest.
    assert spec.config == yaml.safe_load(CONFIG)
    assert (spec.device, spec.warmup_steps, spec.representative) == (CARD, 0, True)
    assert spec.measured_steps == predicted_steps(spec.accumulation_steps)
    assert spec.data_folder == "/no/such/folder"
    assert executor.is_shut_down


def test_json_says_that_it_is_predicted(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    done = cli("estimate", "good.yaml", "--device", CARD, "--json")
    assert done.code == 0
    assert done.json["source"] == "predicted"
    assert done.json["errors"] == {"allocated": 0.01, "memory_margin": 0.05, "rate": 0.25}
    (card,) = done.json["cards"]
    assert card["fits"] is True
    assert card["budget_bytes"] == round(0.95 * card["memory_bytes"])
    rate = card["tokens_per_s"]
    assert rate["low"] == pytest.approx(0.75 * rate["median"])
    assert card["makeup"]["peak_bytes"] == card["used_bytes"]


def test_what_a_file_says_reaches_the_probe(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    text = CONFIG + "gradient_accumulation_steps: 16\nuse_cpu: true\nnum_processes: 1\n"
    text += "env:\n  PYTORCH_ALLOC_CONF: expandable_segments:True\n  CUDA_VISIBLE_DEVICES: 1\n"
    text += "eval_strategy: steps\ndataset_streaming: true\nweight_decay: 0.1\n"
    Path("hand.yaml").write_text(text)
    done = cli("estimate", "hand.yaml", "--device", CARD)
    assert done.code == 0, done.err
    (executor,) = machine["made"]
    (spec,) = executor.submitted
    assert spec.accumulation_steps == 16
    assert spec.process_env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert spec.phases == ("eval",)
    assert spec.config["weight_decay"] == 0.1
    assert {"use_cpu", "num_processes"}.isdisjoint(spec.config)
    for name in ("use_cpu", "num_processes"):
        assert f"note: {name}" in done.out
    ((task, request),) = executor.tasks
    assert task == "prepare"
    assert request["config"]["dataset_streaming"] is False


def test_what_does_not_fit_says_what_it_would_need(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("big.yaml").write_text(CONFIG + "per_device_train_batch_size: 64\n")
    done = cli("estimate", "big.yaml", "--device", CARD)
    assert done.code == 3
    assert "DOES NOT FIT: it would need a predicted 68.00 GiB" in done.out
    assert "tokens/s predicted" not in done.out
    (executor,) = machine["made"]
    assert [spec.beyond_device for spec in executor.submitted] == [False, True]
    done = cli("estimate", "big.yaml", "--device", CARD, "--json")
    assert done.code == 3
    assert done.json["cards"][0]["fits"] is False


def test_what_fits_only_in_the_margin_is_too_close(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["wall"] = MemoryWall(capacity_bytes=24 * GIB, weights_bytes=3 * GIB + (GIB >> 2))
    Path("close.yaml").write_text(CONFIG + "per_device_train_batch_size: 10\n")
    done = cli("estimate", "close.yaml", "--device", CARD)
    assert done.code == 3
    assert "TOO CLOSE: a predicted 23.00 GiB used" in done.out


def test_several_cards_are_a_line_each(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    def fault(spec: ProbeSpec) -> Outcome | None:
        return Outcome.UNSUPPORTED if spec.device == "virtual:t4" else None

    machine["fault"] = fault
    Path("mine.toml").write_text('base = "4090"\nmemory_bytes = 3_000_000_000\n')
    done = cli("estimate", "good.yaml", "--device", "4090, virtual:t4,mine.toml")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert any(line.startswith("NVIDIA GeForce RTX 4090 ") and " yes " in line for line in lines)
    assert any(line.startswith("Tesla T4") and " no " in line for line in lines)
    assert "Tesla T4: DOES NOT RUN: as the fake was told" in done.out
    assert "All columns are predicted" in done.out
    (executor,) = machine["made"]
    # A card's file means the same in every folder.
    names = [spec.device for spec in executor.submitted]
    assert names == ["virtual:4090", "virtual:t4", f"virtual:{Path('mine.toml').resolve()}"]


def test_rows_are_assumed(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    Path("model.yaml").write_text("model_name_or_path: some/model\npacking: true\n")
    done = cli("estimate", "model.yaml", "--device", CARD, "--assume-length", 256)
    assert done.code == 0, done.err
    assert "Assumed rows of 256 tokens" in done.out
    (executor,) = machine["made"]
    ((_, request),) = executor.tasks
    # Enough that packing to TRL's 1024 tokens leaves several micro-batches of 8.
    assert request["assume"] == {"length": 256, "count": 4 * 8 * 4}
    assert cli("estimate", "model.yaml", "--device", CARD, "--assume-length", 1).code == 2


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_timeline_is_drawn(
    suffix: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    pytest.importorskip("matplotlib")
    done = cli("estimate", "good.yaml", "--device", CARD, "--plot", f"memory.{suffix}")
    assert done.code == 0
    assert f"wrote memory.{suffix}" in done.err
    assert Path(f"memory.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "named", "hint"),
    [
        (None, "there is no file", "YAML"),
        ("a: [1,\n", "cannot be read as YAML", "trl sft --config"),
        ("- 1\n- 2\n", "no mapping", "key: value"),
        ("", "no mapping", "key: value"),
        ("1: 2\n", "1 is no TRL key", ""),
        (CONFIG + "learning_rat: 1\n", "unknown TRL key 'learning_rat'", "'learning_rate'"),
        ("dataset_name: a/b\n", "names no model", "model_name_or_path"),
        ("model_name_or_path: 7\ndataset_name: a/b\n", "names no model", "model_name_or_path"),
        ("model_name_or_path: ./nope\ndataset_name: a/b\n", "no model folder", "config.json"),
        ("model_name_or_path: a/b\n", "names no data set", "--assume-length"),
        (CONFIG + "env: fast\n", "env is 'fast'", ""),
        (CONFIG + "fsdp: full_shard\n", "several cards (fsdp)", "one card"),
        (CONFIG + "num_processes: 8\n", "several cards (num_processes)", "one card"),
        (CONFIG + "accelerate_config: zero3\n", "several cards (accelerate_config)", "one card"),
        (CONFIG + "num_generations: 4\n", "does not say which trainer", "--trainer grpo"),
        ("# trl bco --config x.yaml\n" + CONFIG, "trainer 'bco'", "sft"),
    ],
)
def test_a_file_that_cannot_be_predicted(
    text: str | None,
    named: str,
    hint: str,
    machine: dict[str, Any],
    cli: Callable[..., Done],
) -> None:
    if text is not None:
        Path("bad.yaml").write_text(text)
    done = cli("estimate", "bad.yaml", "--device", CARD)
    assert done.code == 2
    assert named in done.err
    assert hint in done.err
    assert done.out == ""
    # Nothing was started for it.
    assert machine["made"] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "virtual:rtx-409"], "rtx-4090"),
        (["--device", "cuda"], "autotune search --device cuda"),
        (["--device", "cpu"], "not here"),
        (["--device", ","], "no card"),
        (["--device", "gone.toml"], "gone.toml"),
        (["--device", CARD, "--plot", "memory.pdf"], ".png"),
        (["--device", CARD, "--plot", "nope/memory.png"], "no folder nope"),
        (["--device", "4090,t4", "--plot", "memory.png"], "one card"),
        (["--device", CARD, "--probe-timeout", "long"], "--probe-timeout"),
        ([], "--device"),
    ],
)
def test_options_that_cannot_be(
    arguments: list[str], named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli("estimate", "good.yaml", *arguments)
    assert done.code == 2
    assert named in done.err
    assert machine["made"] == []


def test_hints_speak_of_the_file(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    def refuse(request: Any) -> dict[str, Any]:
        raise PrerequisiteError("the data set 'x' was not found.", hint="Choose one with --split.")

    machine["answers"] = {"prepare": refuse}
    done = cli("estimate", "good.yaml", "--device", CARD)
    assert done.code == 2
    assert "dataset_train_split" in done.err
    assert "--assume-length" in done.err


@pytest.mark.parametrize(
    ("outcome", "code"), [(Outcome.UNSUPPORTED, 2), (Outcome.CRASHED, 1), (Outcome.TIMEOUT, 1)]
)
def test_no_prediction_at_all(
    outcome: Outcome, code: int, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["fault"] = lambda spec: outcome
    done = cli("estimate", "good.yaml", "--device", CARD)
    assert done.code == code
    words = (
        "DOES NOT RUN" if outcome is Outcome.UNSUPPORTED else f"CANNOT BE TOLD ({outcome.value})"
    )
    assert f"{words}: as the fake was told" in done.out


def test_every_card_that_refuses_is_named(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["fault"] = lambda spec: Outcome.UNSUPPORTED
    done = cli("estimate", "good.yaml", "--device", "t4,v100-32gb")
    assert done.code == 2
    for label in ("Tesla T4", "Tesla V100-SXM2-32GB"):
        assert f"{label}: DOES NOT RUN: as the fake was told" in done.out
        assert f"hint for {label}: Change it in good.yaml." in done.err
    done = cli("estimate", "good.yaml", "--device", "t4,v100-32gb", "--json")
    assert done.code == 2
    assert [card["fits"] for card in done.json["cards"]] == [False, False]
    for card in done.json["cards"]:
        assert card["verdict"] == "DOES NOT RUN: as the fake was told"
        assert card["hint"] == "Change it in good.yaml."


# --- reports of predicted runs ------------------------------------------------------------------


def test_a_predicted_search_says_so_everywhere(found: Path, cli: Callable[..., Done]) -> None:
    done = cli("report", found)
    assert done.code == 0
    for text in ("none is measured", "within about 1%", "margin of 5%", "±25%", "--device cuda"):
        assert text in " ".join(done.out.split())
    assert "as predicted" in done.out
    assert "[balanced]\nPredicted peak in forward" in done.out
    assert "Predicted memory allocated" not in done.out
    assert "against peak memory, predicted" in done.out
    assert "measured at" not in done.out
    assert "Predicted memory allocated" in cli("report", found, "--verbose").out
    assert "weights" not in done.out
    for pick in ("balanced", "0"):
        exported = cli("export", found, "--pick", pick).out
        assert "GiB predicted" in exported
        assert "predicted, not measured" in exported
        assert "random weights" not in exported


def test_progress_of_a_predicted_search_says_so(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    search = ("search", "some/model", "some/rows", "--space", "quick", "--device", CARD)
    done = cli(*search, "--trials", 3, "--run-dir", "here")
    assert done.code == 0
    for line in done.err.splitlines():
        if "tokens/s" in line or " GiB)" in line:
            assert "predicted" in line
    assert "confirm them on the card: " in done.err
    assert "probing the Pareto set again" not in done.err


def test_a_cards_file_is_found_from_everywhere(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("mine.toml").write_text('base = "4090"\n')
    search = ("search", "some/model", "some/rows", "--space", "quick", "--trials", 2)
    assert cli(*search, "--device", "virtual:mine.toml", "--run-dir", "here").code == 0
    (executor,) = machine["made"]
    asked = next(request for name, request in executor.tasks if name == "describe")
    assert asked["device"] == f"virtual:{Path('mine.toml').resolve()}"
    done = cli(*search, "--device", "virtual:gone.toml", "--run-dir", "there")
    assert done.code == 2
    assert "no card file" in done.err


def test_a_dry_run_of_predictions_confirms_none(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    search = ("search", "some/model", "some/rows", "--space", "quick", "--device", CARD)
    done = cli(*search, "--dry-run", "--trials", 5)
    assert done.code == 0
    assert "5 trials, all predicted: usually seconds each. The bound is" in done.out


# --- verify -------------------------------------------------------------------------------------


def test_a_predicted_run_is_verified_on_its_card_alone(
    found: Path,
    machine: dict[str, Any],
    cli: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Path] = []

    def run(files: Any, **_: Any) -> Iterator[Check]:
        ran.extend(files)
        for file in files:
            yield Check(file=str(file), passed=True, num_steps=3, wall_time_s=1.0,
                        peak_resident_bytes=None)  # fmt: skip

    monkeypatch.setattr(verify, "verify_files", run)
    machine["answers"] = make_answers(make_context(device=make_cpu()))
    lone = Path("lone.yaml")
    lone.write_text((found / "configs" / "best.yaml").read_text())
    for source in (found, lone):
        done = cli("verify", source)
        assert done.code == 2
        assert "predicted for NVIDIA GeForce RTX 4090, and PyTorch sees no GPU here" in done.err
        assert "hint: Copy the run folder" in done.err
        assert ran == []
    gpu = make_gpu(label="NVIDIA GeForce RTX 4090")
    machine["answers"] = make_answers(make_context(device=gpu))
    done = cli("verify", found)
    assert done.code == 0
    assert len(ran) == len(Report.load(found / "report.json").pareto)
    assert "note:" not in done.err
    machine["answers"] = make_answers(make_context(device=make_gpu(label="NVIDIA H200")))
    done = cli("verify", found)
    assert done.code == 0
    assert "note: predicted for NVIDIA GeForce RTX 4090, run here on NVIDIA H200" in done.err


# --- doctor -------------------------------------------------------------------------------------


def test_doctor_tells_of_virtual_cards(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")
    machine["answers"] = {**machine["answers"], "check_virtual": {}}
    done = cli("doctor")
    assert done.code == 0
    assert (
        f"ok   virtual cards: probes on them run here; {len(cards.catalogue())} cards" in done.out
    )

    def refuse(request: Any) -> dict[str, Any]:
        raise PrerequisiteError("PyTorch 2.1 is too old.", hint="Update it.")

    machine["answers"]["check_virtual"] = refuse
    done = cli("doctor")
    assert done.code == 0  # a search on a real device can run
    assert (
        "--   virtual cards: probes on them cannot run here: PyTorch 2.1 is too old." in done.out
    )

"""What people and programs read must not change unnoticed.

After an intended change: ``pytest tests/golden --update-golden``, and read the difference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "report"))
from report_factory import make_failure, make_profile, make_report, make_trial, mixed_trials

from autotune.report import Report, lengths, warnings
from autotune.report.terminal import probe_line, render_text

FOLDER = Path(__file__).parent


@pytest.fixture
def report():
    trials = mixed_trials()
    return make_report(
        trials,
        warnings=warnings.collect(trials, pareto=(0, 1, 2, 3)),
        notices=("max_length was left at the trainer's own 1024.",),
        inactive_knobs=(("load_in_4bit", "bitsandbytes is not installed"),),
        removed_values=(("attn_implementation=flash_attention_2", "needs flash-attn"),),
        min_coverage=0.8,
    )


def test_report_json(golden, report):
    golden("report.json", json.dumps(report.to_dict(), indent=1) + "\n")


def test_the_stored_report_can_still_be_read(report):
    assert Report.load(FOLDER / "report.json") == report


def test_report_text(golden, report):
    golden("report.txt", render_text(report, width=100))


def test_report_text_of_a_search_where_nothing_fits(golden):
    trials = [
        make_failure(0),
        make_failure(1, results=(), skipped_because="out of memory is implied by trial 0"),
        make_trial(2, peak_gib=17, feasible=False, violations={"memory_budget": 0.0625}),
    ]
    text = render_text(make_report(trials, finished=False, interrupted=True), width=100)
    golden("nothing-fits.txt", text)


def test_probe_lines(golden, report):
    lines = [probe_line(item, report.baseline) for item in report.trials]
    golden("probe-lines.txt", "\n".join(lines) + "\n")


def test_exported_yaml(golden, tmp_path):
    config = {
        "model_name_or_path": "org/model",
        "dataset_name": "org/data",
        "output_dir": "out",
        "save_strategy": "no",
        "max_length": None,
        "learning_rate": 1e-5,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "lora_target_modules": ["q_proj", "v_proj"],
        "optim": "adamw_torch",
        "env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    }
    trials = [make_trial(0, num_probes=2), make_trial(1, 1500, 8, config=config, num_probes=2)]
    path = make_report(trials).pick("balanced").export(tmp_path / "sft.yaml")
    golden("sft.yaml", path.read_text())


def test_lengths(golden):
    golden("lengths.txt", lengths.render_text(make_profile()))

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import JournalError, UsageError
from autotune.export import export, write_configs
from autotune.probe import trl_yaml

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from(
        ["no", "Yes", "1e-3", "1e3", "0x1F", "12:30", "2026-01-02", "null", "~", "1_0"]
    ),
    st.sampled_from([1e-4, 2e-5, 1e22, 1e-300, 5e-324, 0.1]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.one_of(st.text(), st.sampled_from(["learning_rate", "dtype", "env", "max_length", "no"]))
CONFIGS = st.dictionaries(KEYS, VALUES, max_size=6)


@given(config=CONFIGS, device=st.text())
def test_yaml_gives_back_the_mapping(config, device):
    text = trl_yaml.render(config, {"device": device}, file_name="x.yaml")
    assert yaml.safe_load(text) == config


@given(config=CONFIGS)
def test_the_order_of_the_mapping_does_not_matter(config):
    turned = dict(reversed(config.items()))
    text = trl_yaml.render(config, {}, file_name="x.yaml")
    assert list(yaml.safe_load(trl_yaml.render(turned, {}, file_name="x.yaml"))) == list(
        yaml.safe_load(text)
    )


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("no", "k: 'no'"),
        ("y", "k: 'y'"),
        ("1e-3", "k: '1e-3'"),
        ("adamw_torch", "k: adamw_torch"),
        (None, "k: null"),
        (True, "k: true"),
        (1e-5, "k: 1.0e-05"),
        (5e-4, "k: 0.0005"),
        (["q_proj", "v_proj"], "k: [q_proj, v_proj]"),
        ({"use_reentrant": False}, "k:\n  use_reentrant: false"),
        ([{"path": "json"}], "k:\n- path: json"),
        (("a",), "k: [a]"),
        ({}, "k: {}"),
    ],
)
def test_how_values_are_written(value, line):
    text = trl_yaml.render({"k": value}, {}, file_name="x.yaml")
    assert f"\n{line}\n" in text


def test_keys_come_in_groups():
    config = {
        "report_to": "none",
        "optim": "adamw_torch",
        "bf16": True,
        "gradient_accumulation_steps": 2,
        "a_new_key": 1,
        "dataset_name": "d",
        "model_name_or_path": "m",
    }
    text = trl_yaml.render(config, {}, file_name="x.yaml")
    assert list(yaml.safe_load(text)) == [
        "model_name_or_path",
        "dataset_name",
        "gradient_accumulation_steps",
        "bf16",
        "optim",
        "a_new_key",
        "report_to",
    ]
    assert "\n# batching\ngradient" in text


def test_no_key_is_listed_twice():
    names = " ".join(trl_yaml.GROUPS.values()).split()
    assert len(names) == len(set(names))


@pytest.mark.parametrize("config", [{"k": {1, 2}}, {"k": {"a": object()}}, {1: 2}, {"k": {1: 2}}])
def test_what_yaml_cannot_give_back_is_refused(config):
    with pytest.raises(UsageError):
        trl_yaml.render(config, {}, file_name="x.yaml")


def test_header_cannot_be_broken_out_of():
    text = trl_yaml.render({}, {"device": "a\nb: 1\x85c: 2\u2028d: 3"}, file_name="x\ny.yaml")
    assert yaml.safe_load(text) == {}


def test_header_without_facts_is_one_line():
    assert trl_yaml.header_lines({}, file_name="x") == [f"{trl_yaml.MARK}."]


def test_header_says_measured_or_predicted_and_of_what():
    header = {"source": "predicted", "peak_bytes": 2**30, "peak_of": "device memory in use"}
    _, line, *beware = trl_yaml.header_lines(header, file_name="x")
    assert "1.00 GiB predicted, device memory in use" in line
    assert "predicted, not measured" in beware[0]
    assert "±25%" in beware[1]
    header["source"] = "measured"
    (_, line) = trl_yaml.header_lines(header, file_name="x")
    assert "1.00 GiB measured" in line


def test_a_baseline_is_not_compared_with_itself():
    header = {
        "peak_bytes": 2**30,
        "tokens_per_s": {"median": 1000.0, "low": 990.0, "high": 1010.0},
        "rate_ratio": 1.0,
        "memory_ratio": 1.0,
        "changed": {},
    }
    text = "\n".join(trl_yaml.header_lines(header, file_name="x"))
    assert "the baseline's" not in text
    assert "nothing: this is the baseline" in text
    other = trl_yaml.header_lines({**header, "changed": {"optim": "sgd"}}, file_name="x")
    assert "\n".join(other).count("1.00 x the baseline's") == 2


def test_header_of_a_trainer_without_a_command_shows_none():
    lines = trl_yaml.header_lines({"trainer": "orpo"}, file_name="x")
    assert not any("trl " in line for line in lines)


def test_export_replaces_the_file_as_a_whole(tmp_path):
    path = tmp_path / "deep" / "sft.yaml"
    export({"a": "x" * 1000}, {"trainer": "sft"}, path)
    assert export({"a": 1}, {"trainer": "sft"}, str(path)) == path
    assert "trl sft --config sft.yaml\n" in path.read_text()
    assert yaml.safe_load(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_export_leaves_the_old_file(tmp_path, monkeypatch):
    path = export({"a": 1}, {}, tmp_path / "sft.yaml")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(JournalError, match="disk full"):
        export({"a": 2}, {}, path)
    assert yaml.safe_load(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@dataclass
class FakeTrial:
    number: int
    suffix: str = ".yaml"

    def export(self, path):
        return export({"number": self.number}, {}, path)


@dataclass
class FakeReport:
    pareto: tuple[FakeTrial, ...]

    def pick(self, which):
        assert which == "balanced"
        return self.pareto[-1]


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_write_configs_writes_members_and_the_best(tmp_path):
    written = write_configs(FakeReport((FakeTrial(7), FakeTrial(12))), tmp_path)
    assert names(tmp_path) == ["best.yaml", "trial-0007.yaml", "trial-0012.yaml"]
    assert sorted(item.name for item in written) == names(tmp_path)
    assert yaml.safe_load((tmp_path / "best.yaml").read_text()) == {"number": 12}


def test_write_configs_of_a_trainer_without_a_command_writes_scripts(tmp_path):
    write_configs(FakeReport((FakeTrial(7),)), tmp_path)
    write_configs(FakeReport((FakeTrial(7, ".py"),)), tmp_path)
    assert names(tmp_path) == ["best.py", "trial-0007.py"]


def test_write_configs_removes_only_its_own_stale_files(tmp_path):
    write_configs(FakeReport((FakeTrial(7),)), tmp_path)
    (tmp_path / "trial-0001.yaml").write_text("mine: 1\n")
    (tmp_path / "trial-0002.yaml").mkdir()
    export({}, {}, tmp_path / "notes.yaml")
    write_configs(FakeReport((FakeTrial(8),)), tmp_path)
    kept = ["best.yaml", "notes.yaml", "trial-0001.yaml", "trial-0002.yaml", "trial-0008.yaml"]
    assert names(tmp_path) == kept
    assert write_configs(FakeReport(()), tmp_path) == ()
    assert names(tmp_path) == ["notes.yaml", "trial-0001.yaml", "trial-0002.yaml"]


def test_write_configs_of_nothing_makes_no_folder(tmp_path):
    assert write_configs(FakeReport(()), tmp_path / "configs") == ()
    assert not (tmp_path / "configs").exists()


def test_a_file_says_what_it_needs_and_that_its_rate_is_too_noisy() -> None:
    rate = {"median": 100.0, "low": 60.0, "high": 110.0}
    facts = {"tokens_per_s": rate, "source": "measured", "unranked": True}
    text = "\n".join(
        trl_yaml.header_lines(
            {**facts, "needs": ["the package x", "the package y"]}, file_name="a.yaml"
        )
    )
    assert "too noisy to rank" in text
    assert "needs" in text
    assert "the package x" in text
    assert "the package y" in text
    predicted = "\n".join(
        trl_yaml.header_lines({**facts, "source": "predicted"}, file_name="a.yaml")
    )
    assert "too noisy to rank" not in predicted
    assert "needs" not in predicted


def test_header_says_what_is_modelled():
    header = {"source": "predicted", "modelled": "vLLM's share of memory and time"}
    text = "\n".join(trl_yaml.header_lines(header, file_name="x"))
    assert "vLLM's share of memory and time: modelled, neither measured nor traced" in text


@pytest.mark.parametrize(
    ("trainer", "name", "beside", "commands"),
    [
        ("sft", "a b.yaml", None, ["trl sft --config 'a b.yaml'"]),
        ("sft", "a.yaml", "b.yaml", ["trl sft --config a.yaml --accelerate_config b.yaml"]),
        ("orpo", "a b.py", None, ["python 'a b.py'", "accelerate launch 'a b.py'"]),
        ("orpo", "a.py", "b.yaml", ["accelerate launch --config_file b.yaml a.py"]),
        ("orpo", "a.yaml", None, []),
    ],
)
def test_a_file_says_what_a_shell_runs(
    trainer: str, name: str, beside: str | None, commands: list[str]
) -> None:
    assert trl_yaml.run_with(trainer, name, beside) == commands

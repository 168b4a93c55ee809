"""Scripts for trainers without a command: what they say, and what is read back of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UsageError
from autotune.probe import trl_file, trl_script

SCRIPT = {
    "trainer": "trl.experimental.online_dpo.OnlineDPOTrainer",
    "config": "trl.experimental.online_dpo.OnlineDPOConfig",
    "arguments": "trl.scripts.grpo.GRPOScriptArguments",
    "takes": ["reward_funcs", "peft_config"],
}
BARE = {
    "trainer": "trl.experimental.orpo.ORPOTrainer",
    "config": "trl.experimental.orpo.ORPOConfig",
    "arguments": "trl.ScriptArguments",
    "takes": ["quantization_config"],
}
CONFIG = {
    "model_name_or_path": 'it\'s "here"\n',
    "datasets": [{"path": "json", "data_files": "/" + "long/" * 30, "split": "train"}],
    "env": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "learning_rate": 1e-300,
    "max_grad_norm": float("inf"),
    "max_length": None,
    "use_peft": True,
}
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


def render(config: dict[str, Any], script: dict[str, Any] = SCRIPT, **header: Any) -> str:
    return trl_script.render(config, header, script, file_name="best.py")


@given(config=st.dictionaries(st.text(), VALUES, max_size=5), device=st.text())
def test_the_mapping_is_read_back(config: dict[str, Any], device: str) -> None:
    text = render(config, device=device)
    ast.parse(text)
    assert trl_script.config_of(text) == config
    changed = trl_script.with_config(text, {"a": 1})
    assert trl_script.config_of(changed) == {"a": 1}
    assert trl_script.with_config(changed, config) == text


@pytest.mark.parametrize("script", [SCRIPT, BARE])
@pytest.mark.parametrize("left_out", ["datasets", "env"])
def test_it_is_tidy(left_out: str, script: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "best.py"
    config = {**CONFIG, "datasets": []}
    del config[left_out]
    path.write_text(render(config, script))
    assert all(len(line) <= 99 for line in path.read_text().splitlines())
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        [*ruff, "check", "--isolated", "--select", "F,E,W,I,B", "--ignore", "E402"],
        [*ruff, "format", "--isolated", "--check", "--diff"],
    ):
        command += ["--line-length", "99", str(path)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr


def test_it_builds_what_the_trainer_takes() -> None:
    scored, bare = render({}), render({}, BARE)
    assert "from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer\n" in scored
    assert "reward_funcs=load_rewards(" in scored
    assert "peft_config=" in scored
    assert 'model_init_kwargs["quantization_config"]' in scored
    assert "reward" not in bare
    assert "peft_config=" not in bare
    assert "quantization_config=get_quantization_config(model_args)," in bare


def test_lines_are_counted_as_python_counts_them() -> None:
    """Not as str.splitlines does, which ends them at form feeds and the like, too."""
    text = render({"a": 1})
    edited = text.replace("CONFIG = {", "# one \x0c two \u2028 three\nCONFIG = {")
    changed = trl_script.with_config(edited, {"b": 2})
    assert trl_script.config_of(changed) == {"b": 2}
    assert "# one \x0c two \u2028 three\n" in changed
    compile(changed, "x.py", "exec")


def test_it_says_how_it_is_run() -> None:
    text = render({}, trainer="online_dpo")
    assert "run it with  python best.py\n" in text
    assert "accelerate launch best.py\n" in text
    assert "python best.py" not in render({}, trainer="online_dpo", outcome="device_oom")


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="nan"):
        render({"a": float("nan")})


def test_it_is_read_as_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "best.py"
    path.write_text(render(CONFIG, trainer="online_dpo", device="RTX 4090 (virtual)"))
    read = trl_file.read(path)
    assert read.config == CONFIG
    assert (read.trainer, read.card) == ("online_dpo", "RTX 4090")
    line = path.read_text().splitlines()[read.lines["learning_rate"] - 1]
    assert line.strip() == '"learning_rate": 1e-300,'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('hello')\n", "nothing says that autotune wrote it"),
        ("# Written by autotune.\nCONFIG = open('x')\n", "no CONFIG that can be read"),
        ("# Written by autotune.\nx = 1\n", "nothing is called CONFIG"),
        ("# Written by autotune.\nCONFIG = [1]\n", "no mapping of TRL keys"),
        ("# Written by autotune.\nCONFIG = {\n", "no CONFIG that can be read"),
    ],
)
def test_other_scripts_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        trl_file.read(path)

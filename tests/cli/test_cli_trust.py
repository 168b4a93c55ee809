"""What a file may have run: code of a model's repository, and variables of the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import CARD, CONFIG, SEARCH, Done, on_a_virtual_card

from autotune import verify
from autotune.verify import Check

ASKING = [
    "trust_remote_code: true\n",
    "trust_remote_code: 'yes'\n",
    "model_init_kwargs: {trust_remote_code: true}\n",
    "model_init_kwargs: '{\"trust_remote_code\": true}'\n",
    "attn_implementation: somebody/attention\n",
    "attn_implementation: paged|somebody/attention@main:fast\n",
    "model_init_kwargs: {attn_implementation: {text_config: somebody/attention}}\n",
]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return on_a_virtual_card(monkeypatch)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files that would have run under trl."""
    found: list[Path] = []

    def run(files: Any, **_: Any) -> Iterator[Check]:
        for file in files:
            found.append(file)
            yield Check(file=str(file), passed=True, num_steps=3, wall_time_s=1.0,
                        peak_resident_bytes=None)  # fmt: skip

    monkeypatch.setattr(verify, "verify_files", run)
    return found


# --- code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("asking", ASKING)
def test_a_file_cannot_allow_itself_to_run_code(
    asking: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("evil.yaml").write_text(CONFIG + asking)
    done = cli("estimate", "evil.yaml", "--device", CARD)
    assert done.code == 2
    assert "evil.yaml" in done.err
    assert "--trust-remote-code" in done.err
    assert machine["made"] == []  # nothing was started for it


def test_the_command_line_allows_it(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    Path("mine.yaml").write_text(CONFIG + ASKING[0])
    done = cli("estimate", "mine.yaml", "--device", CARD, "--trust-remote-code")
    assert done.code == 0, done.err
    (executor,) = machine["made"]
    ((_, request),) = executor.tasks
    assert request["trust_remote_code"] is True
    assert executor.submitted[0].trust_remote_code is True


def test_the_option_alone_lets_no_code_run(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("plain.yaml").write_text(CONFIG + "trust_remote_code: false\n")
    done = cli("estimate", "plain.yaml", "--device", CARD, "--trust-remote-code")
    assert done.code == 0, done.err
    (executor,) = machine["made"]
    assert executor.submitted[0].trust_remote_code is False


@pytest.mark.parametrize("asking", ASKING)
def test_verify_runs_no_such_code_unasked(
    asking: str, ran: list[Path], machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("good.yaml").write_text(CONFIG)
    Path("evil.yaml").write_text(CONFIG + asking)
    done = cli("verify", "evil.yaml")
    assert (done.code, ran) == (2, [])
    assert "--trust-remote-code" in done.err
    assert cli("verify", "evil.yaml", "--trust-remote-code").code == 0
    assert cli("verify", "good.yaml").code == 0
    assert [file.name for file in ran] == ["evil.yaml", "good.yaml"]


def test_verify_says_that_it_runs_what_the_file_says(cli: Callable[..., Done]) -> None:
    assert "run what the file says" in " ".join(cli("verify", "--help").out.split())


@pytest.mark.parametrize(
    "fixed",
    [
        "trust_remote_code: true",
        "model_init_kwargs: {trust_remote_code: true}",
        "env: {LD_PRELOAD: ./evil.so}",
    ],
)
def test_a_space_cannot_either(
    fixed: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("space.yaml").write_text(
        f"schema: 1\nknobs: {{adaptation: [full, lora]}}\nfixed:\n  {fixed}\n"
    )
    search = [*SEARCH[:3], "--space", "space.yaml", "--trials", 2, "--run-dir", "here"]
    done = cli(*search)
    assert done.code == 2
    assert "space.yaml" in done.err or "the space 'space'" in done.err
    assert machine["made"] == []
    if "trust" in fixed:
        assert "--trust-remote-code" in done.err
    else:
        assert "LD_PRELOAD" in done.err


# --- environment --------------------------------------------------------------------------------


def test_only_harmless_variables_reach_a_prediction(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("env.yaml").write_text(
        CONFIG + "env:\n  LD_PRELOAD: ./evil.so\n  PYTHONPATH: /tmp\n  PATH: /tmp\n"
        "  CUDA_INJECTION64_PATH: ./evil.so\n  HF_ENDPOINT: https://evil.example\n"
        "  OMP_NUM_THREADS: 2\n  HF_HUB_OFFLINE: '1'\n  MALLOC_ARENA_MAX: '1'\n"
        "  LRU_CACHE_CAPACITY: '64'\n  PYTORCH_ALLOC_CONF: expandable_segments:True\n"
    )
    done = cli("estimate", "env.yaml", "--device", CARD)
    assert done.code == 0, done.err
    (executor,) = machine["made"]
    (spec,) = executor.submitted
    wanted = {
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "MALLOC_ARENA_MAX": "1",
        "LRU_CACHE_CAPACITY": "64",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert spec.process_env == wanted
    # TRL's own parser would set what is left in the configuration.
    assert spec.config["env"] == wanted
    ((_, request),) = executor.tasks
    assert request["process_env"] == request["config"]["env"] == wanted
    text = " ".join(done.out.split())
    assert (
        "note: env: CUDA_INJECTION64_PATH, HF_ENDPOINT, LD_PRELOAD, PATH, PYTHONPATH: left out"
        in text
    )


def test_what_exports_write_reaches_a_prediction() -> None:
    from autotune.devices import host
    from autotune.probe import trust

    for names in (host.MALLOC_ENV, host.ONEDNN_ENV, ("PYTORCH_CUDA_ALLOC_CONF",)):
        assert set(names) <= trust.HARMLESS

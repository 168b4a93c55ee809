from __future__ import annotations

import copy
import pickle

import pytest

from autotune import errors
from autotune.errors import AutotuneError, UnknownNameError

CLASSES = sorted(
    (
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, AutotuneError)
    ),
    key=lambda item: item.__name__,
)
EXIT_CODES = {
    "AutotuneError": 1,
    "BaselineError": 1,
    "ExecutorError": 1,
    "JournalError": 1,
    "NoFeasibleConfigError": 3,
    "PrerequisiteError": 2,
    "SpaceError": 2,
    "StudyMismatchError": 2,
    "UnknownNameError": 2,
    "UsageError": 2,
}


def make(kind: type[AutotuneError]) -> AutotuneError:
    if kind is UnknownNameError:
        return UnknownNameError("knob", "lora_rr", ["lora_r", "optim"], where="my.yaml, line 7")
    return kind("It broke.", hint="Mend it.")


def test_exit_codes() -> None:
    assert {item.__name__: item.exit_code for item in CLASSES} == EXIT_CODES


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(kind: type[AutotuneError], protocol: int) -> None:
    error = make(kind)
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(again) is kind
        assert (again.message, again.hint, str(again)) == (error.message, error.hint, str(error))
        assert again.args == error.args
        assert again.exit_code == error.exit_code


def test_builtin_bases() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.SpaceError, errors.UsageError)
    assert issubclass(errors.UnknownNameError, errors.UsageError)
    assert issubclass(errors.ExecutorError, RuntimeError)


def test_text() -> None:
    assert str(AutotuneError("It broke.")) == "It broke."
    assert str(AutotuneError("It broke.", hint="Mend it.")) == "It broke. Mend it."


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("lora_rr", ["lora_r", "optim"], "Did you mean 'lora_r'?"),
        ("optm", ["optim", "optim", "x"], "Did you mean 'optim'?"),
        ("zzz", ["b", "a"], "Known: a, b."),
        ("zzz", [], "None is known."),
    ],
)
def test_an_unknown_name_comes_with_the_nearest(name: str, known: list[str], hint: str) -> None:
    error = UnknownNameError("knob", name, known)
    assert error.message == f"unknown knob {name!r}."
    assert error.hint == hint


def test_at_most_three_near_names_are_listed() -> None:
    error = UnknownNameError("knob", "name", [f"name{i}" for i in range(9)])
    assert error.hint.count(" or ") == 2


def test_an_unknown_name_says_where_it_was_read() -> None:
    error = UnknownNameError("knob", "x", ["y"], where="my.yaml, line 7")
    assert error.message == "my.yaml, line 7: unknown knob 'x'."


def test_hundreds_of_known_names_are_not_listed() -> None:
    known = [f"card-{number}" for number in range(200)]
    far = UnknownNameError("card", "zzzz", known, listing="`autotune gpus` lists all cards.")
    near = UnknownNameError("card", "card-1", known, listing="`autotune gpus` lists all cards.")
    for error in (far, near):
        assert len(str(error)) < 200
        assert error.hint.endswith(" `autotune gpus` lists all cards.")
    assert "of 200 known: card-" in far.hint
    assert "Did you mean 'card-1'" in near.hint


@pytest.mark.parametrize(
    ("hint", "in_python"),
    [
        (
            "Use --device cpu, or install the PyTorch build for your accelerator.",
            'Use device="cpu" (with an executor of your own, its devices=("cpu",)), or install the'
            " PyTorch build for your accelerator.",
        ),
        ("Raise --memory-budget.", "Raise memory_budget_bytes."),
        (
            "Continue it with --resume, or choose another --run-dir.",
            "Continue it with resume=True, or choose another run_dir.",
        ),
        ("Try --pin dtype=bfloat16.", 'Try pins={"dtype": "bfloat16"}.'),
        ("search with --weights random, which", 'search with weights="random", which'),
        ("add --trust-remote-code.", "add trust_remote_code=True."),
        ("`autotune search --device cpu` runs.", "`autotune search --device cpu` runs."),
        ("The option --unheard-of.", "The option --unheard-of."),
        ("", ""),
    ],
)
def test_a_script_is_told_of_arguments_and_a_shell_of_options(hint: str, in_python: str) -> None:
    error = errors.UsageError("It broke.", hint=hint)
    assert error.hint == hint
    assert error.python_hint == in_python
    assert str(error) == f"It broke. {in_python}".strip()

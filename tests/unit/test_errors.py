from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import errors
from autotune.errors import AutotuneError, UnknownNameError
from autotune.space.pins import parse_pins

PACKAGE = Path(errors.__file__).parent

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
    "TooSmallError": 2,
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
        (
            "--device virtual:rtx-4090 predicts.",
            'device="virtual:rtx-4090" predicts.',
        ),
        ("--device 'virtual:a card' predicts.", 'device="virtual:a card" predicts.'),
        ("(--pin lora_r: 8 before, 16 now).", '(pins["lora_r"]: 8 before, 16 now).'),
        ("--pin: unknown knob 'x'.", "pins: unknown knob 'x'."),
        ("--revision has no effect.", "revision has no effect."),
        ("The option --unheard-of.", "The option --unheard-of."),
        ("", ""),
    ],
)
def test_a_script_is_told_of_arguments_and_a_shell_of_options(hint: str, in_python: str) -> None:
    error = errors.UsageError("It broke.", hint=hint)
    assert error.hint == hint
    assert error.python_hint == in_python
    assert str(error) == f"It broke. {in_python}".strip()
    told = errors.UsageError(hint)
    assert told.message == hint
    assert told.python_message == str(told) == in_python


COMMANDS_ONLY = frozenset(
    # Options of commands that have no counterpart in Python, of trl and of nvidia-smi.
    {"accelerate", "all", "assume-length", "config", "dataset", "format", "logging", "main"}
    | {"max", "model", "output", "plot", "query-gpu", "report", "save", "verbose"}
)
OWN_COMMAND_LINES = ("cli/", "worker/__main__.py", "worker/server.py", "executors/connection.py")
"""Texts that Python never meets, and the worker's own options."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield each text in the package that may end up in an error, and where it is."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(OWN_COMMAND_LINES):
            continue
        tree = ast.parse(path.read_text())
        inside = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
            if part is not node
        } | {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr)  # a docstring
        }
        for node in ast.walk(tree):
            if id(node) in inside:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{name}:{node.lineno}", node.value
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "all" for part in node.values
                ]
                yield f"{name}:{node.lineno}", "".join(map(str, parts))


def test_no_text_of_an_error_names_an_option_in_python() -> None:
    found = [(where, text) for where, text in texts() if re.search(r"--[a-z]", text)]
    assert len(found) > 50
    for where, text in found:
        shown = re.sub("`[^`]*`", "", str(errors.UsageError(text)))
        left = set(re.findall(r"--([a-z-]*[a-z])", shown)) - COMMANDS_ONLY
        assert not left, f"{where}: {text!r} names {left} from Python"


def test_an_unknown_pin_is_named_as_python_gives_it() -> None:
    with pytest.raises(UnknownNameError) as raised:
        parse_pins((), "sft", {"adaption": "lora"})
    assert raised.value.message == "--pin: unknown knob 'adaption'."
    assert str(raised.value).startswith("pins: unknown knob 'adaption'. Did you mean 'adaptation'")

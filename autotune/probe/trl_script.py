"""A configuration as a Python script, for trainers that the ``trl`` command does not have.

The script holds the very mapping that the probes ran, has TRL's own parser read it, and builds the
trainer as TRL's scripts do. It needs TRL and what TRL needs, and nothing of ours.
"""

from __future__ import annotations

import ast
import io
import math
from collections.abc import Mapping
from typing import Any

from autotune.errors import UsageError
from autotune.probe import trl_yaml

SUFFIX = ".py"
_NAME = "CONFIG"
_WIDTH = 99

_START = '''"""Trains with {trainer}. Options go over CONFIG, such as --max_steps 3."""

{imports}{config}
{environment}
{libraries}

'''

_ENVIRONMENT = """
ENV = {name: str(value) for name, value in CONFIG.pop("env").items()}
if any(os.environ.get(name) != value for name, value in ENV.items()):
    # Some variables are read when a process starts, so that it starts again with them.
    os.environ.update(ENV)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
"""

_REWARDS = '''
def load_reward(name):
    """Return a reward function: one of TRL's, or one of your own as module.function."""
    if name == "get_soft_overlong_punishment":
        return rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    if hasattr(rewards, name):
        return getattr(rewards, name)
    sys.path.insert(0, os.getcwd())
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def load_rewards(script_args, training_args, model_args):
    """Return the reward model and the reward functions that CONFIG names."""
    found = [load_reward(name) for name in script_args.reward_funcs or []]
    if script_args.reward_model_name_or_path:
        model = AutoModelForSequenceClassification.from_pretrained(
            script_args.reward_model_name_or_path,
            num_labels=1,
            dtype=model_args.dtype,
            trust_remote_code=training_args.trust_remote_code,
        )
        found.insert(0, model)
    return found

'''

_MAIN = """
def main():
    parser = TrlParser(({script}, {config}, ModelConfig, DatasetMixtureConfig))
    unknown = parser.set_defaults_with_config(**CONFIG)
    assert not unknown, f"TRL does not know {{unknown}}"
    script_args, training_args, model_args, dataset_args = parser.parse_args_into_dataclasses()

    training_args.model_init_kwargs = {{
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {{}}),
    }}
{quantization}
    if dataset_args.datasets:
        dataset = get_dataset(dataset_args)
    else:
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

    trainer = {trainer}(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split]
        if training_args.eval_strategy != "no"
        else None,
        processing_class=AutoTokenizer.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            trust_remote_code=training_args.trust_remote_code,
        ),
{arguments}    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
"""

_QUANTIZATION = """
    quantization_config = get_quantization_config(model_args)
    if quantization_config is not None:
        training_args.model_init_kwargs["quantization_config"] = quantization_config
"""

_ARGUMENTS = {
    "reward_funcs": "load_rewards(script_args, training_args, model_args)",
    "quantization_config": "get_quantization_config(model_args)",
    "peft_config": "get_peft_config(model_args)",
}
"""What a trainer may take beyond what all take."""


def render(
    config: Mapping[str, Any],
    header: Mapping[str, Any],
    script: Mapping[str, Any],
    *,
    file_name: str,
) -> str:
    """Return the text of a script.

    Args:
        config: The mapping that TRL is to read; plain JSON values.
        header: Facts for the comment at the top; see
            :func:`autotune.probe.trl_yaml.header_lines`.
        script: ``trainer``, ``config`` and ``arguments``: the dotted names of its classes, and
            what the trainer ``takes``.
        file_name: Name of the file, for the command that the comment shows.

    Raises:
        UsageError: If ``config`` holds something that a script cannot hold.
    """
    classes = {name: script[name].rpartition(".") for name in ("trainer", "config", "arguments")}
    has_env = "env" in config
    takes = [name for name in _ARGUMENTS if name in script["takes"]]
    scores = "reward_funcs" in takes
    modules = [*(["importlib"] if scores else []), *(["os", "sys"] if scores or has_env else [])]
    text = _START.format(
        trainer=classes["trainer"][2],
        imports="".join(f"import {name}\n" for name in modules) + "\n" * bool(modules),
        config=_assignment(config),
        environment=_ENVIRONMENT if has_env else "",
        libraries=_libraries(list(classes.values()), takes),
    )
    text += _REWARDS if scores else ""
    text += _MAIN.format(
        script=classes["arguments"][2],
        config=classes["config"][2],
        trainer=classes["trainer"][2],
        quantization="" if "quantization_config" in takes else _QUANTIZATION,
        arguments="".join(f"        {name}={_ARGUMENTS[name]},\n" for name in takes),
    )
    comment = "\n".join(trl_yaml.header_lines(header, file_name=file_name))
    return f"{comment}\n{text}"


def _libraries(classes: list[tuple[str, str, str]], takes: list[str]) -> str:
    """Return the import statements that follow the environment."""
    names: dict[str, set[str]] = {
        "datasets": {"load_dataset"},
        "transformers": {"AutoTokenizer"},
        "trl": {
            "DatasetMixtureConfig",
            "ModelConfig",
            "TrlParser",
            "get_dataset",
            "get_quantization_config",
            *(["get_peft_config"] if "peft_config" in takes else []),
        },
    }
    if "reward_funcs" in takes:
        names["transformers"].add("AutoModelForSequenceClassification")
        names["trl"].add("rewards")
    for module, _, name in classes:
        names.setdefault(module, set()).add(name)
    lines = []
    for module in sorted(names, key=lambda name: (name.partition(".")[0], name)):
        line = f"from {module} import {', '.join(sorted(names[module]))}"
        if len(line) > _WIDTH:
            inner = "".join(f"    {name},\n" for name in sorted(names[module]))
            line = f"from {module} import (\n{inner})"
        lines.append(line)
    return "\n".join(lines)


def config_of(text: str) -> dict[str, Any]:
    """Return the configuration in a script's text; nothing of it is run.

    Raises:
        UsageError: If it is no script that was written here.
    """
    try:
        found = ast.literal_eval(_found(text).value)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise UsageError(
            f"it has no {_NAME} that can be read: {error}",
            hint="Give a script that `autotune` exported, or the YAML file of a configuration.",
        ) from error
    if not isinstance(found, dict):
        raise UsageError(f"its {_NAME} is no mapping of TRL keys.")
    return found


def lines_of(text: str) -> dict[str, int]:
    """Return the line, from 1, of each key of the configuration in a script's text."""
    value = _found(text).value
    assert isinstance(value, ast.Dict)
    return {str(key.value): key.lineno for key in value.keys if isinstance(key, ast.Constant)}


def with_config(text: str, config: Mapping[str, Any]) -> str:
    """Return a script's text with another configuration in it."""
    node = _found(text)
    # Lines as Python counts them: str.splitlines also ends them at form feeds and the like.
    lines = list(io.StringIO(text, newline=""))
    assert node.end_lineno is not None
    return "".join(
        [*lines[: node.lineno - 1], f"{_assignment(config)}\n", *lines[node.end_lineno :]]
    )


def _found(text: str) -> ast.Assign:
    for node in ast.parse(text).body:
        is_named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if is_named and node.targets[0].id == _NAME:  # type: ignore[attr-defined]
            return node  # type: ignore[return-value]
    raise ValueError(f"nothing is called {_NAME}")


def _assignment(config: Mapping[str, Any]) -> str:
    lines = [f"{_NAME} = {{"]
    for title, group in trl_yaml.grouped(config):
        lines.append(f"    # {title}")
        lines += [
            f"    {_text(name)}: {_literal(value, indent=4)}," for name, value in group.items()
        ]
    return "\n".join([*lines, "}"])


def _literal(value: Any, *, indent: int) -> str:
    """Return a plain value as Python writes it, over several lines where one is too long."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise UsageError("a script cannot hold a number that is none (nan).")
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, dict | list) or not value:
        return repr(value)
    start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    inner = (
        [f"{_text(key)}: {_literal(item, indent=indent + 4)}" for key, item in value.items()]
        if isinstance(value, dict)
        else [_literal(item, indent=indent + 4) for item in value]
    )
    line = f"{start}{', '.join(inner)}{end}"
    if len(line) + indent + 24 < _WIDTH and "\n" not in line:
        return line
    space = " " * (indent + 4)
    return "\n".join([start, *(f"{space}{item}," for item in inner), f"{' ' * indent}{end}"])


def _text(value: str) -> str:
    """Return a text as the rest of the script writes them, in double quotes if it can be."""
    written = repr(value)
    return written if '"' in written else f'"{written[1:-1]}"'

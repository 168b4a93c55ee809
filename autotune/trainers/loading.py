"""Opening a model's configuration, tokenizer and data set, with errors that say what to do."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import yaml
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from safetensors import safe_open
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.quantizers import AutoHfQuantizer
from trl import get_dataset

from autotune.errors import PrerequisiteError, UsageError
from autotune.probe import sources
from autotune.trainers import models


def open_model(
    name: str, *, revision: str | None, trust_remote_code: bool
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Return a model's configuration and tokenizer; no weights are read.

    Raises:
        PrerequisiteError: If there is no such model, it is gated, or needs its own code.
        UsageError: If its architecture is unknown or it cannot be fine-tuned as it is.
    """
    try:
        config = models.load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    except MemoryError:
        raise
    except Exception as error:
        raise _model_error(name, error) from error
    names = config.architectures
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UsageError(
            f"the configuration of {name!r} names no architecture.",
            hint='Add "architectures": ["LlamaForCausalLM"] (or yours) to its config.json.',
        )
    _check_quantization(name, config)
    _check_tokenizer_files(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except MemoryError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise _own_code(name) from error
        raise PrerequisiteError(
            f"the tokenizer of {name!r} cannot be loaded: {_short(error)}",
            hint="A local model folder needs the tokenizer's files beside config.json.",
        ) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise UsageError(
            f"the tokenizer of {name!r} has neither a pad nor an eos token, and TRL needs one.",
            hint="Set eos_token in its tokenizer_config.json.",
        )
    return config, tokenizer


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "*.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)


def _check_tokenizer_files(name: str) -> None:
    """Refuse a local model folder without any tokenizer's file.

    transformers makes an empty tokenizer of some architectures instead, whose first trouble would
    be told in its place.

    Raises:
        PrerequisiteError: If there is none.
    """
    folder = Path(name)
    if folder.is_dir() and not any(
        next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES
    ):
        raise PrerequisiteError(
            f"the model folder {name!r} holds no tokenizer.",
            hint="Copy the tokenizer's files (tokenizer.json, tokenizer_config.json) beside its "
            "config.json.",
        )


def _model_error(name: str, error: BaseException) -> PrerequisiteError | UsageError:
    text = str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GatedRepoError):
            return PrerequisiteError(
                f"the model {name!r} is gated and you have no access to it.",
                hint="Accept its terms on the hub and log in with `hf auth login`.",
            )
        cause = cause.__cause__ or cause.__context__
    if "trust_remote_code" in text:
        return _own_code(name)
    if "does not recognize this architecture" in text or isinstance(error, KeyError):
        return UsageError(
            f"the installed transformers cannot build {name!r}: {_short(error)}",
            hint="Update transformers, or choose a model that it knows.",
        )
    if not isinstance(error, (OSError, ValueError)):
        return UsageError(
            f"transformers refuses the config.json of {name!r}: {_short(error)}",
            hint="Correct the config.json, or take it from the model that this one was made from.",
        )
    return PrerequisiteError(
        f"the model {name!r} cannot be loaded: {_short(error)}",
        hint="Give a hub id such as Qwen/Qwen3-0.6B, or a folder with config.json and tokenizer.",
    )


def _own_code(name: str) -> PrerequisiteError:
    return PrerequisiteError(
        f"the model {name!r} needs code from its own repository.",
        hint="Read that code; if you trust it, add --trust-remote-code.",
    )


def _check_quantization(name: str, config: PretrainedConfig) -> None:
    """Refuse a quantised checkpoint that the installed packages cannot load."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return
    try:
        quantizer = AutoHfQuantizer.from_config(declared, pre_quantized=True)
    except ImportError as error:
        raise _needs_package(name, error) from error
    except Exception as error:
        raise UsageError(
            f"transformers cannot read how {name!r} is quantised: {_short(error)}",
            hint="Correct quantization_config in its config.json, or choose another checkpoint.",
        ) from error
    try:
        quantizer.validate_environment(device_map=None)
    except ImportError as error:
        raise _needs_package(name, error) from error
    except Exception:  # noqa: BLE001  what it says of devices is not about the device of probes
        return


def _needs_package(name: str, error: ImportError) -> PrerequisiteError:
    return PrerequisiteError(
        f"the checkpoint {name!r} is quantised, and loading it needs a package: {_short(error)}",
        hint="Install the package, or choose a checkpoint that is not quantised.",
    )


def check_weights(name: str, weights: str) -> None:
    """Check that a local folder holds the weights that ``--weights real`` asks for.

    Raises:
        PrerequisiteError: If there are none, or a part is missing.
        UsageError: If a file is damaged.
    """
    folder = Path(name)
    if weights != "real" or not folder.is_dir():
        return
    names = {file.name for file in folder.iterdir()}
    index = names & {"model.safetensors.index.json", "pytorch_model.bin.index.json"}
    wanted = {shard for file in index for shard in _shards(folder / file)}
    if not names & {"model.safetensors", "pytorch_model.bin", "adapter_config.json"}:
        missing = sorted(wanted - names) or ([] if wanted else ["model.safetensors"])
        if missing:
            raise PrerequisiteError(
                f"the model folder {name!r} holds no {missing[0]}.",
                hint="Copy the weights there, or search with --weights random, which needs none.",
            )
    for file in sorted(names):
        if file.endswith(".safetensors"):
            _check_safetensors(folder / file)


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, error) from error


def _check_safetensors(file: Path) -> None:
    try:
        with safe_open(str(file), framework="pt"):
            pass
    except Exception as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: BaseException) -> UsageError:
    return UsageError(
        f"the file {str(file)!r} is damaged or incomplete: {_short(error)}",
        hint="Copy it again, or search with --weights random, which needs none.",
    )


def open_dataset(
    script_args: Any, dataset_args: Any, *, eval_strategy: str = "no"
) -> datasets.Dataset:
    """Return the training split that TRL's script would train on.

    Args:
        script_args: TRL's ``ScriptArguments``.
        dataset_args: TRL's ``DatasetMixtureConfig``.
        eval_strategy: When TRL evaluates; unless ``no``, its script takes the test split, too.

    Raises:
        PrerequisiteError: If there is no such data set or it cannot be reached.
        UsageError: If it has no such split or configuration, cannot be read, or is empty.
    """
    split = script_args.dataset_train_split
    named = script_args.dataset_name
    if dataset_args.datasets:
        named = ", ".join(_mixture_name(entry) for entry in dataset_args.datasets)
    elif Path(named).is_file():
        # Whether it is looked for on the hub depends on how its path is written.
        raise UsageError(
            f"the data set {named!r} is a data file; `dataset_name` takes a hub id or a folder.",
            hint=_lines_for(Path(named)),
        )
    try:
        if dataset_args.datasets:
            found = get_dataset(dataset_args)
        else:
            found = datasets.load_dataset(named, name=script_args.dataset_config)
    except FileNotFoundError as error:
        raise PrerequisiteError(
            f"the data set {named!r} was not found: {_short(error)}",
            hint="Give a hub id, or a json, jsonl, parquet, csv or arrow file, or a folder.",
        ) from error
    except (ConnectionError, HfHubHTTPError, RepositoryNotFoundError) as error:
        raise PrerequisiteError(
            f"the data set {named!r} cannot be reached: {_short(error)}",
            hint="Check the name and the network; a gated data set needs `hf auth login`.",
        ) from error
    except StopIteration as error:  # the JSON loader's answer to a file without a line
        raise UsageError(
            f"the data set {named!r} is empty.", hint="Check the file, or choose another."
        ) from error
    except (ValueError, RuntimeError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"the data set {named!r} cannot be read: {_short(error)}",
            hint="Check the file's format; --dataset-config and --split choose parts of it.",
        ) from error
    if split not in found:
        raise UsageError(
            f"the data set {named!r} has no split {split!r}.",
            hint=f"It has: {', '.join(map(str, found))}. Choose one with --split.",
        )
    test_split = script_args.dataset_test_split
    if eval_strategy != "no" and test_split not in found:
        raise _nothing_to_evaluate(named, test_split, list(map(str, found)), dataset_args)
    rows = found[split]
    if len(rows) == 0:
        raise UsageError(
            f"the split {split!r} of {named!r} is empty.", hint="Choose another with --split."
        )
    return rows


def _lines_for(file: Path) -> str:
    """Return the lines of a configuration that name a data file, as an exported one has them."""
    try:
        keys = sources.dataset_keys(str(file), split=None, config_name=None)
    except UsageError as error:
        return f"{error.message} {error.hint}"
    lines = yaml.safe_dump({"datasets": keys["datasets"]}, sort_keys=False, width=10_000)
    return "in place of dataset_name, write:\n" + textwrap.indent(lines.rstrip(), "    ")


def _nothing_to_evaluate(
    named: str, split: str, splits: Sequence[str], dataset_args: Any
) -> UsageError:
    hint = f"It has: {', '.join(splits)}. Name one with dataset_test_split: NAME"
    if dataset_args.datasets:
        hint = "Add test_split_size: 0.05, which keeps that share of the rows for evaluation"
    return UsageError(
        f"eval_strategy asks for evaluation, and {named!r} has no split {split!r} to evaluate on:"
        f" trl ends with KeyError: {split!r}.",
        hint=f"{hint}; or take eval_strategy out.",
    )


def _mixture_name(entry: Any) -> str:
    files = entry["data_files"] if isinstance(entry, Mapping) else entry.data_files
    path = entry["path"] if isinstance(entry, Mapping) else entry.path
    # Names are escaped for the patterns that `datasets` takes them for.
    return re.sub(r"\[([*?[])\]", r"\1", str(files or path))


def _short(error: BaseException) -> str:
    """Return the first line of an error that says something, without a traceback's noise."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(cause).__name__

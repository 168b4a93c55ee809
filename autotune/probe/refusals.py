"""Who refused a configuration that was predicted, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import AutotuneError
from autotune.probe.result import Outcome, ProbeResult

_NOT_VIRTUAL = "NotVirtual"
_NOT_ON_CARD = "NotOnCard"
_MISSING = ("ImportError", "ModuleNotFoundError", "PackageNotFoundError")
_HALF_GRADIENTS = "unscale FP16 gradients"
"""Part of what PyTorch's scaler says, which names no key of a file."""
_ABOUT_KEYS = ("TRL refuses the configuration", "unknown TRL key", "unknown value of")
_BFLOAT16 = ("does not support bfloat16", "cannot scale bfloat16 gradients")
"""Parts of what a card without bfloat16 says to bf16: true, and to fp16: true."""
_NAME = re.compile(r"^\w+(Error|Exception): ")


def at_its_line(error: AutotuneError, places: Mapping[str, str]) -> AutotuneError:
    """Return an error about a TRL key or its value with the place where the key was read.

    Args:
        error: Any; one that names no key of ``places`` is returned as it is.
        places: Key to place, such as ``my.yaml, line 7``.
    """
    if not error.message.startswith(_ABOUT_KEYS):
        return error
    for key, place in places.items():
        if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", error.message):
            return error.at(place)
    return error


def is_refusal(result: ProbeResult) -> bool:
    """Return whether the run would be refused on the card, too, and not only here without it."""
    only_here = (_NOT_VIRTUAL, *_MISSING)
    return result.outcome is Outcome.UNSUPPORTED and result.error_type not in only_here


def quantisation(config: Mapping[str, Any], *, checkpoint: bool) -> tuple[str, ...]:
    """Return what quantises the weights: keys of a configuration, or that the checkpoint is.

    Args:
        config: The configuration for ``trl``.
        checkpoint: Whether the checkpoint itself is quantised.
    """
    keys = tuple(key for key in ("load_in_4bit", "load_in_8bit") if config.get(key))
    return keys or (("the checkpoint",) if checkpoint else ())


def reason(result: ProbeResult, quantised: Sequence[str] = ()) -> str:
    """Return why a probe did not end well; of a refusal without the name of an exception."""
    if not _is_unsupported(result):
        return result.detail
    text = _NAME.sub("", result.detail)
    if quantised and _BFLOAT16[0] in text:
        # Said at once: with fp16: true in its place the run would be refused in its first step.
        text += ", in which TRL trains the adapters of a quantised model, with fp16: true as well"
    return text


def hint(result: ProbeResult, file: str, quantised: Sequence[str] = ()) -> str:
    """Return what to do about a probe without a prediction; empty if there is nothing to add.

    Args:
        result: How it ended.
        file: The name of the configuration.
        quantised: What quantises the weights, see :func:`quantisation`; empty if nothing does.
    """
    if result.outcome is Outcome.HOST_OOM:
        return "A prediction takes memory of this machine: end other work on it."
    if result.outcome is Outcome.TIMEOUT:
        return "Give it longer with --probe-timeout."
    if not _is_unsupported(result):
        return ""
    if result.error_type == _NOT_VIRTUAL:
        return (
            f"No other card would help: take it out of {file} to predict the rest, or measure it"
            " on a card."
        )
    if any(words in result.detail for words in _BFLOAT16):
        return _without_bfloat16(result, file, quantised)
    if result.error_type == _NOT_ON_CARD:
        return f"The card lacks it: choose another card, or change {file}."
    if result.error_type in _MISSING:
        return (
            "A package is missing on this machine; the card has no part in it. Install it here, or"
            f" take what needs it out of {file}."
        )
    if _HALF_GRADIENTS in result.detail:
        return f"fp16: true trains float32 weights: set dtype: float32 in {file}."
    return f"Change it in {file}."


def _without_bfloat16(result: ProbeResult, file: str, quantised: Sequence[str]) -> str:
    """Return what to do on a card without bfloat16: fp16 helps only what is not quantised."""
    if not quantised:
        if _BFLOAT16[0] in result.detail:
            return f"Set bf16: false and fp16: true in {file}, or choose a card with bfloat16."
        return f"fp16: true trains float32 weights: set dtype: float32 in {file}."
    keys = [key for key in quantised if key.startswith("load_in_")]
    unquantised = (
        f", or train adapters on unquantised weights, if they fit (without {' and '.join(keys)},"
        " with fp16: true, bf16: false, dtype: float16)"
        if keys
        else ""
    )
    return (
        f"Choose a card with bfloat16{unquantised}. In {file}, bf16: false, fp16: false and dtype:"
        " float32 together are predicted to run here, slowly; nobody tried that on such a card."
    )


def _is_unsupported(result: ProbeResult) -> bool:
    return result.outcome is Outcome.UNSUPPORTED

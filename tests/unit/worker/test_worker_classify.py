from __future__ import annotations

import errno
import json
import types
from typing import Any

import pytest

from autotune.devices.base import OomSignature
from autotune.errors import PrerequisiteError, UsageError
from autotune.probe.result import Outcome
from autotune.trainers.base import DivergedError
from autotune.virtual.errors import NoKernel, NotOnCard, NotVirtual
from autotune.worker.classify import classify, classify_text

CUDA = (
    OomSignature(type_name="torch.OutOfMemoryError"),
    OomSignature(type_name="RuntimeError", message="CUBLAS_STATUS_ALLOC_FAILED"),
)
CPU = (OomSignature(type_name="MemoryError"),)


class OutOfMemoryError(RuntimeError):
    __module__ = "torch"


class AcceleratorError(RuntimeError):
    __module__ = "torch"


def raised(error: BaseException, module: str = "__main__", cause: BaseException | None = None):
    """Return ``error`` after it was raised in a frame of ``module``."""
    code = compile("def go(error, cause):\n    raise error from cause\n", module, "exec")
    namespace: dict[str, Any] = types.ModuleType(module).__dict__
    exec(code, namespace)
    try:
        namespace["go"](error, cause)
    except BaseException as caught:  # noqa: BLE001
        return caught


def of(error: BaseException, *, kind: str = "cuda", phase: str = "later_steps") -> Outcome:
    return classify(error, CUDA if kind == "cuda" else CPU, device_kind=kind, phase=phase)


@pytest.mark.parametrize(
    ("error", "on_cuda", "on_cpu"),
    [
        (OutOfMemoryError("CUDA out of memory"), Outcome.DEVICE_OOM, Outcome.DEVICE_OOM),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED in x"), Outcome.DEVICE_OOM, Outcome.CRASHED),
        (MemoryError(), Outcome.HOST_OOM, Outcome.DEVICE_OOM),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            Outcome.HOST_OOM,
            Outcome.DEVICE_OOM,
        ),
        (RuntimeError("std::bad_alloc"), Outcome.HOST_OOM, Outcome.DEVICE_OOM),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Outcome.HOST_OOM, Outcome.DEVICE_OOM),
        (DivergedError("nan"), Outcome.DIVERGED, Outcome.DIVERGED),
        (RuntimeError("size mismatch"), Outcome.CRASHED, Outcome.CRASHED),
        (KeyError("labels"), Outcome.CRASHED, Outcome.CRASHED),
        (SystemError(), Outcome.CRASHED, Outcome.CRASHED),
    ],
)
def test_outcome_by_type_and_message(
    error: BaseException, on_cuda: Outcome, on_cpu: Outcome
) -> None:
    assert of(raised(error)) is on_cuda
    assert of(raised(error), kind="cpu") is on_cpu


def test_out_of_memory_is_found_behind_other_errors() -> None:
    oom = OutOfMemoryError("CUDA out of memory")
    assert of(raised(ValueError("wrapped"), "trl.trainer", cause=oom)) is Outcome.DEVICE_OOM
    assert of(ExceptionGroup("several", [KeyError(1), oom])) is Outcome.DEVICE_OOM
    error = KeyError("while handling")
    error.__context__ = oom
    assert of(error) is Outcome.DEVICE_OOM


def test_a_share_that_vllm_cannot_have_is_a_want_of_memory_and_one_too_small_is_not() -> None:
    """Messages of vLLM 0.31.0, vllm/v1/worker/utils.py and vllm/v1/core/kv_cache_utils.py."""
    accelerators = pytest.importorskip("autotune.devices.accelerators")
    not_free = (
        "Free memory on device cuda:0 (9.1/79.1 GiB) on startup is less than desired GPU memory"
        " utilization (0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used"
    )
    too_small = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    outcomes = [
        classify(
            raised(ValueError(text), "vllm.v1.worker"),
            accelerators._OOM,
            device_kind="cuda",
            phase="load",
        )
        for text in (not_free, too_small)
    ]
    assert outcomes == [Outcome.DEVICE_OOM, Outcome.UNSUPPORTED]


def test_a_context_that_was_suppressed_does_not_count() -> None:
    error = KeyError("another matter")
    error.__context__ = OutOfMemoryError("probed and handled")
    error.__suppress_context__ = True
    assert of(error) is Outcome.CRASHED


def test_a_circle_of_causes_ends() -> None:
    first, second = KeyError("1"), KeyError("2")
    first.__cause__, second.__cause__ = second, first
    assert of(first) is Outcome.CRASHED


@pytest.mark.parametrize("kind", [ValueError, TypeError, NotImplementedError, AttributeError])
@pytest.mark.parametrize("phase", ["load", "first_step", "later_steps"])
@pytest.mark.parametrize(
    "module", ["torch.utils.checkpoint", "trl.trainer", "peft", "bitsandbytes"]
)
def test_what_a_library_refuses_is_unsupported(
    kind: type[Exception], phase: str, module: str
) -> None:
    assert of(raised(kind("no"), module), phase=phase) is Outcome.UNSUPPORTED


def test_a_missing_package_is_unsupported_with_its_message() -> None:
    error = raised(ImportError("FlashAttention2 is not installed"), "transformers.modeling_utils")
    assert of(error, phase="load") is Outcome.UNSUPPORTED


@pytest.mark.parametrize(
    ("error", "module", "phase", "outcome"),
    [
        (RuntimeError("only with sdpa"), "transformers.x", "load", Outcome.UNSUPPORTED),
        (RuntimeError("only with sdpa"), "transformers.x", "first_step", Outcome.CRASHED),
        (RuntimeError("CUDA error: device-side assert"), "torch.x", "load", Outcome.CRASHED),
        (RuntimeError("No CUDA GPUs are available"), "torch.cuda", "load", Outcome.CRASHED),
        (AcceleratorError("launch failure"), "torch.x", "load", Outcome.CRASHED),
        (
            ValueError("refused by the adapter"),
            "autotune.trainers.hf",
            "load",
            Outcome.UNSUPPORTED,
        ),
        (ValueError("a bug"), "autotune.trainers.hf", "first_step", Outcome.CRASHED),
        (TypeError("a bug"), "autotune.trainers.hf", "load", Outcome.CRASHED),
        (ValueError("no such split"), "datasets.load", "load", Outcome.CRASHED),
        (ValueError("no such repo"), "huggingface_hub.utils", "load", Outcome.CRASHED),
        (OSError("can't load the model"), "transformers.x", "load", Outcome.CRASHED),
        (FileNotFoundError("config.json"), "transformers.x", "load", Outcome.CRASHED),
        (ConnectionError("hub"), "transformers.x", "load", Outcome.CRASHED),
        (json.JSONDecodeError("bad", "{", 0), "transformers.x", "load", Outcome.CRASHED),
        (KeyError("qwen9"), "transformers.x", "load", Outcome.CRASHED),
    ],
)
def test_who_raised_and_when_decides(
    error: Exception, module: str, phase: str, outcome: Outcome
) -> None:
    assert of(raised(error, module), phase=phase) is outcome


def test_an_unreachable_hub_behind_a_refusal_is_no_verdict() -> None:
    error = raised(ValueError("unrecognised model"), "transformers.x", cause=OSError("hub"))
    assert of(error, phase="load") is Outcome.CRASHED


def test_the_standard_librarys_frames_are_passed_over() -> None:
    namespace: dict[str, Any] = types.ModuleType("transformers.config").__dict__
    exec("import json\ndef go(): json.dumps({1, 2})", namespace)
    with pytest.raises(TypeError) as caught:
        namespace["go"]()
    assert of(caught.value) is Outcome.UNSUPPORTED


def test_a_full_disk_is_no_outcome() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PrerequisiteError, match="disk is full"):
        of(raised(RuntimeError("could not save"), "torch.serialization", cause=full))


def test_an_error_of_ours_is_raised_again() -> None:
    error = UsageError("no such trainer")
    with pytest.raises(UsageError) as caught:
        of(error)
    assert caught.value is error


@pytest.mark.parametrize(
    "text",
    [
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "terminate called after throwing an instance of 'std::bad_alloc'\n",
        "Traceback ...\nMemoryError",
        "RuntimeError: can't start new thread",
    ],
)
def test_last_words_count_only_with_a_budget(text: str) -> None:
    assert classify_text(text, device_kind="cpu", has_budget=True) is Outcome.DEVICE_OOM
    assert classify_text(text, device_kind="cuda", has_budget=True) is Outcome.HOST_OOM
    assert classify_text(text, device_kind="cpu", has_budget=False) is Outcome.CRASHED
    assert classify_text("fatal", device_kind="cpu", has_budget=True) is Outcome.CRASHED


def test_a_device_may_know_more_last_words() -> None:
    signature = OomSignature(type_name="", message="HBM exhausted")
    text = "xpu runtime: HBM exhausted"
    outcome = classify_text(text, device_kind="cpu", has_budget=True, signatures=(signature,))
    assert outcome is Outcome.DEVICE_OOM


@pytest.mark.parametrize(
    "error", [NotOnCard("needs more"), NoKernel("no kernel"), NotVirtual("it", "of data")], ids=str
)
def test_what_a_pretended_card_cannot_do_is_a_refusal_in_every_phase(error: Exception) -> None:
    for phase in ("load", "first_step", "eval"):
        assert classify(error, device_kind="virtual", phase=phase) is Outcome.UNSUPPORTED

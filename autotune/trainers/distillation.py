"""On-policy distillation: TRL's ``DistillationTrainer``.

The model completes each prompt once, for all micro-batches of an optimizer step together, and is
trained towards what a teacher says of each token. The teacher is a second model, which the user
names, and sees each micro-batch as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import DistillationConfig, DistillationTrainer, ScriptArguments

from autotune.errors import AutotuneError, UsageError
from autotune.probe.spec import ProbeSpec
from autotune.trainers import detect, loading, models
from autotune.trainers.base import registry
from autotune.trainers.online import GenerationEnd, OnlineAdapter

_TEACHER = "teacher_model_name_or_path"


class DistillationAdapter(OnlineAdapter):
    """Builds ``DistillationTrainer`` on prompts."""

    name: ClassVar[str] = "distillation"
    small_keys: ClassVar[Mapping[str, Any]] = {
        "max_completion_length": 2,
        "generation_kwargs": {"min_new_tokens": 2},
    }

    def config_class(self) -> Any:
        """Return ``DistillationConfig``."""
        return DistillationConfig

    def script_class(self) -> type:
        """Return the arguments that all scripts have."""
        return ScriptArguments  # type: ignore[no-any-return]

    def make_trainer(self, **kwargs: Any) -> Any:
        """Return the ``DistillationTrainer``."""
        return DistillationTrainer(**kwargs)

    def check(self, request: Mapping[str, Any]) -> None:
        """Check that there is a teacher, for the same vocabulary.

        Raises:
            UsageError: If none is named, or it is no such model.
        """
        name = request["config"].get(_TEACHER)
        if not name:
            raise UsageError(
                "distillation needs a teacher, and none is named.",
                hint=f"Give {_TEACHER} under `fixed:` in the space: a hub id or a folder.",
            )
        try:
            loading.open_model(
                str(name),
                revision=request["config"].get("teacher_model_revision"),
                trust_remote_code=bool(request.get("trust_remote_code")),
            )
        except AutotuneError as error:
            raise UsageError(f"the teacher: {error.message}", hint=error.hint) from error

    def small_arguments(self, args: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return a small teacher."""
        return {"teacher_model": detect.small_model(len(tokenizer))}

    def further_arguments(
        self, spec: ProbeSpec, training_args: Any, load: Callable[[], Any]
    ) -> dict[str, Any]:
        """Return the teacher, loaded as TRL's script would have it loaded."""
        self._end = GenerationEnd(training_args.per_device_train_batch_size)
        name = training_args.teacher_model_name_or_path
        kwargs = {
            "revision": training_args.teacher_model_revision,
            "trust_remote_code": spec.trust_remote_code,
            "attn_implementation": spec.config.get("attn_implementation"),
            "dtype": spec.config.get("dtype", "float32"),
            **(training_args.teacher_model_init_kwargs or {}),
        }
        if spec.weights == "random":
            training_args.teacher_model_init_kwargs = None
            quantization = kwargs.pop("quantization_config", None)
            return {"teacher_model": models.with_random_weights(name, kwargs, quantization)}
        training_args.teacher_model_init_kwargs = kwargs
        return {"teacher_model": name}

    def row_tokens(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each prompt's only completion."""
        return [int(training_args.max_completion_length)] * len(dataset)


registry.register("distillation", DistillationAdapter)

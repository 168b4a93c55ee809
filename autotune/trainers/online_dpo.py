"""Online DPO: TRL's experimental ``OnlineDPOTrainer``.

A row of the data is a prompt. For each micro-batch the model writes two completions of each of its
prompts, which are scored, and is trained to prefer the better one. In a probe all completions have
the full ``max_new_tokens``: that is the most memory, and neither memory nor time depend on what
the text says. Trained tokens are those of completions.

Prompt and completion together are cut to ``max_length``, at the prompt's start and in what is
trained on alone; the model generates from whole prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase
from trl import apply_chat_template
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.scripts.grpo import GRPOScriptArguments

from autotune.devices.base import DeviceBackend, MicroBatches
from autotune.probe.spec import ProbeSpec
from autotune.trainers import raw, rewards
from autotune.trainers.base import Recorder, registry
from autotune.trainers.hf import Sample, Session, prepared_rows
from autotune.trainers.prompts import PromptsAdapter, generate_less
from autotune.trainers.schedule import num_steps, subset

PER_PROMPT = 2
"""Completions of each prompt, which no setting changes."""


class _GeneratingSession(Session):
    """A built trainer that generates for each micro-batch."""

    def listen(self, recorder: Recorder) -> None:
        """Let batches be counted and the trainer's events be heard, generations among them."""
        super().listen(recorder)
        trainer = self._trainer

        def told(generate: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                recorder.enter_phase("generation")
                found = generate(*args, **kwargs)
                recorder.end_generation()
                first = trainer.state.global_step == 0
                recorder.enter_phase("first_step" if first else "later_steps")
                return found

            return run

        # Rewards are asked for after the forward passes, so that they tell of no generation's end.
        trainer._generate = told(trainer._generate)
        trainer._generate_vllm = told(trainer._generate_vllm)


class OnlineDpoAdapter(PromptsAdapter):
    """Builds ``OnlineDPOTrainer`` on prompts."""

    name: ClassVar[str] = "online_dpo"
    session_class: ClassVar[type[Session]] = _GeneratingSession
    small_keys: ClassVar[Mapping[str, Any]] = {
        "max_new_tokens": 2,
        "generation_kwargs": {"min_new_tokens": 2},
    }

    def config_class(self) -> Any:
        """Return ``OnlineDPOConfig``."""
        return OnlineDPOConfig

    def script_class(self) -> type:
        """Return GRPO's arguments, by which rewards are named; TRL has no script of this one."""
        return GRPOScriptArguments  # type: ignore[no-any-return]

    def make_trainer(self, **kwargs: Any) -> Any:
        """Return the ``OnlineDPOTrainer``, which takes a quantisation with the model's keys."""
        quantization = kwargs.pop("quantization_config", None)
        if quantization is not None:
            kwargs["args"].model_init_kwargs["quantization_config"] = quantization
        return OnlineDPOTrainer(**kwargs)

    def overlay(self, spec: ProbeSpec, device: DeviceBackend) -> dict[str, Any]:
        """Return the probe-only keys: completions of full length."""
        most = spec.config.get("max_new_tokens", self.config_class().max_new_tokens)
        given = spec.config.get("generation_kwargs") or {}
        return {
            **super().overlay(spec, device),
            "generation_kwargs": {**given, "min_new_tokens": most},
        }

    def further_arguments(
        self, spec: ProbeSpec, training_args: Any, load: Callable[[], Any]
    ) -> dict[str, Any]:
        """Return the rewards; models are loaded here, as the exported script does.

        The trainer would load them with the policy's revision and quantisation.
        """
        kwargs = {
            "dtype": spec.config.get("dtype", "float32"),
            "trust_remote_code": spec.trust_remote_code,
        }

        def loaded(reward: Any) -> Any:
            if not isinstance(reward, str):
                return reward
            kind = AutoModelForSequenceClassification
            return kind.from_pretrained(reward, num_labels=1, **kwargs)

        return {"reward_funcs": [loaded(item) for item in rewards.scorers(spec, self.name)]}

    def small_arguments(self, args: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return a reward that scores nothing."""
        return {"reward_funcs": [_no_reward]}

    def completion_length(self, training_args: Any) -> int:
        """Return the tokens of the longest completion."""
        return int(training_args.max_new_tokens)

    def completions_per_prompt(self) -> int:
        """Return the completions of a prompt that are trained on."""
        return PER_PROMPT

    def tokenise(
        self, prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, training_args: Any
    ) -> list[list[int]]:
        """Return the prompts' tokens, as the template writes them."""
        texts = [
            apply_chat_template({"prompt": prompt}, tokenizer)["prompt"]
            if isinstance(prompt, list)
            else prompt
            for prompt in prompts
        ]
        return [list(ids) for ids in tokenizer(text=texts, add_special_tokens=False)["input_ids"]]

    def load_rows(self, spec: ProbeSpec, training_args: Any) -> Sample:
        """Return enough prompts for the probe."""
        rows = prepared_rows(spec)
        lengths = [row[0] for row in rows[raw.LENGTHS]]
        batch_size = training_args.per_device_train_batch_size
        steps = num_steps(spec.warmup_steps + spec.measured_steps, spec.first_worst_steps)
        chosen = subset(
            lengths,
            num_needed=batch_size * self.accumulation(spec) * steps,
            num_longest=2 * batch_size,
            seed=spec.seed,
            at_least=raw.ROWS_KEPT,
        )
        ratio = len(lengths) / len(chosen)
        return Sample(
            rows=rows.select(chosen).remove_columns([raw.LENGTHS, raw.NUM_PROMPT]),
            rows_ratio=ratio,
            tokens_ratio=ratio,  # completions are all of one length
        )

    def row_tokens(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each prompt's completions."""
        return [PER_PROMPT * training_args.max_new_tokens] * len(dataset)

    def count(self, rows: Sequence[Any], batch: Any) -> Mapping[str, int]:
        """Return the counts of what will be generated for a batch of prompts."""
        tokens = len(rows) * PER_PROMPT * self._max_new_tokens
        return {"num_tokens": tokens, "num_positions": tokens, "num_loss_tokens": tokens}

    def session(
        self, trainer: Any, spec: ProbeSpec, sample: Sample, repeats: MicroBatches | None
    ) -> Session:
        """Return the session, with what its rows are measured by at hand."""
        self._tokenizer = trainer.processing_class
        self._max_new_tokens = trainer.args.max_new_tokens
        if repeats is not None:
            generate_less(trainer, repeats)
        # Each micro-batch begins with a generation, which is timed: none is spared as a whole.
        return super().session(trainer, spec, sample, None)


def _no_reward(completions: Sequence[Any], **others: Any) -> list[float]:
    return [0.0] * len(completions)


registry.register("online_dpo", OnlineDpoAdapter)

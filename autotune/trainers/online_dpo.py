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
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase
from trl import apply_chat_template
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.scripts.grpo import GRPOScriptArguments

from autotune.devices.base import DeviceBackend, MicroBatches
from autotune.probe.spec import ProbeSpec
from autotune.trainers import columns, detect, preparing, raw, rewards
from autotune.trainers.base import Recorder, registry
from autotune.trainers.hf import HfAdapter, Sample, Session, prepared_rows
from autotune.trainers.online import draw_freely
from autotune.trainers.schedule import num_steps, subset

PER_PROMPT = 2
"""Completions of each prompt, which no setting changes."""

_SMALL = {"max_new_tokens": 2, "generation_kwargs": {"min_new_tokens": 2}}
"""TRL keys of what is tried on the smallest of models."""


class _GeneratingSession(Session):
    """A built trainer that generates for each micro-batch."""

    def listen(self, recorder: Recorder) -> None:
        """Let batches be counted and the trainer's events be heard, generations among them."""
        trainer, repeats = self._trainer, self._repeats
        if repeats is not None:
            repeats.generate_less(trainer.model)
            draw_freely(getattr(trainer, "generation_config", None), trainer.model)
        # Each micro-batch begins with a generation, which is timed: none is spared as a whole.
        self._repeats = None
        super().listen(recorder)

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


class OnlineDpoAdapter(HfAdapter):
    """Builds ``OnlineDPOTrainer`` on prompts."""

    name: ClassVar[str] = "online_dpo"
    batches_decide: ClassVar[bool] = True
    session_class: ClassVar[type[Session]] = _GeneratingSession

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

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenise the prompts to know their lengths; keep the rows as they are.

        Raises:
            UsageError: If no row can be generated from, or a reward cannot be loaded.
        """
        opened = preparing.open_request(
            self.config_class(), request, script_class=self.script_class()
        )
        folder = Path(request["folder"])
        trust = bool(request.get("trust_remote_code"))
        rewards.check(request["config"], self.name, trust_remote_code=trust)
        rows = preparing.open_rows(opened, request)
        columns.require(self.name, rows.column_names)
        ids = _tokenise(rows["prompt"], opened.tokenizer)
        most = opened.training_args.max_new_tokens
        lengths = [len(row) for row in ids]
        chat = isinstance(rows[0]["prompt"], list)
        trained = PER_PROMPT * most
        profile = preparing.profile_of(
            (
                # Completions are never cut, whatever max_length is.
                preparing.Row(length + most, lambda limit: trained, row)
                for length, row in zip(lengths, ids, strict=True)
            ),
            [length + most for length in lengths],
            extra_lengths=request.get("max_lengths", ()),
            kind="prompts, conversational" if chat else "prompts",
            columns={"prompt": lengths},
        )
        refused = raw.checkpointing(
            lambda **keys: self.config_class()(**{**keys, **_SMALL}),
            lambda args, few: self.make_trainer(
                model=detect.small_model(len(opened.tokenizer)),
                args=args,
                train_dataset=few,
                processing_class=opened.tokenizer,
                reward_funcs=[_no_reward],
            ),
            rows,
        )
        kept = raw.measured(rows, [[length] for length in lengths], lengths)
        return preparing.answer(opened, kept, profile, folder, refusals={"checkpointing": refused})

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

    def row_lengths(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each prompt, whole, with a completion of full length."""
        ids = _tokenise(dataset["prompt"], self._tokenizer)
        return [len(row) + training_args.max_new_tokens for row in ids]

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
        return super().session(trainer, spec, sample, repeats)


def _no_reward(completions: Sequence[Any], **others: Any) -> list[float]:
    return [0.0] * len(completions)


def _tokenise(prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the prompts' tokens as the trainer makes them."""
    try:
        texts = [
            apply_chat_template({"prompt": prompt}, tokenizer)["prompt"]
            if isinstance(prompt, list)
            else prompt
            for prompt in prompts
        ]
        found = tokenizer(text=texts, add_special_tokens=False)
    except Exception as error:
        raise preparing.explained(error) from error
    return [list(ids) for ids in found["input_ids"]]


registry.register("online_dpo", OnlineDpoAdapter)

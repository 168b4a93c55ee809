"""Trainers that generate what they are trained on: GRPO, RLOO and distillation.

A row of the data is a prompt. Once per optimizer step the model writes ``num_generations``
completions of each prompt, they are scored, and micro-batches of completions are trained on. In a
probe all completions have the full ``max_completion_length``: that is the most memory, and neither
memory nor time depend on what the text says.

Trained tokens are those of completions. A reward function of the probe's own, called after the
user's, tells when the generation is over and what was generated; it scores nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from autotune.devices.base import DeviceBackend, MicroBatches
from autotune.probe.spec import ProbeSpec
from autotune.trainers import engines, raw, rewards
from autotune.trainers.base import Recorder
from autotune.trainers.hf import RecorderCallback, Sample, Session, prepared_rows
from autotune.trainers.prompts import PromptsAdapter, generate_less
from autotune.trainers.schedule import num_steps, plan, subset


class GenerationEnd:
    """A reward function that scores nothing, and tells a recorder that completions are there.

    Args:
        micro_batch: Completions that the model is trained on at once.
    """

    __name__ = "autotune_generation_end"

    def __init__(self, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        self._recorder: Recorder | None = None
        self._phase: str | None = None
        self._after: str | None = None

    def listen(self, recorder: Recorder) -> None:
        """Take the recorder to tell."""
        self._recorder = recorder

    def begin(self, phase: str) -> None:
        """Start a generation, after which the run is in ``phase``."""
        assert self._recorder is not None
        self._recorder.enter_phase("generation")
        self._phase = self._after = phase

    def begin_again(self) -> None:
        """Start another generation of the same step, unless one is under way."""
        if self._phase is None and self._after is not None:
            self.begin(self._after)

    def end(self, prompts: Sequence[Any], shape: Sequence[int]) -> None:
        """Count completions of that shape, (B, L), of a trainer that asks for no rewards."""
        if self._phase is not None:
            self(prompts, [range(shape[1])] * shape[0])

    def __call__(
        self, prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], **others: Any
    ) -> list[float]:
        """Count the completions; return no reward for each."""
        if self._recorder is not None and self._phase is not None:
            self._recorder.end_generation()
            self._recorder.enter_phase(self._phase)
            self._phase = None
            lengths = [len(ids) for ids in completion_ids]
            longest = max(lengths)
            num_prompts = len({repr(prompt) for prompt in prompts})
            for first in range(0, len(lengths), self._micro_batch):
                part = lengths[first : first + self._micro_batch]
                self._recorder.count(
                    num_tokens=sum(part),
                    num_positions=len(part) * longest,
                    num_loss_tokens=sum(part),
                    num_rows=num_prompts if first == 0 else 0,
                )
        return [0.0] * len(completion_ids)


class OnlineCallback(RecorderCallback):
    """Tells that a step begins with a generation."""

    def __init__(self, end: GenerationEnd, recorder: Recorder, **options: Any) -> None:
        super().__init__(recorder, **options)
        self._end = end

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the first step with its generation."""
        super().on_train_begin(args, state, control, **kwargs)
        self._end.begin("first_step")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kw: Any
    ) -> None:
        """Start the next step with its generation."""
        super().on_log(args, state, control, logs, **kw)
        if not self.is_done:
            self._end.begin("later_steps")


class OnlineSession(Session):
    """A built trainer that generates."""

    def __init__(self, end: GenerationEnd, **options: Any) -> None:
        super().__init__(**options)
        self._end = end

    def _run_less(self, repeats: MicroBatches) -> None:
        """Let a prediction not run what it knows: steps of generations, and micro-batches.

        A trainer's own step begins with the generation if one is due, and counts the micro-batches
        since then (``_prepare_inputs`` and ``_step`` of all these trainers in trl 1.16). Both must
        happen for those that are not run, too.
        """
        trainer = self._trainer
        generate_less(trainer, repeats)
        prepare, run = trainer._prepare_inputs, repeats.around(trainer.training_step)

        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            model.train()
            batch = prepare(inputs)
            repeats.expect(batch)
            count = trainer._step
            trainer._prepare_inputs = lambda _: batch
            try:
                return run(model, inputs, *args, **kwargs)
            finally:
                trainer._prepare_inputs, trainer._step = prepare, count + 1

        trainer.training_step = training_step

    def listen(self, recorder: Recorder) -> None:
        """Let the trainer's events be heard; batches are counted when they are generated."""
        if self._repeats is not None:
            self._run_less(self._repeats)
        self._end.listen(recorder)
        trainer = self._trainer
        generate = trainer._generate_and_score_completions

        def told(batch: Any) -> Any:
            if trainer.model.training:
                self._end.begin_again()  # where a step has several
            found = generate(batch)
            if trainer.model.training:
                self._end.end([row["prompt"] for row in batch], found["completion_ids"].shape)
            return found

        trainer._generate_and_score_completions = told
        trainer.add_callback(
            OnlineCallback(
                self._end, recorder, num_steps=self._num_steps, phases=self._spec.phases
            )
        )


class OnlineAdapter(PromptsAdapter):
    """Base of adapters whose trainer generates once for all micro-batches of a step."""

    small_keys: ClassVar[Mapping[str, Any]] = {
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 2,
        "generation_kwargs": {"min_new_tokens": 2},
        "beta": 0.0,
    }
    """TRL keys of what is tried on the smallest of models, which has no reference."""

    _reference: Callable[[], Any] | None = None
    _engine: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    _end: GenerationEnd

    def completion_length(self, training_args: Any) -> int:
        """Return the tokens of the longest completion."""
        return int(training_args.max_completion_length)

    def tokenise(
        self, prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, training_args: Any
    ) -> list[list[int]]:
        """Return the prompts' tokens, with the template's word to go on."""
        prompts = copy.deepcopy(list(prompts))
        if isinstance(prompts[0], list):
            kwargs = getattr(training_args, "chat_template_kwargs", None) or {}
            found = tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **kwargs
            )
        else:
            found = tokenizer(text=prompts)
        return [list(ids) for ids in found["input_ids"]]

    def small_arguments(self, args: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return further arguments of a trainer that is tried on the smallest of models."""
        return {"reward_funcs": [GenerationEnd(args.per_device_train_batch_size)]}

    def accumulation(self, spec: ProbeSpec) -> int:
        """Return all micro-batches of a step: completions of all of them are generated at once."""
        return spec.accumulation_steps

    def overlay(self, spec: ProbeSpec, device: DeviceBackend) -> dict[str, Any]:
        """Return the probe-only keys: prompts in order, completions of full length."""
        config = spec.config
        most = config.get("max_completion_length", self.config_class().max_completion_length)
        return {
            **super().overlay(spec, device),
            "max_steps": num_steps(_typical_steps(spec), spec.first_worst_steps),
            **spec.overlay,
            "shuffle_dataset": False,
            "log_completions": False,
            "generation_kwargs": {
                **(config.get("generation_kwargs") or {}),
                engines.least_tokens_key(config): most,
            },
        }

    def load_rows(self, spec: ProbeSpec, training_args: Any) -> Sample:
        """Return enough prompts for the probe."""
        rows = prepared_rows(spec)
        lengths = [row[0] for row in rows[raw.LENGTHS]]
        num_prompts = _prompts_per_generation(training_args)
        steps = num_steps(_typical_steps(spec), spec.first_worst_steps)
        chosen = subset(
            lengths,
            num_needed=num_prompts * _generations_per_step(training_args) * steps,
            num_longest=2 * num_prompts,
            seed=spec.seed,
            at_least=raw.ROWS_KEPT,
        )
        found = rows.select(chosen)
        ratio = len(lengths) / len(chosen)
        return Sample(
            rows=found.remove_columns([raw.LENGTHS, raw.NUM_PROMPT]),
            rows_ratio=ratio,
            tokens_ratio=ratio,  # completions are all of one length
        )

    def further_arguments(
        self, spec: ProbeSpec, training_args: Any, load: Callable[[], Any]
    ) -> dict[str, Any]:
        """Return the reward functions, the probe's own among them."""
        self._reference = load if spec.weights == "random" else None
        given = rewards.scorers(spec, self.name)
        if training_args.reward_weights is not None:
            training_args.reward_weights = [*training_args.reward_weights, 0.0]
        self._end = GenerationEnd(training_args.per_device_train_batch_size)
        engines.stand_in(spec, training_args)
        self._engine = engines.without_weights(spec, training_args)
        return {"reward_funcs": [*given, self._end]}

    @contextlib.contextmanager
    def reference_in(self, module: Any) -> Iterator[None]:
        """Let a trainer's module load the reference model with random weights, if those are asked.

        These trainers load it from the policy's path, and take none that is loaded, as DPO's does
        (``create_model_from_path`` in trl 1.16's grpo_trainer.py and rloo_trainer.py).
        """
        usual, load = module.create_model_from_path, self._reference
        if load is not None:
            module.create_model_from_path = lambda *args, **kwargs: load()
        try:
            with self._engine:
                yield
        finally:
            module.create_model_from_path = usual

    def row_tokens(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each prompt's completions."""
        return [training_args.num_generations * training_args.max_completion_length] * len(dataset)

    def count(self, rows: Sequence[Any], batch: Any) -> Mapping[str, int]:
        """Not called: completions are counted when they are there."""
        raise NotImplementedError

    def session(
        self, trainer: Any, spec: ProbeSpec, sample: Sample, repeats: MicroBatches | None
    ) -> Session:
        """Return the session, with prompts laid out so that the longest come first and last."""
        self._tokenizer = trainer.processing_class
        args = trainer.args
        lengths = self.row_lengths(trainer.train_dataset, args)
        schedule = plan(
            lengths,
            batch_size=_prompts_per_generation(args),
            accumulation=_generations_per_step(args),
            num_typical_steps=_typical_steps(spec),
            num_first_worst=spec.first_worst_steps,
            seed=spec.seed,
            shuffle=spec.config.get("shuffle_dataset", True),
            representative=spec.representative,
        )
        facts = {
            **self.facts(trainer, sample),
            "worst_batch": (args.per_device_train_batch_size, schedule.worst_batch[1]),
        }
        trainer.train_dataset = trainer.train_dataset.select(schedule.rows)
        return OnlineSession(
            self._end,
            trainer=trainer,
            spec=spec,
            num_steps=schedule.num_steps,
            facts=facts,
            count=self.count,
            repeats=repeats,
        )


def _typical_steps(spec: ProbeSpec) -> int:
    """Return the steps between those with the longest prompts: one at least.

    Of other trainers a prediction has none where typical micro-batches share steps with the
    largest; here all micro-batches of a step come from one generation.
    """
    return max(1, spec.warmup_steps + spec.measured_steps)


def _generations_per_step(args: Any) -> int:
    """Return how often the model generates in an optimizer step.

    Raises:
        ValueError: If what it generates serves several steps.
    """
    if not hasattr(args, "steps_per_generation"):
        return 1
    found, rest = divmod(args.gradient_accumulation_steps, args.steps_per_generation)
    if rest or args.num_iterations != 1:
        raise ValueError(
            "a probe measures optimizer steps that generate what they train on: with"
            f" num_iterations={args.num_iterations}, steps_per_generation="
            f"{args.steps_per_generation} and {args.gradient_accumulation_steps} micro-batches per"
            " step, a generation serves several steps"
        )
    return int(found)


def _prompts_per_generation(args: Any) -> int:
    """Return the prompts of a generation.

    Raises:
        ValueError: If generations do not divide the completions, as TRL would say later.
    """
    if not hasattr(args, "num_generations"):
        completions = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return int(completions * args.world_size)
    num_prompts, rest = divmod(args.generation_batch_size, args.num_generations)
    if rest or not num_prompts:
        raise ValueError(
            f"{args.generation_batch_size} completions are no multiple of"
            f" num_generations={args.num_generations}"
        )
    return int(num_prompts)

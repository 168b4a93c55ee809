"""What all of TRL's trainers share: parsing, overlay, callbacks, running.

A probe reads the exported mapping with TRL's own parser and builds the trainer as TRL's own script
does; nothing of the exported configuration is interpreted here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from datasets import Dataset, disable_caching, disable_progress_bars, load_from_disk
from tqdm import tqdm
from transformers import AutoTokenizer, TrainerCallback
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from autotune.devices.base import DeviceBackend, MicroBatches
from autotune.errors import UnknownNameError
from autotune.probe import accelerate_config
from autotune.probe.spec import ProbeSpec
from autotune.space.knobs.batching import TRL_BATCH_SIZE
from autotune.trainers import models
from autotune.trainers.base import LAID_ASIDE, Recorder
from autotune.trainers.schedule import num_steps, plan, probe_accumulation


def parse(
    config_class: type,
    mapping: Mapping[str, Any],
    folder: Path,
    script_class: type = ScriptArguments,
) -> tuple[Any, ...]:
    """Return TRL's dataclasses for ``mapping``, read from a file as ``trl --config`` reads it.

    Args:
        config_class: Of the trainer.
        mapping: TRL keys.
        folder: Takes the file.
        script_class: Of the arguments of the trainer's script.

    Raises:
        UnknownNameError: If TRL knows no such key.
        ValueError: If it refuses a value.
    """
    classes = (script_class, config_class, ModelConfig, DatasetMixtureConfig)
    known = {field.name for kind in classes for field in dataclasses.fields(kind)} | {"env"}
    for key in mapping:
        if key not in known:
            raise UnknownNameError("TRL key", key, known)
    for key, choices in _closed_values(classes).items():
        value = mapping.get(key)
        # A dtype may be any of PyTorch's, whatever TRL offers on its command line.
        if isinstance(value, str) and value not in choices and not _is_dtype(key, value):
            raise UnknownNameError(f"value of {key}", value, choices)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(dict(mapping), sort_keys=False))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return TrlParser(classes).parse_args_and_config(  # type: ignore[no-any-return]
                args=["--config", str(path)], fail_with_unknown_args=True
            )
    except SystemExit as error:
        # argparse prints its usage and exits; its last line says what is wrong.
        lines = said.getvalue().strip().splitlines() or ["a value is refused"]
        said_last = lines[-1].partition("error: ")[2] or lines[-1]
        raise ValueError(re.sub(r"^argument --(\w+)[^:]*", r"\1", said_last)) from error


def _closed_values(classes: Sequence[type]) -> dict[str, list[str]]:
    """Return the values that a key can have, of those keys that have a few."""
    found = {}
    for kind in classes:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            kinds = (hints[field.name], *typing.get_args(hints[field.name]))
            enums = [item for item in kinds if isinstance(item, type) and issubclass(item, Enum)]
            values = [str(item.value) for item in itertools.chain.from_iterable(enums)]
            choices = field.metadata.get("choices") or values
            if choices:
                found[field.name] = [str(choice) for choice in choices]
    return found


def _is_dtype(key: str, value: str) -> bool:
    return key == "dtype" and isinstance(getattr(torch, value, None), torch.dtype)


def probe_overlay(spec: ProbeSpec, device: DeviceBackend) -> dict[str, Any]:
    """Return the probe-only keys: a few steps, nothing saved, reported or shuffled."""
    return {
        "output_dir": str(Path(spec.folder) / "output"),
        "max_steps": num_steps(spec.warmup_steps + spec.measured_steps, spec.first_worst_steps),
        "gradient_accumulation_steps": accumulation(spec),
        # The rows are laid out by the schedule; the trainer must take them as they come.
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": 0,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "push_to_hub": False,
        "disable_tqdm": True,
        "load_best_model_at_end": False,
        **{key: value for key, value in LAID_ASIDE.items() if key in spec.config},
        # It has no say in memory, and a virtual card is not among those that PyTorch allows it.
        **({"tf32": None} if device.source == "predicted" else {}),
        **device.trainer_keys(),
        **spec.overlay,
    }


def accumulation(spec: ProbeSpec) -> int:
    """Return the micro-batches per step that the probe runs."""
    return probe_accumulation(
        spec.accumulation_steps,
        batch_size=spec.processes
        * int(spec.config.get("per_device_train_batch_size", TRL_BATCH_SIZE)),
        packed=bool(spec.config.get("packing", False)),
        rows_per_step=spec.rows_per_step,
    )


class CountingCollator:
    """The trainer's own collator, which also tells the recorder what each micro-batch holds.

    Args:
        inner: The trainer's.
        count: Says of rows and their batch how many tokens, positions and tokens with loss it has.
        recorder: Told of each batch.
    """

    def __init__(
        self,
        inner: Callable[[Sequence[Any]], Any],
        count: Callable[[Sequence[Any], Any], Mapping[str, int]],
        recorder: Recorder,
        repeats: MicroBatches | None = None,
    ) -> None:
        self._inner = inner
        self._count = count
        self._recorder = recorder
        self._repeats = repeats

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Collate ``rows`` into a batch and count it."""
        batch = self._inner(rows)
        self._recorder.count(**self._count(rows, batch), num_rows=len(rows))
        if self._repeats is not None:
            self._repeats.expect(batch)
        return batch


class RecorderCallback(TrainerCallback):  # type: ignore[misc]
    """Hands the Trainer's events to a recorder."""

    def __init__(self, recorder: Recorder, *, num_steps: int, phases: Sequence[str]) -> None:
        self._recorder = recorder
        self.is_done = False
        self._num_steps = num_steps
        self._phases = phases

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the first step's phase and clock."""
        self._recorder.enter_phase("first_step")
        self._recorder.begin_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close a micro-batch that does not end a step."""
        self._recorder.end_micro_batch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the micro-batch that ends the step."""
        self._recorder.end_micro_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the step; ask for the extra phases after the last one."""
        self._recorder.end_step()
        if state.global_step == 1:
            self._recorder.enter_phase("later_steps")
        if state.global_step >= self._num_steps:
            self.is_done = True
            if "eval" in self._phases:
                control.should_evaluate = True
                self._recorder.enter_phase("eval")
            elif "save" in self._phases:
                self._recorder.enter_phase("save")
            control.should_save = "save" in self._phases

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kw: Any
    ) -> None:
        """Check the loss and start the next step's clock, so that logging is not timed."""
        if logs and "loss" in logs:
            self._recorder.report_loss(float(logs["loss"]))
        if not self.is_done:
            self._recorder.begin_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on to the save phase, if asked for."""
        if "save" in self._phases:
            self._recorder.enter_phase("save")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The rows that a probe processes, and how much of the data they stand for.

    Attributes:
        rows: The rows, tokenised and not yet cut or packed.
        rows_ratio: Rows of the whole data per row of these.
        tokens_ratio: Tokens that the candidate trains on in the whole data per token that it
            trains on of these; other than ``rows_ratio`` where the longest rows were sought out.
    """

    rows: Dataset
    rows_ratio: float
    tokens_ratio: float


class Session:
    """A built trainer and the rows laid out for it."""

    def __init__(
        self,
        trainer: Any,
        spec: ProbeSpec,
        num_steps: int,
        facts: dict[str, Any],
        count: Callable[[Sequence[Any], Any], Mapping[str, int]],
        repeats: MicroBatches | None,
    ) -> None:
        self._trainer = trainer
        self._count = count
        self._spec = spec
        self._num_steps = num_steps
        self._facts = facts
        self._repeats = repeats

    def run(self, recorder: Recorder) -> None:
        """Train, with the recorder listening."""
        recorder.describe_run(**self._facts)
        self.listen(recorder)
        self._trainer.train()

    def listen(self, recorder: Recorder) -> None:
        """Let batches be counted and the trainer's events be heard."""
        trainer = self._trainer
        trainer.data_collator = CountingCollator(
            trainer.data_collator, self._count, recorder, self._repeats
        )
        if self._repeats is not None:
            trainer.training_step = self._repeats.around(trainer.training_step)
        trainer.add_callback(
            RecorderCallback(recorder, num_steps=self._num_steps, phases=self._spec.phases)
        )


class HfAdapter(ABC):
    """Base of the adapters of TRL's own trainers.

    A subclass names its TRL classes and how its rows are measured.

    Attributes:
        name: As users write it.
        session_class: What runs a built trainer.
        batches_decide: Whether micro-batches of the same shapes always run the same operators, so
            that a prediction need not run them again.
    """

    name: ClassVar[str]
    session_class: ClassVar[type[Session]] = Session
    batches_decide: ClassVar[bool] = False

    @abstractmethod
    def config_class(self) -> type:
        """Return TRL's configuration class."""
        ...

    def script_class(self) -> type:
        """Return TRL's class of the arguments of the trainer's script."""
        return ScriptArguments  # type: ignore[no-any-return]

    def accumulation(self, spec: ProbeSpec) -> int:
        """Return the micro-batches per step that the probe runs."""
        return accumulation(spec)

    def overlay(self, spec: ProbeSpec, device: DeviceBackend) -> dict[str, Any]:
        """Return the probe-only keys."""
        return {
            **probe_overlay(spec, device),
            "gradient_accumulation_steps": self.accumulation(spec),
            **spec.overlay,
        }

    @abstractmethod
    def make_trainer(self, **kwargs: Any) -> Any:
        """Return TRL's trainer for the arguments that TRL's script would pass."""
        ...

    @abstractmethod
    def load_rows(self, spec: ProbeSpec, training_args: Any) -> Sample:
        """Return the rows to process and how much of the data they stand for."""
        ...

    @abstractmethod
    def row_lengths(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens per row of the processed data set, as batches hold them. Shape (N,).

        Of several sequences per row, the longest one counts.
        """
        ...

    def row_tokens(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens trained on per row of the processed data set. Shape (N,).

        Of several sequences per row, all count.
        """
        return self.row_lengths(dataset, training_args)

    @abstractmethod
    def count(self, rows: Sequence[Any], batch: Any) -> Mapping[str, int]:
        """Return a batch's ``num_tokens``, ``num_positions`` and ``num_loss_tokens``.

        Args:
            rows: As they lie in the processed data set.
            batch: What the trainer's collator made of them, on the host.
        """
        ...

    def load_model(
        self, name: str, model_init_kwargs: Mapping[str, Any], quantization: object | None
    ) -> Any:
        """Return the model with random weights, of the class that the trainer would load."""
        return models.with_random_weights(name, model_init_kwargs, quantization)

    def further_arguments(
        self, spec: ProbeSpec, training_args: Any, load: Callable[[], Any]
    ) -> dict[str, Any]:
        """Return arguments of the trainer beyond those that all have.

        Args:
            spec: The probe's.
            training_args: The trainer's, parsed.
            load: Loads the model once more, such as for a reference; with random weights as asked.
        """
        return {}

    def build(self, spec: ProbeSpec, device: DeviceBackend) -> Session:
        """Return the trainer of ``spec``, built as TRL's script builds it."""
        disable_progress_bars()
        # Its thread, which only redraws bars, makes the layout of the heap differ from run to run.
        tqdm.monitor_interval = 0
        # A probe that found rows processed by an earlier one would load in less memory.
        disable_caching()
        folder = Path(spec.folder)
        mapping = {**spec.config, **self.overlay(spec, device)}
        _, training_args, model_args, _ = parse(
            self.config_class(), mapping, folder, self.script_class()
        )
        model_init_kwargs = {
            "revision": model_args.model_revision,
            "trust_remote_code": spec.trust_remote_code,
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype,
            **(training_args.model_init_kwargs or {}),
        }
        training_args.model_init_kwargs = model_init_kwargs
        sample = self.load_rows(spec, training_args)
        quantization = get_quantization_config(model_args)
        name: str = model_args.model_name_or_path
        model: Any = name
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=spec.trust_remote_code
        )
        stored = quantization

        def load() -> Any:
            return self.load_model(name, model_init_kwargs, stored)

        if spec.weights == "random":
            model = load()
            quantization, training_args.model_init_kwargs = None, None
        trainer = self.make_trainer(
            model=model,
            args=training_args,
            train_dataset=sample.rows,
            eval_dataset=sample.rows if "eval" in spec.phases else None,
            processing_class=tokenizer,
            quantization_config=quantization,
            peft_config=get_peft_config(model_args),
            **self.further_arguments(spec, training_args, load),
        )
        if spec.processes > 1:
            check_launched(trainer, spec)
        repeats = device.repeats() if self.batches_decide else None
        return self.session(trainer, spec, sample, repeats)

    def session(
        self,
        trainer: Any,
        spec: ProbeSpec,
        sample: Sample,
        repeats: MicroBatches | None,
    ) -> Session:
        """Return the session of a built trainer, with its rows laid out."""
        processed = trainer.train_dataset
        lengths = self.row_lengths(processed, trainer.args)
        schedule = plan(
            lengths,
            batch_size=trainer.args.per_device_train_batch_size,
            accumulation=trainer.args.gradient_accumulation_steps,
            num_typical_steps=spec.warmup_steps + spec.measured_steps,
            num_first_worst=spec.first_worst_steps,
            seed=spec.seed,
            shuffle=spec.config.get("train_sampling_strategy", "random") != "sequential",
            padded=not (spec.config.get("packing") or spec.config.get("padding_free")),
            representative=spec.representative,
            processes=spec.processes,
        )
        facts = {"worst_batch": schedule.worst_batch, **self.facts(trainer, sample)}
        trainer.train_dataset = processed.select(schedule.rows)
        if "eval" in spec.phases:
            size = trainer.args.per_device_eval_batch_size * spec.processes
            worst = schedule.rows[: size * 2]
            trainer.eval_dataset = processed.select(worst)
        return self.session_class(trainer, spec, schedule.num_steps, facts, self.count, repeats)

    def facts(self, trainer: Any, sample: Sample) -> dict[str, Any]:
        """Return what the measurement says of a run, of its epoch above all."""
        processed = trainer.train_dataset
        return {
            "rows_per_epoch": len(processed) * sample.rows_ratio,
            "rows_per_sample": len(processed) / len(sample.rows),
            "tokens_per_epoch": sum(self.row_tokens(processed, trainer.args))
            * sample.tokens_ratio,
            "num_trainable_parameters": sum(
                p.numel() for p in trainer.model.parameters() if p.requires_grad
            ),
        }


def check_launched(trainer: Any, spec: ProbeSpec) -> None:
    """Check that the trainer is distributed as the configuration for accelerate says.

    accelerate passes over what it does not support on a device, and trains in another way.

    Raises:
        ValueError: If it is not.
    """
    wanted = accelerate_config.sharding_of(spec.accelerate)
    kind = trainer.accelerator.distributed_type.value
    found = {"FSDP": "fsdp", "DEEPSPEED": "zero"}.get(kind, "ddp")
    if not wanted.startswith(found):
        raise ValueError(f"accelerate does not shard as {wanted} here: it trains as {kind}")
    if trainer.args.world_size != spec.processes:
        raise ValueError(
            f"the trainer sees {trainer.args.world_size} processes of {spec.processes}"
        )


def prepared_rows(spec: ProbeSpec) -> Dataset:
    """Return the tokenised rows that the prepare task wrote.

    Raises:
        FileNotFoundError: If they are gone.
    """
    if spec.data_folder is None:
        raise FileNotFoundError("the probe names no folder with tokenised rows")
    return load_from_disk(spec.data_folder)

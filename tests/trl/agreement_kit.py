"""One TRL configuration run twice: with real tensors on the CPU, and on the pretend device."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
import trl.trainer.utils
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from autotune.probe.spec import ProbeSpec
from autotune.space.context import Context
from autotune.testing.contexts import make_context, make_model
from autotune.trainers.base import load
from autotune.virtual import device, realtrace, state, values
from autotune.virtual.placement import placed
from autotune.virtual.repeats import Repeats
from autotune.virtual.session import Session
from autotune.virtual.trace import Trace, rounded

VOCABULARY = 1000
LAYERS = 5
LENGTHS = (96, 96, 90, 61, 96, 33, 75, 96) * 8 + tuple(range(20, 84))
"""Tokens per row of the data set: the longest fill the worst batches, the rest vary."""


@dataclass
class Steps:
    """Bytes that a run had in use.

    Attributes:
        loaded_bytes: When training began.
        peak_bytes: The most, per phase.
        after_bytes: After each step.
        host_peak_bytes: The most that the host held for the device.
        num_generations: How often something was generated.
    """

    num_generations: int = 0
    loaded_bytes: int = 0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    after_bytes: list[int] = field(default_factory=list)
    host_peak_bytes: int = 0


class Recorder:
    """Reads the trace where a probe reads its device; a step is a phase of its own."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.steps = Steps()
        self._phase = ""

    def _enter(self, name: str) -> None:
        if self._phase:
            self.steps.peak_bytes[self._phase] = self.trace.peak_bytes
        self._phase = name
        self.steps.host_peak_bytes = max(self.steps.host_peak_bytes, self.trace.host_peak_bytes)
        self.trace.reset_peak()

    def enter_phase(self, name: str) -> None:
        if name == "first_step":
            self.steps.loaded_bytes = self.trace.allocated_bytes
        self._enter(name)

    def begin_step(self) -> None:
        self._enter(f"step {len(self.steps.after_bytes) + 1}")

    def end_generation(self) -> None:
        self.steps.num_generations += 1

    def end_micro_batch(self) -> None:
        pass

    def end_step(self) -> None:
        self.steps.after_bytes.append(self.trace.allocated_bytes)

    def count(self, **counts: int) -> None:
        pass

    def report_loss(self, loss: float) -> None:
        pass

    def describe_run(self, **facts: Any) -> None:
        pass

    def close(self) -> Steps:
        self._enter("")
        return self.steps


class Place:
    """The part of a device that an adapter asks for."""

    def __init__(self, *, on_cpu: bool, repeats: Repeats | None = None) -> None:
        self._on_cpu = on_cpu
        self._repeats = repeats
        self.kind = "cpu" if on_cpu else "virtual"
        self.source = "measured" if on_cpu else "predicted"

    def trainer_keys(self) -> dict[str, object]:
        return {"use_cpu": True} if self._on_cpu else {}

    def repeats(self) -> Repeats | None:
        return self._repeats


def write_model(folder: Path, kind: str = "llama", **changes: Any) -> str:
    """Write the configuration and tokenizer of a tiny model; weights are never read."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        **changes,
    }
    config = Qwen3Config(head_dim=16, **shape) if kind == "qwen3" else LlamaConfig(**shape)
    config.architectures = ["Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLM"]
    config.save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
    ).save_pretrained(folder)
    return str(folder)


def know(lengths: Sequence[int], **changes: Any) -> Context:
    """Return what a search would know of the tiny model and rows of these lengths."""
    facts = make_model(
        num_parameters=340_000,
        num_layers=LAYERS,
        max_positions=2048,
        vocab_size=VOCABULARY,
    )
    return make_context(model=facts, lengths=lengths, **changes)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let transformers say errors only."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def write_rows(folder: Path, lengths: Sequence[int] = LENGTHS) -> str:
    """Write tokenised rows of the given lengths."""
    draw = random.Random(5)
    rows = [[draw.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
    columns = {"input_ids": rows, "labels": rows, "num_tokens": [len(row) for row in rows]}
    Dataset.from_dict(columns).save_to_disk(folder)
    return str(folder)


def make_spec(
    folder: Path, model: str, data: str, config: Mapping[str, Any], **changes: Any
) -> ProbeSpec:
    """Return the spec of a short probe; ``config`` goes over TRL's defaults for the test."""
    folder.mkdir(parents=True, exist_ok=True)
    full = {
        "model_name_or_path": model,
        "dataset_name": "none",
        "output_dir": str(folder),
        "bf16": False,
        "per_device_train_batch_size": 4,
        **{key: value for key, value in config.items() if key != "env"},
    }
    settings: dict[str, Any] = {
        "probe_id": folder.name,
        "folder": str(folder),
        "trainer": "sft",
        "config": full,
        "device": "cpu",
        "data_folder": data,
        "warmup_steps": 0,
        "measured_steps": 1,
        "accumulation_steps": int(full.get("gradient_accumulation_steps", 1)),
        "overlay": {"max_steps": 2},
        **changes,
    }
    return ProbeSpec(**settings)


def _small_tiles() -> Any:
    # A tile of the loss is as wide as a real vocabulary, far more than a tiny model's activations.
    return mock.patch.object(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 256)


def run_real(spec: ProbeSpec) -> tuple[Steps, Trace]:
    """Train with real tensors on the CPU."""
    gc.collect()
    AcceleratorState._reset_state(True)
    with realtrace.traced_on_host() as trace, _small_tiles():
        recorder = Recorder(trace)
        session = load(spec.trainer).build(spec, Place(on_cpu=True))
        realtrace.adopt(trace, session._trainer.model)
        gc.collect()
        session.run(recorder)
        steps = recorder.close()
        del session
    return steps, trace


@contextlib.contextmanager
def built(spec: ProbeSpec) -> Iterator[Any]:
    """Return the session of a probe on the CPU, not run."""
    AcceleratorState._reset_state(True)
    yield load(spec.trainer).build(spec, Place(on_cpu=True))


def run_virtual(spec: ProbeSpec, **changes: Any) -> tuple[Steps, Trace]:
    """Train on the pretend accelerator, without what only a card's kernels and libraries take."""
    card = Session(scratch=False, workspace_bytes=0, host_kernels=True, **changes)
    return run_on(card, spec), card.trace


def run_on(card: Session, spec: ProbeSpec, repeats: Repeats | None = None) -> Steps:
    """Train on ``card``; ``repeats`` spares micro-batches."""
    gc.collect()
    device.install()
    state.activate(card)
    try:
        with placed(card), _small_tiles():
            recorder = Recorder(card.trace)
            session = load(spec.trainer).build(spec, Place(on_cpu=False, repeats=repeats))
            gc.collect()
            session.run(recorder)
            steps = recorder.close()
            del session
    finally:
        card.trace.close()
        state.activate(None)
        values.clear()
    return steps


def figures(steps: Steps) -> dict[str, int]:
    """Return every figure of a run, by name, in bytes."""
    after = {f"after step {i + 1}": nbytes for i, nbytes in enumerate(steps.after_bytes)}
    return {"loaded": steps.loaded_bytes, **steps.peak_bytes, **after}


def deviations(real: Steps, virtual: Steps) -> dict[str, float]:
    """Return the relative deviation of every figure that the two runs share."""
    wanted, found = figures(real), figures(virtual)
    assert wanted.keys() == found.keys()
    return {name: found[name] / nbytes - 1 for name, nbytes in wanted.items() if nbytes}


def compare(real: Steps, virtual: Steps, *, tolerance: float, slack_bytes: int) -> None:
    """Assert that every figure deviates by no more than the tolerance and the slack."""
    found = deviations(real, virtual)
    worst = max(found, key=lambda name: abs(found[name]))
    assert abs(found[worst]) <= tolerance, f"{worst}: {found[worst]:+.3%} of {real}"
    pairs = zip(figures(real).items(), figures(virtual).values(), strict=True)
    for (name, wanted), got in pairs:
        assert abs(got - wanted) <= slack_bytes, f"{name}: {got:,} instead of {wanted:,} bytes"


def bytes_by_kind(trace: Trace) -> dict[str, int]:
    """Return all bytes that were ever allocated to stay, in blocks, by kind."""
    totals: dict[str, int] = {}
    for storage in trace.storages:
        kind = trace.kind_of(storage)
        if kind == "temporaries":
            continue
        totals[kind] = totals.get(kind, 0) + rounded(storage.nbytes)
    return totals

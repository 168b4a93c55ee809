"""How long predictions take: an 8B and a 70B model on a virtual card, on the CPU.

    python benchmarks/virtual_speed.py [--candidates 60]

Probes run through the executor as in a search, on one processor: the first with everything that
comes before it (imports, device, tokenising), further ones alone. DPO and GRPO follow with the 8B
model, the latter with 8 completions of 512 tokens. Then candidates drawn from the SFT space run on
all processors. Shapes: Qwen3-8B and Llama-3-70B, micro-batch 4 of 2,048 tokens for SFT. Run it
alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import Plan, Request, make_plan
from autotune.probe.result import ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.runfolder import RunFolder
from autotune.space.space import SearchSpace

LENGTH = 2048
BATCH = 4
CARD = "virtual:b200-180gb"
LARGE_CARD = "virtual:2048GiB"
"""So large that no candidate ends early for want of memory."""
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""Source: config.json of Qwen/Qwen3-8B on the Hugging Face Hub."""

LLAMA3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
"""Source: config.json of meta-llama/Meta-Llama-3-70B on the Hugging Face Hub."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {"per_device_train_batch_size": BATCH},
    {"per_device_train_batch_size": BATCH, "checkpointing": "every_2_layers"},
    {"per_device_train_batch_size": BATCH, "adaptation": "lora"},
    {"per_device_train_batch_size": BATCH, "adaptation": "lora_4bit_nested"},
    {"per_device_train_batch_size": BATCH, "optim": "adamw_8bit"},
    {"per_device_train_batch_size": BATCH, "checkpointing": "none"},
)


@dataclass(frozen=True)
class Other:
    """What is predicted of another trainer: its data, rows per step, and candidates."""

    data: str
    global_batch: int
    variants: tuple[dict[str, Any], ...]


OTHERS = {
    "dpo": Other(
        "preference",
        4,
        (
            {"per_device_train_batch_size": 4},
            {"per_device_train_batch_size": 4, "adaptation": "lora"},
            {"per_device_train_batch_size": 2, "precompute_ref_log_probs": "on"},
            {"per_device_train_batch_size": 4, "adaptation": "lora_4bit", "checkpointing": "none"},
        ),
    ),
    "grpo": Other(
        "prompts",
        8,
        (
            {"per_device_train_batch_size": 8},
            {"per_device_train_batch_size": 4, "adaptation": "lora"},
            {"per_device_train_batch_size": 8, "adaptation": "lora_4bit"},
            {"per_device_train_batch_size": 2, "dtype": "bfloat16", "checkpointing": "none"},
        ),
    ),
}
"""All on a card so large that none ends early."""


class ResidentPeak(threading.Thread):
    """Watches the resident size of the largest of this process's descendants."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._done = threading.Event()

    def run(self) -> None:
        """Look twenty times a second."""
        while not self._done.wait(0.05):
            for pid in _descendants(os.getpid()):
                try:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                except (OSError, ValueError, IndexError):
                    continue
                self.peak_bytes = max(self.peak_bytes, pages * os.sysconf("SC_PAGE_SIZE"))

    def stop(self) -> None:
        """End the watch."""
        self._done.set()
        self.join()


def _descendants(pid: int) -> Iterator[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def make_model(folder: Path, tokenizer: Path, config: Mapping[str, Any]) -> Path:
    """Write a model folder: a configuration and a tokenizer, no weights."""
    shutil.copytree(
        tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_rows(path: Path) -> Path:
    """Write tokenised rows: some of the full length, most shorter."""
    source = random.Random(0)
    lengths = [LENGTH] * 40 + [source.randrange(200, LENGTH) for _ in range(160)]
    with path.open("w") as file:
        for length in lengths:
            ids = [source.randrange(5, 4000) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return path


def plan_for(
    model: Path,
    rows: Path,
    folder: Path,
    executor: SubprocessExecutor,
    card: str = CARD,
    trainer: str = "sft",
) -> Plan:
    """Return the plan of a search of a trainer's space on the executor's virtual card."""
    request = Request(
        model=str(model),
        dataset=str(rows),
        space=SearchSpace.load(trainer),
        trainer=trainer,
        device=card,
        global_batch=BATCH if trainer == "sft" else OTHERS[trainer].global_batch,
        pins={"max_length": str(LENGTH)} if trainer == "sft" else {},
    )
    run = RunFolder(folder)
    run.work.mkdir(parents=True)
    return make_plan(request, run, executor)


def submit(
    plan: Plan, candidate: Mapping[str, Any], folder: Path, executor: SubprocessExecutor
) -> Future[ProbeResult]:
    """Start the probe of one candidate."""
    folder.mkdir(parents=True)
    config = plan.config(candidate)
    accumulation = int(config.get("gradient_accumulation_steps", 1))
    warmup_steps, measured_steps = plan.steps(accumulation)
    return executor.submit(
        ProbeSpec(
            probe_id=folder.name,
            folder=str(folder),
            trainer=plan.request.trainer,
            config=config,
            device=plan.context.device.name,
            data_folder=plan.data_folder,
            warmup_steps=warmup_steps,
            measured_steps=measured_steps,
            rows_per_step=plan.rows_per_step,
            first_worst_steps=plan.first_worst_steps,
            representative=True,
            accumulation_steps=accumulation,
        )
    )


def timed(
    plan: Plan, changes: Mapping[str, Any], folder: Path, executor: SubprocessExecutor
) -> float:
    """Return the wall time of one probe, in seconds."""
    started = time.perf_counter()
    result = submit(plan, {**plan.space.baseline, **changes}, folder, executor).result()
    elapsed = time.perf_counter() - started
    print(f"{folder.name} {dict(changes)}: {result.outcome}, {elapsed:.2f} s", flush=True)
    return elapsed


def other_trainer(trainer: str, model: Path, folder: Path, rows: str) -> list[float]:
    """Return the wall times of predictions of another trainer after its first, in seconds."""
    executor = SubprocessExecutor(devices=(LARGE_CARD,), trainer=trainer)
    plan = plan_for(model, Path(rows), folder / f"run-{trainer}", executor, LARGE_CARD, trainer)
    variants = OTHERS[trainer].variants
    times = [
        timed(plan, changes, folder / f"{trainer}-{number}", executor)
        for number, changes in enumerate((variants[0], *variants))
    ]
    executor.shutdown()
    return times[1:]


@contextmanager
def one_processor() -> Iterator[None]:
    """Let this process and those that it starts use one processor."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def main() -> None:
    """Measure, print what was measured, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description="How long predictions take.")
    parser.add_argument("--candidates", type=int, default=60)
    num_candidates = parser.parse_args().candidates
    folder = Path(tempfile.mkdtemp(prefix="autotune-virtual-speed-"))
    watch = ResidentPeak()
    watch.start()
    try:
        maker = SubprocessExecutor(devices=("cpu",))
        maker.run_task("demo", {"folder": str(folder)}, timeout_s=300)
        made = {
            trainer: maker.run_task(
                "demo", {"folder": str(folder / trainer), "data": other.data}, timeout_s=300
            )["dataset"]
            for trainer, other in OTHERS.items()
        }
        maker.shutdown()
        eight = make_model(folder / "qwen3-8b", folder / "tiny-llama", QWEN3_8B)
        seventy = make_model(folder / "llama3-70b", folder / "tiny-llama", LLAMA3_70B)
        rows = make_rows(folder / "rows.jsonl")
        with one_processor():
            started = time.perf_counter()
            executor = SubprocessExecutor(devices=(CARD,))
            plan = plan_for(eight, rows, folder / "run-8b", executor)
            timed(plan, VARIANTS[0], folder / "8b-first", executor)
            first_s = time.perf_counter() - started
            print(f"the first candidate, all in: {first_s:.2f} s")
            further = [
                timed(plan, changes, folder / f"8b-{number}", executor)
                for number, changes in enumerate(VARIANTS)
            ]
            executor.shutdown()
            executor = SubprocessExecutor(devices=(LARGE_CARD,))
            large = plan_for(seventy, rows, folder / "run-70b", executor, LARGE_CARD)
            largest = [
                timed(large, changes, folder / f"70b-{number}", executor)
                for number, changes in enumerate(VARIANTS[:4])
            ]
            executor.shutdown()
            others = {
                trainer: other_trainer(trainer, eight, folder, made[trainer]) for trainer in OTHERS
            }
        slots = len(os.sched_getaffinity(0))
        executor = SubprocessExecutor(devices=(CARD,) * slots)
        source = random.Random(0)
        candidates = [
            plan.space.draw(lambda name, legal, ordered: source.choice(legal))
            for _ in range(num_candidates)
        ]
        submit(plan, plan.space.baseline, folder / "warm", executor).result()
        started = time.perf_counter()
        running = [
            submit(plan, candidate, folder / f"drawn-{number}", executor)
            for number, candidate in enumerate(candidates)
        ]
        results = [future.result() for future in running]
        outcomes = [result.outcome for result in results]
        per_minute = 60 * num_candidates / (time.perf_counter() - started)
        print({str(outcome): outcomes.count(outcome) for outcome in sorted(set(outcomes))})
        for result in results:
            if result.outcome not in ("ok", "device_oom"):
                print(f"{result.probe_id}: {result.outcome}, {result.detail}")
        executor.shutdown()
    finally:
        watch.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"further candidates: median {statistics.median(further):.2f} s")
    figures = {
        "first_s": round(first_s, 2),
        "further_s": round(max(further), 2),
        "llama_70b_s": round(max(largest), 2),
        **{f"{trainer}_s": round(max(times), 2) for trainer, times in others.items()},
        "peak_rss_mb": round(watch.peak_bytes / 1e6),
        "candidates_per_minute": round(per_minute, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

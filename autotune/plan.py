"""From a user's request to everything that is fixed before the first candidate is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune import launching, membudget
from autotune.devices import host
from autotune.devices.base import check_name as check_device_name
from autotune.errors import UsageError
from autotune.executors.base import Executor
from autotune.probe import accelerate_config, refusals, sources, trust
from autotune.runfolder import RunFolder
from autotune.space.context import Context, DataProfile, DeviceInfo, ModelFacts
from autotune.space.domains import Quantiles, Value
from autotune.space.knobs import sharding
from autotune.space.knobs.batching import MAX_LENGTH, TRL_BATCH_SIZE
from autotune.space.pins import parse_pins
from autotune.space.remedies import is_possible
from autotune.space.space import ResolvedSpace, SearchSpace
from autotune.units import counted
from autotune.virtual.cards import full_name

MEASURED_FIRST_WORST = 2
PREDICTED_FIRST_WORST = 1
MEASURED_ROWS = 8
PREDICTED_ROWS = 2
"""Rows per step: what a virtual probe spends on them buys less than another candidate does."""


def predicted_steps(accumulation_steps: int) -> int:
    """Return the typical steps of a prediction, which needs no warm-up and no repetition.

    One, of a micro-batch that stands for all, between those with the largest; none where steps
    accumulate, since the first and the last one hold a typical micro-batch each beside it.
    """
    return 1 if accumulation_steps < 2 else 0


MOST_ROWS = 2**31
"""Of a global batch: what TRL and PyTorch count in 32 bits somewhere."""

DEFAULT_MIN_COVERAGE = 0.95
"""Cutting rows short is always faster and leaner, so that nothing else would win without it."""

_LEAN_WEIGHTS: tuple[tuple[str, Value], ...] = (
    ("dtype", "bfloat16"),
    ("adaptation", "lora_4bit"),
    ("adaptation", "lora"),
    ("dtype", "float16"),
)
"""Pins that make weights smaller, each taken if it is possible beside those before it."""

PREPARE_TIMEOUT_S = 6 * 3600.0
DESCRIBE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user asks a search for; see the command line's options of the same names."""

    model: str
    dataset: str
    space: SearchSpace
    trainer: str = "sft"
    device: str = "auto"
    memory_budget_bytes: int | None = None
    global_batch: int | None = None
    pins: Mapping[str, Any] = field(default_factory=dict)
    min_coverage: float | None = None
    split: str | None = None
    dataset_config: str | None = None
    revision: str | None = None
    weights: str = "random"
    trust_remote_code: bool = False
    phases: tuple[str, ...] = ()
    probe_timeout_s: float = 300.0
    warmup_steps: int = 1
    measured_steps: int = 5
    seed: int = 0
    processes: int | None = None
    accelerate_config: str | None = None
    launched: Mapping[str, Any] = field(init=False, default_factory=dict)
    """What is in ``accelerate_config``, read once."""

    def __post_init__(self) -> None:
        checks = [
            (self.weights in ("random", "real"), "weights must be 'random' or 'real'"),
            (
                self.weights == "random" or not self.device.startswith("virtual:"),
                "a virtual card holds no data, so that weights can't be 'real'",
            ),
            (0.0 <= self.least_coverage <= 1.0, "min_coverage must be from 0 to 1"),
            (
                self.global_batch is None or 0 < self.global_batch <= MOST_ROWS,
                f"global_batch must be from 1 to {MOST_ROWS:,}",
            ),
            (set(self.phases) <= {"eval", "save"}, "phases are 'eval' and 'save'"),
            (self.measured_steps >= 1, "measured_steps must be at least 1"),
            (self.warmup_steps >= 0, "warmup_steps must not be negative"),
            (self.probe_timeout_s > 0, "probe_timeout_s must be positive"),
            (0 <= self.seed < 2**32, "seed must be from 0 to 4294967295"),
            (
                self.space.trainer == self.trainer,
                f"the space {self.space.name!r} is for the trainer {self.space.trainer!r}, not"
                f" for {self.trainer!r}",
            ),
            # An empty name would be taken for one that was not given, or for the current folder.
            *(
                (value is None or bool(value.strip()), f"the {name} is an empty name")
                for name, value in (
                    ("model", self.model),
                    ("data set", self.dataset),
                    ("split", self.split),
                    ("data set's configuration", self.dataset_config),
                    ("revision", self.revision),
                )
            ),
        ]
        for holds, message in checks:
            if not holds:
                raise UsageError(f"{message}.")
        self._check_fixed()
        launched = launching.check_request(
            self.processes, self.accelerate_config, device=self.device
        )
        object.__setattr__(self, "launched", launched)
        membudget.check_asked(self.memory_budget_bytes)
        # Workers need not run in the present folder.
        object.__setattr__(self, "device", full_name(self.device))
        check_device_name(self.device)
        self.space.check_pins(self.pins)

    def _check_fixed(self) -> None:
        """Refuse a space that has code of others run, or sets variables that could."""
        where = f"the space {self.space.name!r}"
        trust.check_code(self.space.fixed, where, trusted=self.trust_remote_code)
        env = self.space.fixed.get("env") or {}
        if not isinstance(env, Mapping):
            raise UsageError(f"{where}: env is {env!r}, not a mapping of names to values.")
        _, refused = trust.harmless(env)
        if refused:
            raise UsageError(
                f"{where} sets {', '.join(refused)} under env, which a space may not.",
                hint="Set it in your shell for the search, and in the exported file for training.",
            )

    @property
    def num_processes(self) -> int:
        """Return the processes that a probe trains in."""
        return int(self.launched.get("num_processes", self.processes or 1))

    @property
    def least_coverage(self) -> float:
        """Return the least share (0 to 1) of the data's loss tokens that is trained on.

        Who pins a length has decided what is cut.
        """
        if self.min_coverage is not None:
            return self.min_coverage
        return 0.0 if "max_length" in self.pins else DEFAULT_MIN_COVERAGE

    def source_keys(self) -> dict[str, Any]:
        """Return the TRL keys that name model and data set.

        Raises:
            PrerequisiteError, UsageError: If a path leads nowhere or to the wrong kind of file.
        """
        return {
            **sources.model_keys(
                self.model, revision=self.revision, trust_remote_code=self.trust_remote_code
            ),
            **sources.dataset_keys(
                self.dataset, split=self.split, config_name=self.dataset_config
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is fixed before the first candidate is drawn.

    Attributes:
        request: What was asked for.
        context: The facts that knobs decide on.
        space: The space, with what this machine, model and data rule out taken out.
        base_config: TRL keys that every candidate shares.
        data_folder: Tokenised rows.
        budget_bytes: Peak memory that a candidate must stay within.
        budget_source: How the budget came about, for people.
        enforced: Whether the budget is a hard limit for the probes' allocations.
        environment: Versions and device, to compare results by.
        lean_pins: The pins, as ``knob=value``, that make weights smaller and are possible
            together, beside those that were given.
        script: How a script builds the trainer; empty where ``trl`` has a command for it.
        accelerate_config: The user's configuration of ``accelerate launch``; empty if the knob
            ``sharding`` decides.
    """

    request: Request
    context: Context
    space: ResolvedSpace
    base_config: Mapping[str, Any]
    data_folder: str
    budget_bytes: int
    budget_source: str
    enforced: bool
    environment: Mapping[str, Any]
    lean_pins: tuple[str, ...] = ()
    script: Mapping[str, Any] = field(default_factory=dict)
    accelerate_config: Mapping[str, Any] = field(default_factory=dict)

    def accelerate(self, candidate: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ``accelerate launch`` starts a candidate's processes with; empty for one."""
        if self.context.num_processes == 1:
            return {}
        if self.accelerate_config:
            return dict(self.accelerate_config)
        return accelerate_config.written(
            str(candidate.get("sharding", accelerate_config.DDP)),
            device_kind=self.context.device.kind,
            processes=self.context.num_processes,
        )

    def config(self, candidate: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole TRL configuration of a candidate, as it is exported."""
        config = {**self.base_config, **self.space.config(candidate)}
        config.pop(sharding.KEY, None)  # see accelerate()
        env = {**self.base_config.get("env", {}), **config.get("env", {})}
        return {**config, "env": env} if env else config

    def steps(self, accumulation_steps: int) -> tuple[int, int]:
        """Return the warm-up and the measured steps of a probe with so many micro-batches each."""
        request = self.request
        if self.context.device.is_virtual:
            return 0, min(request.measured_steps, predicted_steps(accumulation_steps))
        return request.warmup_steps, request.measured_steps

    @property
    def first_worst_steps(self) -> int:
        """Return the steps at the start that hold the largest batch.

        Predicted, one does: it is what the allocator's blocks are as large as from then on. Once
        the optimizer states exist, the one at the end tells what is needed.
        """
        return PREDICTED_FIRST_WORST if self.context.device.is_virtual else MEASURED_FIRST_WORST

    @property
    def rows_per_step(self) -> int:
        """Return the rows that a step of a probe holds at least, where rows differ in length."""
        return PREDICTED_ROWS if self.context.device.is_virtual else MEASURED_ROWS

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what the user should know about the set-up, in whole sentences."""
        data, found, model = self.context.data, list(self.space.notices), self.context.model
        found += launching.notices(self.context, self.accelerate_config)
        if model.declared_architecture not in ("", model.architecture):
            found.append(
                f"The model's config.json names the architecture {model.declared_architecture}, "
                f"which transformers does not know; trl trains {model.architecture} in its place, "
                "and so do the probes."
            )
        found.extend(model.notices(predicted=self.context.device.is_virtual))
        found.extend(data.notices())
        if data.num_empty_rows:
            found.append(
                f"{counted(data.num_empty_rows, 'row')} of the data "
                f"{'is' if data.num_empty_rows == 1 else 'are'} null or empty. The probes leave "
                "such rows out, but trl fails on them: remove them before you train."
            )
        if self.context.global_batch > data.num_rows:
            found.append(
                f"The global batch of {self.context.global_batch:,} is more than the data's "
                f"{counted(data.num_rows, 'row')}, so that an epoch is less than one step."
            )
        own_budget = membudget.own_budget_notice(
            self.request.memory_budget_bytes, self.context.device
        )
        found += [own_budget] if own_budget else []
        name = str(self.base_config["model_name_or_path"])
        if not sources.may_hold_weights(name):
            found.append(
                f"{sources.no_weights(name)} The probes need none, but trl does: put them there "
                "before you train."
            )
        return tuple(found)

    def identity(self) -> dict[str, Any]:
        """Return what must be the same for results to belong to one search."""
        request = self.request
        return {
            "model": self.base_config["model_name_or_path"],
            "revision": request.revision or self.context.model.revision,
            "dataset": {
                key: self.base_config[key]
                for key in ("dataset_name", "dataset_config", "dataset_train_split", "datasets")
                if key in self.base_config
            },
            "data_fingerprint": self.context.data.fingerprint,
            "trainer": request.trainer,
            "space": request.space.digest,
            "pins": {key: str(value) for key, value in sorted(request.pins.items())},
            "device": f"{self.context.device.kind} {self.context.device.label}",
            "memory_budget_bytes": request.memory_budget_bytes,
            "global_batch": self.context.global_batch,
            "min_coverage": request.least_coverage,
            "weights": request.weights,
            "phases": list(request.phases),
            "steps": [request.warmup_steps, request.measured_steps],
            **launching.identity(self.context.num_processes, self.accelerate_config),
        }


def describe(device: str, executor: Executor) -> dict[str, Any]:
    """Return the device, the packages and the versions, seen from a disposable process."""
    device = full_name(device)
    check_device_name(device)
    request = {"device": device, "process_env": host.process_env(device)}
    return executor.run_task("describe", request, timeout_s=DESCRIBE_TIMEOUT_S)


def make_plan(
    request: Request, folder: RunFolder, executor: Executor, *, budget_bytes: int | None = None
) -> Plan:
    """Gather the facts in worker processes and resolve the space against them.

    Args:
        request: What was asked for.
        folder: Its ``work`` folder takes the tokenised rows.
        executor: Runs the worker tasks.
        budget_bytes: Budget of the search being resumed; None for a new one.

    Raises:
        AutotuneError: If model, data, device, space or pins cannot be used; nothing has been
            probed then.
    """
    keys = request.source_keys()
    seen = describe(request.device, executor)
    processes = request.num_processes
    device = launching.share(DeviceInfo.from_dict(seen["device"]), processes)
    budget, source, enforced = membudget.decide(request.memory_budget_bytes, device, budget_bytes)
    occupied = int(seen.get("occupied_bytes") or 0)
    # Before the data is tokenised, which can take long.
    membudget.check_occupied(budget, occupied, device)
    prepared = _prepare(request, keys, folder, executor)
    sharded = launching.check_sharding(
        request.launched, request.accelerate_config, device, seen["packages"]
    )
    context = Context(
        trainer=request.trainer,
        device=device,
        model=ModelFacts.from_dict(prepared["model"]),
        data=DataProfile.from_dict(prepared["data"]),
        packages=seen["packages"],
        global_batch=request.global_batch or TRL_BATCH_SIZE,
        min_coverage=request.least_coverage,
        budget_bytes=budget,
        refusals=prepared.get("refusals", {}),
        num_processes=processes,
        sharding=sharded,
    )
    membudget.check_weights(budget, occupied, context)
    name = sources.short_name(str(keys["model_name_or_path"]))
    base = {**keys, "output_dir": f"{name}-{request.trainer}", **seen["trainer_keys"]}
    env = host.process_env(device.kind, processes)
    if env:
        base["env"] = env
    return Plan(
        request=request,
        context=context,
        space=request.space.resolve(context, request.pins),
        base_config=base,
        data_folder=prepared["data_folder"],
        budget_bytes=budget,
        budget_source=source,
        enforced=enforced,
        environment=seen["environment"],
        lean_pins=_lean_pins(request, context),
        script=prepared.get("script") or {},
        accelerate_config=request.launched,
    )


def _lean_pins(request: Request, context: Context) -> tuple[str, ...]:
    """Return the pins that make weights smaller, tried against all rules and other pins."""
    space, found = request.space, dict[str, Value]()
    given = parse_pins(space.knobs, request.trainer, request.pins)
    for name, value in _LEAN_WEIGHTS:
        # Adapters alone make no weight smaller; beside float16 they are what makes it possible.
        alone = (name, value) == ("adaptation", "lora")
        tried = {**found, name: value, **({"dtype": "float16"} if alone else {})}
        if name not in found and is_possible(space.knobs, context, {**given, **tried}):
            found = tried
    return tuple(f"{name}={value}" for name, value in found.items())


def make_profile(
    request: Request, folder: RunFolder, executor: Executor
) -> tuple[DataProfile, tuple[int, ...]]:
    """Return the token lengths of the data, and the ``max_length`` that the space offers for it.

    Raises:
        AutotuneError: If model or data cannot be used.
    """
    prepared = _prepare(request, request.source_keys(), folder, executor)
    data = DataProfile.from_dict(prepared["data"])
    return data, offered_lengths(request, data, ModelFacts.from_dict(prepared["model"]))


def offered_lengths(request: Request, data: DataProfile, model: ModelFacts) -> tuple[int, ...]:
    """Return the values of ``max_length`` that a search draws from, ascending, in tokens.

    Layouts that cut rows take those of them that keep to the least coverage.
    """
    # Lengths are made of the data and the model's positions, whatever the device.
    device = DeviceInfo(
        name="cpu", kind="cpu", label="", total_bytes=0, free_bytes=0, supports_bf16=False
    )
    context = Context(
        trainer=request.trainer,
        device=device,
        model=model,
        data=data,
        packages={},
        global_batch=request.global_batch or TRL_BATCH_SIZE,
        min_coverage=request.least_coverage,
    )
    values = [
        value
        for knob in request.space.knobs
        if knob.name == "max_length"
        for value in knob.values(context)
    ]
    return tuple(sorted(int(value) for value in values if isinstance(value, int)))


def _prepare(
    request: Request, keys: Mapping[str, Any], folder: RunFolder, executor: Executor
) -> dict[str, Any]:
    """Return the prepare task's answer for a search."""
    task = {
        "trainer": request.trainer,
        "config": {**keys, **request.space.fixed},
        "folder": str(folder.work),
        "max_lengths": _asked_lengths(request),
        "trust_remote_code": request.trust_remote_code,
        "weights": request.weights,
    }
    try:
        return prepare(task, folder, executor, process_env=host.process_env(request.device))
    except UsageError as error:
        raise refusals.at_its_line(error, request.space.places) from error


def prepare(
    task: Mapping[str, Any],
    folder: RunFolder,
    executor: Executor,
    *,
    process_env: Mapping[str, str],
) -> dict[str, Any]:
    """Return the prepare task's answer, from the run folder if it was given there before."""
    kept = folder.work / "prepared.json"
    try:
        record = json.loads(kept.read_text())
        if record["task"] == json.loads(json.dumps(task)):
            return record["answer"]  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError):
        pass
    asked = {**task, "process_env": dict(process_env)}
    answer = executor.run_task("prepare", asked, timeout_s=PREPARE_TIMEOUT_S)
    folder.write_json(kept, {"task": dict(task), "answer": answer})
    return answer


def _asked_lengths(request: Request) -> list[int]:
    """Return the lengths that the space or a pin names, whose coverage must be known exactly."""
    lengths = {int(str(MAX_LENGTH.of(request.trainer).baseline))}
    for knob in request.space.knobs:
        if knob.name == "max_length" and knob.domain and not isinstance(knob.domain, Quantiles):
            lengths |= {int(value) for value in knob.domain.values if value is not None}
    pinned = str(request.pins.get("max_length", ""))
    if pinned.isdecimal():
        lengths.add(int(pinned))
    return sorted(lengths)

"""What one configuration for ``trl`` would take on cards that are not here: one probe for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import membudget
from autotune.devices import host
from autotune.devices.base import check_name
from autotune.errors import AutotuneError, PrerequisiteError, UnknownNameError, UsageError
from autotune.executors.base import Executor, ending
from autotune.executors.disk import temporary_folder
from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import PREDICTED_FIRST_WORST, PREDICTED_ROWS, predicted_steps, prepare
from autotune.probe import modelled, peaks, refusals, sources, trl_config, trust
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.probe.trl_file import TrlFile, hint_for_file
from autotune.report.estimated import CardEstimate, Estimate
from autotune.runfolder import RunFolder
from autotune.space.context import DataProfile, ModelFacts
from autotune.space.trainers import is_known
from autotune.trainers.base import registry as trainers
from autotune.units import counted
from autotune.virtual import cards

TIMELINE_POINTS = 240
MIN_ASSUMED_ROWS = 8
PREFIX = "virtual:"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What all cards share."""

    config: Mapping[str, Any]
    process_env: Mapping[str, str]
    data_folder: str
    quantised: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPrediction(CardEstimate):
    """The prediction for one card, with what to do where there is none.

    Attributes:
        hint: In a whole sentence; empty if there is nothing to add.
    """

    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**CardEstimate.to_dict(self), "verdict": self.verdict(), "hint": self.hint}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Estimate):
    """The predictions for one configuration."""

    cards: tuple[CardPrediction, ...]


class Estimator:
    """Predicts one configuration on one or more cards.

    Args:
        file: The configuration.
        devices: Cards, each with or without ``virtual:`` before it.
        assume_length: Tokens of each row, to do without the data set; None to read it.
        timeout_s: Limit of one probe.
        trust_remote_code: Whether code of the model's repository may run, if the file asks for it.
        executor: Where probes run; by default subprocesses that end with the estimate.
        on_card: Called with each card's name before it is probed.

    Raises:
        UsageError, PrerequisiteError: If file or cards are not such that they can be predicted.
    """

    def __init__(
        self,
        file: TrlFile,
        devices: Sequence[str],
        *,
        assume_length: int | None = None,
        timeout_s: float = 1800.0,
        trust_remote_code: bool = False,
        executor: Executor | None = None,
        on_card: Callable[[str], None] = lambda label: None,
    ) -> None:
        self._file = file
        self._devices = tuple(dict.fromkeys(device_name(item) for item in devices))
        if not self._devices:
            raise UsageError(
                "no card was given.", hint="`autotune gpus` lists those that --device can name."
            )
        _check_trainer(file)
        trust.check_code(file.config, str(file.path), trusted=trust_remote_code)
        self._config, self._env, self._notes = trl_config.for_one_card(file.config, str(file.path))
        _check_sources(file, self._config, needs_data=assume_length is None)
        self._assume_length = assume_length
        self._timeout_s = timeout_s
        self._executor = executor
        self._on_card = on_card

    def run(self) -> Prediction:
        """Return the predictions.

        Raises:
            UsageError, PrerequisiteError: If model, data or a setting cannot be used on any card.
        """
        with temporary_folder("autotune-estimate-") as path, self._open_executor(path) as executor:
            folder = RunFolder(path)
            folder.work.mkdir(exist_ok=True)
            answer = self._prepare(folder, executor)
            data = DataProfile.from_dict(answer["data"])
            model = ModelFacts.from_dict(answer["model"])
            shared = _Prepared(
                config=self._config,
                process_env=self._env,
                data_folder=answer["data_folder"],
                quantised=refusals.quantisation(self._config, checkpoint=model.quantized),
            )
            found = self._probe_all(folder, executor, shared)
        return Prediction(
            file=str(self._file.path),
            trainer=self._file.trainer,
            cards=tuple(found),
            coverage=trl_config.coverage(self._config, data),
            data=self._data_line(data),
            notes=(
                *self._notes,
                *self._assumptions(data),
                *data.notices(),
                *self._beyond_positions(data, model),
                *model.notices(predicted=True),
                *_on_peaks(self._config, found),
                *_on_engine({**self._config, "env": self._env}, found),
            ),
        )

    @contextlib.contextmanager
    def _open_executor(self, folder: Path) -> Iterator[Executor]:
        if self._executor is not None:
            yield self._executor
            return
        copies = min(host.usable_cpus(), len(self._devices))
        with ending(
            SubprocessExecutor(
                devices=("virtual",) * copies,
                timeout_s=self._timeout_s,
                log_folder=folder,
                trainer=self._file.trainer,
            )
        ) as executor:
            yield executor

    @property
    def _places(self) -> dict[str, str]:
        return {key: self._file.place(key) for key in self._config}

    def _prepare(self, folder: RunFolder, executor: Executor) -> dict[str, Any]:
        length, trl = self._assume_length, trl_config
        max_length = trl.number(self._config, "max_length", trl.TRL_MAX_LENGTH)
        keys = [key for key in ("dataset_streaming", "streaming") if key in self._config]
        task: dict[str, Any] = {
            "trainer": self._file.trainer,
            "config": {**self._config, **dict.fromkeys(keys, False)},
            "folder": str(folder.work),
            "max_lengths": [max_length] if max_length else [],
            "trust_remote_code": bool(self._config.get("trust_remote_code")),
        }
        if length is not None:
            count = max(MIN_ASSUMED_ROWS, trl.rows_enough(self._config, length))
            task["assume"] = {"length": length, "count": count}
        try:
            return prepare(task, folder, executor, process_env=self._env)
        except UnknownNameError as error:
            raise refusals.at_its_line(error, self._places) from error
        except (UsageError, PrerequisiteError) as error:
            told = _of_a_file(error, self._file.path)
            raise refusals.at_its_line(told, self._places) from error

    def _probe_all(
        self, folder: RunFolder, executor: Executor, shared: _Prepared
    ) -> list[CardPrediction]:
        specs = [
            self._spec(folder, shared, device, number)
            for number, device in enumerate(self._devices)
        ]
        for device in self._devices:
            self._on_card(_card(device).name)
        futures = [executor.submit(spec) for spec in specs]
        results = [future.result() for future in futures]
        again = {}
        for number, (spec, result) in enumerate(zip(specs, results, strict=True)):
            if result.outcome is Outcome.DEVICE_OOM:
                beyond = self._spec(folder, shared, spec.device, number, beyond=True)
                again[number] = executor.submit(beyond)
        return [
            self._estimate(
                spec.device,
                result,
                again[number].result() if number in again else result,
                shared.quantised,
            )
            for number, (spec, result) in enumerate(zip(specs, results, strict=True))
        ]

    def _spec(
        self,
        folder: RunFolder,
        shared: _Prepared,
        device: str,
        number: int,
        *,
        beyond: bool = False,
    ) -> ProbeSpec:
        """Return the spec that a search would probe the configuration with on a virtual card."""
        config = shared.config
        place = folder.probe_folder(f"{number:04d}{'-beyond' if beyond else ''}")
        place.mkdir(parents=True)
        accumulation = trl_config.number(config, "gradient_accumulation_steps", 1) or 1
        return ProbeSpec(
            probe_id=place.name,
            folder=str(place),
            trainer=self._file.trainer,
            config=config,
            device=device,
            data_folder=shared.data_folder,
            beyond_device=beyond,
            timeline_points=TIMELINE_POINTS,
            warmup_steps=0,
            measured_steps=predicted_steps(accumulation),
            rows_per_step=PREDICTED_ROWS,
            first_worst_steps=PREDICTED_FIRST_WORST,
            representative=True,
            accumulation_steps=accumulation,
            phases=("eval",) if trl_config.evaluates(config) else (),
            process_env=shared.process_env,
            timeout_s=self._timeout_s,
            trust_remote_code=bool(config.get("trust_remote_code")),
        )

    def _estimate(
        self, device: str, result: ProbeResult, needed: ProbeResult, quantised: Sequence[str]
    ) -> CardPrediction:
        card = _card(device)
        budget, _, _ = membudget.decide(None, cards.device_info(card, device), None)
        return CardPrediction(
            device=device,
            label=card.name,
            memory_bytes=card.memory_bytes,
            context_bytes=card.context_bytes,
            budget_bytes=budget,
            outcome=result.outcome,
            detail=refusals.reason(result, quantised),
            is_refusal=refusals.is_refusal(result),
            measurement=needed.measurement,
            hint=refusals.hint(result, str(self._file.path), quantised),
        )

    def _data_line(self, data: DataProfile) -> str:
        if self._assume_length is not None:
            return f"Assumed rows of {self._assume_length:,} tokens, all with loss"
        rows = counted(data.num_rows, "row")
        return f"Data: {rows}, {data.num_tokens:,} tokens, longest {data.longest:,}"

    def _assumptions(self, data: DataProfile) -> list[str]:
        found = []
        limit = trl_config.number(self._config, "max_length", trl_config.TRL_MAX_LENGTH)
        if self._assume_length is not None and limit and limit < self._assume_length:
            how = "packed into" if trl_config.packs(self._config) else "cut to"
            found.append(f"the assumed rows are {how} max_length, {limit:,} tokens.")
        if self._assume_length is not None and trl_config.evaluates(self._config):
            split = self._config.get("dataset_test_split", trl_config.TRL_TEST_SPLIT)
            found.append(
                f"eval_strategy: trl ends with KeyError: {split!r} unless the data has a split"
                f" {split!r}; with --assume-length nobody looked."
            )
        name = str(self._config["model_name_or_path"])
        if not sources.may_hold_weights(name):
            found.append(f"{sources.no_weights(name)} The prediction needs none, but trl does.")
        if data.num_empty_rows:
            found.append(
                f"{counted(data.num_empty_rows, 'empty row')} left out; trl fails on such rows."
            )
        return found

    def _beyond_positions(self, data: DataProfile, model: ModelFacts) -> list[str]:
        """Return a note where sequences are longer than any that the model was made for."""
        limit = trl_config.number(self._config, "max_length", trl_config.TRL_MAX_LENGTH)
        packs = trl_config.packs(self._config)
        longest = limit if limit and packs else min(limit or data.longest, data.longest)
        if not model.max_positions or longest <= model.max_positions:
            return []
        return [
            f"sequences of {longest:,} tokens are longer than the {model.max_positions:,} that the"
            " model was made for (max_position_embeddings)."
        ]


def device_name(text: str) -> str:
    """Return a virtual card's whole device name.

    Raises:
        UsageError: If it is a real device.
        UnknownNameError, PrerequisiteError: If there is no such card.
    """
    name = text.strip()
    if name.partition(":")[0] in ("auto", "cpu", "cuda", "mps", "xpu"):
        raise UsageError(
            f"{name!r} is a device to measure on; an estimate is for a card that is not here.",
            hint="Give --device virtual:CARD (`autotune gpus` lists them), or measure: `autotune"
            f" search --device {name}`, `autotune verify FILE`.",
        )
    name = cards.full_name(name if name.startswith(PREFIX) else PREFIX + name)
    check_name(name)
    return name


def _check_trainer(file: TrlFile) -> None:
    known = set(trainers.declared())
    if file.trainer not in known and not is_known(file.trainer):
        raise UsageError(
            f"{file.path} is for the trainer {file.trainer!r}, which cannot be predicted yet.",
            hint=f"Supported: {', '.join(sorted(known))}; or module:Class, one of your own.",
        )


def _check_sources(file: TrlFile, config: dict[str, Any], *, needs_data: bool) -> None:
    model = config.get("model_name_or_path")
    if not isinstance(model, str) or not model.strip():
        raise UsageError(
            f"{file.path} names no model.", hint="Add model_name_or_path: a hub id or a folder."
        )
    config |= sources.model_keys(model, revision=None, trust_remote_code=False)
    if needs_data and not (config.get("dataset_name") or config.get("datasets")):
        raise UsageError(
            f"{file.path} names no data set.",
            hint="Add dataset_name or datasets, or give --assume-length N to do without.",
        )


def _of_a_file(error: UsageError | PrerequisiteError, path: Path) -> AutotuneError:
    hint = hint_for_file(error.hint, path)
    if "data set" in error.message:
        between = "\n  " if "\n" in hint else " "  # lines to copy stand alone
        hint = f"{hint}{between}Without the data: --assume-length N.".strip()
    return type(error)(error.message, hint=hint)


def _on_peaks(config: Mapping[str, Any], found: Sequence[CardPrediction]) -> list[str]:
    """Return notes on what the verdicts' peaks are, and on a mask that could be spared."""
    notes = []
    only, *others = found
    if not others and only.measurement is not None and not only.fits:
        limit = only.budget_bytes - only.context_bytes
        notes.append(peaks.note_on_decision(only.measurement, limit))
    masks = {card.label: peaks.mask_bytes(config, card.makeup) for card in found}
    able = [
        card.label
        for card in found
        if masks[card.label] and _card(card.device).capability >= cards.FLASH_CAPABILITY
    ]
    if able:
        notes.append(peaks.note_on_mask(max(masks[label] for label in able), able))
    return [note for note in notes if note]


def _on_engine(config: Mapping[str, Any], found: Sequence[CardPrediction]) -> list[str]:
    """Return what of the figures is modelled, where vLLM generates."""
    engines = [engine for card in found if (engine := modelled.engine_of(card.makeup))]
    notes = [modelled.note_on_engines(engines), modelled.note_on_allocator(config)]
    return [note for note in notes if note]


def _card(device: str) -> cards.Card:
    return cards.find(device.removeprefix(PREFIX))

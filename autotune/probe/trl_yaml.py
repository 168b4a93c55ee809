"""The YAML that ``trl <command> --config FILE`` reads, with a header that says where it is from.

The mapping written is the very one that the probes ran; PyYAML's safe loader, which TRL uses,
gives it back unchanged.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import JournalError, UsageError
from autotune.probe import prediction
from autotune.probe.result import phase_name
from autotune.units import format_gib, format_rate

MARK = "# Written by autotune"
"""First words of every file written here; nothing without them is ever removed."""

TRL_COMMANDS = ("distillation", "dpo", "grpo", "kto", "reward", "rloo", "sft")

GROUPS: dict[str, str] = {
    "model": """model_name_or_path model_revision trust_remote_code dtype attn_implementation
        model_init_kwargs load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant
        bnb_4bit_quant_storage use_peft lora_r lora_alpha lora_dropout lora_target_modules
        lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora""",
    "data": """dataset_name dataset_config datasets dataset_train_split dataset_test_split
        test_split_size dataset_streaming streaming dataset_text_field chat_template_path
        max_length truncation_mode packing packing_strategy padding_free pad_to_multiple_of
        eval_packing completion_only_loss assistant_only_loss shuffle_dataset""",
    "batching": """per_device_train_batch_size gradient_accumulation_steps
        per_device_eval_batch_size eval_accumulation_steps auto_find_batch_size
        train_sampling_strategy num_generations generation_batch_size""",
    "memory": """bf16 fp16 tf32 gradient_checkpointing gradient_checkpointing_kwargs
        activation_checkpointing activation_checkpointing_kwargs activation_offloading
        use_liger_kernel liger_kernel_config loss_type use_cache torch_empty_cache_steps
        torch_compile torch_compile_backend torch_compile_mode use_cpu fsdp fsdp_config deepspeed
        accelerate_config num_processes env""",
    "optimizer": """optim optim_args optim_target_modules learning_rate lr_scheduler_type
        lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon
        max_grad_norm num_train_epochs max_steps""",
}
"""Keys by theme, in the order they are written; all others follow by name."""

_MISREAD = re.compile(
    r"""^(y|n|yes|no|on|off|true|false|null|none|~
        |[-+]?(\d[\d_]*)?\.?\d*(e[-+]?\d+)?|[-+]?0[box][\da-f_]+|[-+]?\.(inf|nan)
        |\d+(:\d+)+|\d{4}-\d.*)$""",
    re.IGNORECASE | re.VERBOSE,
)
"""Texts that a reader of YAML 1.1 or 1.2 might take for something else: always quoted."""


class _Dumper(yaml.SafeDumper):
    """Block mappings, flow lists of scalars, and quotes wherever a reader could go wrong."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "'" if _MISREAD.match(value) else None
    if not value.isprintable():
        # Escaped: some line breaks do not survive PyYAML's other styles.
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _represent_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    flow = not any(isinstance(item, dict | list) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flow)


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(list, _represent_list)


def render(config: Mapping[str, Any], header: Mapping[str, Any], *, file_name: str) -> str:
    """Return the text of a configuration file.

    Args:
        config: The mapping that TRL is to read; plain JSON values.
        header: Facts for the comment at the top; see :func:`header_lines`.
        file_name: Name of the file, for the command that the comment shows.

    Raises:
        UsageError: If ``config`` holds something YAML cannot give back unchanged.
    """
    parts = ["\n".join(header_lines(header, file_name=file_name)) + "\n"]
    for title, group in grouped(config):
        text = yaml.dump(
            group,
            Dumper=_Dumper,
            sort_keys=False,
            default_flow_style=False,
            allow_unicode=True,
            width=4096,
        )
        parts.append(f"# {title}\n{text}")
    if len(parts) == 1:
        parts.append("{}\n")
    return "\n".join(parts)


def grouped(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return a configuration by theme, each with its title, as plain values.

    Raises:
        UsageError: If ``config`` holds something that is no plain value.
    """
    plain = {_key(name): _plain(name, value) for name, value in config.items()}
    groups = {title: names.split() for title, names in GROUPS.items()}
    known = {name for names in groups.values() for name in names}
    groups["further settings"] = sorted(plain.keys() - known)
    found = [
        (title, {name: plain[name] for name in names if name in plain})
        for title, names in groups.items()
    ]
    return [(title, group) for title, group in found if group]


def header_lines(header: Mapping[str, Any], *, file_name: str) -> list[str]:
    """Return the comment at the top of a configuration file, one line each.

    Args:
        header: Any of ``version``, ``created_at``, ``trial``, ``num_trials``, ``picked_as``,
            ``source``, ``outcome``, ``feasible``, ``peak_bytes``, ``peak_of``, ``peak_phase``,
            ``covers``, ``host_bytes``, ``budget_bytes``, ``tokens_per_s`` (median, low, high),
            ``num_probes``, ``on_the_edge``, ``rate_ratio``, ``memory_ratio``, ``coverage``,
            ``changed``, ``changes``, ``unranked``, ``disturbed``, ``modelled``, ``needs``,
            ``device``, ``driver``, ``weights``, ``versions``, ``processes``,
            ``accelerate_file`` and ``trainer``. What is absent or None is left out.
        file_name: Name of the file, for the command to run it.
    """
    known = {name: value for name, value in header.items() if value is not None}
    rows = [("", text) for text in _origin(known)]
    rows += [("peak memory", text) for text in _peak(known)]
    if known.get("host_bytes", 0) >= prediction.HOST_NOTED_BYTES:
        held = f"{format_gib(known['host_bytes'])} {known.get('source', '')}".rstrip()
        rows.append(
            ("host memory", f"{held}, beside the process itself: what the card moves there")
        )
    if "processes" in known:
        text = f"{known['processes']}; the memory is the worst one's, the rate the whole job's"
        rows.append(("processes", text))
    if "covers" in known:
        rows.append(("covers", known["covers"]))
    rows += [("rate", text) for text in _rate(known)]
    if "coverage" in known:
        rows.append(("trains on", f"{known['coverage']:.2%} of the data's tokens that carry loss"))
    if "changed" in known:
        changed = settings(known["changed"])
        rows.append(("changed", changed or "nothing: this is the baseline"))
    if known.get("source") == prediction.SOURCE:
        rows += [("beware", text) for text in _trust(str(known.get("device", "")))]
    if known.get("disturbed"):
        share = f"{known['disturbed']:.0%}"
        rows.append(("beware", f"other work took {share} of the processors: the rate is too low"))
    if known.get("modelled"):
        rows.append(("beware", f"{known['modelled']}: modelled, neither measured nor traced"))
    if known.get("changes"):
        rows.append(("beware", f"not the baseline's training: other {_and(known['changes'])}"))
    rows += [("needs", text) for text in known.get("needs", ())]
    if "device" in known:
        driver = f", driver {known['driver']}" if "driver" in known else ""
        rows.append(("device", f"{known['device']}{driver}"))
    if known.get("versions"):
        versions = ", ".join(f"{name} {value}" for name, value in known["versions"].items())
        rows.append(("versions", versions))
    trainer = known.get("trainer")
    if trainer is not None and trainer not in TRL_COMMANDS:
        rows.append(("trainer", str(trainer)))
    # What does not work is exported to be looked at.
    if known.get("outcome", "ok") == "ok":
        commands = run_with(trainer, file_name, known.get("accelerate_file"))
        rows += [("run it with", text) for text in commands]
    first, *rest = rows
    width = max((len(label) for label, _ in rest), default=0)
    lines, last = [f"{MARK}{first[1]}"], ""
    for label, text in rest:
        lines.append(f"#   {'' if label == last else label:<{width}}  {text}")
        last = label
    return [_printable(line) for line in lines]


def run_with(trainer: str | None, file_name: str, accelerate_file: str | None = None) -> list[str]:
    """Return the commands that run an exported file, the usual one first; none if none does.

    Args:
        trainer: That it is for.
        file_name: Of the file.
        accelerate_file: What ``accelerate launch`` starts several processes with.
    """
    launch = [] if accelerate_file is None else ["--config_file", accelerate_file]
    script = [["accelerate", "launch", *launch, file_name]]
    if file_name.endswith(".py"):
        commands = script if launch else [["python", file_name], *script]
    elif trainer in TRL_COMMANDS:
        own = [] if accelerate_file is None else ["--accelerate_config", accelerate_file]
        commands = [["trl", str(trainer), "--config", file_name, *own]]
    else:
        commands = []
    return [shlex.join(command) for command in commands]


def settings(changed: Mapping[str, Any]) -> str:
    """Return knobs as ``name=value, ...``, the values as the YAML shows them."""
    return ", ".join(f"{name}={_setting(value)}" for name, value in changed.items())


def write_text(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` holds either the old or the whole new text."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` so that ``path`` holds either the old or the whole new content.

    Raises:
        JournalError: If it cannot be written, such as on a full disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise JournalError(
            f"{path} cannot be written: {error.strerror or error}.",
            hint="Free space on the disk, or choose another place.",
        ) from error


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _origin(known: Mapping[str, Any]) -> list[str]:
    version = f" {known['version']}" if "version" in known else ""
    date = f" on {known['created_at']}" if "created_at" in known else ""
    trial = f", trial {known['trial']}" if "trial" in known else ""
    total = f" of {known['num_trials']}" if trial and "num_trials" in known else ""
    names = f" ({_and(known['picked_as'])})" if known.get("picked_as") else ""
    lines = [f"{version}{date}{trial}{total}{names}."]
    if known.get("outcome", "ok") != "ok":
        return [*lines, f"DOES NOT WORK: the outcome was {known['outcome']}."]
    if not known.get("feasible", True):
        return [*lines, "OVER A LIMIT: this trial is not feasible."]
    return lines


def _peak(known: Mapping[str, Any]) -> list[str]:
    if "peak_bytes" not in known:
        return []
    what = f", {known['peak_of']}" if "peak_of" in known else ""
    phase = f", reached in {phase_name(known['peak_phase'])}" if "peak_phase" in known else ""
    source = f" {known['source']}" if "source" in known else ""
    lines = [f"{format_gib(known['peak_bytes'])}{source}{what}{phase}"]
    if "budget_bytes" in known:
        lines.append(f"the budget was {format_gib(known['budget_bytes'])}")
    if known.get("on_the_edge"):
        lines.append("on the edge: the allocator had to free its cache to go on")
    if "memory_ratio" in known and not _is_baseline(known):
        lines.append(f"{known['memory_ratio']:.2f} x the baseline's")
    return lines


def _trust(card: str) -> list[str]:
    return [
        "figures are predicted, not measured: allocated memory within about"
        f" {prediction.ALLOCATED_ERROR:.0%},",
        f"rates {prediction.rate_error(card)};",
        "`autotune verify RUN` on the card confirms them",
    ]


def _rate(known: Mapping[str, Any]) -> list[str]:
    if "tokens_per_s" not in known:
        return []
    rate = known["tokens_per_s"]
    source = f" {known['source']}" if "source" in known else ""
    probes = f", {known['num_probes']} probes" if known.get("num_probes", 1) > 1 else ""
    is_predicted = known.get("source") == prediction.SOURCE
    spread = f"quartiles {format_rate(rate['low'])} to {format_rate(rate['high'])}"
    if is_predicted:
        # Its steps differ by their rows alone, which says nothing about how wrong it may be.
        spread = f"±{prediction.RATE_ERROR:.0%}"
    lines = [f"{format_rate(rate['median'])} tokens/s{source}, {spread}{probes}"]
    if known.get("unranked") and not is_predicted:
        lines.append("too noisy to rank: more than a tenth to a side of the median")
    if known.get("weights") == "random" and not is_predicted:  # which has no weights at all
        lines.append("with random weights of the same shapes")
    if "rate_ratio" in known and not _is_baseline(known):
        lines.append(f"{known['rate_ratio']:.2f} x the baseline's")
    return lines


def _is_baseline(known: Mapping[str, Any]) -> bool:
    """Whether nothing is changed, so that a comparison with the baseline says nothing."""
    return "changed" in known and not known["changed"]


def _and(names: Any) -> str:
    return " and ".join(str(name) for name in names)


def _printable(line: str) -> str:
    # A line break or a control character in a name would end the comment or spoil the file.
    return "".join(char if char.isprintable() else " " for char in line).rstrip()


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is not a key of a TRL configuration; keys are texts.")
    return name


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise UsageError(
        f"{name} is a {type(value).__name__}, which a YAML configuration cannot hold.",
        hint="Use plain values: texts, numbers, true, false, null, lists and mappings.",
    )

"""Knobs of training in several processes: what of the model each of them holds."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, Value
from autotune.space.knob import Candidate, Knob, add
from autotune.space.knobs.packages import missing

KEY = "accelerate_config"
"""What ``trl`` starts its processes with."""

_DEEPSPEED = ("zero2", "zero3")


def cannot_shard(sharding: str, device_kind: str) -> str | None:
    """Return why accelerate would not shard so on a kind of device; None if it would.

    accelerate takes FSDP and DeepSpeed for accelerators alone (1.15, ``AcceleratorState`` in
    state.py): told to train on the CPU it holds the whole model in every process, without a word.
    """
    if sharding == "ddp" or device_kind != "cpu":
        return None
    return (
        "accelerate shards on accelerators alone: on the CPU every process would hold the whole"
        " model without a word, as with sharding=ddp"
    )


def _sharding_inactive(candidate: Candidate, context: Context) -> str | None:
    if context.sharding is not None:
        return "the accelerate config that was given decides"
    if context.num_processes == 1:
        return "one process holds the whole model; --processes asks for several"
    return None


def _refuse_sharding(value: Value, candidate: Candidate, context: Context) -> str | None:
    if value in _DEEPSPEED:
        lacking = missing(context, ("deepspeed",))
        if lacking:
            return lacking
    return cannot_shard(str(value), context.device.kind)


SHARDING = add(
    Knob(
        name="sharding",
        baseline="ddp",
        changes="nothing",
        help=(
            "What each of several processes holds. ddp: everything. zero2: its share of gradients"
            " and optimizer states (DeepSpeed). zero3, fsdp2: of the weights as well (DeepSpeed,"
            " PyTorch)."
        ),
        domain=Choice(("ddp", "fsdp2", "zero2", "zero3")),
        keys=(KEY, "fsdp", "fsdp_config", "deepspeed"),
        needs={"zero2": ("deepspeed",), "zero3": ("deepspeed",)},
        # TRL's own key, whose value may be such a name or a file. A plan takes it out and has the
        # file written, which says how many processes there are as well.
        write=lambda value, candidate, context: {KEY: value},
        active_if=_sharding_inactive,
        refuse=_refuse_sharding,
        leanest=("zero3", "fsdp2", "zero2", "ddp"),
    )
)


def _gather_inactive(candidate: Candidate, context: Context) -> str | None:
    sharding = context.sharding or candidate.get("sharding", "ddp")
    if sharding == "zero3":
        return None
    return "nothing is gathered unless DeepSpeed shards the weights (sharding=zero3)"


def _write_gather(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    return {"ds3_gather_for_generation": value == "on"}


GATHER = add(
    Knob(
        name="ds3_gather_for_generation",
        baseline="on",
        changes="nothing",
        help=(
            "Whether all weights are gathered on every device to generate. off: layer by layer,"
            " for models that do not fit on one; much slower. With trl 1.16 and DeepSpeed 0.19.8"
            " the backward pass after it failed on two CPU processes; not tried on GPUs."
        ),
        domain=Choice(("on",)),
        accepts=Choice(("on", "off")),
        needed_keys=("ds3_gather_for_generation",),
        depends_on=("sharding",),
        write=_write_gather,
        active_if=_gather_inactive,
        leanest=("off", "on"),
        ignored_when_inactive=True,
    )
)

"""Knobs that decide how rows become batches: layout, length, padding and micro-batch."""

from __future__ import annotations

import itertools
import math
from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, IntRange, PowerOfTwo, Quantiles, Value
from autotune.space.knob import (
    LEAST,
    Candidate,
    Fidelity,
    Knob,
    Refusal,
    Remedy,
    add,
    at_least,
    loads_alike,
)
from autotune.space.lengths import round_up_useful
from autotune.space.packing import too_few_rows

TRL_MAX_LENGTH = 1024
TRL_BATCH_SIZE = 8
KTO_LOSS = "kto"
"""TRL's default of ``loss_type`` in KTO, where micro-batches depend on it."""

# Told apart by position_ids alone, documents of these models attend to each other: their masks
# come from the attention mask (ALiBi or learned positions), which a flattened batch lacks.
# Measured in TRL 1.16: log-probabilities differ by 2.2 (bloom) and 2.3 (opt) from a padded batch,
# without a warning. mpt builds its ALiBi mask the same way as bloom.
MIXES_DOCUMENTS = frozenset({"opt", "bloom", "mpt"})

_FLATTENED = ("padding_free", "bfd", "bfd_split")
_TRUNCATED = ("padded", "bfd")
_LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False, "padding_free": False},
    "padding_free": {"packing": False, "padding_free": True, "max_length": None},
    # bfd and bfd_split make TRL's collator flatten the batch whatever padding_free says.
    "bfd": {"packing": True, "packing_strategy": "bfd", "padding_free": True},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split", "padding_free": True},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "padding_free": False},
}


def layout_of(candidate: Candidate) -> str:
    """Return how the candidate lays out batches; TRL's ``padded`` if it does not say."""
    return str(candidate.get("batching", "padded"))


def share_of_tokens(candidate: Candidate, context: Context) -> float:
    """Return the share (0 to 1) of the data's loss tokens that the candidate trains on.

    Raises:
        ValueError: If no coverage is known for so short a ``max_length``.
    """
    if layout_of(candidate) not in _TRUNCATED:
        return 1.0
    return context.data.coverage(int(candidate.get("max_length", TRL_MAX_LENGTH) or 0))


def _refuse_batching(value: Value, candidate: Candidate, context: Context) -> str | None:
    model, attention = context.model, str(candidate.get("attn_implementation", "sdpa"))
    if value not in _FLATTENED:
        return None
    if model.model_type in MIXES_DOCUMENTS:
        return (
            f"documents in one flattened batch would attend to each other: {model.model_type}"
            " does not build its attention mask from position_ids"
        )
    if model.keeps_documents_apart.get(attention) is False:
        return (
            "documents in one flattened batch would attend to each other: a test of this model"
            f" with {attention} attention found it"
        )
    if not model.keeps_documents_apart:
        return (
            "it could not be tested whether documents in one flattened batch stay apart in"
            f" {model.architecture}"
        )
    longest = context.data.longest
    if value == "padding_free" and model.max_positions and longest > model.max_positions:
        return (
            "it cannot truncate, and the longest row has"
            f" {longest} tokens where the model has {model.max_positions} positions"
        )
    return None


def _batching_trains_as(value: Value, candidate: Candidate, context: Context) -> Value:
    # The same rows in the same steps; max_length tells whether they are cut.
    return "padded" if value == "padding_free" else value


def _default_lengths(context: Context, quantiles: Quantiles | None) -> tuple[Value, ...]:
    """Return useful lengths: at quantiles of the rows', the shortest allowed, TRL's default."""
    data, positions = context.data, context.model.max_positions
    shares = (quantiles or Quantiles()).shares
    lengths = {round_up_useful(data.quantile(share)) for share in shares}
    if context.min_coverage:
        # Of long rows the quantiles may leave the longest alone.
        kept = (n for n in data.max_lengths if data.coverage(n) >= context.min_coverage)
        lengths |= set(itertools.islice(kept, 1))
    if positions is not None:
        lengths = {min(length, positions) for length in lengths}
    longest = data.longest
    # Above the longest row one length is as good as another, except as the size of a bin.
    enough = {length for length in lengths if length >= longest}
    lengths = {length for length in lengths if length < longest}
    default = MAX_LENGTH.of(context.trainer).baseline
    assert isinstance(default, int)
    return tuple(sorted({*lengths, *sorted(enough)[:1], default}))


def _length_inactive(candidate: Candidate, context: Context) -> str | None:
    if layout_of(candidate) == "padding_free":
        return "batching=padding_free needs max_length: null; TRL refuses any other value"
    return None


def _refuse_length(value: Value, candidate: Candidate, context: Context) -> str | None:
    assert isinstance(value, int)
    layout, data, positions = layout_of(candidate), context.data, context.model.max_positions
    # Only wrapped rows have positions that run on across documents.
    reach = value if layout == "wrapped" else min(value, data.longest)
    if positions is not None and reach > positions:
        return f"the model has {positions} positions only"
    if layout not in _TRUNCATED:
        return None
    try:
        coverage = data.coverage(value)
    except ValueError as error:
        return str(error)
    if coverage < context.min_coverage:
        return Refusal(
            f"cutting rows at {value} tokens keeps {math.floor(coverage * 10_000) / 100:.2f}% of"
            f" the loss tokens, less than the {context.min_coverage * 100:g}% of --min-coverage",
            remedies=_longer_rows(coverage, context),
        )
    return None


def _longer_rows(coverage: float, context: Context) -> tuple[Remedy, ...]:
    """Return what helps where cutting rows keeps too small a share of the loss tokens."""
    lower = math.floor(coverage * 10_000) / 10_000
    enough = (
        n for n in context.data.max_lengths if context.data.coverage(n) >= context.min_coverage
    )
    found = [
        Remedy(
            text=f"lower --min-coverage to {lower:g}",
            context={"min_coverage": lower},
            kind="coverage",
        ),
        *(
            Remedy(
                text=f"allow longer rows (max_length={length})",
                pins={"max_length": length},
                kind="length",
            )
            for length in itertools.islice(enough, 1)
        ),
        Remedy(
            text="split rows instead of cutting them (batching=bfd_split)",
            pins={"batching": "bfd_split"},
        ),
    ]
    return tuple(found)


def _loads_rows(larger: Value, smaller: Value, candidate: Candidate, context: Context) -> bool:
    # Rows are cut and packed before the first step, on the host.
    return context.device.kind != "cpu"


def _effective_length(value: Value, candidate: Candidate, context: Context) -> Value:
    if layout_of(candidate) == "padded" and isinstance(value, int):
        return min(value, context.data.longest)
    return value  # packed: the size of a bin counts, even above the longest row


def _length_trains_as(value: Value, candidate: Candidate, context: Context) -> Value:
    if layout_of(candidate) == "padding_free":
        return context.data.longest
    return _effective_length(value, candidate, context)


def _padding_inactive(candidate: Candidate, context: Context) -> str | None:
    layout = layout_of(candidate)
    return None if layout == "padded" else f"batching={layout} leaves next to nothing to pad"


def _write_padding(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    return {"pad_to_multiple_of": None if value == "none" else value}


def _padding_at_least(
    larger: Value, smaller: Value, candidate: Candidate, context: Context
) -> bool:
    # Not against "none": attention may copy an unaligned mask to align it.
    if not isinstance(larger, int) or not isinstance(smaller, int):
        return False
    return larger % smaller == 0


def accumulation_steps(micro_batch: int, context: Context) -> int:
    """Return the micro-batches per optimizer step that keep the global batch."""
    return context.global_batch // (micro_batch * context.num_processes)


def with_loss(loss: str) -> str:
    """Return the name under which preparing tells of micro-batches that a loss cannot have."""
    return f"per_device_train_batch_size with loss_type={loss}"


def _refuse_micro_batch(value: Value, candidate: Candidate, context: Context) -> str | None:
    assert isinstance(value, int)
    if context.global_batch % (value * context.num_processes):
        processes = f" in {context.num_processes} processes" if context.num_processes > 1 else ""
        return (
            f"micro-batches of {value}{processes} do not add up to the global batch of"
            f" {context.global_batch}"
        )
    found = context.refusals.get(with_loss(str(candidate.get("loss_type", KTO_LOSS))), {})
    if str(value) in found:
        return found[str(value)]
    length = int(candidate.get("max_length", TRL_MAX_LENGTH) or 0)
    return too_few_rows(
        context.data, value * context.num_processes, layout=layout_of(candidate), max_length=length
    )


def _write_micro_batch(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    assert isinstance(value, int)
    return {
        "per_device_train_batch_size": value,
        "gradient_accumulation_steps": accumulation_steps(value, context),
    }


def _micro_batch_at_least(
    larger: Value, smaller: Value, candidate: Candidate, context: Context
) -> bool:
    if not isinstance(larger, int) or not isinstance(smaller, int) or larger < smaller:
        return False
    # With accumulation the gradients live on during the next micro-batch's forward pass. Without
    # it they do not, so that a larger micro-batch may need less than a smaller one.
    accumulates = accumulation_steps(larger, context) > 1
    return accumulates or accumulation_steps(smaller, context) == 1


BATCHING = add(
    Knob(
        name="batching",
        baseline="padded",
        changes="tokens",
        help=(
            "How rows form batches. padded: one row each, padded to the longest (TRL's default)."
            " padding_free: rows end to end, no padding, nothing cut. bfd: rows packed whole into"
            " bins of max_length, longer ones cut. bfd_split: the same, but longer rows go on in"
            " another bin. wrapped: everything joined and cut every max_length tokens; documents"
            " deliberately attend to each other."
        ),
        domain=Choice(tuple(_LAYOUTS)),
        # Fixed elsewhere, these would undo or contradict the layout without a word.
        keys=(
            "packing",
            "packing_strategy",
            "padding_free",
            "eval_packing",
            "dataset_kwargs.skip_prepare_dataset",
        ),
        needed_keys=("packing", "padding_free"),
        depends_on=("attn_implementation",),
        write=lambda value, candidate, context: dict(_LAYOUTS[str(value)]),
        refuse=_refuse_batching,
        trains_as=_batching_trains_as,
        loads_at_least=_loads_rows,
        # Joined and cut anywhere, documents attend to each other.
        fidelity=Fidelity(order=(tuple(_LAYOUTS)[:-1], "wrapped"), weight=10),
    )
)

MAX_LENGTH = add(
    Knob(
        name="max_length",
        baseline=TRL_MAX_LENGTH,
        defaults={"online_dpo": 512},
        changes="tokens",
        help=(
            "Longest row in tokens; longer ones are cut at their end. With packing, the size of a"
            " bin. auto takes quantiles of the data's own lengths and TRL's default, 1024."
            " Online DPO cuts prompts at their start, in what is trained on alone."
        ),
        accepts=IntRange(1, 1 << 24),
        # Coverage is tabulated for keep_start, TRL's default.
        keys=("max_length", "truncation_mode"),
        needed_keys=("max_length",),
        depends_on=("batching",),
        always=True,
        default_values=_default_lengths,
        active_if=_length_inactive,
        refuse=_refuse_length,
        effective=_effective_length,
        trains_as=_length_trains_as,
        memory_at_least=at_least,
        loads_at_least=_loads_rows,
        leanest=LEAST,
        pin_needs_active=True,
    )
)

PAD_TO_MULTIPLE_OF = add(
    Knob(
        name="pad_to_multiple_of",
        baseline="none",
        changes="nothing",
        help=(
            "Pads each batch to a multiple of this many tokens: a little more padding, for fewer"
            " different shapes (allocator) and aligned ones (tensor cores)."
        ),
        domain=Choice(("none", 8, 64, 128)),
        needed_keys=("pad_to_multiple_of",),
        depends_on=("batching",),
        write=_write_padding,
        active_if=_padding_inactive,
        memory_at_least=_padding_at_least,
        loads_at_least=loads_alike,
    )
)

MICRO_BATCH = add(
    Knob(
        name="per_device_train_batch_size",
        baseline=TRL_BATCH_SIZE,
        changes="nothing",
        help=(
            "Rows per forward pass on each device. Gradient accumulation follows, so that the"
            " global batch stays what was asked for."
        ),
        domain=PowerOfTwo(1, 64),
        accepts=IntRange(1, 1 << 16),
        keys=(
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "auto_find_batch_size",
        ),
        # Packing and cutting decide how many rows there are to form a micro-batch from.
        depends_on=("batching", "max_length", "loss_type"),
        always=True,
        write=_write_micro_batch,
        refuse=_refuse_micro_batch,
        memory_at_least=_micro_batch_at_least,
        loads_at_least=loads_alike,
        leanest=LEAST,
    )
)

"""What is known before anything is drawn: the device, the model, the data, the packages.

These are facts gathered once per search (in a disposable child process) and handed to the knobs,
whose rules decide from them what may be drawn. All are plain records that round-trip through JSON.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autotune.units import counted

KNOWN_ROLES = ("system", "user", "assistant", "tool", "developer")
"""Roles of messages that chat templates commonly know."""

NUM_NAMED = 5
"""Of more odd roles than this the most frequent are named."""

_MOSTLY = 0.9
"""Share of parameters below which quantising the rest is not what a user expects of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device that probes run on.

    Attributes:
        name: As given to ``--device``, resolved: ``cpu``, ``cuda:0``, ``mps``, ``xpu:0``.
        kind: Backend name: ``cpu``, ``cuda``, ``mps``, ``xpu``.
        label: What a person calls it, such as ``NVIDIA H200``.
        total_bytes: Memory of the device.
        free_bytes: Memory free when the search started.
        supports_bf16: Whether bfloat16 arithmetic is supported.
        capability: CUDA compute capability as ``(major, minor)``; None elsewhere.
        driver: Driver version; None if there is none.
        num_devices: How many devices of this kind are visible.
    """

    name: str
    kind: str
    label: str
    total_bytes: int
    free_bytes: int
    supports_bf16: bool
    capability: tuple[int, int] | None = None
    driver: str | None = None
    num_devices: int = 1

    @property
    def trains_in_fp16(self) -> bool:
        """Return whether float16 takes bfloat16's place: only CUDA has a scaler for it."""
        return self.kind == "cuda" and not self.supports_bf16

    @property
    def is_virtual(self) -> bool:
        """Return whether results on it are predicted."""
        return self.name.startswith("virtual:")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceInfo:
        """Return the record that :meth:`to_dict` wrote."""
        values = dict(data)
        if values.get("capability") is not None:
            values["capability"] = tuple(values["capability"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's config says; no weights are read.

    Attributes:
        model_type: transformers' ``model_type``, such as ``llama``.
        architecture: Class that is built, such as ``LlamaForCausalLM``.
        num_parameters: All parameters, tied ones once.
        num_layers: Transformer blocks; None if the config does not say.
        max_positions: Longest sequence the config declares; None if it declares none.
        vocab_size: Rows of the embedding.
        revision: Commit of the hub repository; None for a local folder.
        keeps_documents_apart: Whether flattened documents, told apart by ``position_ids`` alone,
            attend only to themselves, per attention implementation; None where not tested.
        has_chat_template: Whether the tokenizer carries one.
        quantized: Whether the checkpoint itself is already quantised.
        declared_architecture: Class name that the config gives, which transformers may not know;
            TRL then takes the class for the model type. Empty if not known.
        num_experts: Experts per layer of a mixture of experts; 0 for other models.
        share_in_linear: Share (0 to 1) of the parameters in linear layers and embeddings: what is
            outside of them, such as fused experts, bitsandbytes does not quantise.
    """

    model_type: str
    architecture: str
    num_parameters: int
    num_layers: int | None
    max_positions: int | None
    vocab_size: int
    revision: str | None = None
    keeps_documents_apart: Mapping[str, bool] = field(default_factory=dict)
    has_chat_template: bool = False
    quantized: bool = False
    declared_architecture: str = ""
    num_experts: int = 0
    share_in_linear: float = 1.0

    def notices(self, *, predicted: bool) -> tuple[str, ...]:
        """Return what a user should know about figures of such a model, in whole sentences."""
        found = []
        if self.num_experts and predicted:
            found.append(
                f"The model is a mixture of {self.num_experts} experts per layer. That its memory "
                "is predicted well was not checked on a card: kernels for experts differ, and in "
                "some the routing decides. Verify on the card before you rely on it."
            )
        if self.share_in_linear < _MOSTLY:
            found.append(
                f"Only {self.share_in_linear * 100:.0f} % of the model's parameters are in linear "
                "layers and embeddings. bitsandbytes quantises no others, such as fused experts, "
                "so that 8-bit and 4-bit weights save little."
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "keeps_documents_apart": dict(self.keeps_documents_apart)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelFacts:
        """Return the record that :meth:`to_dict` wrote."""
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProfile:
    """Token lengths of a data set, as TRL tokenises it.

    Attributes:
        num_rows: Rows with at least one token.
        num_tokens: Tokens of all rows.
        num_loss_tokens: Tokens that carry loss (label not -100).
        length_counts: Token length to number of rows.
        max_lengths: Candidate lengths, ascending, that the tables below speak of.
        loss_tokens_kept: Per candidate length, tokens with loss left by truncation at that length
            (``keep_start``; ``bfd`` packing cuts the same way).
        rows_cut: Per candidate length, rows longer than it.
        rows_dropped: Per candidate length, rows left without any loss token.
        format: Data format, such as ``messages`` or ``prompt-completion``.
        fingerprint: Digest of the tokenised rows.
        num_empty_rows: Rows without a token, dropped before anything else.
        sequences_per_row: Sequences that the model sees per row: 2 for pairs of preferences.
            ``length_counts`` and the tables then speak of the longer one.
        column_counts: Per column, token length to number of rows; empty if rows have one only.
        odd_roles: Role that chat templates do not commonly know to the number of messages.
    """

    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    length_counts: Mapping[int, int]
    max_lengths: tuple[int, ...]
    loss_tokens_kept: tuple[int, ...]
    rows_cut: tuple[int, ...]
    rows_dropped: tuple[int, ...]
    format: str
    fingerprint: str
    num_empty_rows: int = 0
    sequences_per_row: int = 1
    column_counts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    odd_roles: Mapping[str, int] = field(default_factory=dict)

    def notices(self) -> tuple[str, ...]:
        """Return what is odd in the data though TRL trains on it, in whole sentences."""
        if not self.odd_roles:
            return ()
        listed = list(self.odd_roles.items())
        named = ", ".join(f"{role!r} ({counted(n, 'message')})" for role, n in listed[:NUM_NAMED])
        more = f" and {len(listed) - NUM_NAMED} more" if len(listed) > NUM_NAMED else ""
        known = f"{', '.join(KNOWN_ROLES[:-1])} nor {KNOWN_ROLES[-1]}"
        return (
            f"The data's messages have roles that are neither {known}: {named}{more}. TRL"
            " trains on them as the chat template writes them; if that is a slip, correct the"
            " data.",
        )

    @property
    def longest(self) -> int:
        """Return the length of the longest row, in tokens."""
        return max(self.length_counts)

    @property
    def mean_length(self) -> float:
        """Return the mean length of a sequence, in tokens."""
        return self.num_tokens / (self.num_rows * self.sequences_per_row)

    def quantile(self, share: float) -> int:
        """Return the smallest length that a ``share`` (0 to 1) of the rows do not exceed."""
        needed = share * self.num_rows
        seen = 0
        for length in sorted(self.length_counts):
            seen += self.length_counts[length]
            if seen >= needed:
                return length
        return self.longest

    def coverage(self, max_length: int | None) -> float:
        """Return the share (0 to 1) of loss tokens that truncation at ``max_length`` keeps.

        Between two tabled lengths the smaller one's share is given, so it is never overstated.

        Raises:
            ValueError: If ``max_length`` lies below every tabled length.
        """
        if max_length is None or max_length >= self.longest:
            return 1.0
        return self.loss_tokens_kept[self._tabled(max_length)] / self.num_loss_tokens

    def rows_left(self, max_length: int) -> int:
        """Return the rows that keep a loss token when cut at ``max_length``: TRL drops the others.

        Between two tabled lengths the smaller one's count is given, so it is never overstated.

        Raises:
            ValueError: If ``max_length`` lies below every tabled length.
        """
        return self.num_rows - self.rows_dropped[self._tabled(max_length)]

    def _tabled(self, max_length: int) -> int:
        """Return the place in the tables of ``max_length``, or of the length below it."""
        index = bisect_left(self.max_lengths, max_length)
        if index == len(self.max_lengths) or self.max_lengths[index] != max_length:
            index -= 1
        if index < 0:
            raise ValueError(f"no coverage is known below {self.max_lengths[0]} tokens")
        return index

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        data = asdict(self)
        data["length_counts"] = _with_text_keys(self.length_counts)
        data["column_counts"] = {
            name: _with_text_keys(counts) for name, counts in self.column_counts.items()
        }
        data["odd_roles"] = dict(self.odd_roles)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataProfile:
        """Return the record that :meth:`to_dict` wrote."""
        values = dict(data)
        values["length_counts"] = _with_numbers(values["length_counts"])
        values["column_counts"] = {
            name: _with_numbers(counts) for name, counts in values.get("column_counts", {}).items()
        }
        for name in ("max_lengths", "loss_tokens_kept", "rows_cut", "rows_dropped"):
            values[name] = tuple(values[name])
        return cls(**values)


def _with_text_keys(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(key): value for key, value in counts.items()}


def _with_numbers(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(key): value for key, value in counts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything a knob's rule may look at.

    Attributes:
        trainer: Trainer name, such as ``sft``.
        device: The device probes run on.
        model: What the model's config says.
        data: Token lengths.
        packages: Distribution name to installed version; missing packages are absent.
        global_batch: Rows per optimizer step, over all devices; never varied by the search.
        num_processes: Data-parallel processes per probe.
        min_coverage: Least share (0 to 1) of loss tokens a candidate must train on.
        budget_bytes: Peak memory that a candidate must stay within; None if not known.
        refusals: Per knob, values that were found to fail or to have no effect in this trainer,
            each with the reason.
        sharding: How the user's own accelerate configuration shards, such as ``zero3``; None
            where the knob ``sharding`` decides.
    """

    trainer: str
    device: DeviceInfo
    model: ModelFacts
    data: DataProfile
    packages: Mapping[str, str]
    global_batch: int
    num_processes: int = 1
    min_coverage: float = 0.0
    budget_bytes: int | None = None
    refusals: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sharding: str | None = None

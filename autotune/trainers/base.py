"""What a trainer adapter must offer; the only place that knows SFT, DPO, GRPO, ... apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from autotune.errors import UnknownNameError
from autotune.probe.spec import ProbeSpec
from autotune.registry import Registry
from autotune.space import trainers

if TYPE_CHECKING:
    from autotune.devices.base import DeviceBackend


class DivergedError(Exception):
    """The loss is no longer a finite number."""


class Recorder(Protocol):
    """Receives the events of a training run; reads clocks and memory at each."""

    def enter_phase(self, name: str) -> None:
        """Start phase ``name``, one of ``autotune.probe.result.PHASES``."""
        ...

    def begin_step(self) -> None:
        """Start an optimizer step."""
        ...

    def end_generation(self) -> None:
        """Close the generation that began with the step."""
        ...

    def end_micro_batch(self) -> None:
        """Close one micro-batch (data, forward, backward)."""
        ...

    def end_step(self) -> None:
        """Close the optimizer step; what came after the last micro-batch is the optimizer's."""
        ...

    def count(
        self, *, num_tokens: int, num_positions: int, num_loss_tokens: int, num_rows: int
    ) -> None:
        """Add a micro-batch's counts to the current step."""
        ...

    def report_loss(self, loss: float) -> None:
        """Take a step's loss.

        Raises:
            DivergedError: If it is not finite.
        """
        ...

    def describe_run(self, **facts: Any) -> None:
        """Take facts of the run, such as ``worst_batch`` and ``rows_per_epoch``."""
        ...


class TrainingSession(Protocol):
    """A built trainer with its batches laid out, ready to run."""

    def run(self, recorder: Recorder) -> None:
        """Train all steps of the probe, telling ``recorder`` of each event."""
        ...


class TrainerAdapter(Protocol):
    """Builds one kind of TRL trainer from a probe's spec."""

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenise the data once and return model facts and data profile as plain JSON."""
        ...

    def build(self, spec: ProbeSpec, device: DeviceBackend) -> TrainingSession:
        """Return a session for ``spec``."""
        ...


LAID_ASIDE: Mapping[str, object] = {
    # Of loaders in processes of their own, which a probe has not.
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    # Rows come with their labels; TRL refuses to find an assistant's tokens in them again.
    "assistant_only_loss": False,
    "eval_on_start": False,
    "streaming": False,
}
"""What a probe sets these keys to where a configuration has them."""

registry: Registry[Callable[[], TrainerAdapter]] = Registry(
    "trainer", group=trainers.GROUP, modules=trainers.BUILTIN
)


def load(name: str) -> TrainerAdapter:
    """Return the adapter called ``name``: a registered name or ``module:class``.

    Raises:
        UnknownNameError: If there is none.
    """
    module_name, _, attribute = name.partition(":")
    if attribute:
        try:
            return getattr(import_module(module_name), attribute)()  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            raise UnknownNameError("trainer", name, registry.names()) from error
    return registry.get(name)()

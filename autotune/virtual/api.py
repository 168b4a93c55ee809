"""``accelerator``: the pretend accelerator around any PyTorch training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autotune.errors import UsageError
from autotune.virtual import cards, device, placement, state, values
from autotune.virtual.cards import CPU, Card
from autotune.virtual.roofline import Roofline
from autotune.virtual.session import Session
from autotune.virtual.trace import Trace


def session_for(card: Card) -> Session:
    """Return a session that has the card's memory, capability and rates.

    What stands for a CPU (:func:`autotune.standin.of_cpu`) computes as a CPU does.
    """
    is_cpu = card.architecture == CPU
    return Session(
        host_kernels=is_cpu,
        has_triton=not is_cpu,
        scratch=not is_cpu,
        capability=card.capability,
        workspace_bytes=card.cublas_workspace_bytes,
        roofline=Roofline(card),
        name=card.name,
        total_bytes=card.memory_bytes,
        multiprocessors=card.multiprocessors,
        supports_bf16=card.supports_bf16,
    )


@contextlib.contextmanager
def accelerator(card: str | Card) -> Iterator[Trace]:
    """Run the block's PyTorch code on a pretend ``card``; yield the trace of what it allocates.

    Inside, ``torch.device("virtual")`` exists, and Trainers of transformers and TRL choose it.
    Tensors there have no data: losses read as 1.0, numbers are finite, comparisons of unknown
    values are false, and unknown masks select everything. What was made in an earlier block is not
    counted in this one: make model and optimizer inside. It only traces: nothing runs out of
    memory, and :func:`autotune.virtual.fit` says afterwards whether the card would have.
    ``torch.cuda.is_available()`` is false, as the card is no CUDA device of this machine: place
    tensors with ``device="virtual"``, not ``"cuda"``.

    Args:
        card: A name as in ``--device virtual:NAME``, or a :class:`~autotune.virtual.cards.Card`.

    Raises:
        UnknownNameError: If there is no such card.
        PrerequisiteError: If the installed PyTorch cannot have a device made in Python.
        UsageError: If another such block is active.
    """
    if state.current() is not None:
        raise UsageError("a virtual accelerator is active already; leave its block first.")
    found = cards.find(card) if isinstance(card, str) else card
    device.install()
    session = session_for(found)
    state.activate(session)
    try:
        with placement.placed(session):
            yield session.trace
    finally:
        session.trace.close()
        state.activate(None)
        values.clear()

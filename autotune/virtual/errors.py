"""What the pretend accelerator cannot do."""

from __future__ import annotations


class NotVirtual(NotImplementedError):  # noqa: N818 - it says what is the case, as NotImplemented
    """Something needs a real card: its code, its data, or its driver.

    Args:
        what: What was asked for, such as ``torch.compile``.
        reason: Why it can't be had without a card; ends the sentence.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} cannot run on a virtual accelerator: {reason}.")
        self.what = what
        self.reason = reason

    def __reduce__(self) -> tuple[type[NotVirtual], tuple[str, str]]:
        # Exceptions are rebuilt from their arguments, of which the base class keeps the message.
        return type(self), (self.what, self.reason)


class NotOnCard(ImportError, ValueError):  # noqa: N818 - as above
    """A package has no code for the card: what importing it there says, and the candidate's fault.

    Libraries expect an ``ImportError``; a ``ValueError`` is how this package refuses a candidate.
    """

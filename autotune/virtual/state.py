"""Which pretend accelerator is active in this process; none most of the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.virtual.session import Session

_session: Session | None = None


def current() -> Session | None:
    """Return the active session; None outside of one."""
    return _session


def activate(session: Session | None) -> None:
    """Make ``session`` the one that counts."""
    global _session
    _session = session

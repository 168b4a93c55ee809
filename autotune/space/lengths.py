"""Sequence lengths that a person would choose: four per octave.

The knob ``max_length`` offers only such lengths, and the step that tokenises the data tabulates
coverage at exactly these, so that every offered length has an exact coverage.
"""

from __future__ import annotations

_FINEST_STEP = 8


def _step_above(length: int) -> int:
    """Return the distance between useful lengths just above ``length``."""
    # Lengths in (2**k, 2**(k + 1)] are multiples of 2**k / 4, which is four per octave.
    return max(_FINEST_STEP, (1 << (length.bit_length() - 1)) // 4) if length > 0 else _FINEST_STEP


def round_up_useful(length: int) -> int:
    """Return the smallest useful length that is at least ``length``, in tokens.

    Raises:
        ValueError: If ``length`` is not positive.
    """
    if length <= 0:
        raise ValueError(f"a length must be greater than zero, not {length}")
    # The octave is open at its lower end: 64 itself belongs to the multiples of 8.
    step = _step_above(length - 1)
    return -(-length // step) * step


def useful_lengths(limit: int) -> tuple[int, ...]:
    """Return the useful lengths up to and including ``limit``, ascending, in tokens.

    They are multiples of 8 up to 64, of 16 up to 128, of 32 up to 256, of 64 up to 512 and so on.
    """
    lengths = []
    length = _FINEST_STEP
    while length <= limit:
        lengths.append(length)
        length += _step_above(length)
    return tuple(lengths)

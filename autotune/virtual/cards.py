"""The hardware catalogue: what is known of each card, and where each figure comes from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from autotune.errors import PrerequisiteError, UnknownNameError, UsageError
from autotune.files import check_regular
from autotune.space.context import DeviceInfo
from autotune.units import MIB, parse_bytes

CATALOGUE = Path(__file__).with_name("gpus.toml")
_CUSTOM = "a100-80gb"
"""A card that is given by its size alone is taken for an Ampere data-centre card of that size."""

SOURCE_OF = {
    "compute_capability": "capability",
    "multiprocessors": "capability",
    "memory_bytes": "memory",
    "driver_memory_mib": "driver_memory",
    "context_bytes": "context",
    "bandwidth_bytes_per_s": "bandwidth",
    "link_bytes_per_s": "link",
    "l2_bytes": "l2",
    "cublas_workspace_bytes": "cublas_workspace",
    "tflops": "tflops",
}
"""The key in ``sources`` that tells of each figure."""

CPU = "cpu"
"""Architecture of what stands for a processor; the catalogue has none such."""

LAUNCH_S = 6e-6
"""Time per operator that can't be hidden: PyTorch's dispatch and the kernel launch."""

FLASH_CAPABILITY = (8, 0)
"""From this compute capability on there is FlashAttention, 2 and PyTorch's own."""
_TEXTS = ("name", "vendor", "architecture", "compute_capability")
_INTEGERS = (
    "memory_bytes",
    "driver_memory_mib",
    "context_bytes",
    "multiprocessors",
    "l2_bytes",
    "cublas_workspace_bytes",
)
_MAY_BE_ZERO = ("context_bytes", "l2_bytes", "cublas_workspace_bytes")
_FLOATS = ("bandwidth_bytes_per_s", "link_bytes_per_s")
_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])|gfx([0-9]{1,2})([0-9])[0-9a-f]", re.ASCII)
_SIZE = re.compile(r"[-+]?([0-9.]+|nan|inf(inity)?)\s*([kmgt]i?b?|b)", re.ASCII | re.IGNORECASE)
"""What was meant as a size, be it one or not."""
_MOST_BYTES = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One accelerator.

    Attributes:
        id: Name in the catalogue, such as ``rtx-4090``.
        name: As the driver reports it.
        vendor: ``nvidia`` or ``amd``.
        architecture: ``ada``, ``hopper``, ``cdna3``, ...
        compute_capability: ``8.9``; AMD: ``gfx942``.
        multiprocessors: Streaming multiprocessors or compute units.
        memory_bytes: Memory that a process can use, context included.
        driver_memory_mib: What the driver's tool reports as total, in MiB.
        context_bytes: Taken by the context and the libraries' kernels.
        bandwidth_bytes_per_s: Device memory, theoretical.
        link_bytes_per_s: To the host, one direction, theoretical.
        l2_bytes: Last level of L2.
        cublas_workspace_bytes: PyTorch's workspace per cuBLAS handle and stream.
        tflops: Dense rate per dtype in 10^12 per s, accumulated in float32.
        aliases: Other names.
        sources: Where each figure comes from.
    """

    id: str
    name: str
    vendor: str
    architecture: str
    compute_capability: str
    multiprocessors: int
    memory_bytes: int
    driver_memory_mib: int
    context_bytes: int
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    l2_bytes: int
    cublas_workspace_bytes: int
    tflops: Mapping[str, float]
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def capability(self) -> tuple[int, int]:
        """Return the CUDA capability; what PyTorch on ROCm reports for AMD's cards."""
        # ROCm builds report gfx90a and gfx942 as (9, 0) and (9, 4).
        found = _CAPABILITY.fullmatch(self.compute_capability)
        if found is None:
            raise ValueError(f"no compute capability: {self.compute_capability!r}")
        major, minor = (part for part in found.groups() if part is not None)
        return int(major), int(minor)

    @property
    def supports_bf16(self) -> bool:
        """Return whether the matrix units take bfloat16."""
        return "bf16" in self.tflops


def _table() -> dict[str, Any]:
    with CATALOGUE.open("rb") as file:
        return tomllib.load(file)["cards"]  # type: ignore[no-any-return]


@cache
def catalogue() -> dict[str, Card]:
    """Return all cards by id."""
    return {name: _card(name, entry, CATALOGUE.name) for name, entry in _table().items()}


def _card(identity: str, entry: Mapping[str, Any], where: str) -> Card:
    known = set(Card.__dataclass_fields__) - {"id"}
    for key in entry:
        if key not in known:
            raise UnknownNameError("card field", key, known, where=where)
    missing = sorted(known - {"aliases", "sources"} - set(entry))
    if missing:
        raise UsageError(
            f"the card {identity!r} in {where} lacks {', '.join(missing)}.",
            hint="Give every field; `autotune gpus CARD` shows those of a known one.",
        )
    for key in _TEXTS:
        if not isinstance(entry[key], str) or not entry[key].strip():
            raise UsageError(f"{key} of the card {identity!r} in {where} must be text.")
    for key in (*_INTEGERS, *_FLOATS):
        value = entry[key]
        if not _is_number(value) or value < (0 if key in _MAY_BE_ZERO else 1):
            raise UsageError(
                f"{key} of the card {identity!r} in {where} is {value!r}, not a positive number."
            )
    tflops = entry["tflops"]
    if not isinstance(tflops, Mapping) or not all(
        _is_number(rate) and rate > 0 for rate in tflops.values()
    ):
        raise UsageError(f"tflops of the card {identity!r} in {where} must map dtypes to numbers.")
    for dtype in tflops:
        if dtype not in _DTYPES:
            raise UnknownNameError("dtype", dtype, _DTYPES, where=f"tflops in {where}")
    if "fp32" not in tflops:
        raise UsageError(f"tflops of the card {identity!r} in {where} lacks fp32.")
    aliases, sources = entry.get("aliases", []), entry.get("sources", {})
    if not isinstance(aliases, (list, tuple)) or not all(
        isinstance(item, str) for item in aliases
    ):
        raise UsageError(f"aliases of the card {identity!r} in {where} must be a list of names.")
    if not all(isinstance(text, str) for text in sources.values()):
        raise UsageError(f"sources of the card {identity!r} in {where} must map names to texts.")
    values = {**entry, "aliases": tuple(aliases)}
    values.update({key: int(entry[key]) for key in _INTEGERS})
    values.update({key: float(entry[key]) for key in _FLOATS})
    card = Card(id=identity, **values)
    try:
        card.capability  # noqa: B018  looked at to see if it can be read
    except ValueError as error:
        raise UsageError(
            f"compute_capability of the card {identity!r} in {where} is"
            f" {card.compute_capability!r}.",
            hint='Write it as "8.9", or for AMD as "gfx942".',
        ) from error
    _check_room(card, f" in {where}")
    return card


def _is_number(value: object) -> bool:
    # Neither infinite, nor more than PyTorch could count.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 63


def _check_room(card: Card, where: str = "") -> None:
    """Refuse a card whose memory the context takes alone, and one beyond all that is built."""
    if card.memory_bytes > _MOST_BYTES:
        raise UsageError(
            f"the card {card.id!r}{where} has {card.memory_bytes:,} bytes of memory; at most"
            f" {_MOST_BYTES >> 40:,} TiB can be predicted.",
            hint="Write a size like 24GiB.",
        )
    if card.memory_bytes <= card.context_bytes:
        raise UsageError(
            f"the card {card.id!r}{where} has {card.memory_bytes:,} bytes of memory, and the"
            f" context takes {card.context_bytes:,} of them.",
            hint="Give it more, or a card's file with another context_bytes.",
        )


def find(name: str) -> Card:
    """Return the card called ``name``: an id or alias, a size (``24GiB``), or a TOML file.

    A file holds the fields of one card; ``base`` names a card of the catalogue to take the
    others from.

    Raises:
        UnknownNameError: If the catalogue has no such card; names the nearest ones.
        UsageError: If the file or the size is wrong.
        PrerequisiteError: If there is no such file.
    """
    if name.endswith(".toml"):
        return _from_file(_path(name))
    cards = catalogue()
    if card := _by_name().get(_compact(name)):
        return card
    text = name.strip()
    if not text:
        raise UsageError(
            "virtual: names no card.", hint="Write virtual:rtx-4090; `autotune gpus` lists them."
        )
    if text[:1].isdigit() or _SIZE.fullmatch(text):
        try:
            size = parse_bytes(text)
        except ValueError as error:
            if _SIZE.fullmatch(text):
                raise UsageError(
                    f"the card {text!r} cannot be: {error}.",
                    hint="`autotune gpus` lists the cards that have a name.",
                ) from error
        else:
            return _of_size(size, text)
    names = [*cards, *(alias for card in cards.values() for alias in card.aliases)]
    raise UnknownNameError(
        "card", name, names, listing="`autotune gpus` lists all cards.", num_known=len(cards)
    )


def is_known(name: str) -> bool:
    """Return whether the catalogue has a card of that id, name or alias."""
    return _compact(name) in _by_name()


def _compact(name: str) -> str:
    """Return a name such that ``RTX 4090``, ``rtx_4090`` and ``rtx4090`` are ``rtx-4090``."""
    return re.sub(r"[\s_-]+", "", name.lower())


@cache
def _by_name() -> dict[str, Card]:
    """Return the cards by every name that they have, ids before aliases."""
    cards = catalogue().values()
    return {
        _compact(name): card
        for names in (
            [(alias, card) for card in cards for alias in (card.name, *card.aliases)],
            [(card.id, card) for card in cards],
        )
        for name, card in names
    }


def _path(name: str) -> Path:
    """Return the path that ``name`` means.

    Raises:
        UsageError: If there is no such user or folder.
    """
    try:
        return Path(name).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"the card file {name!r} cannot be read: {error}") from error


def _of_size(size: int, name: str) -> Card:
    base = catalogue()[_CUSTOM]
    values = {key: getattr(base, key) for key in Card.__dataclass_fields__}
    if size < MIB and name.isdecimal():
        raise UsageError(
            f"a card of {size:,} bytes holds nothing.",
            hint=f"Did you mean {size}GiB? Without a unit, a size is in bytes.",
        )
    values.update(
        id=name,
        name=f"a card of {name} (rates of {base.name})",
        memory_bytes=size,
        driver_memory_mib=size >> 20,
        aliases=(),
        sources={key: f"taken from {base.id}: {text}" for key, text in base.sources.items()}
        | dict.fromkeys(("memory", "driver_memory"), "the size that was asked for"),
    )
    card = Card(**values)
    _check_room(card)
    return card


def _from_file(path: Path) -> Card:
    check_regular(path)
    try:
        with path.open("rb") as file:
            entry = tomllib.load(file)
    except FileNotFoundError as error:
        raise PrerequisiteError(
            f"there is no card file {str(path)!r}.", hint="`autotune gpus` lists known cards."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the card file {str(path)!r} cannot be read: {error}") from error
    base = entry.pop("base", None)
    inherited: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if base is not None:
        is_name = isinstance(base, str) and not base.endswith(".toml")
        table, card = _table(), find(base) if is_name else None
        if card is None or card is not catalogue().get(card.id):
            raise UsageError(
                f"the base {base!r} of the card file {str(path)!r} is not in the catalogue.",
                hint="`autotune gpus` lists the cards that can be a base.",
            )
        named = f"{card.name} as in {path.name}"
        inherited = {**table[card.id], "name": named, "aliases": ()}
        sources = {key: f"taken from {card.id}: {text}" for key, text in card.sources.items()}
    sources |= {SOURCE_OF[key]: f"given in {path.name}" for key in entry if key in SOURCE_OF}
    given = entry.get("sources", {})
    if not isinstance(given, Mapping):
        raise UsageError(f"sources in the card file {str(path)!r} must map names to texts.")
    return _card(path.stem, {**inherited, **entry, "sources": {**sources, **given}}, path.name)


def full_name(device: str) -> str:
    """Return a device's name that means the same in every folder: a card's file by its whole path.

    Args:
        device: As given to ``--device``; any but a virtual card's is returned as it is.
    """
    kind, _, card = device.partition(":")
    if kind != "virtual" or not card.endswith(".toml"):
        return device
    return f"{kind}:{_path(card)}"


def device_info(card: Card, device: str) -> DeviceInfo:
    """Return what knobs and budgets decide on; they see a CUDA device, which it stands for.

    Args:
        card: Its figures.
        device: Its name as a device.
    """
    return DeviceInfo(
        name=device,
        kind="cuda",
        label=f"{card.name} (virtual)",
        total_bytes=card.memory_bytes,
        free_bytes=card.memory_bytes,
        supports_bf16=card.supports_bf16,
        capability=card.capability,
    )

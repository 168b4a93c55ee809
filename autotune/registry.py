"""One small registry for knobs, trainers, devices, executors and objectives.

Built-in entries register by decorator; outside packages by entry points, loaded on first use. A
broken entry point is a warning and a line in ``autotune doctor``, never a crash.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from autotune.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to entries of one kind.

    Args:
        kind: What an entry is, in the singular; used in messages.
        group: Entry-point group that outside packages register under.
        builtin: Modules that register the built-in entries when imported.
        modules: The same where a module registers one entry and takes long to import: name to
            module, of which only those that are asked for are imported.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str,
        builtin: tuple[str, ...] = (),
        modules: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.group = group
        self.broken: dict[str, str] = {}
        self._builtin = builtin
        self._modules = dict(modules or {})
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str, entry: T | None = None) -> Callable[[T], T]:
        """Add ``entry`` under ``name``, or return a decorator that does."""

        def add(item: T) -> T:
            if name in self._entries and self._entries[name] is not item:
                raise ValueError(f"the {self.kind} {name!r} is registered twice")
            self._entries[name] = item
            return item

        if entry is not None:
            add(entry)
        return add

    def get(self, name: str, *, where: str = "") -> T:
        """Return the entry called ``name``.

        Raises:
            UnknownNameError: If there is none; it lists the nearest names.
        """
        if name in self._modules:
            import_module(self._modules[name])
        else:
            self._load()
        try:
            return self._entries[name]
        except KeyError:
            raise UnknownNameError(self.kind, name, self.declared(), where=where) from None

    def names(self) -> tuple[str, ...]:
        """Return all names, in the order of registration."""
        self._load()
        return tuple(self._entries)

    def declared(self) -> tuple[str, ...]:
        """Return the names known without importing anything: registered so far, or declared."""
        points = (point.name for point in entry_points(group=self.group))
        return tuple(dict.fromkeys((*self._entries, *self._modules, *points)))

    def __iter__(self) -> Iterator[tuple[str, T]]:
        """Yield name and entry, in the order of registration."""
        self._load()
        yield from self._entries.items()

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for module in (*self._builtin, *self._modules.values()):
            import_module(module)
        for point in entry_points(group=self.group):
            try:
                self.register(point.name, point.load())
            except Exception as error:  # noqa: BLE001  a stranger's package may raise anything
                self.broken[point.name] = f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"the {self.kind} plug-in {point.name!r} could not be loaded ({error})",
                    stacklevel=2,
                )

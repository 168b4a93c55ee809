from __future__ import annotations

from typing import Any

import pytest

from autotune import registry as module
from autotune.errors import UnknownNameError
from autotune.registry import Registry


class Point:
    """An entry point."""

    def __init__(self, name: str, load: Any) -> None:
        self.name = name
        self.load = load


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Any]:
    monkeypatch.setattr(module, "entry_points", lambda group: [])
    return Registry("fruit", group="tests.fruit")


def test_entries_are_found_by_name(registry: Registry[Any]) -> None:
    registry.register("apple", 1)

    @registry.register("pear")
    def pear() -> int:
        return 2

    assert registry.get("apple") == 1
    assert registry.get("pear") is pear
    assert registry.names() == ("apple", "pear")
    assert dict(registry) == {"apple": 1, "pear": pear}


def test_an_unknown_name_lists_the_nearest(registry: Registry[Any]) -> None:
    registry.register("apple", 1)
    with pytest.raises(UnknownNameError, match=r"x\.yaml, line 3: unknown fruit 'aple'") as caught:
        registry.get("aple", where="x.yaml, line 3")
    assert "'apple'" in caught.value.hint


def test_a_name_has_one_entry(registry: Registry[Any]) -> None:
    entry = object()
    registry.register("apple", entry)
    registry.register("apple", entry)
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("apple", object())


def test_a_falsy_entry_is_an_entry(registry: Registry[Any]) -> None:
    registry.register("zero", 0)
    assert registry.get("zero") == 0


def test_plug_ins_are_loaded_once_and_on_demand(
    registry: Registry[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []

    def load() -> str:
        loads.append("kiwi")
        return "a kiwi"

    monkeypatch.setattr(module, "entry_points", lambda group: [Point("kiwi", load)])
    registry.register("apple", 1)
    assert loads == []
    assert registry.get("kiwi") == "a kiwi"
    assert registry.names() == ("apple", "kiwi")
    assert loads == ["kiwi"]


@pytest.mark.parametrize("error", [ImportError("no juice"), RuntimeError("rotten"), SyntaxError()])
def test_a_broken_plug_in_is_a_warning_and_is_listed(
    error: Exception, registry: Registry[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Any:
        raise error

    points = [Point("kiwi", load), Point("lime", lambda: "a lime")]
    monkeypatch.setattr(module, "entry_points", lambda group: points)
    with pytest.warns(UserWarning, match="'kiwi' could not be loaded"):
        assert registry.get("lime") == "a lime"
    assert registry.broken == {"kiwi": f"{type(error).__name__}: {error}"}
    assert "kiwi" not in registry.names()


def test_a_plug_in_cannot_replace_a_built_in_entry(
    registry: Registry[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "entry_points", lambda group: [Point("apple", lambda: "wax")])
    registry.register("apple", 1)
    with pytest.warns(UserWarning, match="twice"):
        assert registry.get("apple") == 1
    assert "apple" in registry.broken


def test_built_in_modules_are_imported_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "entry_points", lambda group: [])
    imported: list[str] = []
    monkeypatch.setattr(module, "import_module", imported.append)
    registry: Registry[Any] = Registry("fruit", group="x", builtin=("a.b", "c"))
    assert imported == []
    assert registry.names() == ()
    assert registry.names() == ()
    assert imported == ["a.b", "c"]

"""Reads a search space from YAML; every error names the file and the line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import SpaceError, UnknownNameError
from autotune.files import check_regular
from autotune.space.bounds import find_excess
from autotune.space.domains import Choice, Domain
from autotune.space.fixed import refuse_fixed
from autotune.space.forms import domain_from_json
from autotune.space.knob import Knob, not_for, registry
from autotune.space.trainers import is_known, known

SCHEMA = 1
_KEYS = ("schema", "trainer", "description", "knobs", "fixed")
# YAML 1.1 reads 1e-4 as text, for want of a dot.
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceParts:
    """What a search space's file holds.

    Attributes:
        trainer: The trainer that it is for.
        description: For people.
        knobs: In the order of the file, with the file's values.
        fixed: TRL keys that every candidate has.
        places: Where each of those stands, for errors.
    """

    trainer: str
    description: str
    knobs: tuple[Knob, ...]
    fixed: dict[str, Any]
    places: dict[str, str]


def read(path: Path) -> SpaceParts:
    """Return what the file holds.

    Raises:
        UnknownNameError: If it names a knob, a key or a trainer that does not exist.
        SpaceError: If it cannot be read or is wrong.
    """
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpaceError(f"the search space {path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpaceError(f"the search space {path} cannot be read: {error}.") from error
    return parse(text, str(path))


def parse(text: str, source: str = "<text>") -> SpaceParts:
    """Return what YAML text holds; ``source`` names it in errors."""
    return _Reader(source).read(text)


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source

    def read(self, text: str) -> SpaceParts:
        try:
            excess = find_excess(text)
            if excess is not None:
                line, reason = excess
                raise SpaceError(
                    f"{self.source}, line {line}: {reason}.",
                    hint="A search space is a short list of knobs; see search_spaces/sft.yaml.",
                )
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise SpaceError(
                f"{self.source}, line {line}: not valid YAML: {error.problem or error.context}."
            ) from error
        except yaml.YAMLError as error:
            raise SpaceError(f"{self.source}: not valid YAML: {error}.") from error
        if root is None:
            raise SpaceError(f"{self.source}: the file is empty.")
        parts = dict(self._items(root, "a search space"))
        for key, (key_node, _) in parts.items():
            if key not in _KEYS:
                raise UnknownNameError("key", key, _KEYS, where=self._where(key_node))
        self._check_schema(root, parts)
        trainer = self._trainer(parts)
        known = {name: knob for name, knob in registry if knob.is_for(trainer)}
        if "knobs" not in parts:
            raise self._error(root, "the key 'knobs' is missing")
        knobs = tuple(
            self._knob(key, node, trainer, key_node)
            for key, (key_node, node) in self._items(parts["knobs"][1], "knobs")
        )
        if not knobs:
            raise self._error(parts["knobs"][1], "at least one knob is needed")
        return SpaceParts(
            trainer=trainer,
            description=self._text(parts, "description", ""),
            knobs=knobs,
            fixed=self._fixed(parts, known),
            places=self._places(parts),
        )

    def _check_schema(
        self, root: yaml.Node, parts: Mapping[str, tuple[yaml.Node, yaml.Node]]
    ) -> None:
        if "schema" not in parts:
            raise self._error(root, f"the key 'schema' is missing; this version reads {SCHEMA}")
        node = parts["schema"][1]
        schema = self._plain(node)
        if isinstance(schema, bool) or schema != SCHEMA:
            raise self._error(node, f"schema {schema!r} is unknown; this version reads {SCHEMA}")

    def _trainer(self, parts: Mapping[str, tuple[yaml.Node, yaml.Node]]) -> str:
        trainer = self._text(parts, "trainer", "sft")
        if not is_known(trainer):
            raise UnknownNameError(
                "trainer", trainer, known(), where=self._where(parts["trainer"][1])
            )
        return trainer

    def _text(
        self, parts: Mapping[str, tuple[yaml.Node, yaml.Node]], key: str, default: str
    ) -> str:
        if key not in parts:
            return default
        value = self._plain(parts[key][1])
        if not isinstance(value, str):
            raise self._error(parts[key][1], f"{key} must be text, not {value!r}")
        return value

    def _knob(self, name: str, node: yaml.Node, trainer: str, key_node: yaml.Node) -> Knob:
        usable = [found for found, knob in registry if knob.is_for(trainer)]
        if name not in registry.names():
            raise UnknownNameError("knob", name, usable, where=self._where(key_node))
        knob = registry.get(name)
        if not knob.is_for(trainer):
            raise self._error(key_node, not_for(knob, trainer))
        try:
            return replace(knob, domain=self._domain(knob, node))
        except SpaceError as error:
            if error.message.startswith(f"{self.source}, line"):
                raise
            raise self._error(node, f"{name}: {error.message}", error.hint) from error

    def _domain(self, knob: Knob, node: yaml.Node) -> Domain | None:
        if isinstance(node, yaml.MappingNode):
            domain = domain_from_json(self._plain(node))
            knob.check_domain(domain)
            if isinstance(domain, Choice):
                values = tuple(knob.parse(value) for value in domain.values)
                return Choice(values, ordered=knob.ordered)
            return domain
        if isinstance(node, yaml.SequenceNode):
            if not node.value:
                raise self._error(node, f"{knob.name}: at least one value is needed")
            return self._choice(knob, node.value)
        if self._plain(node) == "auto":
            if knob.default_values is not None:
                return None
            return knob.domain
        return self._choice(knob, [node])

    def _choice(self, knob: Knob, nodes: list[yaml.Node]) -> Choice:
        values = []
        for node in nodes:
            try:
                value = knob.parse(self._plain(node))
            except SpaceError as error:
                if error.message.startswith(f"{self.source}, line"):
                    raise
                raise self._error(node, error.message, error.hint) from error
            if value in values:
                raise self._error(node, f"{knob.name}: the value {value!r} is listed twice")
            values.append(value)
        return Choice(tuple(values), ordered=knob.ordered)

    def _fixed(
        self, parts: Mapping[str, tuple[yaml.Node, yaml.Node]], known: Mapping[str, Knob]
    ) -> dict[str, Any]:
        if "fixed" not in parts or self._is_null(parts["fixed"][1]):
            return {}
        fixed = {}
        for key, (key_node, node) in self._items(parts["fixed"][1], "fixed"):
            value = self._plain(node)
            reason = refuse_fixed(key, value, known.values())
            if reason is not None:
                raise self._error(key_node, reason)
            fixed[key] = value
        return fixed

    def _places(self, parts: Mapping[str, tuple[yaml.Node, yaml.Node]]) -> dict[str, str]:
        node = parts["fixed"][1] if "fixed" in parts else None
        if node is None or self._is_null(node):
            return {}
        return {key: self._where(key_node) for key, (key_node, _) in self._items(node, "fixed")}

    def _items(
        self, node: yaml.Node, what: str
    ) -> Iterator[tuple[str, tuple[yaml.Node, yaml.Node]]]:
        """Yield key, and the nodes of key and value; refuse duplicates."""
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, f"{what} must be a mapping of names to values")
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, f"{what}: a name must be text")
            key = str(key_node.value)
            if key in seen:
                raise self._error(
                    key_node, f"{what}: {key!r} is given twice, first in line {seen[key]}"
                )
            seen[key] = key_node.start_mark.line + 1
            yield key, (key_node, value_node)

    def _plain(self, node: yaml.Node, parents: tuple[int, ...] = ()) -> Any:
        """Return a node as plain JSON values."""
        if id(node) in parents:
            raise self._error(node, "an alias may not refer to itself")
        inside = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            return {
                key: self._plain(item, inside) for key, (_, item) in self._items(node, "a mapping")
            }
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, inside) for item in node.value]
        assert isinstance(node, yaml.ScalarNode)
        if node.tag == "tag:yaml.org,2002:str":
            is_float = node.style is None and _FLOAT.fullmatch(node.value)
            return float(node.value) if is_float else str(node.value)
        try:
            value = yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self._error(node, f"{node.value!r} cannot be read") from error
        if value is not None and not isinstance(value, bool | int | float):
            raise self._error(node, f"{node.value!r} is not a plain value; put it in quotes")
        return value

    def _is_null(self, node: yaml.Node) -> bool:
        return isinstance(node, yaml.ScalarNode) and self._plain(node) is None

    def _where(self, node: yaml.Node) -> str:
        return f"{self.source}, line {node.start_mark.line + 1}"

    def _error(self, node: yaml.Node, message: str, hint: str = "") -> SpaceError:
        return SpaceError(f"{self._where(node)}: {message.rstrip('.')}.", hint=hint)

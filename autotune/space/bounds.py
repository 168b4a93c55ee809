"""Bounds on a YAML text, checked event by event before anything is built from it.

A few lines of aliases can stand for more nodes than fit any memory, and brackets can nest deeper
than Python recurses. Neither is a search space.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

MAX_DEPTH = 32
MAX_SIZE = 50_000
"""Values that a text may stand for once its aliases are written out; a list for a knob may hold
ten thousand (``domains.MAX_VALUES``)."""

_CHARACTERS_PER_VALUE = 256
"""Characters that count as one value more: long texts can be repeated by aliases as well."""


@dataclass(slots=True)
class _Open:
    """A list or mapping that is being read."""

    anchor: str | None
    size: int = 1


def find_excess(text: str) -> tuple[int, str] | None:
    """Return the line, from 1, at which a YAML text goes beyond the bounds, and why; else None.

    Raises:
        yaml.YAMLError: If it is not valid YAML.
    """
    sizes: dict[str, int] = {}
    opened: list[_Open] = []
    total = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(_Open(event.anchor))
            if len(opened) > MAX_DEPTH:
                return line, f"lists and mappings nest more than {MAX_DEPTH} deep"
            total += 1
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            done = opened.pop()
            anchor, size = done.anchor, done.size
        elif isinstance(event, yaml.AliasEvent):
            # One that is not whole yet refers to itself, which the reader refuses.
            anchor, size = None, sizes.get(str(event.anchor), 1)
            total += size
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1 + len(event.value) // _CHARACTERS_PER_VALUE
            total += size
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        if opened:
            opened[-1].size += size
        if total > MAX_SIZE:
            what = "its aliases written out, the text" if sizes else "the text"
            return line, f"{what} stands for more than {MAX_SIZE:,} values"
    return None


def find_repeated(text: str) -> tuple[int, str] | None:
    """Return the line, from 1, at which a mapping repeats a key, and which one; else None.

    Raises:
        yaml.YAMLError: If it is not valid YAML.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    waiting, seen = [root] if root is not None else [], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue  # an alias, maybe of what it is in
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                waiting += [key, value]
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    return line, f"{key.value!r} is given twice, first in line {lines[name]}"
                lines[name] = line
    return None

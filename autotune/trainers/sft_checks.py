"""Rows that TRL cannot train on, found before it is asked to: where they are and what is wrong.

TRL looks at the first row to tell one format from another, and goes on without a word, or stops
with an error about something else, where rows are of no format it knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset

from autotune.errors import UsageError
from autotune.space.context import KNOWN_ROLES
from autotune.units import counted

IGNORED = -100
"""Label of a token without loss."""

MAX_ROLE = 40
"""A text that took the place of a role is shown up to here."""

_CHATS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "messages": (("messages",), "role"),
    "conversations": (("conversations",), "from"),
    "prompt-completion conversational": (("prompt", "completion"), "role"),
}
"""Columns with messages by format, and what the role is called there."""

_SAYS_SOMETHING = ("content", "tool_calls", "function_call", "reasoning_content", "thinking")
_CHAT_HINT = (
    'A message is written like {"role": "user", "content": "..."}. Rename the keys, or convert the'
    " rows to that."
)
_FROM_VALUE_HINT = (
    'In `conversations` a message is written like {"from": "human", "value": "..."}; a column with'
    ' "role" and "content" must be called `messages`.'
)
_TEXT_HINT = "Every row must hold text there. Convert the others, or leave them out."
_IDS_HINT = "Every row must hold a list of whole numbers there. Tokenise the rows again."


def check_rows(raw: Dataset, kind: str, text_field: str) -> None:
    """Check the rows against their format; those that are null or empty are left to the caller.

    Args:
        raw: As read, before TRL has changed anything.
        kind: Their format, as told by the columns and the first row.
        text_field: TRL's ``dataset_text_field``.

    Raises:
        UsageError: Naming the first row that is wrong.
    """
    checks: dict[str, tuple[tuple[str, ...], Callable[[Any], str | None], str]] = {
        "messages": (("messages",), _chat_problem, _CHAT_HINT),
        "conversations": (("conversations",), _from_value_problem, _FROM_VALUE_HINT),
        "prompt-completion conversational": (("prompt", "completion"), _chat_problem, _CHAT_HINT),
        "prompt-completion": (("prompt", "completion"), _text_problem, _TEXT_HINT),
        "text": ((text_field,), _text_problem, _TEXT_HINT),
        "pre-tokenised": (("input_ids", "labels"), _ids_problem, _IDS_HINT),
    }
    columns, problem_of, hint = checks[kind]
    for column in columns:
        if column not in raw.column_names:
            continue
        said = problem_of is not _chat_problem
        for number, value in enumerate(raw[column], start=1):
            # Nothing at all is no wrong format; but labels must be there where there are tokens.
            problem = problem_of(value) if value or column == "labels" else None
            said = said or _says_something(value)
            if problem is not None:
                raise UsageError(
                    f"TRL cannot train on row {number} of the data set: {column!r} {problem}.",
                    hint=hint,
                )
        if not said and any(raw[column]):
            raise UsageError(f"no message in {column!r} has any 'content'.", hint=hint)


def odd_roles(raw: Dataset, kind: str) -> dict[str, int]:
    """Return roles that chat templates do not commonly know, to the number of messages with each.

    All rows are looked at; TRL hands any role on to the chat template.
    """
    columns, key = _CHATS.get(kind, ((), ""))
    found = Counter(
        message[key][:MAX_ROLE]
        for column in columns
        if column in raw.column_names
        for messages in raw[column]
        for message in messages or ()
        if message[key] not in KNOWN_ROLES
    )
    return dict(found.most_common())


def _text_problem(value: object) -> str | None:
    return None if isinstance(value, str) else f"is {_named(value)}, not text"


def _chat_problem(value: object) -> str | None:
    def problem_of(message: Mapping[str, Any]) -> str | None:
        if not isinstance(message.get("role"), str):
            return f"has no 'role'; its keys are {_keys(message)}"
        others = set(_keys_used(message)) - {"role", "name"}
        if others and others.isdisjoint(_SAYS_SOMETHING):
            return f"has no 'content'; its keys are {_keys(message)}"
        return None

    return _message_problem(value, problem_of)


def _says_something(value: object) -> bool:
    """Whether a message has more than a role. A few that have not are no error of TRL's."""
    return isinstance(value, list) and any(
        isinstance(message, Mapping) and set(_keys_used(message)) - {"role", "name"}
        for message in value
    )


def _from_value_problem(value: object) -> str | None:
    def problem_of(message: Mapping[str, Any]) -> str | None:
        if not isinstance(message.get("from"), str):
            return f"has no 'from'; its keys are {_keys(message)}"
        others = set(_keys_used(message)) - {"from"}
        if others and "value" not in others:
            return f"has no 'value'; its keys are {_keys(message)}"
        return None

    return _message_problem(value, problem_of)


def _message_problem(
    value: object, problem_of: Callable[[Mapping[str, Any]], str | None]
) -> str | None:
    if not isinstance(value, list):
        return f"is {_named(value)}, not a list of messages"
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            return f"holds {_named(message)} where a message should be"
        problem = problem_of(message)
        if problem is not None:
            return f"holds a message (number {number}) that {problem}"
    return None


def _ids_problem(value: object) -> str | None:
    if not isinstance(value, list):
        return f"is {_named(value)}, not a list of token ids"
    wrong = next((item for item in value if type(item) is not int), 0)
    return None if type(wrong) is int else f"holds {_named(wrong)}, not token ids alone"


def _named(value: object) -> str:
    if value is None:
        return "null"
    names = {str: "text", list: "a list", bool: "true or false", int: "a whole number"}
    names |= {float: "a fraction", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)


def _keys_used(message: Mapping[str, Any]) -> list[str]:
    """Return the keys with a value: where rows differ, Arrow gives each the keys of all."""
    return [str(key) for key, value in message.items() if value is not None]


def _keys(message: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in _keys_used(message)) or "none"


def check_ids(
    rows: Dataset, *, vocab_size: int, pad_token_id: int | None, tokenised: bool
) -> None:
    """Check that the model has an embedding for every token; past its end, training crashes.

    A tokenizer that knows more tokens than the model is no error in itself: some models of renown
    have one, and no row holds the tokens in excess.

    Args:
        rows: As TRL would train on them.
        vocab_size: Rows of the model's embedding.
        pad_token_id: What short rows are filled up with.
        tokenised: Whether the data came as token ids, not from the model's tokenizer.

    Raises:
        UsageError: Naming the first id that has no embedding.
    """
    source = "the data holds" if tokenised else "the tokenizer makes of the data"
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        if len(ids) != len(labels):
            raise UsageError(
                f"a row of the data set has {counted(len(ids), 'token id')} but"
                f" {counted(len(labels), 'label')}.",
                hint="Give every token a label; -100 is for those without loss.",
            )
        wrong = _outside({*ids, *labels} - {IGNORED}, vocab_size)
        if wrong is None and IGNORED in ids:
            wrong = IGNORED
        if wrong is not None:
            raise _beyond(f"{source} the token id {wrong}", vocab_size)
    if pad_token_id is not None and pad_token_id >= vocab_size:
        raise _beyond(f"the tokenizer pads rows with the token id {pad_token_id}", vocab_size)


def _outside(ids: set[int], vocab_size: int) -> int | None:
    least, most = min(ids, default=0), max(ids, default=0)
    return least if least < 0 else most if most >= vocab_size else None


def _beyond(what: str, vocab_size: int) -> UsageError:
    return UsageError(
        f"{what}, but the model knows only those from 0 to {vocab_size - 1:,}"
        f" (vocab_size {vocab_size:,} in its config.json).",
        hint="Use the tokenizer that belongs to the model, or correct vocab_size.",
    )

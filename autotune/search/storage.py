"""Optuna's storages: opening one, and looking whether one could be opened without writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna

from autotune.errors import AutotuneError, JournalError, PrerequisiteError, UsageError
from autotune.masking import masked, masked_address


@contextmanager
def recording(hint: str = "") -> Iterator[None]:
    """Turn what a full disk or a lost database raises into an error of ours.

    Args:
        hint: What to do, if it is not to go on with ``--resume``.

    Raises:
        JournalError: If the study cannot be read or written.
    """
    try:
        yield
    except (OSError, optuna.exceptions.StorageInternalError) as error:
        reason = masked(str(getattr(error, "strerror", None) or error))
        raise JournalError(
            f"the study cannot be read or written: {reason}.",
            hint=hint
            or "Free space on the disk, or mend the storage, and continue with --resume; "
            "finished probes are kept.",
        ) from error


def open_storage(storage: str) -> optuna.storages.BaseStorage:
    """Open a journal file, or the storage that a URL names; what does not exist is made.

    Raises:
        UsageError: If the folder of a journal file does not exist.
        JournalError: If a journal file is damaged or cannot be written.
        PrerequisiteError: If a URL names no storage that can be reached from here.
    """
    if "://" not in storage:
        return _open_journal(Path(storage))
    try:
        return optuna.storages.get_storage(storage)
    except Exception as error:
        raise _not_opened(storage, error) from error


def check_storage(storage: str) -> None:
    """Look whether :func:`open_storage` would succeed, without making or changing anything.

    Raises:
        AutotuneError: As :func:`open_storage` does.
    """
    if "://" not in storage:
        path = Path(storage)
        _check_place(path)
        if path.exists():
            _open_journal(path)  # reads all of it, and writes nothing
        return
    try:
        _check_url(storage)
    except AutotuneError:
        raise
    except Exception as error:
        raise _not_opened(storage, error) from error


def _check_url(storage: str) -> None:
    import sqlalchemy

    url = sqlalchemy.engine.make_url(storage)
    engine = sqlalchemy.create_engine(url)  # names the missing driver, and does not connect yet
    if url.get_backend_name() == "sqlite":
        if not url.database or url.database == ":memory:":
            return
        path = Path(url.database)
        _check_place(path)
        if not path.exists():
            return  # connecting would make the file
    try:
        with engine.connect() as connection:
            sqlalchemy.inspect(connection).get_table_names()
    finally:
        engine.dispose()


def _check_place(path: Path) -> None:
    """Check that a file is there or can be made.

    Raises:
        UsageError: If its folder does not exist, or it may not be written.
    """
    if not path.parent.is_dir():
        # Made silently, a slip in the path of a shared disk would split the search in two.
        raise UsageError(
            f"the study {str(path)!r} cannot be opened: there is no folder {path.parent}.",
            hint="Make that folder first, or give another --study.",
        )
    if path.is_dir():
        raise UsageError(
            f"the study {str(path)!r} is a folder.", hint="Give --study the name of a file."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(
            f"the study {str(path)!r} may not be written.",
            hint="Give another --study, or change the permissions.",
        )


def _open_journal(path: Path) -> optuna.storages.BaseStorage:
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    _check_place(path)
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        raise JournalError(
            f"the study {str(path)!r} cannot be opened: {error.strerror or error}.",
            hint="Free space on the disk, or give another --study.",
        ) from error
    except Exception as error:
        # Whatever Optuna stumbles over in a line that it did not write.
        raise JournalError(
            f"{path} is damaged, or no journal of Optuna's.",
            hint="Delete it and continue with --resume, since the results are in probes.jsonl; "
            "if it is another kind of file, give another --study.",
        ) from error


def _not_opened(storage: str, error: Exception) -> PrerequisiteError:
    shown = masked_address(storage)
    reason = masked(str(error).replace(storage, shown)).strip().splitlines()
    return PrerequisiteError(
        f"the study storage {shown!r} cannot be opened: {(reason or [type(error).__name__])[0]}",
        hint="Give a file path, or an Optuna URL such as sqlite:///study.db.",
    )

"""The folder of one search: what is in it, who may write to it, what makes two searches the same.

Every file is written to a temporary name and renamed, or appended line by line, so that the
folder can be read after any crash, kill or full disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.differences import differences
from autotune.errors import JournalError, StudyMismatchError, UsageError
from autotune.probe import journal, typed

SCHEMA = 1

_WRONG_PLACE = (
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOENT,
)
"""Errors of a name that cannot be a folder of the user's; others are the disk's."""

_RUN_TYPES: dict[str, Any] = {
    "identity": Mapping[str, Any] | None,
    "run_id": str | None,
    "budget_bytes": int | None,
}
"""What a resumed search takes from ``run.json``; the rest is for people."""


class RunFolder:
    """Paths and records of one search.

    Args:
        path: The folder; need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().resolve()
        self._lock: int | None = None

    @property
    def run_file(self) -> Path:
        """Return the file that says what is searched."""
        return self.path / "run.json"

    @property
    def study_file(self) -> Path:
        """Return Optuna's journal."""
        return self.path / "study.journal"

    @property
    def journal_file(self) -> Path:
        """Return the trials, one JSON line each."""
        return self.path / "probes.jsonl"

    @property
    def report_file(self) -> Path:
        """Return the report, current after each probe."""
        return self.path / "report.json"

    @property
    def configs(self) -> Path:
        """Return the folder of exported configurations."""
        return self.path / "configs"

    @property
    def work(self) -> Path:
        """Return the folder of tokenised rows and worker logs, which can be made again."""
        return self.path / "work"

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def probe_folder(self, probe_id: str) -> Path:
        """Return the folder of one probe."""
        return self.path / "probes" / probe_id

    def start(self, *, resume: bool) -> None:
        """Create the folder, or check that it holds a search to go on with; lock it.

        Raises:
            UsageError: If it holds a search and ``resume`` is false, holds none and it is true,
                is in use, or cannot be such a folder.
            JournalError: If it cannot be written, such as on a full disk.
        """
        with self._explaining():
            self._check_content(resume=resume)
            self.path.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(exist_ok=True)
            self._take_lock()
            # Optuna appends to such a line and cannot read the study any more.
            journal.drop_torn_line(self.study_file)

    def check(self, *, resume: bool) -> None:
        """Look whether :meth:`start` would succeed, without making or locking anything.

        Raises:
            UsageError, JournalError: As :meth:`start` does.
        """
        with self._explaining():
            self._check_content(resume=resume)
            place = self.path
            while not place.exists():
                place = place.parent
            if not place.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{place} is a file")
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"{place} may not be written")
            if self._lock_file.exists():
                descriptor = os.open(self._lock_file, os.O_RDONLY)
                try:
                    self._flock(descriptor)
                finally:
                    os.close(descriptor)

    def _check_content(self, *, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        if self.run_file.exists() and not resume:
            raise UsageError(
                f"the run folder {self.path} holds a search already.",
                hint="Continue it with --resume, or choose another --run-dir.",
            )
        if resume and not self.run_file.exists():
            if self._strangers():
                raise UsageError(
                    f"{self.path} holds no {self.run_file.name}, so that no search can be resumed"
                    " in it.",
                    hint="Put that file back if it was lost, or start anew in another --run-dir;"
                    " what is there stays as it is.",
                )
            raise UsageError(
                f"there is no search to resume in {self.path}.",
                hint="Leave --resume away to start one there.",
            )
        if not resume and self._strangers():
            raise UsageError(
                f"the folder {self.path} is not empty and holds no search.",
                hint="Choose another --run-dir; nothing there was touched.",
            )

    def _strangers(self) -> bool:
        """Whether the folder holds more than what a search without a record leaves behind."""
        if not self.path.is_dir():
            return False
        return bool({item.name for item in self.path.iterdir()} - {"work", ".lock"})

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Tell a folder that was named wrongly from a disk that fails."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in _WRONG_PLACE:
                raise UsageError(
                    f"{self.path} cannot be a run folder: {reason}.",
                    hint="Choose another --run-dir: a folder, or a new name in one that you may "
                    "write to.",
                ) from error
            raise JournalError(
                f"the run folder {self.path} cannot be written: {reason}.",
                hint="Free space, or choose another --run-dir, and give the same command again.",
            ) from error

    def _take_lock(self) -> None:
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._flock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock = descriptor

    def _flock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another search is writing to {self.path}.",
                hint="Wait for it, or choose another --run-dir.",
            ) from None

    def release(self) -> None:
        """Give up the lock; safe to call twice. A folder without a search is taken away again."""
        if self._lock is None:
            return
        if not self.run_file.exists():
            self.clear_work()
            self.study_file.unlink(missing_ok=True)  # ours: there was none at the start
            self._lock_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody else's files are in it
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def write_run(self, identity: Mapping[str, Any], details: Mapping[str, Any]) -> None:
        """Record what is searched."""
        self.write_json(self.run_file, {"schema": SCHEMA, "identity": dict(identity), **details})

    def read_run(self) -> dict[str, Any]:
        """Return what :meth:`write_run` recorded.

        Raises:
            JournalError: If it cannot be read, holds something else or is of a newer schema.
        """
        try:
            data = typed.loads(self.run_file.read_text())
        except (OSError, ValueError) as error:
            raise self._unreadable(str(error)) from error
        if not isinstance(data, dict):
            raise self._unreadable("it holds no mapping")
        if not typed.has_type(data.get("schema"), int):
            raise self._unreadable("it does not say of which schema it is")
        if data["schema"] > SCHEMA:
            raise JournalError(
                f"{self.run_file} was written by a newer version (schema {data['schema']}).",
                hint="Update autotune to go on with it.",
            )
        for name, kind in _RUN_TYPES.items():
            if not typed.has_type(data.get(name), kind):
                raise self._unreadable(f"its {name} is {data[name]!r}")
        if (data.get("budget_bytes") or 1) < 1:
            raise self._unreadable(f"its budget_bytes is {data['budget_bytes']!r}")
        return data

    def _unreadable(self, reason: str) -> JournalError:
        return JournalError(
            f"{self.run_file} cannot be read: {reason}.",
            hint="Start a new search in another --run-dir; results stay under probes/.",
        )

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Check that a resumed search asks for the same thing.

        Raises:
            StudyMismatchError: Naming what differs.
            JournalError: If the folder does not say what it holds.
        """
        known = self.read_run().get("identity")
        if known is None:
            raise self._unreadable("it does not say what was searched")
        wanted = json.loads(json.dumps(dict(identity)))
        found = differences(known, wanted)
        if found:
            raise StudyMismatchError(
                f"the run folder {self.path} belongs to another search ({'; '.join(found)}).",
                hint="Use the same settings as before, or another --run-dir.",
            )

    def append(self, kind: str, value: Mapping[str, Any]) -> None:
        """Add a record to the journal."""
        journal.append(self.journal_file, kind, value)

    def records(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the journal's records, each with its line."""
        return journal.read_numbered(self.journal_file)

    def write_json(self, path: Path, value: object) -> None:
        """Write JSON so that ``path`` holds either the old or the whole new text.

        Raises:
            JournalError: If it cannot be written, such as on a full disk.
        """
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("w") as file:
                json.dump(value, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            hint = "Free space on the disk and continue with --resume; finished probes are kept."
            if not self.run_file.exists():  # --resume would find nothing
                hint = "Free space on the disk and give the same command again."
            raise JournalError(
                f"{path} cannot be written: {error.strerror or error}.", hint=hint
            ) from error

    def clear_work(self) -> None:
        """Delete what can be made again: tokenised rows, caches."""
        shutil.rmtree(self.work, ignore_errors=True)

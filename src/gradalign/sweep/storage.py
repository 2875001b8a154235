"""Where a sweep's trials are written down: its folder with Optuna's journal, or a database; and whose sweep it is."""

from __future__ import annotations

import fcntl
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from sqlalchemy.exc import DatabaseError

from gradalign.errors import FolderInUseError, GradalignError
from gradalign.runs import SWEEP, differing_fields, writing
from gradalign.runs.compared import claim
from gradalign.runs.locks import locked
from gradalign.runs.untrusted import is_file, is_there

JOURNAL = "study.journal"
_BEAT_SECONDS, _GRACE_SECONDS = 15, 120
_PATIENCE_SECONDS = 10.0
_DESCRIPTION = "gradalign_sweep"


@contextmanager
def opened(folder: Path, url: str | None, study: str, description: Mapping[str, Any]) -> Iterator[BaseStorage]:
    """Open a sweep's folder and its storage, or say in one sentence why they cannot be used.

    Processes that share the folder share its journal; ``url`` names a database instead, for many machines, in which the
    sweep is called ``study``. A folder or a database that holds another ``description`` is refused.
    """
    with ExitStack() as held:
        database = None
        if url is not None:  # before the folder is made: a mistake leaves nothing behind
            database = held.enter_context(opened_database(url))
            _check_study(database, study, description)
        place = JOURNAL if url is None else _without_password(url)
        with locked(folder, retries=500):  # ten seconds: several processes may come at once
            claim(folder, SWEEP, {**description, "storage": place, "study": study})
        if database is not None:
            _register_study(database, study, description)
        try:
            yield open_journal(folder) if database is None else database
        except StorageInternalError as error:
            raise GradalignError(
                f"the storage failed: {_reason(error)}; the same command goes on where this ended"
            ) from None


class _Journal(JournalFileBackend):
    """Optuna's journal, written under a lock that ends with its process.

    Optuna's own locks outlive a killed process by half a minute. And a last line that a full disk cut off is dropped
    here before the next one is written: the two together could never be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with writing(self._path), self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                end = file.truncate(os.pread(file.fileno(), end, 0).rfind(b"\n") + 1)
            file.seek(end)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())


def open_journal(folder: Path) -> JournalStorage:
    _hush()
    path = folder.resolve() / JOURNAL
    if is_there(path) and not is_file(path):
        raise GradalignError(f"{path} is not a file; remove it, or choose another --out")
    try:
        return JournalStorage(_Journal(path))
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        raise GradalignError(f"{path} is damaged ({_reason(error)}); choose another --out") from None


@contextmanager
def opened_database(url: str) -> Iterator[RDBStorage]:
    """Open a database. An SQLite file could give one trial to two processes: a lock beside it admits one at a time."""
    _hush()
    if url in ("sqlite://", "sqlite:///") or ":memory:" in url:
        raise GradalignError(f"the storage {url} is gone with this process; give a file: sqlite:///sweep.db")
    file = Path(url.partition(":///")[2].partition("?")[0]) if url.startswith("sqlite") else None
    with ExitStack() as held:
        if file is not None and file.parent.is_dir():
            try:
                held.enter_context(locked(file.with_name(f".{file.name}.in-use")))
            except FolderInUseError:
                raise GradalignError(
                    f"another process uses {url}, and an SQLite file serves one at a time; "
                    "give both the same --out and no --storage, or use a database server"
                ) from None
        yield _open_database(url)


def _open_database(url: str, tries: int = 3) -> RDBStorage:
    is_sqlite = url.startswith("sqlite")
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if is_sqlite else {"pool_pre_ping": True}
    try:
        return RDBStorage(url, engine_kwargs=options, heartbeat_interval=_BEAT_SECONDS, grace_period=_GRACE_SECONDS)
    except Exception as error:
        # Two processes that make the tables of a new database at once get in each other's way.
        if tries > 1 and not is_sqlite and isinstance(error.__cause__ or error, DatabaseError):
            time.sleep(0.5)
            return _open_database(url, tries - 1)
        raise GradalignError(f"cannot use the storage {_without_password(url)}: {_reason(error)}") from None


def _hush() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", ExperimentalWarning)


def _reason(error: Exception) -> str:
    return (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{place}" if at else url


def _register_study(storage: BaseStorage, study: str, description: Mapping[str, Any]) -> None:
    """Write down what is swept, or compare it with what the database holds under this name."""
    try:
        number = storage.create_new_study([StudyDirection.MAXIMIZE], study)
        storage.set_study_user_attr(number, _DESCRIPTION, dict(description))
    except DuplicatedStudyError:
        _check_study(storage, study, description)


def _check_study(storage: BaseStorage, study: str, description: Mapping[str, Any]) -> None:
    try:
        number = storage.get_study_id_from_name(study)
    except KeyError:
        return
    until = time.monotonic() + _PATIENCE_SECONDS
    while _DESCRIPTION not in (attributes := storage.get_study_user_attrs(number)):
        # Whoever made it writes it down next, unless it is not one of ours.
        if time.monotonic() > until or storage.get_all_trials(number, deepcopy=False):
            raise GradalignError(
                f'the storage has a study "{study}" that is not a sweep of gradalign\'s; choose another --study'
            )
        time.sleep(0.1)
    differing = differing_fields(attributes[_DESCRIPTION], json.loads(json.dumps(description)))
    if differing:
        raise GradalignError(
            f'the storage holds another sweep under the name "{study}": {"; ".join(differing[:3])}; '
            "choose another --study"
        )

"""Opening an Optuna storage, and knowing whose sweep it holds."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from gradalign.errors import GradalignError
from gradalign.runs.folder import differing_fields

_PATIENCE_SECONDS = 10.0
_DESCRIPTION = "gradalign_sweep"


def open_storage(url: str) -> RDBStorage:
    """Open an Optuna storage, or say in one sentence why it cannot be used."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    is_sqlite = url.startswith("sqlite")
    if url in ("sqlite://", "sqlite:///") or ":memory:" in url:
        raise GradalignError(f"the storage {url} is gone with this process; give a file: sqlite:///sweep.db")
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if is_sqlite else {"pool_pre_ping": True}
    for attempt in range(5):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except Exception as error:
            # Two processes that make the tables of a new database at once get in each other's way: try again.
            if attempt < 4 and _collided(error):
                time.sleep(0.2 * (attempt + 1))
                continue
            reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
            raise GradalignError(f"cannot use the storage {without_password(url)}: {reason}") from None
    raise AssertionError("unreachable")


def _collided(error: BaseException) -> bool:
    """Whether a database failed because another process was at work on it, and not for good."""
    if error.__cause__ is not None and _collided(error.__cause__):
        return True
    if isinstance(error, IntegrityError | ProgrammingError):  # a row or, on PostgreSQL, a table is there already
        return True
    if not isinstance(error, OperationalError) or error.orig is None:
        return False
    number = error.orig.args[0] if error.orig.args else None
    code = getattr(error.orig, "sqlite_errorcode", -1) & 0xFF  # the low byte is the kind
    # SQLite's word for a table that is there already is its general one; MySQL has a number for it.
    return number == 1050 or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_ERROR)


def without_password(url: str) -> str:
    """Return a storage URL that may be shown and kept."""
    scheme, separator, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{place}" if at else url


def register_sweep(storage: RDBStorage, study: str, description: Mapping[str, Any]) -> None:
    """Write down what is swept, or compare it with what the storage holds under this name."""
    try:
        number = storage.create_new_study([StudyDirection.MAXIMIZE], study)
        storage.set_study_user_attr(number, _DESCRIPTION, dict(description))
    except DuplicatedStudyError:
        check_sweep(storage, study, description)


def check_sweep(storage: RDBStorage, study: str, description: Mapping[str, Any]) -> None:
    """Refuse a storage that holds something else under this name."""
    try:
        number = storage.get_study_id_from_name(study)
    except KeyError:
        return
    mine = json.loads(json.dumps(description))
    until = time.monotonic() + _PATIENCE_SECONDS
    while _DESCRIPTION not in (attributes := storage.get_study_user_attrs(number)):
        # Whoever made it writes it down next, unless it is not one of ours.
        if time.monotonic() > until or storage.get_all_trials(number, deepcopy=False):
            raise GradalignError(
                f'the storage has a study "{study}" that is not a sweep of gradalign\'s; choose another --study'
            )
        time.sleep(0.1)
    differing = differing_fields(attributes[_DESCRIPTION], mine)
    if differing:
        raise GradalignError(
            f'the storage holds another sweep under the name "{study}": {"; ".join(differing[:3])}; '
            "choose another --study"
        )

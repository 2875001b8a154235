"""A table's columns from a CSV or Parquet file, as numbers or as texts.

pyarrow reads both. It infers the type of a CSV column from all of its rows, knows the usual words for a missing value,
and refuses a line with a field too many or too few instead of guessing.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError, need

_LARGEST = 1e100  # a number beyond this has no square
_SHOWN_NAMES = 12


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: numbers, NaN where one is missing. Of texts they are the places in ``levels``, which are sorted."""

    name: str
    values: NDArray[np.float64]
    levels: tuple[str, ...] | None = None

    def words(self, value: float) -> str:
        """Return a value as the file has it."""
        if self.levels is not None:
            return self.levels[int(value)]
        return str(int(value)) if float(value).is_integer() else f"{value:.12g}"

    def require_whole(self, what: str) -> None:
        """Refuse missing values in a column that must have none."""
        missing = np.flatnonzero(np.isnan(self.values))
        if len(missing):
            raise GradalignError(
                f'the column "{self.name}", {what}, is empty in {len(missing):,} of {len(self.values):,} rows, first '
                f"in row {missing[0] + 1}; fill them in or leave those rows out"
            )


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """A file's columns, each made into numbers when it is asked for."""

    path: Path
    table: Any
    names: list[str]

    def require(self, name: str) -> None:
        """Refuse a name that no column has, and say which there are."""
        if name not in self.names:
            close = difflib.get_close_matches(name, self.names, n=1)
            known = ", ".join(self.names[:_SHOWN_NAMES]) + (", …" if len(self.names) > _SHOWN_NAMES else "")
            hint = f'did you mean "{close[0]}"?' if close else f"it has {known}"
            raise GradalignError(f'{self.path} has no column "{name}"; {hint}')

    def column(self, name: str) -> Column:
        """Return a column by its name."""
        self.require(name)
        return _column(name, self.table.column(self.names.index(name)), self.path)


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 digest of a file's content."""
    with _readable(Path(path)), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: str | Path) -> TableFile:
    """Read a CSV file (fields divided by comma, semicolon or tab; perhaps compressed) or a Parquet file."""
    need("pyarrow", "tables")
    path = Path(path)
    with _readable(path):
        with path.open("rb") as file:
            start = file.read(4)
        table = _read_parquet(path) if start == b"PAR1" else _read_csv(path, start)
        names = [name.strip() for name in table.column_names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GradalignError(f'{path} has two columns with the name "{twice}"; give each a name of its own')
    if table.num_rows == 0:
        raise GradalignError(f"{path} has no rows")
    return TableFile(path=path, table=table, names=names)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say in one sentence why a file cannot be read."""
    if not path.is_file():
        raise GradalignError(f"{path} is a folder, not a table" if path.is_dir() else f"there is no file {path}")
    try:
        yield
    except UnicodeDecodeError:
        raise GradalignError(f"{path} is not a table in UTF-8; save it as CSV in UTF-8") from None
    except OSError as error:
        raise GradalignError(f"cannot read {path}: {error.strerror or error}") from None


def _read_parquet(path: Path) -> Any:
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_table(path, use_threads=False)
    except ArrowException as error:
        raise GradalignError(f"{path} is not a whole Parquet file: {error}") from None


def _read_csv(path: Path, start: bytes) -> Any:
    from pyarrow import ArrowException, csv, input_stream

    if start[:2] in (b"PK", b"\xd0\xcf"):
        raise GradalignError(f"{path} is a spreadsheet or an archive; save the table as CSV in UTF-8")
    try:
        with input_stream(str(path)) as file:  # which also unpacks .gz, .bz2 and the like
            beginning = file.read(1 << 16)
        if b"\0" in beginning:
            raise GradalignError(f"{path} is not a CSV file in UTF-8: it has NUL bytes")
        header = beginning.splitlines()[0] if beginning.strip() else b""
        if not header:
            raise GradalignError(f"{path} is empty; a table needs a line with the columns' names, and rows")
        return csv.read_csv(
            str(path),
            read_options=csv.ReadOptions(use_threads=False),
            parse_options=csv.ParseOptions(
                delimiter=max(",;\t", key=lambda mark: header.count(mark.encode())), newlines_in_values=True
            ),
            convert_options=csv.ConvertOptions(strings_can_be_null=True),
        )
    except ArrowException as error:
        raise GradalignError(f"{path} is not a CSV file: {error}") from None


def _column(name: str, found: Any, path: Path) -> Column:
    import pyarrow as pa
    from pyarrow import compute, types

    kind = found.type
    if types.is_dictionary(kind):
        kind, found = kind.value_type, found.cast(kind.value_type)
    if types.is_date(kind) or types.is_timestamp(kind):
        found = compute.divide(found.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).cast(pa.float64()), 86400.0)
    if any(is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
        return _texts(name, compute.utf8_trim_whitespace(found.cast(pa.large_string())).combine_chunks())
    if types.is_binary(kind):
        raise GradalignError(f'{path}: the column "{name}" is not text in UTF-8; save the file as CSV in UTF-8')
    try:
        values = found.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
    except pa.ArrowException:
        raise GradalignError(f'{path}: the column "{name}" holds {kind}, which is neither number nor text') from None
    wrong = np.flatnonzero(np.abs(values) > _LARGEST)
    if len(wrong):
        place = f"in {len(wrong):,} rows, first in row {wrong[0] + 1}"
        raise GradalignError(f'{path}: the column "{name}" is infinite or beyond 1e100 {place}')
    return Column(name=name, values=values)


def _texts(name: str, found: Any) -> Column:
    encoded = found.dictionary_encode()
    levels = np.array(encoded.dictionary.to_pylist(), object)
    order = np.argsort(levels, kind="stable")
    places = np.empty(len(levels) + 1)
    places[order] = np.arange(len(levels))
    places[-1] = np.nan
    blank = np.flatnonzero(levels == "")  # a text of blanks alone says as little as none
    places[blank] = np.nan
    codes = encoded.indices.fill_null(len(levels)).to_numpy(zero_copy_only=False)
    return Column(name=name, values=places[codes], levels=tuple(levels[order]))

"""Where data lies: the data folder, decoded arrays in the cache folder, and checked downloads of the original archives.

A decoded array belongs to its source files' paths, sizes and times of change. Entries appear whole, by a rename, so
processes that start together may both make one and either's is used. An archive is downloaded beside its place, checked
against the published hash, then unpacked: only the files a data set needs leave it, each to a place named here, so no
name inside it matters, and what is interrupted or altered never reaches its place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError
from gradalign.stopping import at_stake

Arrays = dict[str, NDArray[Any]]
Progress = Callable[[int, int], None]
"""Is told the bytes received and how many there will be; 0 where the server does not say."""
_FORM = "2"  # raise this when a reader changes what it makes of the same file
_chosen: ContextVar[Path | None] = ContextVar("data_folder", default=None)


def cache_folder() -> Path:
    """Return the folder for downloads and decoded arrays: $GRADALIGN_CACHE, or the user's own cache."""
    if named := os.environ.get("GRADALIGN_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "gradalign/gradalign/Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/gradalign"
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache").expanduser() / "gradalign"


def data_folder(named: str | Path | None = None, *, to_make: bool = False) -> Path:
    """Return the one folder where data sets are looked for and downloaded to.

    It is the named one, else that of ``--data-dir``, else $GRADALIGN_DATA, else a folder in the user's cache. One that
    does not exist is refused, unless it is ``to_make``.
    """
    chosen = named or _chosen.get() or os.environ.get("GRADALIGN_DATA")
    if not chosen:
        return cache_folder() / "data"
    folder = Path(chosen).expanduser()
    if not folder.is_dir() and not (to_make and not folder.exists()):
        raise GradalignError(f"the data folder {folder} {'is no folder' if folder.exists() else 'does not exist'}")
    return folder


@contextmanager
def using_data_folder(folder: Path | None) -> Iterator[None]:
    """Look for data in this folder inside the block; None changes nothing."""
    token = _chosen.set(folder or _chosen.get())
    try:
        yield
    finally:
        _chosen.reset(token)


def find_file(folder: Path, places: Sequence[str], names: Sequence[str]) -> Path | None:
    """Return the first of these files that exists, place by place."""
    candidates = (folder / place / name for place in places for name in names)
    return next((path for path in candidates if path.is_file()), None)


def cached_arrays(kind: str, sources: Sequence[Path], decode: Callable[[], Mapping[str, NDArray[Any]]]) -> Arrays:
    """Return what ``decode`` makes of these files, from the cache when it is there.

    The arrays are mapped copy-on-write: processes share their pages, and nobody can change the files through them.
    """
    stats = [(path.resolve(), path.stat()) for path in sources]
    whose = _digest([_FORM, kind, *(str(path) for path, _ in stats)])
    state = _digest([f"{stat.st_size} {stat.st_mtime_ns}" for _, stat in stats])
    entry = cache_folder() / "decoded" / f"{kind}-{whose}-{state}"
    if found := _mapped(entry):
        return found
    arrays = {name: np.ascontiguousarray(array) for name, array in decode().items()}
    try:
        _store(entry, arrays)
        for other in entry.parent.glob(f"{kind}-{whose}-*"):
            if other != entry:  # of the same files in an earlier state; who has it mapped keeps it
                shutil.rmtree(other, ignore_errors=True)
    except OSError:  # a full disk or a cache that cannot be written: slower next time, right all the same
        return arrays
    return _mapped(entry) or arrays


@contextmanager
def _workshop(beside: Path, prefix: str) -> Iterator[Path]:
    """Make a folder for things that are not whole yet, and remove it with what is left in it."""
    workshop = Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
    try:
        yield workshop
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _mapped(entry: Path) -> Arrays | None:
    """Map an entry's arrays; None when it is not there or damaged."""
    try:
        names = sorted(path for path in entry.iterdir() if path.suffix == ".npy")
        return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in names} or None
    except (OSError, ValueError, EOFError):
        return None


def _store(entry: Path, arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _workshop(entry.parent, ".making-") as workshop:
        for name, array in arrays.items():
            with (workshop / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        if entry.exists() and _mapped(entry) is None:
            shutil.rmtree(entry)
        with suppress(OSError):  # another process was first: its entry is as good
            workshop.rename(entry)


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A published archive, and the place in the data folder for each of its members that is needed."""

    url: str
    known_hash: str
    members: Mapping[str, str]
    most_bytes: int = 1_000_000_000
    """More than the archive has: a server that sends more is not listened to any longer."""


_EMNIST = [
    f"emnist-balanced-{split}-{kind}-ubyte.gz" for split in ("train", "test") for kind in ("images-idx3", "labels-idx1")
]
_CIFAR10 = [f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")]
ARCHIVES = {
    "emnist": Archive(
        url="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        known_hash="md5:58c8d27c78d21e728a6bc7b3cc06412e",
        members={f"gzip/{name}": f"EMNIST/raw/{name}" for name in _EMNIST},
    ),
    "cifar10": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        known_hash="sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        members={name: name for name in _CIFAR10},
        most_bytes=200_000_000,
    ),
    "cifar100": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        known_hash="sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        members={name: name for name in ("cifar-100-python/train", "cifar-100-python/test")},
        most_bytes=200_000_000,
    ),
}
NO_ARCHIVE = (
    "Shakespeare has no published archive: make it with LEAF's scripts (github.com/TalwalkarLab/leaf, folder "
    "data/shakespeare: ./preprocess.sh -s niid --sf 0.2 -k 0 -t sample -tf 0.8), and put its train and test folders "
    "into a folder named shakespeare in the data folder"
)


def fetch(archive: Archive, folder: Path, progress: Progress | None = None) -> list[Path]:
    """Download an archive, check it, put its files into the data folder, made where need be, and return them."""
    places = {member: folder / place for member, place in archive.members.items()}
    if not all(path.is_file() for path in places.values()):
        made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _workshop(folder, ".download-") as workshop, at_stake():
                _unpack(_download(archive, workshop, progress), places, workshop)
        except OSError as error:
            raise GradalignError(f"cannot write to the data folder {folder}: {error.strerror or error}") from None
        finally:
            if made:
                with suppress(OSError):  # it is there for the data that came
                    folder.rmdir()
    return list(places.values())


def _download(archive: Archive, workshop: Path, progress: Progress | None) -> Path:
    import requests

    found = workshop / archive.url.rsplit("/", 1)[-1]
    try:
        _receive(archive, found, progress)
    except (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError):
        raise GradalignError(
            f"cannot download {archive.url}: the connection failed or broke off; nothing of it was kept, try again"
        ) from None
    except requests.exceptions.RequestException as error:
        reason = (str(error) or type(error).__name__).split("\n")[0][:200]
        raise GradalignError(f"cannot download {archive.url}: {reason}") from None
    kind, known = archive.known_hash.split(":")
    with found.open("rb") as file:
        if hashlib.file_digest(file, kind).hexdigest() != known:
            raise GradalignError(
                f"{archive.url} did not arrive as published (its {kind} differs): "
                "it was cut short or altered; nothing of it was kept, try again"
            )
    return found


def _receive(archive: Archive, place: Path, progress: Progress | None) -> None:
    """Download to a file, but never more than the archive may have."""
    import requests

    too_much = f"{archive.url} sends more than {archive.most_bytes:,} bytes, which the archive does not have"
    with requests.get(archive.url, stream=True, timeout=60) as answer, place.open("wb") as target:
        answer.raise_for_status()
        declared = answer.headers.get("Content-Length", "").strip()
        total = int(declared) if declared.isdecimal() and declared.isascii() and len(declared) < 20 else 0
        received = 0
        if total > archive.most_bytes:
            raise GradalignError(too_much)
        for part in answer.iter_content(1 << 16):
            received += len(part)
            if received > archive.most_bytes:
                raise GradalignError(too_much)
            target.write(part)
            if progress:
                progress(received, total)


@contextmanager
def _members(path: Path) -> Iterator[Any]:
    """Yield a function that opens a member of a zip or tar archive by name, or returns None."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            yield lambda name: packed.open(name) if name in packed.namelist() else None
    else:
        with tarfile.open(path) as unpacked:
            names = set(unpacked.getnames())
            yield lambda name: unpacked.extractfile(name) if name in names else None


def _unpack(path: Path, places: Mapping[str, Path], workshop: Path) -> None:
    """Copy the members out, all of them beside their places first, then into place."""
    copies = [workshop / str(number) for number in range(len(places))]
    try:
        with _members(path) as opened:
            for member, copy in zip(places, copies, strict=True):
                source: IO[bytes] | None = opened(member)
                if source is None:
                    raise GradalignError(f"{path.name} holds no file {member}")
                with source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target)
                    target.flush()
                    os.fsync(target.fileno())
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise GradalignError(f"{path.name} is not a readable archive: {error}") from None
    for copy, place in zip(copies, places.values(), strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            copy.chmod(0o644)
        copy.replace(place)

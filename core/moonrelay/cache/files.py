"""Which weights a model's files hold: a digest of their content, whatever they are called and wherever they lie.

Owns reading files for their digest, once for each file as long as it is the same file. Loads neither torch nor a host.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from moonrelay.cache.keys import digest_of

_PIECE: Final = 4 << 20

#: Device, inode, size, and when content and entry were last changed: another file, or another content, has another one.
_Identity: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Known:
    identity: _Identity
    digest: str


class FileDigests:
    """Digests of files and folders. Files are looked at each time, and read when they are other ones.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, _Known] = {}
        #: How many files were read so far.
        self.reads = 0

    def of(self, path: Path, *, pattern: str = "*") -> str | None:
        """Return 64 hexadecimal digits of a file's content, or of all files below a folder by their names in it.

        Args:
            path: The file or folder. A file's own name is not in its digest.
            pattern: Which files of a folder.

        Blocks: while files that are not known yet are read.

        Returns:
            ``None`` where it cannot be told: nothing is there, or a file changes while it is read.
        """
        with self._lock:
            try:
                digests = {name: self._digest(file) for name, file in _files(path, pattern).items()}
            except OSError:
                return None
        whole = digests and None not in digests.values()
        return digest_of("moonrelay.files/1", digests) if whole else None

    def look(self, path: Path, *, pattern: str = "*") -> object:
        """Return what changes when a file becomes another one; reads none.

        Returns:
            Something that is equal to nothing where that cannot be told.
        """
        try:
            found: Mapping[str, _Identity] = {name: _identity(file) for name, file in _files(path, pattern).items()}
        except OSError:
            return object()
        return found or object()

    def _digest(self, file: Path) -> str | None:
        before = _identity(file)
        known = self._files.get(file)
        if known is not None and known.identity == before:
            return known.digest
        import xxhash

        digest = xxhash.xxh3_128()
        self.reads += 1
        with file.open("rb") as content:
            while piece := content.read(_PIECE):
                digest.update(piece)
        if _identity(file) != before:
            return None
        self._files[file] = _Known(before, digest.hexdigest())
        return digest.hexdigest()


def _files(path: Path, pattern: str) -> dict[str, Path]:
    if path.is_file():
        return {"": path}
    return {str(file.relative_to(path)): file for file in sorted(path.rglob(pattern)) if file.is_file()}


def _identity(file: Path) -> _Identity:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

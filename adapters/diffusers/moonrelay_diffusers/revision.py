"""Which weights a model's files hold: a commit on the hub, or a digest of the files' content.

Owns reading files for their digest, once for each file as long as it is the same file. Imports neither torch nor
diffusers, and the hub's client only for a hub id.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from moonrelay.cache.keys import digest_of

if TYPE_CHECKING:
    from moonrelay_diffusers.model import ModelInfo

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_PIECE: Final = 4 << 20

#: Device, inode, size, and when content and entry were last changed: another file, or another content, has another one.
_Identity: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Known:
    identity: _Identity
    digest: str


class Revisions:
    """Revisions of a model's modules. A folder's files are looked at each time, and read when they are other ones.

    Args:
        info: The model.

    Threads: any.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._files: dict[Path, _Known] = {}
        self._commit: str | None = None
        #: How many files were read so far.
        self.reads = 0

    def of(self, component: str) -> str | None:
        """Return a module's revision: 64 hexadecimal digits of a folder's content, or the 40 of a commit on the hub.

        Blocks: while files that are not known yet are read.

        Returns:
            ``None`` where it cannot be told: a file that changes while it is read, or no commit.
        """
        folder = Path(self._info.source)
        with self._lock:
            return self._of_folder(folder / component) if folder.is_dir() else self._of_hub()

    def look(self, component: str) -> object:
        """Return what changes when a file of a module becomes another one; reads none."""
        folder = Path(self._info.source) / component
        if not Path(self._info.source).is_dir():
            return None
        try:
            return {name: _identity(file) for name, file in _files(folder).items()}
        except OSError:
            return object()  # equal to nothing

    def _of_folder(self, folder: Path) -> str | None:
        try:
            digests = {name: self._digest(file) for name, file in _files(folder).items()}
        except OSError:
            return None
        whole = digests and None not in digests.values()
        return digest_of("moonrelay.files/1", digests) if whole else None

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

    def _of_hub(self) -> str | None:
        if self._commit is None:
            from moonrelay_diffusers.model import hub_snapshot

            name = hub_snapshot(self._info).name
            self._commit = name if _COMMIT.fullmatch(name) else ""
        return self._commit or None


def _files(folder: Path) -> dict[str, Path]:
    return {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _identity(file: Path) -> _Identity:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

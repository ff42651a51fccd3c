"""Which weights a model's files hold: a commit on the hub, or a digest of the files' content.

Owns which of the two a module has. Imports neither torch nor diffusers, and the hub's client only for a hub id.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonrelay.cache.files import FileDigests

if TYPE_CHECKING:
    from moonrelay_diffusers.model import ModelInfo

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class Revisions:
    """Revisions of a model's modules. A folder's files are looked at each time, and read when they are other ones.

    Args:
        info: The model.

    Threads: any.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._digests = FileDigests()
        self._commit: str | None = None

    @property
    def reads(self) -> int:
        """How many files were read so far."""
        return self._digests.reads

    def of(self, component: str) -> str | None:
        """Return a module's revision: 64 hexadecimal digits of a folder's content, or the 40 of a commit on the hub.

        Blocks: while files that are not known yet are read.

        Returns:
            ``None`` where it cannot be told: a file that changes while it is read, or no commit.
        """
        folder = Path(self._info.source)
        if folder.is_dir():
            return self._digests.of(folder / component)
        with self._lock:
            return self._of_hub()

    def look(self, component: str) -> object:
        """Return what changes when a file of a module becomes another one; reads none."""
        folder = Path(self._info.source)
        return self._digests.look(folder / component) if folder.is_dir() else None

    def _of_hub(self) -> str | None:
        if self._commit is None:
            from moonrelay_diffusers.model import hub_snapshot

            name = hub_snapshot(self._info).name
            self._commit = name if _COMMIT.fullmatch(name) else ""
        return self._commit or None

"""The output folder: what a run leaves there, and that two runs never share it.

Owns the names of files. The lock is the kernel's, so a killed run locks nobody out; the next one clears what it left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Final

from moonrelay.errors import ConfigError

_LOCK: Final = ".lock"
_WORK: Final = ".work"
_PICTURES: Final = ("contact.png", "timeline.png", "summary.json")
_ENDINGS: Final = (".mp4", ".gif", ".png", ".npy")


class OutputFolder:
    """``videos/``, ``logs/``, pictures and the summary; and a working folder for the length of the run.

    Args:
        root: Made when missing.

    Raises:
        ConfigError: Another run uses it, or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.videos = self.root / "videos"
        self.logs = self.root / "logs"
        self.work = self.root / _WORK
        self._lock: int | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._clear()
        except BlockingIOError as exc:
            self._unlock()
            message = f"output={str(root)!r} is being written by another demo; give another --output"
            raise ConfigError(message, field="output") from exc
        except OSError as exc:
            self._unlock()
            message = f"output={str(root)!r} cannot be used: {exc}; give another --output"
            raise ConfigError(message, field="output") from exc

    @property
    def contact_sheet(self) -> Path:
        return self.root / "contact.png"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.png"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def keep(self, file: Path, request_id: str) -> Path:
        """Move a result out of the working folder, under the request's name; return where it is."""
        target = self.videos / f"{request_id}{file.suffix}"
        os.replace(file, target)
        return target

    def close(self) -> None:
        """Remove the working folder and let others in. Idempotent."""
        shutil.rmtree(self.work, ignore_errors=True)
        self._unlock()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _clear(self) -> None:
        """Take away what an earlier run left, and nothing else."""
        shutil.rmtree(self.work, ignore_errors=True)
        for name in _PICTURES:
            (self.root / name).unlink(missing_ok=True)
        for folder, endings in ((self.videos, _ENDINGS), (self.logs, (".log",))):
            folder.mkdir(exist_ok=True)
            for file in folder.iterdir():
                if file.suffix in endings and file.is_file():
                    file.unlink()
        self.work.mkdir()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

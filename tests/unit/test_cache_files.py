"""What a model's files are known by: their content, read once for each file as long as it is the same file."""

from __future__ import annotations

import os
from pathlib import Path

from moonrelay.cache.files import FileDigests


def folder_with(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_same_content_has_one_digest_wherever_it_lies(tmp_path: Path) -> None:
    one, other = (folder_with(tmp_path / name, weights=b"w" * 100, config=b"{}") for name in ("a", "b"))
    digests = FileDigests()
    assert digests.of(one) == digests.of(other)
    (one / "w.pth").write_bytes(b"same")
    (one / "x.pth").write_bytes(b"same")
    assert digests.of(one / "w.pth") == digests.of(one / "x.pth")


def test_whatever_changes_the_digest_changes(tmp_path: Path) -> None:
    digests = FileDigests()
    seen = [
        digests.of(folder_with(tmp_path / "a", weights=b"w", config=b"{}")),
        digests.of(folder_with(tmp_path / "b", weights=b"v", config=b"{}")),
        digests.of(folder_with(tmp_path / "c", weight=b"w", config=b"{}")),
        digests.of(folder_with(tmp_path / "d", weights=b"w")),
        digests.of(folder_with(tmp_path / "e", weights=b"w", config=b"")),
        digests.of(tmp_path / "a", pattern="w*ts"),
        digests.of(tmp_path / "a" / "weights"),
    ]
    assert None not in seen
    assert len(set(seen)) == len(seen) - 1  # the pattern leaves what the fourth folder has
    assert seen[3] == seen[5]


def test_a_file_is_read_again_only_when_it_is_another_one(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "a", weights=b"w", config=b"{}")
    digests = FileDigests()
    first, looked = digests.of(folder), digests.look(folder)
    assert digests.of(folder) == first
    assert digests.look(folder) == looked
    assert digests.reads == 2
    before = (folder / "weights").stat()
    (folder / "weights").write_bytes(b"v")
    os.utime(folder / "weights", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests.look(folder) != looked
    assert digests.of(folder) != first
    assert digests.reads == 3


def test_where_nothing_is_there_is_no_digest(tmp_path: Path) -> None:
    digests = FileDigests()
    empty = folder_with(tmp_path / "empty")
    for path in (tmp_path / "missing", empty):
        assert digests.of(path) is None
        assert digests.look(path) != digests.look(path)

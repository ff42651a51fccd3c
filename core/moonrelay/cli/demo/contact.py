"""The contact sheet: a few frames of every result with its prompt and what the comparison said.

Owns its layout. Frames are read back from the files that the decode workers wrote.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonrelay.cli.demo.summary import RequestReport, Summary

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

logger = logging.getLogger(__name__)

#: Cards drawn at most; the videos folder has the rest.
MAX_CARDS: Final = 60
_COLUMNS: Final = 2
_FRAMES: Final = 5
_FRAME: Final = 148
_GAP: Final = 6
_PAD: Final = 18
_MARGIN: Final = 36
_HEAD: Final = 108
_TEXT: Final = 70
_CARD_W: Final = _FRAMES * _FRAME + (_FRAMES - 1) * _GAP + 2 * _PAD
_CARD_H: Final = _TEXT + _FRAME + 2 * _PAD + 26

_PAPER: Final = "#f4f3ef"
_CARD: Final = "#ffffff"
_EDGE: Final = "#dedbd2"
_INK: Final = "#22242a"
_SOFT: Final = "#74767e"
_GOOD: Final = "#1c7c4a"
_BAD: Final = "#b3261e"


class _Fonts:
    """DejaVu as matplotlib brings it: the same on every machine."""

    def __init__(self) -> None:
        import matplotlib

        self._folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        self.title = self._load("DejaVuSans-Bold.ttf", 26)
        self.name = self._load("DejaVuSans-Bold.ttf", 17)
        self.prompt = self._load("DejaVuSans.ttf", 16)
        self.small = self._load("DejaVuSans.ttf", 13)
        self.mark = self._load("DejaVuSans-Bold.ttf", 15)

    def _load(self, name: str, size: int) -> FreeTypeFont:
        from PIL import ImageFont

        return ImageFont.truetype(str(self._folder / name), size)


def draw_contact_sheet(summary: Summary, file: Path) -> None:
    """Draw all results on one sheet.

    Args:
        summary: The run; reports with a file are shown by its frames.
        file: PNG to write.
    """
    from PIL import Image, ImageDraw

    reports = summary.requests[:MAX_CARDS]
    columns = min(_COLUMNS, max(1, len(reports)))
    rows = -(-len(reports) // columns)
    width = 2 * _MARGIN + columns * _CARD_W + (columns - 1) * _PAD
    height = _HEAD + rows * (_CARD_H + _PAD) + _MARGIN - _PAD
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    fonts = _Fonts()
    _head(draw, fonts, summary, width)
    for number, report in enumerate(reports):
        row, column = divmod(number, columns)
        at = (_MARGIN + column * (_CARD_W + _PAD), _HEAD + row * (_CARD_H + _PAD))
        _card(sheet, draw, fonts, report, at)
    sheet.save(file, optimize=True)


def sample(count: int, wanted: int) -> list[int]:
    """Return at most ``wanted`` frame numbers out of ``count``, evenly spread, the first and last among them."""
    if count <= wanted:
        return list(range(count))
    if wanted == 1:
        return [0]
    return [round(number * (count - 1) / (wanted - 1)) for number in range(wanted)]


def _head(draw: ImageDraw, fonts: _Fonts, summary: Summary, width: int) -> None:
    same, count = sum(report.identical for report in summary.requests), len(summary.requests)
    title = f"{same} of {count} identical to the undivided pipeline, bit for bit"
    draw.text((_MARGIN, 30), title, _GOOD if same == count else _BAD, font=fonts.title)
    settings = summary.settings
    words = [
        f"engine {settings['engine']}",
        f"transfer mode {settings['transfer_mode']}",
        "hand-overs: " + (", ".join(f"{n} by {path}" for path, n in sorted(summary.paths.items())) or "none"),
    ]
    if settings.get("model") is None:
        words.append("tiny Wan with random weights, so the pictures are abstract")
    if summary.killed is not None:
        words.insert(2, f"{summary.killed.worker} killed in the middle of {summary.killed.request_id}")
    draw.text(
        (_MARGIN, 68), _fit(draw, "   ·   ".join(words), fonts.small, width - 2 * _MARGIN), _SOFT, font=fonts.small
    )


def _card(sheet: Image, draw: ImageDraw, fonts: _Fonts, report: RequestReport, at: tuple[int, int]) -> None:
    left, top = at
    draw.rounded_rectangle((left, top, left + _CARD_W, top + _CARD_H), 10, fill=_CARD, outline=_EDGE)
    inner, y = left + _PAD, top + _PAD - 4
    name = report.prompt.request_id
    draw.text((inner, y), name, _INK, font=fonts.name)
    indent = int(draw.textlength(name, font=fonts.name)) + 12
    lines = _wrap(draw, report.prompt.prompt, fonts.prompt, _CARD_W - 2 * _PAD - indent, 2)
    for number, line in enumerate(lines):
        draw.text((inner + indent, y + 22 * number), line, _INK, font=fonts.prompt)
    without = report.prompt.negative_prompt
    if without:
        text = _fit(draw, f"without: {without}", fonts.small, _CARD_W - 2 * _PAD - indent)
        draw.text((inner + indent, y + 22 * len(lines) + 3), text, _SOFT, font=fonts.small)
    _frames(sheet, draw, fonts, report, (inner, top + _PAD + _TEXT - 12))
    _foot(draw, fonts, report, (inner, top + _CARD_H - 34))


def _frames(sheet: Image, draw: ImageDraw, fonts: _Fonts, report: RequestReport, at: tuple[int, int]) -> None:
    from PIL import Image

    left, top = at
    pictures = read_frames(report.file, _FRAMES) if report.file is not None else []
    if not pictures:
        text = _fit(draw, report.problem or "no result", fonts.small, _CARD_W - 2 * _PAD)
        draw.text((left, top + _FRAME // 2), text, _BAD, font=fonts.small)
    for number, picture in enumerate(pictures):
        scaled = picture.copy()
        scaled.thumbnail((_FRAME, _FRAME))
        if max(scaled.size) < _FRAME:
            factor = _FRAME / max(scaled.size)
            size = (max(1, round(scaled.width * factor)), max(1, round(scaled.height * factor)))
            scaled = scaled.resize(size, Image.Resampling.BICUBIC)
        spare = ((_FRAME - scaled.width) // 2, (_FRAME - scaled.height) // 2)
        sheet.paste(scaled, (left + number * (_FRAME + _GAP) + spare[0], top + spare[1]))


def _foot(draw: ImageDraw, fonts: _Fonts, report: RequestReport, at: tuple[int, int]) -> None:
    left, top = at
    mark, colour = ("✓ identical", _GOOD) if report.identical else ("✗ not identical", _BAD)
    draw.text((left, top), mark, colour, font=fonts.mark)
    words = []
    if report.digest is not None:
        words.append(f"xxh3 {report.digest[:12]}…")
    for name, stage in report.stages.items():
        if stage.path is not None:
            again = f" (attempt {stage.attempt})" if stage.attempt > 1 else ""
            words.append(f"{name} {_size(stage.input_bytes)} by {stage.path}{again}")
    text = _fit(draw, "   ".join(words), fonts.small, _CARD_W - 2 * _PAD - 150)
    draw.text(
        (left + _CARD_W - 2 * _PAD - draw.textlength(text, font=fonts.small), top + 2), text, _SOFT, font=fonts.small
    )


def read_frames(file: Path, wanted: int) -> list[Image]:
    """Read a few frames of a result; an unreadable file gives none, and a log line."""
    import imageio.v3 as iio
    import numpy as np
    from PIL import Image

    try:
        if file.suffix == ".npy":
            frames = np.load(file, allow_pickle=False)
        elif file.suffix == ".png":
            frames = iio.imread(file)[None]
        else:
            frames = iio.imread(file, plugin="FFMPEG") if file.suffix == ".mp4" else iio.imread(file, index=None)
    except (OSError, ValueError, IndexError) as exc:
        logger.warning("cannot read %s for the contact sheet: %s", file, exc)
        return []
    return [Image.fromarray(frames[number]).convert("RGB") for number in sample(len(frames), wanted)]


def _wrap(draw: ImageDraw, text: str, font: FreeTypeFont, width: int, lines: int) -> list[str]:
    done: list[str] = []
    words = text.split()
    while words and len(done) < lines:
        if len(done) == lines - 1:
            return [*done, _fit(draw, " ".join(words), font, width)]
        line = words.pop(0)
        while words and draw.textlength(f"{line} {words[0]}", font=font) <= width:
            line = f"{line} {words.pop(0)}"
        done.append(line)
    return done


def _fit(draw: ImageDraw, text: str, font: FreeTypeFont, width: int) -> str:
    """Cut a text so that it fits."""
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(text + "…", font=font) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / (1 << 10):.0f} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"

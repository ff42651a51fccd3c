"""What the demo asks for: sentences, some of which share a negative prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """One request of the demo, less its size.

    Attributes:
        request_id: ``r01``, ``r02``, ...
        prompt: What to show.
        negative_prompt: What to avoid; ``None`` leaves it to the model's family.
        seed: Seed of the noise.
    """

    request_id: str
    prompt: str
    negative_prompt: str | None
    seed: int

    def as_dict(self) -> dict[str, str | int | None]:
        """Return the fields as plain values."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "seed": self.seed,
        }


_BLURRY: Final = "blurry, low quality, watermark, jpeg artefacts, static camera"
_CROWDED: Final = "people, text, logos, oversaturated colours"

_PROMPTS: Final[tuple[tuple[str, str | None], ...]] = (
    ("A paper lantern drifts over a black lake while snow begins to fall.", _BLURRY),
    ("A red fox trots through tall grass at dawn, low camera, shallow depth of field.", _BLURRY),
    ("Waves of molten glass fold over each other in slow motion.", None),
    ("A tram climbs a steep street in the rain, its windows glowing amber.", _CROWDED),
    ("Time-lapse of a desert cactus opening its only flower of the year.", _BLURRY),
    ("An astronaut waters a small garden inside a rotating station.", _CROWDED),
    ("Ink blooms in clear water and slowly takes the shape of a bird.", None),
    ("The moon relays its light from one mountain peak to the next.", _CROWDED),
    ("A clockmaker's bench seen from above, gears turning one by one.", _BLURRY),
    ("Northern lights ripple above a lighthouse, long exposure.", None),
)


def demo_prompts(count: int, seed: int) -> tuple[DemoPrompt, ...]:
    """Return ``count`` requests; beyond the sentences that there are they repeat, with other seeds.

    Args:
        count: How many.
        seed: The first request's seed; each further one has the next.
    """
    width = max(2, len(str(count)))
    chosen = (_PROMPTS[number % len(_PROMPTS)] for number in range(count))
    return tuple(
        DemoPrompt(request_id=f"r{number + 1:0{width}d}", prompt=prompt, negative_prompt=negative, seed=seed + number)
        for number, (prompt, negative) in enumerate(chosen)
    )

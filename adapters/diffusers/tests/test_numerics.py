"""What decides bits, set for the whole process and told."""

from __future__ import annotations

import pytest

from moonrelay.errors import ConfigError
from moonrelay_diffusers.numerics import aligned, deterministic_setup


@pytest.mark.usefixtures("same_bits")
def test_the_settings_are_made_and_told() -> None:
    import torch
    from torch.utils import deterministic

    facts = deterministic_setup(2)
    assert facts.threads == torch.get_num_threads() == 2
    assert facts.torch == torch.__version__
    assert torch.are_deterministic_algorithms_enabled()
    # Filling every torch.empty would write all registered memory once more.
    assert not deterministic.fill_uninitialized_memory
    assert deterministic_setup(2) == facts


@pytest.mark.parametrize("threads", [0, -1, True, "2"])
def test_a_wrong_number_of_threads_changes_nothing(threads: int) -> None:
    import torch

    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match="threads"):
        deterministic_setup(threads)
    assert torch.get_num_threads() == before


def test_only_misplaced_memory_is_copied() -> None:
    import torch

    room = torch.arange(64, dtype=torch.float32)
    assert aligned(room).data_ptr() == room.data_ptr()
    moved = aligned(room[3:])
    assert moved.data_ptr() % 64 == 0
    assert torch.equal(moved, room[3:])
    square = room.view(8, 8).T
    assert aligned(square).is_contiguous()
    assert torch.equal(aligned(square), square)

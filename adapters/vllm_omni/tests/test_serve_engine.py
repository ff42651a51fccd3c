"""What of the host's engine can be held without the host: nothing is ready before an order went through all stages."""

from __future__ import annotations

from typing import Any

import pytest

from moonrelay_vllm_omni.serve.engine import HostEngine
from moonrelay_vllm_omni.serve.errors import GenerationFailed, StageDied
from moonrelay_vllm_omni.serve.schema import Order

ORDER = Order(prompt="warm-up", width=32, height=32, seed=0, num_inference_steps=2)


def engine(makes: str, fails: list[Exception]) -> tuple[type[HostEngine], list[Order]]:
    painted: list[Order] = []

    class Hostless(HostEngine):
        async def _open(self, _model: str, _deploy_config: str) -> None:
            self.makes, self.stages = makes, ("decode",)

        async def _paint(self, order: Order) -> list[Any]:
            painted.append(order)
            if fails:
                raise fails.pop(0)
            return [0]

    return Hostless, painted


@pytest.mark.parametrize(("makes", "frames"), [("image", 1), ("video", 5)])
def test_it_is_ready_once_an_order_went_through(makes: str, frames: int) -> None:
    kind, painted = engine(makes, [GenerationFailed("payload unavailable")])
    made = kind("m", "d", ORDER)
    made.close()
    assert [order.num_frames for order in painted] == [frames, frames]


@pytest.mark.parametrize("fails", [[GenerationFailed("no")] * 5, [StageDied(1, "killed")]])
def test_where_none_goes_through_it_does_not_start(fails: list[Exception]) -> None:
    kind, painted = engine("image", [*fails])
    with pytest.raises(type(fails[0])):
        kind("m", "d", ORDER)
    assert len(painted) == len(fails)

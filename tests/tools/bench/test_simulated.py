"""One real rank of 1,024: its state and its traffic are the plan's, and its collectives do not grow with the ranks."""

import pytest

from tools.bench.order import in_a_process
from tools.bench.simulated import simulate


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 3))])
def test_a_rank_of_1024_holds_and_sends_what_the_plan_says(stage):
    found, few = (in_a_process(simulate, world, 2, "ViT-Micro-32", stage) for world in (1024, 8))
    for one in (found, few):
        assert one["state"] == pytest.approx(one["planned_state"], rel=0.01)  # ZeRO pads to a multiple of the ranks
        assert one["sent"] == pytest.approx(one["planned_sent"], rel=0.02)
    assert found["calls"] == few["calls"]
    # Beside gradients and weights: embeddings there and back, the norm with the flag, and what the hosts agree on.
    found["calls"].pop("broadcast_", None)  # of ZeRO 3, which compares its records
    assert sum(found["calls"].values()) <= 8

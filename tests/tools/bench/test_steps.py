"""The benchmark of training steps: every method that it times can make one."""

import pytest
import torch

from finetune.methods.registry import METHODS
from tools.bench.methods import steps


@pytest.mark.parametrize("name", ["vse", "prob-vsepp", "vsrn", "prob-vsrn", "jwae-mh"])
def test_a_step_trains_all_that_the_method_has(name, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(steps, "WORDS", 20)
    made = []
    create = METHODS[name].__init__
    monkeypatch.setattr(
        METHODS[name], "__init__", lambda self, *args: (create(self, *args), made.append((self, args[1])))[0]
    )
    run = steps.step(name, "vsrn-scenes-gru" if METHODS[name].over_regions else steps.SMALL, 4)
    run()
    ((method, model),) = made
    branches = {place for place in map(model.place, dict(model.named_parameters())) if place[1] == "branch"}
    expected = {"prob-vsepp": {"text"}, "prob-vsrn": {"image", "text"}}.get(name, set())
    assert {tower for tower, *_ in branches} == expected
    assert ("decoders" in dict(method.module.named_children())) == (name in ("vsrn", "jwae-mh"))


def test_the_command_leaves_out_what_composes(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        steps, "step", lambda name, architecture, b: asked.append((name, architecture)) or (lambda: None)
    )
    monkeypatch.setattr("sys.argv", ["steps", "--repeats", "1"])
    steps.main()
    names = {name for name, _ in asked}
    assert names == {name for name, method in METHODS.items() if method.trained and not method.composes}
    assert {name for name, architecture in asked if architecture == steps.REGIONS} == {"vsrn", "prob-vsrn", "vse"}
    assert steps.ON_REGIONS in capsys.readouterr().out

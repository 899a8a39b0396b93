"""Flat parameters: the module's are views of them, whatever its modules do with theirs."""

import torch
from torch import nn

from pretrain.engine.engine import Flat


class Net(nn.Module):
    """A recurrent layer, which keeps its weights in a list of its own, and a scalar without dimensions."""

    def __init__(self):
        super().__init__()
        self.gru, self.last = nn.GRU(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        assert self.scale.shape == ()
        return self.last(self.gru(x)[0]) * self.scale


def test_gradients_and_values_reach_recurrent_layers_and_scalars(monkeypatch):
    @torch.no_grad()
    def move(rnn):  # as cuDNN does, on a GPU
        for weight in rnn._flat_weights:
            weight.set_(weight.detach().clone())

    net, x = Net(), torch.randn(4, 2, 6)
    net(x).square().sum().backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)
    flat = Flat(net, torch.optim.SGD(net.parameters(), lr=0.1))
    flat(x).square().sum().backward()
    names = {p: name for name, p in net.named_parameters()}
    for p, one, start in flat.places():
        torch.testing.assert_close(one.grad[start : start + p.numel()].view(p.shape), expected[names[p]])
    with torch.no_grad():
        flat(x)  # an evaluation
        for one in flat.flats:
            one.zero_()
    assert not any(p.any() for p in net.parameters())

"""NCR: two networks classify pairs for each other."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from finetune.config import Config, with_method_file
from finetune.methods import METHODS, Batch
from probemb import Gaussian
from probemb.cli.configuration import parse_config
from probemb.losses import NCRLoss, clean_probability
from probemb.models import Encoded


class TwoNetworks:
    """NCR for four epochs on one batch of twelve pairs; each network embeds two captions far from their images."""

    def __init__(self):
        config = parse_config(Config, "test", "", with_method_file(["--method=ncr", "--epochs=4"]))
        self.method, self.match = METHODS["ncr"](config, None, SimpleNamespace(n_captions=12)), torch.eye(12)
        self.embedded = [self.pairs(wrong=[0, 1], seed=0), self.pairs(wrong=[2, 3], seed=1)]

    @staticmethod
    def pairs(wrong: list[int], seed: int) -> tuple[Gaussian, Gaussian]:
        r = torch.Generator().manual_seed(seed)
        image = F.normalize(torch.randn(12, 32, generator=r), dim=1)
        text = F.normalize(image + 0.1 * torch.randn(12, 32, generator=r), dim=1)
        text[wrong] *= -1
        return Gaussian(image, torch.zeros(12, 32)), Gaussian(text, torch.zeros(12, 32))

    def step(self, epoch: int, network: int):
        rows, other = torch.arange(12), lambda: tuple(map(Encoded, self.embedded[1 - network]))
        batch = Batch(*map(Encoded, self.embedded[network]), self.match, rows, rows, epoch, 0, None, network, other)
        return self.method.loss(batch, None)

    def begin(self, epoch: int) -> None:
        for network in (0, 1):
            self.step(epoch - 1, network)
        self.method.begin_epoch(epoch)

    def say(self, network: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a network's losses and predictions are: w and p of every pair."""
        image, text = self.embedded[network]
        losses = self.method.module.loss.pair_losses(image, text, self.match)
        return clean_probability(losses).float(), self.method.module.loss.predict(image, text, self.match)


@pytest.mark.parametrize(("network", "noisy"), [(0, [2, 3]), (1, [0, 1])])
def test_each_network_of_ncr_trains_the_pairs_that_the_others_losses_call_clean(network, noisy):
    two = TwoNetworks()
    two.begin(1)
    out = two.step(1, network)
    kept = [i for i in range(12) if i not in noisy]  # among them those that it would itself classify as noisy
    (w, _), (_, p) = two.say(1 - network), two.say(network)
    label = (w + (1 - w) * p)[kept]
    image, text = (g[kept] for g in two.embedded[network])
    torch.testing.assert_close(out.loss, NCRLoss()(image, text, torch.eye(10), label=label).loss)
    assert out.terms["clean"] == pytest.approx(10 / 12)


@pytest.mark.parametrize(("network", "noisy"), [(0, [2, 3]), (1, [0, 1])])
def test_pairs_that_ncr_classifies_as_noisy_get_the_mean_of_both_predictions(network, noisy):
    """In the second half of the epochs."""
    two = TwoNetworks()
    two.begin(2)
    out = two.step(2, network)
    (w, q), (_, p) = two.say(1 - network), two.say(network)
    label = w + (1 - w) * p
    label[noisy] = ((p + q) / 2)[noisy]
    assert (label - (w + (1 - w) * p)).abs().max() > 0.1
    torch.testing.assert_close(out.loss, NCRLoss()(*two.embedded[network], two.match, label=label).loss)

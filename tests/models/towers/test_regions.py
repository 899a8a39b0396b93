"""The region tower: SCAN's linear map, VSRN's graph reasoning and GRU, written out for one image."""

import pytest
import torch
from torch.nn import functional as F

from probemb.models import create_model
from probemb.models.options import ModelOptions
from probemb.models.towers.regions import RegionTower

R, WIDTH, D = 5, 6, 4


def tower(n_unc_layers=0, kind="clip", probabilistic=True, **options) -> RegionTower:
    torch.manual_seed(0)
    settings = {"regions": R, "features": 7, "width": WIDTH, **options}
    model = RegionTower(ModelOptions(head=kind, embed_dim=D, probabilistic=probabilistic), n_unc_layers, **settings)
    with torch.no_grad():
        for layer in model.graph:  # W_r starts at zero
            layer.out.weight.normal_()
            layer.out.bias.normal_()
    return model


def regions(lengths=(5, 3, 1)):
    x = torch.randn(len(lengths), R, 7, generator=torch.Generator().manual_seed(1))
    return x * (torch.arange(R) < torch.tensor(lengths)[:, None])[..., None]


VSRN = {"graph_layers": 2, "gru": True}


@pytest.mark.parametrize("options", [{"hidden": (8,)}, VSRN])
def test_equals_the_definition(options):
    model = tower(kind="average", **options)
    features, _ = model.features(regions())
    for row, length in enumerate((5, 3, 1)):
        v = regions()[row, :length]
        for linear in model.maps[:-1]:
            v = torch.relu(v @ linear.weight.T + linear.bias)
        v = v @ model.maps[-1].weight.T + model.maps[-1].bias
        for layer in model.graph:
            v = F.normalize(v, dim=-1)
            told = torch.stack([
                sum((layer.phi(v[i]) @ layer.theta(v[j])) * layer.g(v[j]) for j in range(length)) / length
                for i in range(length)
            ])  # fmt: skip
            v = v + layer.out(told)
        if len(model.graph):
            v = F.normalize(v, dim=-1)
        torch.testing.assert_close(features.tokens[row, :length], v)
        assert not features.tokens[row, length:].any()
        pooled = v.mean(0) if model.gru is None else model.gru(v[None])[1][0, 0]
        torch.testing.assert_close(features.pooled[row], pooled)
        assert features.mask[row].tolist() == [True] * length + [False] * (R - length)


def test_published_architectures():
    """SCAN: tokens of both sides in 1024 dimensions; VSRN: 2048, and no map behind either GRU."""
    scan = create_model("scan-regions-gru", head="average", vocabulary=["a", "dog"], probabilistic=False)
    images = scan.image_tower(torch.randn(2, 36, 2048), want_tokens=True)
    texts = scan.text_tower(torch.tensor([[2, 3], [3, 0]]), want_tokens=True)
    assert (images.tokens.shape, texts.tokens.shape) == ((2, 36, 1024), (2, 2, 1024))
    vsrn = create_model("vsrn-regions-gru", vocabulary=["a", "dog"], probabilistic=False)
    assert vsrn.encode_image(torch.randn(2, 36, 2048)).mean.shape == (2, 2048)
    assert not [name for model in (scan, vsrn) for name, _ in model.named_parameters() if "head" in name]

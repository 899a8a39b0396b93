"""Methods' losses of a batch that W ranks gather equal one process': value, gradients, and the discriminator's step."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from finetune.methods import METHODS, Batch
from probemb import Gaussian, distributed, labels
from probemb.models import Encoded, create_model
from tests.finetune.test_trainer import configured
from tests.ranks import run_ranks

PER_RANK, DIM, WORDS, PLACES = 2, 4, 7, 5
DECODERS = ("--loss.hidden=6", "--loss.word_width=5")
PUBLISHED = ("--loss.published=true", "--loss.direction=i2t", "--loss.image_norm=l1")
GATHERED: dict[str, tuple[str, ...]] = {
    "vse0": (),
    "vsepp": (),
    "vsrn": ("--loss.caption_weight=0",),  # the decoder is tested with regions, in test_vsrn.py
    "order": (),
    "pvse": ("--loss.mmd=0.7",),
    "pcme": ("--loss.uniformity=0.3", "--loss.vib_form=sum"),
    "prob-vsepp": (),
    "prob-vsrn": ("--loss.similarity=kl", "--loss.negatives=semi-hard"),
    "scan": (),
    "scan i2t": ("--loss.direction=i2t", "--loss.aggregation=mean"),
    "mse": DECODERS,
    "mmd-mse": DECODERS,
    "jwae-mse": DECODERS,
    "jwae-mh": DECODERS,
    "vae-mh": DECODERS,
    "jwae-scan": DECODERS,
    "jwae-scan published": (*DECODERS, *PUBLISHED),
}
AUTOENCODERS = [name for name, words in GATHERED.items() if words[:2] == DECODERS]


@pytest.fixture(scope="module")
def made():
    """Every method with its model, in float64, before ranks are forked."""
    torch.set_num_threads(1)
    vocabulary = [f"w{i}" for i in range(9)]
    small = {"embed_dim": DIM, "n_unc_layers": 0, "vocabulary": vocabulary, "init_scale": 2, "init_shift": 2}
    pooled = create_model("resnet-gru-small", head="mlp", **small)
    regions = create_model("scan-scenes-gru", head="average", probabilistic=False, **small)
    found = {}
    for name, words in GATHERED.items():
        cls = METHODS[name.split()[0]]
        model = (regions if cls.wants_tokens is True else pooled).double()
        torch.manual_seed(0)
        method = cls(configured(name.split()[0], *words), model, None)
        method.module.double(), method.aside.double()
        found[name] = method, model
    return found


def side(rows: slice, total: int, method, width: int, lengths) -> tuple[Encoded, list]:
    """These rows of one side of the whole batch, as a tower gives them, and its leaves."""
    g = torch.Generator().manual_seed(width + len(lengths))
    leaves = []

    def leaf(*shape):
        leaves.append(torch.randn(total, *shape, generator=g, dtype=torch.float64)[rows].clone().requires_grad_())
        return leaves[-1]

    several = (2,) if method.wants_tokens == "residuals" else ()
    codes, log_var = leaf(*several, DIM), leaf(*several, DIM)
    gaussian = Gaussian(F.normalize(codes, dim=-1), 0.3 * log_var)
    if several:
        return Encoded(gaussian, leaf(2, DIM), torch.ones(len(codes), 2, dtype=torch.bool)), leaves
    mask = (torch.arange(PLACES + 3) < lengths[:, None])[rows]
    mask = mask[:, : int(mask.sum(1).max())]  # padded to the longest of these rows
    tokens = {"tokens": leaf(PLACES + 3, DIM)[:, : mask.shape[1]], "mask": mask} if method.wants_tokens else {}
    if method.wants_features:
        shape = (PLACES + 3, width) if method.wants_tokens else (width,)
        features = torch.randn(total, *shape, generator=g, dtype=torch.float64)[rows]
        tokens |= {"features": features[:, : mask.shape[1]] if method.wants_tokens else features, "codes": codes}
    return Encoded(gaussian, **tokens), leaves


def batch_of(rows: slice, total: int, method, model) -> tuple[Batch, list]:
    """The batch of all ranks, from this rank's rows, and this rank's leaves."""
    longest = torch.arange(total) % PLACES + 2
    if method.wants_features:
        widths = [tower.target_width(bool(method.wants_tokens)) for tower in (model.image_tower, model.text_tower)]
    else:
        widths = [3, 4]
    images, of_images = side(rows, total, method, widths[0], torch.full((total,), PLACES))
    texts, of_texts = side(rows, total, method, widths[1], longest)
    words = torch.randint(2, 11, (total, PLACES + 3), generator=torch.Generator().manual_seed(4))
    words = words.masked_fill(torch.arange(PLACES + 3) >= longest[:, None], 0)[rows]
    ids = torch.arange(total) % (total // 2)  # captions of an image are on different ranks
    images, texts = distributed.gather_encoded(images, texts)
    generator = torch.Generator().manual_seed(9)
    batch = Batch(
        images, texts, labels.same_image(ids, ids).double(), ids, torch.arange(total), 3, 5, generator,
        words=distributed.gather(words),
    )  # fmt: skip
    return batch, of_images + of_texts


def on_rank(rank, world, made, total):
    """Of every method: the loss, this rank's leaves' gradients, the parameters' as DDP means them, and `aside`."""
    each, found = total // world, {}
    for name, (method, model) in deepcopy(made).items():
        batch, leaves = batch_of(slice(rank * each, (rank + 1) * each), total, method, model)
        loss = method.loss(batch, model).loss
        loss.backward()
        parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in method.module.parameters()]
        for gradient in parameters if world > 1 else ():
            torch.distributed.all_reduce(gradient)
        terms = method.after_step(batch, model) if method.aside_optimizer else {}
        found[name] = {
            "loss": loss.detach().numpy(),
            "leaves": [(torch.zeros_like(x) if x.grad is None else x.grad).numpy() / world for x in leaves],
            "parameters": [gradient.numpy() / world for gradient in parameters],
            "aside": [p.detach().numpy() for p in method.aside.parameters()] + [float(x) for x in terms.values()],
        }
    return found


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_ranks_equal_one_process(world, made):
    expected = on_rank(0, 1, made, PER_RANK * world)
    for rank, found in enumerate(run_ranks(world, on_rank, made, PER_RANK * world)):
        rows = slice(PER_RANK * rank, PER_RANK * (rank + 1))
        for name, one in expected.items():
            assert max(np.abs(x).max() for x in one["leaves"]) > 0, name
            whole = {**one, "leaves": [x[rows] for x in one["leaves"]]}
            for part, values in whole.items():
                for ours, theirs in zip(found[name][part], values) if part != "loss" else [(found[name][part], values)]:
                    np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-11, err_msg=f"{name} {part}")


def test_the_batch_has_what_ranks_could_get_wrong(made):
    """Captions of an image lie on two ranks, whose texts have other lengths; decoders and discriminators are there."""
    one = on_rank(0, 1, made, 6)
    for name, found in one.items():
        assert float(found["loss"]) > 0
        assert (name in AUTOENCODERS) == bool(found["parameters"])
        assert ("jwae" in name) == bool(found["aside"])
    method, model = made["jwae-scan"]
    batch, _ = batch_of(slice(0, 6), 6, method, model)
    assert batch.match[0].nonzero().flatten().tolist() == [0, 3]
    assert batch.texts.mask.sum(1).tolist() == [2, 3, 4, 5, 6, 2]

"""The recipe against the authors' numbers, and each part against its definition written out."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from finetune.config import Config, Optimizer, with_method_file
from finetune.recipe import OPTIMIZERS, Schedule, make_schedule, parameter_groups
from probemb.cli.configuration import parse_config
from probemb.losses import PairwiseMatchLoss
from probemb.models import create_model
from tests.models.formats.test_published import our_name

NAME = "ViT-Micro-32"


def micro(**options):
    torch.manual_seed(0)
    model = create_model(NAME, **{"head": "gpo", "embed_dim": 24, **options})
    for scalar in (model.logit_scale, model.scale, model.shift):
        scalar.requires_grad_(False)
    return model


def rates(groups, model, loss):
    """Parameter's name -> its group."""
    names = {id(p): n for n, p in (*model.named_parameters(), *((f"loss.{n}", p) for n, p in loss.named_parameters()))}
    pairs = [(names[id(parameter)], group) for group in groups for parameter in group["params"]]
    assert len(pairs) == len(dict(pairs))  # no parameter twice
    return dict(pairs)


def name_of(theirs):
    """A parameter's name in the authors' engine -> here."""
    part, _, rest = theirs.partition(".")
    if part == "criterion":
        return "loss." + rest.replace("negative_scale", "scale")
    return our_name({"img_enc": "visual", "txt_enc": "text"}[part], rest)


@pytest.mark.parametrize("case", ["published", "no_layerwise", "no_unc_decay", "no_unc_decay_no_layerwise"])
def test_authors_parameter_groups(parity, case):
    v = parity("12_pcmepp_param_groups")
    options = json.loads(str(v[f"{case}__config_json"]))
    with torch.device("meta"):  # names and sizes of twelve blocks, without numbers
        model, loss = create_model("ViT-B-32", head="gpo", n_unc_layers=1), PairwiseMatchLoss()
    for scalar in (model.logit_scale, model.scale, model.shift):
        scalar.requires_grad_(False)
    optimizer = Optimizer(
        lr=options["lr"],
        weight_decay=options["wd"],
        image_backbone=options["img_backbone_lr_decay"],
        text_backbone=options["txt_backbone_lr_decay"],
        layer_decay=options["layerwise_lr_decay"],
        decay_uncertainty=not options.get("no_img_unc_decay", False),
    )
    groups = parameter_groups(model, loss, optimizer)
    ours = rates(groups, model, loss)
    names = [name_of(str(name)) for name in v[f"{case}__names"]]
    assert set(names) == set(ours)
    for name, lr, decay in zip(names, v[f"{case}__initial_lr"], v[f"{case}__weight_decay"]):
        assert ours[name]["lr"] == pytest.approx(lr, rel=1e-12), name
        assert ours[name]["initial_lr"] == ours[name]["lr"]
        assert ours[name]["weight_decay"] == decay, name


def schedule_of(samples, epochs=25, networks=1, average_epochs=10, **options) -> Schedule:
    return Schedule(Optimizer(**options), epochs, samples, networks, average_epochs=average_epochs)


def test_authors_learning_rate_by_epoch(parity):
    v = parity("12_pcmepp_param_groups")
    expected = v["published__lr_by_epoch_of_head_params"]
    n = 4000
    ends = [5e-4 * schedule_of(n).factor((epoch + 1) * n) for epoch in range(25)]
    starts = [5e-4 * schedule_of(n, warmup_epochs=0).factor(epoch * n + 1) for epoch in range(25)]
    assert ends == pytest.approx(expected[:25], rel=1e-12)  # behind the 25th epoch theirs jumps back up
    assert starts == pytest.approx(expected[:25], rel=1e-12)


@pytest.mark.parametrize("case", ["adamp_pcmepp", "adamp_big", "adamp_nesterov_custom", "adamp_nowd"])
def test_authors_adamp(parity, case):
    v = parity("11_adamp")
    options = json.loads(str(v[f"{case}__hparams_json"]))
    params = {k.removeprefix("init__"): nn.Parameter(torch.tensor(a)) for k, a in v.items() if k.startswith("init__")}
    optimizer = OPTIMIZERS["adamp"]([{"params": list(params.values()), **options}])
    steps = len(v[f"{case}__grads__{next(iter(params))}"])
    for step in range(steps):
        for name, parameter in params.items():
            parameter.grad = torch.tensor(v[f"{case}__grads__{name}"][step])
        optimizer.step()
        for name, parameter in params.items():
            np.testing.assert_allclose(
                parameter.detach().numpy(), v[f"{case}__params__{name}"][step], rtol=0, atol=1e-9, err_msg=name
            )


def test_schedule_of_the_paper():
    n = 400
    s = schedule_of(n)

    def factors(schedule, epochs, share, **more):
        return [schedule.factor(int((epoch + share) * n), **more) for epoch in epochs]

    epochs = (0, 1, 2, 3, 14, 15, 24)
    assert factors(s, epochs, 0.5, image_backbone=True) == [0, 0, 0.5, 1, 1, 0.1, 0.1]
    assert factors(s, epochs, 0.25) == [1, 1, 0.25, 1, 1, 0.1, 0.1]
    assert factors(s, (1, 2, 14), 1) == [1, 1, 1]  # the last step of an epoch belongs to it
    assert [e for e in range(25) if s.frozen(e * n)] == [0, 1]
    assert [e for e in range(25) if s.averages((e + 1) * n)] == list(range(15, 25))
    longer = schedule_of(n, freeze_epochs=1, warmup_epochs=2)
    assert factors(longer, range(4), 0.5) == [1, 0.25, 0.75, 1]
    assert factors(schedule_of(n, freeze_epochs=0), (0,), 0.1) == [0.1]
    assert not any(schedule_of(n, average_epochs=0).averages((e + 1) * n) for e in range(25))


def configured(*words):
    return parse_config(Config, "test", "", with_method_file(["--data.path=x", *words]))


def test_a_rate_that_falls_twice():
    """A tenth in the last 20 of 30 epochs and a tenth of that in the last ten: VSRN's public recipe for Flickr30k."""
    words = ["--method=vsrn", "--batch_size=10"]
    schedule = make_schedule(configured(*words, "--optimizer.decay-epochs=[20, 10]"), networks=1, steps=4)
    found = [schedule.factor(40 * epoch + n) for epoch in (0, 9, 10, 19, 20, 29) for n in (1, 40)]
    assert found == pytest.approx([1] * 4 + [0.1] * 4 + [0.01] * 4)
    assert make_schedule(configured(*words, "--optimizer.decay-epochs=[]"), networks=1, steps=4).factor(30 * 40) == 1


def test_cosine():
    s = schedule_of(100, 4, freeze_epochs=0, warmup_epochs=0.5, schedule="cosine")
    assert [s.factor(n + 1) for n in (100, 200, 300)] == pytest.approx([0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    assert s.factor(25) == pytest.approx(0.5, rel=0.02)  # half of the warm-up
    assert 0 < s.factor(400) < 1e-4


@pytest.mark.parametrize("kind", ["step", "cosine"])
def test_networks_that_take_turns_learn_alike(kind):
    one = schedule_of(400, 2, freeze_epochs=0, decay_epochs=1, schedule=kind)
    two = schedule_of(800, 2, networks=2, freeze_epochs=0, decay_epochs=1, schedule=kind)
    for turn in (0, 400):
        assert [two.factor(turn + n) for n in range(1, 401)] == [one.factor(n) for n in range(1, 401)]

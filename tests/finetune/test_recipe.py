"""The recipe against the authors' numbers, and each part against its definition written out."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from timm.optim import AdamP as TimmsAdamP
from torch import nn

from finetune.adamp import AdamP
from finetune.config import Config, Optimizer, check, shortened, with_method_file
from finetune.recipe import (
    Schedule,
    WeightAverage,
    check_engine,
    create_optimizer,
    make_schedule,
    parameter_groups,
    set_learning_rates,
)
from probemb.cli.configuration import parse_config
from probemb.distributed import gather_pairs
from probemb.errors import UserError
from probemb.losses import PairwiseMatchLoss
from probemb.models import create_model, create_tokenizer
from probemb.models.layers import freeze_backbones
from tests.ranks import run_ranks

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


def our_name(theirs):
    """A parameter's name in the authors' engine -> here."""
    part, _, rest = theirs.partition(".")
    if part == "criterion":
        return "loss." + rest.replace("negative_scale", "scale")
    tower = {"img_enc": "visual", "txt_enc": "text"}[part]
    part, _, name = rest.partition(".")
    if part == "backbone":
        return f"{tower}.{name}".replace("transformer.prob_resblocks", "uncertainty_transformer.resblocks")
    head = {"image_encoder": "mean_head", "image_std_encoder": "log_var_head"}
    head |= {"linear": "mean_head.linear", "gpool": "mean_head.pool"}
    head |= {"std_linear": "log_var_head.linear", "std_gpool": "log_var_head.pool"}
    return f"{tower}.{head[part]}.{name}".replace(".fc.", ".linear.").replace(".gpool.", ".pool.")


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
    names = [our_name(str(name)) for name in v[f"{case}__names"]]
    assert set(names) == set(ours)
    for name, lr, decay in zip(names, v[f"{case}__initial_lr"], v[f"{case}__weight_decay"]):
        assert ours[name]["lr"] == pytest.approx(lr, rel=1e-12), name
        assert ours[name]["initial_lr"] == ours[name]["lr"]
        assert ours[name]["weight_decay"] == decay, name


def test_authors_learning_rate_by_epoch(parity):
    v = parity("12_pcmepp_param_groups")
    expected = v["published__lr_by_epoch_of_head_params"]
    n = 4000
    ends = [5e-4 * Schedule(epoch_samples=n).factor((epoch + 1) * n) for epoch in range(25)]
    starts = [5e-4 * Schedule(epoch_samples=n, warmup_epochs=0).factor(epoch * n + 1) for epoch in range(25)]
    assert ends == pytest.approx(expected[:25], rel=1e-12)  # behind the 25th epoch theirs jumps back up
    assert starts == pytest.approx(expected[:25], rel=1e-12)


@pytest.mark.parametrize(("n_unc_layers", "head"), [(1, "gpo"), (2, "gpo"), (0, "gpo"), (2, "clip")])
def test_every_parameter_is_in_one_group_at_its_rate(n_unc_layers, head):
    model, loss = micro(n_unc_layers=n_unc_layers, head=head, embed_dim=None if head == "clip" else 24), nn.Linear(2, 3)
    groups = parameter_groups(model, loss, Optimizer(lr=1.0, weight_decay=0.3))
    ours = rates(groups, model, loss)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(ours) == trained | {"loss.weight", "loss.bias"}
    for name, group in ours.items():
        f = 0.01 if name.startswith("visual") else 0.1
        if "uncertainty_transformer.resblocks." in name:
            rate = f * 0.7 ** (n_unc_layers - int(name.split("resblocks.")[1][0]))
        elif "resblocks." in name:
            rate = f * 0.7 ** (2 - int(name.split("resblocks.")[1][0]))
        else:
            rate = 1.0 if "_head." in name or "loss" in name else f
        assert group["lr"] == pytest.approx(rate), name
        assert group["weight_decay"] == (0 if "loss" in name else 0.3), name
        backbone = name.startswith("visual") and "_head" not in name and "uncertainty" not in name
        assert group["image_backbone"] == backbone, name


def test_the_models_own_scalars_are_trained_where_they_want_a_gradient():
    model = micro(probabilistic=False)
    model.scale.requires_grad_(True)
    scalars = next(group for group in parameter_groups(model, None, Optimizer()) if group["name"] == "scalars")
    assert scalars["params"] == [model.scale]
    assert (scalars["lr"], scalars["weight_decay"]) == (5e-4, 0)


def test_factors_learn_faster_than_the_logarithm_of_one():
    model = micro()
    for scalar in (model.logit_scale, model.scale, model.shift):
        scalar.requires_grad_(True)
    groups = {
        group["name"]: group for group in parameter_groups(model, PairwiseMatchLoss(), Optimizer(lr=1e-3, scalars=30.0))
    }
    assert [len(groups[name]["params"]) for name in ("scalars", "logit_scale")] == [4, 1]
    assert [groups[name]["lr"] for name in ("scalars", "logit_scale")] == pytest.approx([0.03, 1e-3])


def test_a_frozen_backbone_is_still_in_its_groups():
    model = micro()
    before = sum(len(group["params"]) for group in parameter_groups(model, None, Optimizer()))
    freeze_backbones(model, True)
    assert sum(len(group["params"]) for group in parameter_groups(model, None, Optimizer())) == before


@pytest.mark.parametrize("case", ["adamp_pcmepp", "adamp_big", "adamp_nesterov_custom", "adamp_nowd"])
def test_authors_adamp(parity, case):
    v = parity("11_adamp")
    options = json.loads(str(v[f"{case}__hparams_json"]))
    params = {k.removeprefix("init__"): nn.Parameter(torch.tensor(a)) for k, a in v.items() if k.startswith("init__")}
    optimizer = create_optimizer([{"params": list(params.values()), **options}])
    steps = len(v[f"{case}__grads__{next(iter(params))}"])
    for step in range(steps):
        for name, parameter in params.items():
            parameter.grad = torch.tensor(v[f"{case}__grads__{name}"][step])
        optimizer.step()
        for name, parameter in params.items():
            np.testing.assert_allclose(
                parameter.detach().numpy(), v[f"{case}__params__{name}"][step], rtol=0, atol=1e-9, err_msg=name
            )


def adamp_step(w, grad, m, v, step, lr, weight_decay):
    """AdamP's algorithm for one matrix, row by row as "channels", in numpy. Source: Heo et al., Algorithm 2."""
    m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
    update = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)

    def cosine(a, b):
        return abs((a * b).sum()) / (np.linalg.norm(a) * np.linalg.norm(b))

    def project(a, along):
        unit = along / np.linalg.norm(along)
        return a - (a * unit).sum() * unit

    decay = weight_decay
    if max(cosine(w[i], grad[i]) for i in range(len(w))) < 0.1 / math.sqrt(w.shape[1]):
        update, decay = np.stack([project(update[i], w[i]) for i in range(len(w))]), 0.1 * weight_decay
    elif cosine(w, grad) < 0.1 / math.sqrt(w.size):
        update, decay = project(update, w), 0.1 * weight_decay
    return w * (1 - lr * decay) - lr * update, m, v


@pytest.mark.parametrize("kind", ["rows", "whole", "free"])
def test_adamp_equals_its_definition(kind):
    rng = np.random.default_rng(1)
    w = rng.standard_normal((4, 6))
    m, v = np.zeros_like(w), np.zeros_like(w)
    parameter = nn.Parameter(torch.tensor(w))
    optimizer = create_optimizer([{"params": [parameter], "lr": 0.01, "weight_decay": 0.2}])
    for step in range(1, 5):
        grad = rng.standard_normal(w.shape)
        if kind == "rows":
            grad -= (grad * w).sum(1, keepdims=True) / (w * w).sum(1, keepdims=True) * w
        elif kind == "whole":
            grad -= (grad * w).sum() / (w * w).sum() * w
        parameter.grad = torch.tensor(grad)
        optimizer.step()
        w, m, v = adamp_step(w, grad, m, v, step, 0.01, 0.2)
        np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=0, atol=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_adamp_equals_timms(nesterov):
    """Free, scale-invariant by rows and as a whole, a convolution, a vector, one value, zeros, and one left out."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(6, 40), (6, 40), (6, 40), (4, 3, 5, 5), (7,), (), (3, 4), (1, 1), (5, 5)]
    weights = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    weights[6].zero_()
    both = [[nn.Parameter(w.clone()) for w in weights] for _ in range(2)]
    options = {"lr": 0.01, "weight_decay": 0.1, "nesterov": nesterov}
    ours, timms = (kind(parameters, **options) for kind, parameters in zip((AdamP, TimmsAdamP), both))
    for _ in range(5):
        for i, (one, other) in enumerate(zip(*both)):
            w, grad = one.detach(), torch.randn(one.shape, generator=draw, dtype=torch.float64)
            if i == 1:
                grad -= (grad * w).sum(1, keepdim=True) / w.square().sum(1, keepdim=True) * w
            elif i == 2:
                grad -= (grad * w).sum() / w.square().sum() * w
            one.grad, other.grad = (None, None) if i == 8 else (grad, grad.clone())
        ours.step()
        timms.step()
        for one, other in zip(*both):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert ours.state_dict()["state"].keys() == timms.state_dict()["state"].keys()
    timms.load_state_dict(ours.state_dict())  # its checkpoints are timm's


def test_schedule_of_the_paper():
    n = 400
    s = Schedule(epoch_samples=n)

    def factors(schedule, epochs, share, **more):
        return [schedule.factor(int((epoch + share) * n), **more) for epoch in epochs]

    epochs = (0, 1, 2, 3, 14, 15, 24)
    assert factors(s, epochs, 0.5, image_backbone=True) == [0, 0, 0.5, 1, 1, 0.1, 0.1]
    assert factors(s, epochs, 0.25) == [1, 1, 0.25, 1, 1, 0.1, 0.1]
    assert factors(s, (1, 2, 14), 1) == [1, 1, 1]  # the last step of an epoch belongs to it
    assert [e for e in range(25) if s.frozen(e * n)] == [0, 1]
    assert [e for e in range(25) if s.averages((e + 1) * n)] == list(range(15, 25))
    longer = Schedule(epoch_samples=n, freeze_epochs=1, warmup_epochs=2)
    assert factors(longer, range(4), 0.5) == [1, 0.25, 0.75, 1]
    assert factors(Schedule(epoch_samples=n, freeze_epochs=0), (0,), 0.1) == [0.1]
    assert not any(Schedule(epoch_samples=n, average_epochs=0).averages((e + 1) * n) for e in range(25))


def test_a_rate_that_falls_twice():
    """A tenth in the last 20 of 30 epochs and a tenth of that in the last ten: VSRN's public recipe for Flickr30k."""

    def configured(decay_epochs):
        words = ["--method=vsrn", "--data.path=x", "--batch_size=10", f"--optimizer.decay-epochs={decay_epochs}"]
        return parse_config(Config, "test", "", with_method_file(words))

    schedule = make_schedule(configured("[20, 10]"), networks=1, steps=4)
    found = [schedule.factor(40 * epoch + n) for epoch in (0, 9, 10, 19, 20, 29) for n in (1, 40)]
    assert found == pytest.approx([1] * 4 + [0.1] * 4 + [0.01] * 4)
    assert make_schedule(configured("[]"), networks=1, steps=4).factor(30 * 40) == 1
    with pytest.raises(UserError, match="decay_epochs is 30 of 30 epochs"):
        check(configured("[10, 30]"), world_size=1)


@pytest.mark.parametrize(
    ("words", "freeze", "warmup", "decay"),
    [
        (("--epochs=1",), 0, 0.04, 0),
        (("--epochs=10",), 1, 0.4, 4),
        (("--epochs=11",), 2, 1, 10),  # all of them fit
        (("--epochs=10", "--optimizer.decay-epochs=3"), 2, 1, 3),
        (("--method=vsrn", "--epochs=3", "--optimizer.decay-epochs=[20, 10]"), 0, 0, (20, 10)),  # named: refused
        (("--config=finetune/recipes/pcme-coco.yaml", "--epochs=6"), 3, 0, 10),
        (("--config=finetune/recipes/pcme-coco.yaml", "--epochs=1"), 0, 0, 10),
        (("--method=vsepp", "--epochs=3"), 2, 0, 2),
    ],
)
def test_a_recipe_is_shortened_to_fewer_epochs(words, freeze, warmup, decay):
    argv = with_method_file([*words, "--data.path=x"])
    whole = parse_config(Config, "test", "", argv)
    config, told = shortened(whole, argv)
    o = config.optimizer
    assert (o.freeze_epochs, o.warmup_epochs, o.decay_epochs) == (freeze, warmup, decay)
    assert bool(told) == (o != whole.optimizer)
    if decay == (20, 10):
        with pytest.raises(UserError, match="decay_epochs is 20 of 3 epochs"):
            check(config)
    else:
        check(config)


def test_a_warm_up_longer_than_the_run_is_refused_with_what_it_would_reach():
    words = ["--data.path=x", "--optimizer.warmup_epochs=46"]
    with pytest.raises(UserError, match=r"longer than the 23 that follow the frozen ones: .* at 50% of its peak"):
        check(parse_config(Config, "test", "", with_method_file(words)))


def test_all_that_cannot_work_is_said_at_once():
    words = ["--batch_size=9", "--optimizer.decay-epochs=30", "--method=vse", "--mix.ratio=0.5", "--distance=kl"]
    with pytest.raises(UserError, match=r"^5 settings cannot work") as caught:
        check(parse_config(Config, "test", "", with_method_file(words)), world_size=2)
    for name in ("--data.path", "batch_size", "decay_epochs", "mix.ratio", "distance"):
        assert name in caught.value.what
    with pytest.raises(
        UserError, match=r"no option --optimizer.lrr.*\n.*no option --lr. Did you mean '--optimizer.lr'"
    ):
        parse_config(Config, "test", "", ["--optimizer.lrr=1", "--lr=1"])


def test_cosine():
    s = Schedule(epochs=4, epoch_samples=100, freeze_epochs=0, warmup_epochs=0.5, cosine=True)
    assert [s.factor(n + 1) for n in (100, 200, 300)] == pytest.approx([0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    assert s.factor(25) == pytest.approx(0.5, rel=0.02)  # half of the warm-up
    assert 0 < s.factor(400) < 1e-4


@pytest.mark.parametrize("cosine", [False, True])
def test_networks_that_take_turns_learn_alike(cosine):
    one = Schedule(epochs=2, epoch_samples=400, freeze_epochs=0, cosine=cosine)
    two = Schedule(epochs=2, epoch_samples=800, networks=2, freeze_epochs=0, cosine=cosine)
    for turn in (0, 400):
        assert [two.factor(turn + n) for n in range(1, 401)] == [one.factor(n) for n in range(1, 401)]


def step_once(model, loss, optimizer):
    images = torch.randn(4, 3, 32, 32)
    tokens = create_tokenizer(model)(["a cat", "two dogs", "a red circle", "x"])
    optimizer.zero_grad()
    loss(model.encode_image(images), model.encode_text(tokens)).loss.backward()
    optimizer.step()


def test_learning_rates_reach_the_optimizer_and_the_frozen_backbone_stands_still():
    model, loss = micro(), PairwiseMatchLoss()
    optimizer = create_optimizer(parameter_groups(model, loss, Optimizer(lr=0.01)))
    assert freeze_backbones(model, True)
    assert not freeze_backbones(model, True)
    before = copy.deepcopy(model.state_dict())
    set_learning_rates(optimizer, Schedule(epoch_samples=8), 16)
    step_once(model, loss, optimizer)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert "visual.mean_head.linear.weight" in moved
    assert "visual.uncertainty_transformer.resblocks.0.mlp.c_fc.weight" in moved
    assert "text.token_embedding.weight" in moved
    still = {name for name, _ in model.named_parameters()} - moved - {"logit_scale", "scale", "shift"}
    assert "visual.conv1.weight" in still
    assert all(n.startswith("visual.") and "_head" not in n and "uncertainty" not in n for n in still)
    assert len(still) == len([p for g in optimizer.param_groups if g["image_backbone"] for p in g["params"]])
    assert model.visual.conv1.weight not in optimizer.state  # no moments of what was not trained
    assert freeze_backbones(model, False)
    set_learning_rates(optimizer, Schedule(epoch_samples=8), 20)
    step_once(model, loss, optimizer)
    assert not torch.equal(model.visual.conv1.weight, before["visual.conv1.weight"])
    by_name = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert by_name["image.head.0"] == pytest.approx(0.005)
    assert by_name["image.trunk.1"] == pytest.approx(0.005 * 0.01 * 0.7)
    state = optimizer.state_dict()  # and a checkpoint of it fits a new one
    create_optimizer(parameter_groups(model, loss, Optimizer(lr=0.01))).load_state_dict(state)


def trained_in_two_phases(rank, world_size):
    """Two steps with a frozen backbone and two behind them, on a batch of four: every weight, and a and b."""
    torch.manual_seed(0)
    model, loss = micro().double(), PairwiseMatchLoss().double()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=generator)
    tokens = create_tokenizer(model)(["a cat", "two dogs", "a red circle", "x"])
    mine = slice(4 // world_size * rank, 4 // world_size * (rank + 1))
    optimizer = create_optimizer(parameter_groups(model, loss, Optimizer(lr=0.01)))
    schedule = Schedule(epoch_samples=8)
    for epoch in (1, 2):
        freeze_backbones(model, schedule.frozen(8 * epoch))
        ddp = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
        for step in range(2):
            set_learning_rates(optimizer, schedule, 8 * epoch + 4 * (step + 1))
            optimizer.zero_grad()
            out = ddp(images[mine], tokens[mine])
            loss(*gather_pairs(out.image, out.text)).loss.backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 2.0)
            optimizer.step()
    return [parameter.detach().numpy() for parameter in (*model.parameters(), *loss.parameters())]


def test_freezing_and_thawing_under_ddp_equals_one_process():
    (single,) = run_ranks(1, trained_in_two_phases)
    for weights in run_ranks(2, trained_in_two_phases):
        for ours, theirs in zip(weights, single):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-8)


def test_weight_average_is_the_mean_of_everything():
    model, loss = micro(), PairwiseMatchLoss()
    average = WeightAverage(model, loss)
    assert average.n_averaged == 0
    snapshots = []
    for _ in range(3):
        with torch.no_grad():
            for parameter in (*model.parameters(), *loss.parameters()):
                parameter.add_(torch.randn_like(parameter))
        average.update(model, loss)
        snapshots.append([p.detach().double().clone() for p in (*model.parameters(), *loss.parameters())])
    averaged = (*average.model.parameters(), *average.loss_module.parameters())
    for parameter, values in zip(averaged, zip(*snapshots)):
        torch.testing.assert_close(parameter.double(), sum(values) / 3, rtol=0, atol=1e-6)
    assert average.n_averaged == 3
    assert not average.model.training
    assert not any(parameter.requires_grad for parameter in averaged)
    assert average.model.config == model.config
    assert model.training  # the live model goes on as it was
    assert model.visual.conv1.weight.requires_grad
    again = WeightAverage(model, loss)
    again.load_state_dict(average.state_dict())
    for one in (again, copy.deepcopy(average)):
        assert one.n_averaged == 3
        one.update(model, loss)
        torch.testing.assert_close(one.loss_module.scale, (3 * average.loss_module.scale + loss.scale.detach()) / 4)
    assert average.n_averaged == 3
    assert WeightAverage(model).loss_module is None


def accelerator(kind=DistributedType.NO, n=1):
    return SimpleNamespace(distributed_type=kind, num_processes=n)


@pytest.fixture
def launcher(monkeypatch):
    """Sets the launcher's environment, and nothing else of it."""

    def set_to(**environment):
        for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_engines_that_train(launcher):
    launcher()
    check_engine(accelerator())
    launcher(ACCELERATE_MIXED_PRECISION="no")
    check_engine(accelerator())
    launcher(WORLD_SIZE="1")
    check_engine(accelerator())
    launcher(WORLD_SIZE="2", MASTER_PORT="29500", ACCELERATE_MIXED_PRECISION="bf16")
    check_engine(accelerator(DistributedType.MULTI_CPU, 2))


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM])
def test_engines_that_shard_the_optimizer_are_refused(launcher, kind):
    launcher(WORLD_SIZE="2")
    with pytest.raises(UserError, match=f"AdamP needs whole weights, and {kind.value} cuts them"):
        check_engine(accelerator(kind, 2))


def test_a_launcher_whose_processes_do_not_find_each_other_is_refused(launcher):
    launcher(WORLD_SIZE="2", MASTER_PORT="29500")
    with pytest.raises(UserError, match="started 2 processes, but each of them takes part in a run of 1"):
        check_engine(accelerator())
    launcher(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_MIXED_PRECISION="no")
    with pytest.raises(UserError, match="asked for several processes, but it has started one"):
        check_engine(accelerator())

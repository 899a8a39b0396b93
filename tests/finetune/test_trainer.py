"""The loop itself: ranks against one process, labels of mixed images, averaging, freezing, NaN."""

import gc
import json
from dataclasses import replace
from functools import cache

import numpy as np
import open_clip
import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from torch.nn import functional

from finetune.config import Config, Optimizer, with_method_file
from finetune.loading.augment import draw_mix
from finetune.loading.noise import shuffle_captions
from finetune.loading.pair_loader import PairLoader
from finetune.methods import METHODS
from finetune.pair_feed import Moment
from finetune.recipe import WeightAverage, create_optimizer, make_schedule, parameter_groups
from finetune.run import make_feed, make_networks
from finetune.trainer import Hooks, Joint, State, Trainer
from probemb.cli.configuration import parse_config
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from probemb.losses import CaptionSimilarity
from probemb.models import create_model, create_tokenizer, create_transforms
from tests.ranks import run_ranks
from tools.make_scenes import Plan, make

BATCH = 12


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Four images with three captions each: one batch an epoch."""
    out = tmp_path_factory.mktemp("few") / "world"
    make(Plan(train=4, val=0, classes_images=0, size=32, shard_size=4, captions=3), out, workers=1)
    tokenizer()  # before ranks are forked
    gc.freeze()  # what is there already is not looked through, nor copied, in every one of them
    yield out
    gc.unfreeze()


@cache
def tokenizer():
    return create_tokenizer(create_model("ViT-Micro-32"))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def configured(method: str, *words: str) -> Config:
    base = ["--epochs=2", f"--batch_size={BATCH}", "--optimizer.decay_epochs=1", "--optimizer.freeze_epochs=1"]
    base += ["--model.name=ViT-Micro-32", "--log_every=1", f"--method={method}", "--swa-epochs=0", "--data.path=x"]
    base += ["--loss.warmup_epochs=1"]
    if not hasattr(METHODS[method].Options, "warmup_epochs"):
        base.pop()
    config = parse_config(Config, "test", "", with_method_file([*base, *words]))
    METHODS[config.method].check(config)
    return config


def make_trainer(config: Config, data, rank: int = 0, world: int = 1, double: bool = True, **hooks) -> Trainer:
    """As finetune/run.py puts it together, in float64."""
    torch.manual_seed(0)
    method = METHODS[config.method]
    size = {} if config.model.head == "clip" else {"embed_dim": 8}
    networks = [
        create_model(
            config.model.name, head=config.model.head, init_scale=5, init_shift=5, **size,
            **method.model_options(config),
        )
        for _ in range(method.networks)
    ]  # fmt: skip
    model = networks[0]
    joint = Joint(model, method(config, model, data), *networks[1:])
    for network in networks:
        for name in ("scale", "shift", "logit_scale"):
            getattr(network, name).requires_grad_(name in joint.objective.trains)
    joint = joint.double() if double else joint
    inputs = create_transforms(model).train, tokenizer()
    unpaired = None
    if config.data.unpaired is not None:
        others = find_captions(config.data.unpaired, "train")
        unpaired = PairLoader(others, *inputs, config.data.unpaired_batch, config.seed + 1, rank, world)
    loader = PairLoader(data, *inputs, config.batch_size, config.seed, rank, world, unpaired=unpaired)
    schedule = make_schedule(config, len(networks), loader.steps)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    groups = [
        one for n in networks for one in parameter_groups(n, joint.method if n is model else None, Optimizer(lr=0.01))
    ]
    optimizer = create_optimizer(groups)
    feed = make_feed(config, loader, data, joint.objective, accelerator.device)
    return Trainer(accelerator, State(joint, optimizer), loader, feed, schedule, config, Hooks(**hooks))


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Before a test too: what an earlier file left would be inherited by the ranks."""
    forget_accelerator()
    yield
    forget_accelerator()


def forget_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def weights_of(trainer):
    return trainer.joint.state_dict().items()


def trained(rank, world, few, methods, words):
    """Losses and all weights after two steps, by method."""
    out = {}
    for name in methods:
        data = find_captions(few, "train")
        told = []
        method, *own = name.split()
        config = configured(method, *words, *(word.replace("FEW", str(few)) for word in own))
        trainer = make_trainer(config, data, rank, world, report=lambda step, values, told=told: told.append(values))
        assert trainer.accelerator.num_processes == world
        assert not trainer.fit()
        if world > 1:  # DDP's buffers are as large as the gradients: those of the frozen epoch are gone
            assert len(trainer.accelerator._models) == 1
        state = {key: value.flatten()[:: 1 + len(value.flatten()) // 20_000] for key, value in weights_of(trainer)}
        state = {key: value.numpy().copy() for key, value in state.items()}  # of large ones, some
        out[name] = ([values["loss"] for values in told], state)
    return out


@pytest.fixture(scope="module")
def alone(few):
    return run_ranks(1, trained, few, TRAINED, WORDS)[0]


DECODERS = "--size-augment=0 --loss.hidden=6 --loss.word_width=5"  # small ones; whole captions
TRAINED = (
    "pcmepp --loss.clip=0.5",
    "pcme --loss.uniformity=0.1 --loss.vib_form=sum",
    "infonce",
    "vse",
    "daa",
    "p2rm",
    "ncr",
    "decl",
    "vse0 --size-augment=0",
    "vsepp --size-augment=0",
    "order --model.head=gpo --model.lock-image=false",
    "pvse --model.lock-image=false",
    "prob-vsepp --size-augment=0",
    "prob-vsrn --size-augment=0",
    "vsrn --size-augment=0 --loss.caption_weight=0",
    "scan --size-augment=0",
    *(f"{name} {DECODERS}" for name in ("mse", "mmd-mse", "jwae-mse", "jwae-mh", "vae-mh", "jwae-scan")),
    *(f"{name} {DECODERS} --data.unpaired=FEW --data.unpaired_batch=6" for name in ("jwae-mh", "vae-mh", "jwae-scan")),
)
# Mixing (of pcmepp), SizeAugment, Cutout and dropped words are on: they are drawn for the whole batch.
WORDS = ("--size-augment=0.2", "--augment.cutout=0.2", "--augment.word_dropping=0.3")


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_equal_one_process(world, few, alone):
    """Losses and weights through the real loop and DDP, with the backbone frozen, and thawed and wrapped anew."""
    for one in run_ranks(world, trained, few, TRAINED, WORDS):
        for name in TRAINED:
            (losses, state), (expected, weights) = one[name], alone[name]
            assert len(losses) == 2 * METHODS[name.split()[0]].networks
            np.testing.assert_allclose(losses, expected, rtol=1e-7, err_msg=name)
            for key, value in weights.items():
                np.testing.assert_allclose(state[key], value, rtol=0, atol=2e-7, err_msg=f"{name} {key}")
            assert ("aside" in " ".join(state)) == ("jwae" in name)


def test_batch_norms_of_two_ranks_equal_one_process(few, tmp_path):
    """Their stored statistics, which the checkpoints hold, among the weights."""
    vision = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 16, "image_size": 32}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    (tmp_path / "small-rn.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(tmp_path / "small-rn.json")
    args = few, ["vse"], ["--model.name=small-rn", "--size-augment=0"]
    (alone,) = run_ranks(1, trained, *args)
    losses, weights = alone["vse"]
    assert np.abs(weights["model.visual.bn1.running_mean"]).max() > 1e-3
    for found in run_ranks(2, trained, *args):
        np.testing.assert_allclose(found["vse"][0], losses, rtol=1e-7)
        for key, value in weights.items():
            np.testing.assert_allclose(found["vse"][1][key], value, rtol=0, atol=1e-6, err_msg=key)
    with pytest.raises(UserError, match="swa_epochs is 1"):
        make_networks(configured("vse", *args[2], "--no-model.pretrained", "--swa-epochs=1"), None, print)


@pytest.mark.parametrize("head", ["gpo", "clip"])
@pytest.mark.parametrize("method", ["pcmepp", "pcmepp-clip", "pcmepp-mu", "p2rm"])
def test_every_parameter_that_is_trained_gets_a_gradient(method, head, few):
    """DDP waits for each of them."""
    config = configured(*method.split(), f"--model.head={head}", "--size-augment=0")
    trainer = make_trainer(config, find_captions(few, "train"))
    without, step = [], trainer.optimizer.step

    def spy():
        named = trainer.joint.named_parameters()
        without.append([name for name, p in named if p.requires_grad and p.grad is None])
        step()

    trainer.optimizer.step = spy
    trainer.fit()
    assert without == [[], []]  # frozen, thawed


def mixed(rank, world, few, words):
    """This rank's images, mixed; which images all ranks have, their labels, and how they are mixed."""
    data = find_captions(few, "train")
    config = configured("pcmepp", "--mix.smoothing=0.01", "--size-augment=0", "--augment.cutout=0.2", *words)
    trainer = make_trainer(config, data, rank, world)
    pairs = next(trainer.loader.epoch(0))
    (images, _, _), mix = trainer.feed.inputs(pairs, trainer.model, 0)
    embedded = [torch.zeros(len(images), 8, dtype=torch.float64)] * 4
    batch = trainer.feed.gather(embedded, pairs, mix, Moment(0, 0, 0))
    return images.numpy(), batch.image_index.numpy(), batch.match.numpy(), [x.numpy() for x in mix]


@pytest.mark.parametrize(
    "words", [("--mix.ratio=0.5",), ("--mix.mode=batch", "--mix.ratio=1", "--mix.mixup=0")], ids=["element", "batch"]
)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_mix_images_and_labels_as_one_process(world, words, few):
    ((images, index, match, mix),) = run_ranks(1, mixed, few, words)
    for rank, (own, *others) in enumerate(run_ranks(world, mixed, few, words)):
        np.testing.assert_array_equal(own, images[rank * len(own) : (rank + 1) * len(own)])
        for theirs, expected in zip((*others[:2], *others[2]), (index, match, *mix)):
            np.testing.assert_array_equal(theirs, expected)
    lam, use_cutmix, _, partner = mix
    assert (lam < 1).sum() > BATCH // 4
    assert len(set(lam)) == (1 if "--mix.mode=batch" in words else (lam < 1).sum() + 1)
    assert use_cutmix.all() or "--mix.mode=batch" not in words
    same = index[:, None] == index
    expected = lam[:, None] * same + (1 - lam[:, None]) * same[partner]
    np.testing.assert_allclose(match, expected * 0.98 + 0.01, atol=1e-6)


def test_a_batch_is_mixed_with_the_probability(few):
    config = configured("pcmepp", "--mix.mode=batch", "--mix.ratio=1", "--mix.prob=0.25", "--size-augment=0")
    trainer = make_trainer(config, find_captions(few, "train"))
    pairs = next(trainer.loader.epoch(0))
    drawn = [trainer.feed.inputs(pairs, trainer.model, step)[1].lam for step in range(80)]
    assert 10 < sum(bool((lam < 1).all()) for lam in drawn) < 30
    assert all(len(set(lam.tolist())) == 1 for lam in drawn)


def test_mixing_and_size_augment_change_with_the_step_and_the_seed_alone(few):
    data = find_captions(few, "train")
    config = configured("pcmepp", "--mix.ratio=1", "--size-augment=0.9")
    trainer = make_trainer(config, data)
    pairs = next(trainer.loader.epoch(0))
    (first, mix), (again, same), (later, other) = (
        trainer.feed.inputs(pairs, trainer.model, step) for step in (0, 0, 1)
    )  # fmt: skip
    for a, b in zip((*first, *mix), (*again, *same)):
        assert torch.equal(a, b)
    assert not torch.equal(first[2], later[2])
    assert not torch.equal(mix.lam, other.lam)
    rng = np.random.default_rng([0, 1, 0, 2])
    torch.testing.assert_close(other.lam, draw_mix(BATCH, 32, 32, rng, 1.0).lam)


def test_dropout_follows_seed_and_step_as_a_run_that_resumes_needs(few):
    """A tower from Hugging Face draws it from torch's global generator."""

    def losses(state: int) -> list[float]:
        told: list[float] = []
        data = find_captions(few, "train")
        trainer = make_trainer(configured("vse"), data, report=lambda step, values: told.append(values["loss"]))
        trainer.model.text.ln_final.register_forward_hook(lambda module, inputs, out: functional.dropout(out, 0.5))
        torch.manual_seed(state)
        trainer.fit()
        return told

    assert losses(1) == losses(2)


def diverging(rank, world, few):
    """Rank 1's images are NaN at the second step: what every rank is told, and whether it stepped."""
    trainer = make_trainer(configured("pcmepp"), find_captions(few, "train"), rank, world)
    whole = trainer.feed.inputs

    def broken(pairs, model, step):
        (images, *others), mix = whole(pairs, model, step)
        if step == 1:
            trainer.before = {k: v.clone() for k, v in trainer.joint.state_dict().items()}
            images = images * (float("nan") if rank == 1 else 1)
        return (images, *others), mix

    trainer.feed.inputs = broken
    try:
        trainer.fit()
    except UserError as error:
        state = trainer.joint.state_dict()
        return str(error), trainer.step, all(torch.equal(state[k], v) for k, v in trainer.before.items())


def test_nan_on_one_rank_ends_all_before_the_step(few):
    for told, step, unchanged in run_ranks(2, diverging, few):
        assert "At step 2 the loss or its gradient is NaN or Inf" in told
        assert "nothing was stepped" in told
        assert step == 1
        assert unchanged


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(few):
    trainer = make_trainer(configured("vse"), find_captions(few, "train"))
    parameter = next(trainer.joint.model.text.parameters())
    before = parameter.detach().clone()
    parameter.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(UserError, match=r"At step 1 .*gradient norm (nan|inf)"):
        trainer.fit()
    assert torch.equal(parameter, before)


def test_the_backbone_is_frozen_first_and_trained_after(few):
    images = "model.visual.transformer.resblocks.0.mlp.c_fc.weight"
    head = "model.visual.mean_head.linear.weight"
    seen = []
    trainer = make_trainer(configured("vse"), find_captions(few, "train"), double=False)
    trainer.hooks.end_epoch = lambda epoch: seen.append({k: v.clone() for k, v in trainer.joint.state_dict().items()})
    start = {k: v.clone() for k, v in trainer.joint.state_dict().items()}
    trainer.fit()
    assert torch.equal(seen[0][images], start[images])
    assert not torch.equal(seen[0][head], start[head])
    assert not torch.equal(seen[1][images], start[images])


@pytest.mark.parametrize("method", ["infonce", "ncr"])
def test_the_average_is_that_of_both_towers_the_loss_and_all_networks(method, few):
    data = find_captions(few, "train")
    config = configured(method, "--epochs=3")
    trainer = make_trainer(config, data)
    trainer.schedule = replace(trainer.schedule, lr_drop_epochs=(3,), freeze_epochs=1, average_epochs=2)
    trainer.average = WeightAverage(trainer.joint.model, trainer.joint.method, trainer.joint.second)
    ends = []
    trainer.hooks.end_epoch = lambda epoch: ends.append({k: v.clone() for k, v in trainer.joint.state_dict().items()})
    trainer.fit()
    assert trainer.average.n_averaged == 2
    averaged = {f"method.{k}": v for k, v in trainer.average.loss_module.named_parameters()}
    for name, network in zip(("model", "second"), trainer.average.networks):
        averaged |= {f"{name}.{k}": v for k, v in network.named_parameters()}
    moved = 0
    for key, value in averaged.items():
        torch.testing.assert_close(value, (ends[1][key] + ends[2][key]) / 2, rtol=0, atol=1e-12, msg=key)
        moved += not torch.equal(value, ends[2][key])
    assert moved > 20 * METHODS[method].networks
    if method == "infonce":
        assert not torch.equal(averaged["method.loss.tau"], ends[2]["method.loss.tau"])


def test_two_networks_take_turns(few):
    """From equal weights, each in an order of its own; one stands still while the other is trained."""
    trainer = make_trainer(configured("ncr"), find_captions(few, "train"))
    networks, method = trainer.joint.networks, trainer.joint.objective
    networks[1].load_state_dict(networks[0].state_dict())
    make_inputs, loss, inputs, seen = trainer.feed.inputs, method.loss, [], []

    def keep(pairs, model, step):
        inputs.append(make_inputs(pairs, model, step))
        return inputs[-1]

    def spy(batch, model):
        assert model is networks[batch.network]
        (images, tokens, mask), _ = inputs[-1]
        other, found = networks[1 - batch.network], batch.by_other()
        for ours, theirs in zip(found, (other.encode_image(images, mask), other.encode_text(tokens))):
            torch.testing.assert_close(ours.gaussian.mean, theirs.mean.detach(), rtol=0, atol=0)
            assert not ours.gaussian.mean.requires_grad
        weights = [network.text.transformer.resblocks[0].mlp.c_fc.weight.detach().clone() for network in networks]
        seen.append((batch.network, batch.pair_index.tolist(), weights))
        return loss(batch, model)

    trainer.feed.inputs, method.loss = keep, spy
    assert not trainer.fit()
    turns, orders, weights = zip(*seen)
    assert turns == (0, 1, 0, 1)
    assert len({tuple(order) for order in orders}) == 4
    assert torch.equal(*weights[0])
    for (first, second), (first_later, second_later), turn in zip(weights, weights[1:], turns):
        assert torch.equal(first, first_later) == (turn == 1)
        assert torch.equal(second, second_later) == (turn == 0)
    assert not torch.equal(*weights[2])
    steps = [int(trainer.optimizer.state[network.text.token_embedding.weight]["step"]) for network in networks]
    assert steps == [2, 2]


def test_daa_sees_the_captions_as_they_are_trained_on(few):
    """Moved captions count as captions of the image that they were moved to: a method cannot know better."""
    clean = find_captions(few, "train")
    noisy, _ = shuffle_captions(clean, 0.9, seed=1)
    assert noisy.captions != clean.captions
    trainer = make_trainer(configured("daa"), noisy)
    semantic, used = [], trainer.joint.objective.semantic

    def spy(images, captions):
        semantic.append((images, captions, used(images, captions)))
        return semantic[-1][-1]

    trainer.joint.objective.semantic = spy
    trainer.fit()
    images, captions, values = semantic[0]
    texts, owner = noisy.flat(), noisy.owner()
    assert images == [owner[c] for c in captions]
    rows = CaptionSimilarity(texts, range(len(texts)))  # every caption an image of its own: plain cosines
    for i, image in enumerate(images):
        own = [c for c in range(len(texts)) if owner[c] == image]
        expected = rows(own, captions).mean(0)
        torch.testing.assert_close(values[i], expected, rtol=0, atol=1e-6)

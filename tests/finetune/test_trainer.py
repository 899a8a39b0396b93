"""The loop itself: ranks against one process, turns of two networks, freezing, and NaN."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from finetune.methods import METHODS
from finetune.train import make_networks
from probemb import distributed
from probemb.errors import UserError
from probemb.models import create_model, create_tokenizer
from tests.devices import elsewhere
from tests.finetune.trainers import DECODERS, configured, make_trainer
from tests.ranks import run_ranks

TRAINED = {  # by name: the method's words
    "pcmepp": ("--loss.clip=0.5",),
    "pcme": ("--loss.uniformity=0.1", "--loss.vib_form=sum"),
    "infonce": (),
    "vse": (),
    "daa": (),
    "p2rm": (),
    "ncr": (),
    "decl": (),
    "order": ("--model.head=gpo", "--model.lock-image=false"),
    "pvse": ("--model.lock-image=false",),
    "prob-vsepp": ("--size-augment=0", "--optimizer.name=adam"),
    "scan": ("--size-augment=0",),
    "jwae-mse": DECODERS,
    "jwae-mh": (*DECODERS, "--data.unpaired=FEW", "--data.unpaired_batch=6"),
    "vae-mh": (*DECODERS, "--data.unpaired=FEW", "--data.unpaired_batch=6"),
    "jwae-scan": (*DECODERS, "--data.unpaired=FEW", "--data.unpaired_batch=6"),
    "jwae-scan published": (*DECODERS, "--loss.published=true", "--loss.direction=i2t", "--loss.image_norm=l1"),
}
SOON = ("pcmepp", "pcme", "ncr", "decl", "pvse", "scan", "jwae-mh", "jwae-scan published")
COMPOSED = ("mpc", "mpc-mlp", "pcme-addition", "tirg")  # a composer without parameters, with them, and with batch norms
# Mixing (of pcmepp), SizeAugment, Cutout and dropped words are on: they are drawn for the whole batch.
AUGMENTED = ("--augment.cutout=0.2", "--augment.word_dropping=0.3")


@cache
def tokenizer():  # loaded before ranks are forked
    return create_tokenizer(create_model("ViT-Micro-32"))


def trained(rank, world, data, methods, words=()):
    """Losses and all weights after two epochs of one step, or two steps of composed queries, by method."""
    out = {}
    for name in methods:
        told, method = [], name.split()[0]
        own = [word.replace("FEW", str(data)) for word in (*words, *TRAINED.get(name, ()))]
        trainer = make_trainer(
            configured(method, data, *AUGMENTED, *own), report=lambda step, values, told=told: told.append(values)
        )
        if METHODS[method].composes:
            trainer.stop = lambda trainer=trainer: trainer.step == 1
        for call in ("loss", "after_step"):
            setattr(trainer.objective, call, elsewhere(getattr(trainer.objective, call)))
        assert distributed.world_size() == world
        assert trainer.fit() == METHODS[method].composes
        state = {key: value.flatten() for key, value in trainer.joint.state_dict().items()}
        state = {key: value[:: 1 + len(value) // 20_000].numpy().copy() for key, value in state.items()}
        out[name] = ([values["loss"] for values in told], state)
    return out


def assert_equal(found, expected):
    for name, (losses, weights) in expected.items():
        np.testing.assert_allclose(found[name][0], losses, rtol=1e-7, err_msg=name)
        for key, value in weights.items():
            np.testing.assert_allclose(found[name][1][key], value, rtol=0, atol=3e-7, err_msg=f"{name} {key}")


@pytest.mark.parametrize(("world", "names"), [(2, SOON), pytest.param(3, tuple(TRAINED), marks=pytest.mark.slow)])
def test_ranks_equal_one_process(world, names, few):
    """Losses and weights through the real loop, with the backbone frozen, and thawed."""
    tokenizer()
    (alone,) = run_ranks(1, trained, few, names)
    assert all(len(losses) == 2 * METHODS[name.split()[0]].networks for name, (losses, _) in alone.items())
    for found in run_ranks(world, trained, few, names):
        assert_equal(found, alone)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_equal_one_process_on_composed_queries(world, queries):
    """Also where ranks have other numbers of images and texts among their parts."""
    tokenizer()
    (alone,) = run_ranks(1, trained, queries, COMPOSED)
    for found in run_ranks(world, trained, queries, COMPOSED):
        assert_equal(found, alone)


def test_ranks_equal_one_process_on_regions(regions):
    """A rank generates its own captions."""
    words = "--model.name=vsrn-scenes-gru", "--augment.cutout=0", "--batch_size=60", *DECODERS
    (alone,) = run_ranks(1, trained, regions, ["vsrn"], words)
    for found in run_ranks(2, trained, regions, ["vsrn"], words):
        assert_equal(found, alone)


def test_batch_norms_whose_statistics_no_average_has_are_refused(few):
    words = ("--model.name=RN50", "--size-augment=0", "--model.batch_norm=batch", "--swa-epochs=1")
    with pytest.raises(UserError, match="swa_epochs is 1"):
        make_networks(configured("vse", few, *words), None, print)
    with pytest.raises(UserError, match=r"or of its composer, .* averaged weights \(swa_epochs is 1"):
        make_networks(configured("tirg", few, "--swa-epochs=1"), None, print)


def test_a_head_that_would_leave_the_gru_untrained_is_refused(birds):
    for head in ("gpo", "average"):
        config = configured("vse", birds, "--model.name=pcme-small", f"--model.head={head}", "--size-augment=0")
        with pytest.raises(UserError, match="behind which its GRU would not be trained"):
            make_networks(config, None, print)


def test_dropout_follows_seed_and_step_as_a_run_that_resumes_needs(few):
    """A tower from Hugging Face draws it from torch's global generator."""

    def losses(state: int) -> list[float]:
        told: list[float] = []
        trainer = make_trainer(configured("vse", few), report=lambda step, values: told.append(values["loss"]))
        trainer.model.text.ln_final.register_forward_hook(lambda module, inputs, out: functional.dropout(out, 0.5))
        torch.manual_seed(state)
        trainer.fit()
        return told

    assert losses(1) == losses(2)


def diverging(rank, world, few, where):
    """Rank 1's images are NaN at the second step, or a gradient Inf: what a rank is told, and whether it stepped."""
    trainer = make_trainer(configured("pcmepp", few))
    inputs = trainer.task.inputs

    def broken(pairs, model, step):
        (images, *others), mix = inputs(pairs, model, step)
        if step == 1:
            trainer.before = {k: v.clone() for k, v in trainer.joint.state_dict().items()}
            if rank == 1 and where == "images":
                images = images * float("nan")
            elif rank == 1:
                next(model.text.parameters()).register_hook(lambda grad: grad * float("inf"))
        return (images, *others), mix

    trainer.task.inputs = broken
    try:
        trainer.fit()
    except UserError as error:
        state = trainer.joint.state_dict()
        return str(error), trainer.step, all(torch.equal(state[k], v) for k, v in trainer.before.items())


@pytest.mark.parametrize("where", ["images", "gradient"])
def test_what_is_not_finite_on_one_rank_ends_all_before_the_step(where, few):
    for told, step, unchanged in run_ranks(2, diverging, few, where):
        assert "At step 2 the loss or its gradient is NaN or Inf" in told
        assert ("loss nan" in told) == (where == "images")
        assert "the step was skipped" in told
        assert step == 1
        assert unchanged


@pytest.mark.parametrize("method", ["infonce", "ncr"])
def test_the_backbone_is_frozen_first_and_the_average_is_of_the_last_epochs(method, few):
    words = ("--epochs=3", "--swa_epochs=2", "--optimizer.decay_epochs=0", "--optimizer.warmup_epochs=0")
    trainer = make_trainer(configured(method, few, *words))
    weights = lambda: [p.detach().clone() for p in nn.ModuleList(trainer.networks).parameters()]  # noqa: E731
    image = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    ends, thawed = [weights()], []
    block = trainer.model.get_parameter(image)
    before = block.detach().clone()

    def end_epoch(epoch, average):
        thawed.append(not torch.equal(block, before))
        ends.append(weights())
        return False

    trainer.end_epoch = end_epoch
    trainer.fit()
    assert thawed == [False, True, True]
    average = trainer.joint.average
    assert average.n_averaged == 2
    for value, first, second in zip(average.module.parameters(), *ends[2:], strict=True):
        torch.testing.assert_close(value, (first + second) / 2, rtol=0, atol=1e-12)
    assert sum(not torch.equal(*pair) for pair in zip(average.module.parameters(), ends[3])) > 20


def test_two_networks_take_turns(few):
    """From equal weights, each in an order of its own; one stands still while the other is trained."""
    trainer = make_trainer(configured("ncr", few))
    networks, method = trainer.networks, trainer.objective
    networks[1].load_state_dict(networks[0].state_dict())
    make_inputs, loss, inputs, seen = trainer.task.inputs, method.loss, [], []

    def keep(pairs, model, step):
        inputs.append(make_inputs(pairs, model, step))
        return inputs[-1]

    def spy(batch, model):
        assert model is networks[batch.network]
        (images, tokens, mask), _ = inputs[-1]
        other, found = networks[1 - batch.network], batch.by_other()
        for ours, theirs in zip(found, (other.encode_image(images, mask), other.encode_text(tokens))):
            torch.testing.assert_close(ours.gaussian.mean, theirs.mean.detach(), rtol=0, atol=1e-12)
            assert not ours.gaussian.mean.requires_grad
        weights = [network.text.transformer.resblocks[0].mlp.c_fc.weight.detach().clone() for network in networks]
        seen.append((batch.network, batch.pair_index.tolist(), weights))
        return loss(batch, model)

    trainer.task.inputs, method.loss = keep, spy
    assert not trainer.fit()
    turns, orders, weights = zip(*seen)
    assert turns == (0, 1, 0, 1)
    assert len({tuple(order) for order in orders}) == 4
    assert torch.equal(*weights[0])
    for (first, second), (first_later, second_later), turn in zip(weights, weights[1:], turns):
        assert torch.equal(first, first_later) == (turn == 1)
        assert torch.equal(second, second_later) == (turn == 0)
    assert not torch.equal(*weights[2])

"""Training steps on real engines equal the same steps in plain torch on the whole batch."""

import gc
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import pretrain.trainer
from pretrain.config import Config, Engine, Model, Optimizer
from pretrain.engine.checkpoint import EngineState
from pretrain.objectives import CLIP, PCMEPlusPlus, ProLIP, SigLIP
from pretrain.schedules import learning_rate
from pretrain.trainer import Trainer
from probemb.data.remote import Remote
from probemb.errors import UserError
from probemb.losses import clip_loss, pairwise_match_loss, prolip_loss, siglip_loss
from probemb.models import no_weight_decay
from tests.pretrain.stream.test_stream import make, write_corpus
from tests.ranks import run_ranks
from tests.steps import CPU, random_pairs, take_step, trainer_of

BATCH, STEPS = 8, 3
LOSSES = {
    "pcmepp": PCMEPlusPlus(pseudo_positive=0.1, vib=1e-2),
    "clip": CLIP(),
    "siglip": SigLIP(),
    "prolip": ProLIP(vib=1e-2, inclusion=1e-2, inclusion_scale=2.0),
}
CONFIG = Config(
    batch_size=BATCH,
    loss=LOSSES["pcmepp"],
    model=Model(name="ViT-Micro-32", n_unc_layers=None),
    optimizer=Optimizer(lr=1e-2, warmup_samples=2 * BATCH, clip_grad_norm=0.5),
)


def tiny(objective="pcmepp"):
    torch.manual_seed(0)
    return replace(CONFIG, objective=objective, loss=LOSSES[objective]).create_model()


BATCHES = [random_pairs(BATCH, step) for step in range(STEPS)]


def plain_loss(objective, out):
    """The objective's loss of one process, from the library's functions."""
    means, w = (out.image.mean, out.text.mean), LOSSES[objective]
    if objective == "siglip":
        return siglip_loss(*means, 2 * out.scale, out.shift - 2 * out.scale).loss
    if objective == "prolip":
        options = dict(vib=w.vib, inclusion=w.inclusion, inclusion_scale=w.inclusion_scale)
        return prolip_loss(out.image, out.text, 2 * out.scale, out.shift - 2 * out.scale, **options).loss
    clip = clip_loss(*means, out.logit_scale.clamp(max=100)).loss
    if objective == "clip":
        return clip
    match = {"scale": out.scale, "shift": out.shift, "pseudo_positive": w.pseudo_positive, "vib": w.vib}
    return clip + pairwise_match_loss(out.image, out.text, **match).loss


@cache
def plain_torch(objective):
    """The same recipe without an engine, ranks or parts."""
    model, o = tiny(objective), CONFIG.optimizer
    groups = [
        {"params": [p for n, p in model.named_parameters() if no_weight_decay(n, p) is skip], "weight_decay": decay}
        for skip, decay in ((False, o.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    losses, norms = [], []
    for step, (images, tokens) in enumerate(BATCHES, 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step * BATCH, STEPS * BATCH)
        out = model(images, tokens)
        loss = plain_loss(objective, out)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {n: p.detach().numpy() for n, p in model.named_parameters()}


def on_engine(rank, world, objective, stage, parts, checkpointing):
    engine = Engine(zero_stage=stage, accumulation=parts)
    config = replace(CONFIG, objective=objective, loss=LOSSES[objective], engine=engine)
    model = tiny(objective)
    model.set_grad_checkpointing(checkpointing)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    trainer = trainer_of(config, model, STEPS)
    found = [take_step(trainer, images[mine], tokens[mine]) for images, tokens in BATCHES]
    norms = [values["gradient_norm"] for values in found]
    assert [values["clipped"] for values in found] == [norm > config.optimizer.clip_grad_norm for norm in norms]
    weights, names = EngineState(trainer.engine).weights(), dict(trainer.engine.module.named_parameters())  # of rank 0
    return [values["loss"] for values in found], norms, {n: w.numpy() for n, w in weights.items() if n in names}


def losses_of_one_batch(rank, world, parts):
    """Of three steps without learning, whose loss draws samples."""
    loss = PCMEPlusPlus(distance="match-probability")
    still = replace(CONFIG.optimizer, lr=0.0)
    config = replace(CONFIG, loss=loss, engine=Engine(zero_stage=0, accumulation=parts), optimizer=still)
    model = tiny()
    images, tokens = BATCHES[0]
    trainer = trainer_of(config, model)
    torch.manual_seed(5)
    return [take_step(trainer, images, tokens)["loss"] for _ in range(STEPS)]


def test_a_loss_that_draws_samples_draws_others_in_every_step_with_accumulation_too():
    (whole,), (parts,) = (run_ranks(1, losses_of_one_batch, n) for n in (1, 2))
    assert len(set(whole)) == STEPS
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("objective", "world", "stage", "parts", "checkpointing"),
    [
        ("pcmepp", 2, 0, 2, True),
        ("pcmepp", 2, 3, 1, False),
        ("prolip", 2, 1, 2, False),
        ("siglip", 2, 0, 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("pcmepp", 1, 0, 1, False), ("clip", 2, 2, 2, False), ("prolip", 2, 3, 2, True))
        ),
    ],
)
def test_steps_equal_plain_torch(objective, world, stage, parts, checkpointing):
    losses, norms, weights = plain_torch(objective)
    assert max(norms) > CONFIG.optimizer.clip_grad_norm
    results = run_ranks(world, on_engine, objective, stage, parts, checkpointing)
    assert len(results[0][2]) == len(weights)
    for rank_losses, rank_norms, rank_weights in results:
        np.testing.assert_allclose(rank_losses, losses, rtol=2e-5)
        np.testing.assert_allclose(rank_norms, norms, rtol=1e-3)
        for name, value in rank_weights.items():
            np.testing.assert_allclose(value, weights[name.removeprefix("model.")], atol=2e-4, err_msg=name)


def load_all(rank, world, shards):
    """The positions that a rank was given until the last one was asked to stop, and the rounds; rank 1 reads slowly."""
    slow = [replace(shard, path=Remote(f"pipe:sleep 0.7; cat {shard.path}")) for shard in shards]
    seen, rounds = [], []

    def stop() -> bool:
        rounds.append(len(seen))
        return rank == world - 1 and len(seen) == 2

    with make(slow if rank == 1 else shards, batch_size=60, lanes=world, rank=rank, world_size=world) as stream:
        trainer = Trainer(CONFIG, SimpleNamespace(device=CPU), stream, None, STEPS, stop=stop)
        while batch := trainer.load():
            seen.append((stream.samples_seen, len(batch.keys)))
    return seen, rounds, trainer.stopping


def load_bad(rank, world, shards, share):
    """The batches that a rank was given until too many samples of all ranks were bad, and why it ended."""
    place = {"batch_size": 16, "lanes": world, "rank": rank, "world_size": world}
    with make(shards, failure_share=share, **place) as stream:
        stream.tally.judged_from = 16
        trainer, n = Trainer(CONFIG, SimpleNamespace(device=CPU), stream, None, STEPS), 0
        try:
            while n < STEPS and trainer.load():
                n += 1
        except UserError as error:
            return n, error.what
    return n, None


def test_bad_samples_are_judged_over_all_ranks(tmp_path):
    """All of them on one rank: half of its rows, a quarter of all."""
    sizes = (8,) * 12
    order = make(write_corpus(tmp_path / "data", sizes=sizes), batch_size=16, lanes=2).order
    slots = [order.rows(0, step, 0, 4) for step in range(STEPS)]  # half of rank 0's
    bad = {(int(s), int(i)): "image" for rows in slots for s, i in zip(rows.shard, rows.index)}
    shards = write_corpus(tmp_path / "data", bad, sizes)
    assert run_ranks(2, load_bad, shards, 0.3) == [(STEPS, None)] * 2
    (n, why), other = run_ranks(2, load_bad, shards, 0.2)
    assert other == (n, why)
    assert n == 0
    assert why.startswith("4 of 16 samples cannot be used (25.0%, allowed are 20.0%); the worst shards are 000")


@pytest.mark.parametrize("world", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_ranks_load_in_step_however_slow_one_of_them_is(world, tmp_path):
    shards = write_corpus(tmp_path / "data", sizes=(60 // world,) * 3 * world)
    results = run_ranks(world, load_all, shards)
    seen, rounds, _ = results[0]
    assert results == [(seen, rounds, True)] * world
    assert seen == [(60, 60 // world), (120, 60 // world)]
    assert len(rounds) > 3  # they waited for rank 1
    assert rounds[-2:] == [1, 2]  # and stopped without waiting again


def evaluated(rank, world):
    """An evaluation between whose batches the last rank is asked to stop, and one that would follow."""
    trainer, begun = trainer_of(CONFIG, tiny()), []
    trainer.stream.tally, trainer.stop = SimpleNamespace(read=0, failed=0), lambda: rank == world - 1
    finished = trainer.evaluate([lambda engine, meet: begun.append(rank) or {"x": float(meet())}] * 2)
    return finished, len(begun), trainer.stopping


def test_a_stop_of_one_rank_ends_an_evaluation_on_all():
    assert run_ranks(2, evaluated) == [(False, 1, True)] * 2


def compiled_steps(rank, world, engine, backend):
    """Two epochs of texts of every length, an evaluation after each: losses, and the graphs compiled in each."""
    torch.compile = partial(torch.compile, backend=backend)
    config = replace(CONFIG, log_every=1000, engine=engine, optimizer=replace(CONFIG.optimizer, lr=1e-4))
    trainer = trainer_of(config, tiny())
    images, tokens = BATCHES[0]
    mine, losses, graphs = slice(rank * BATCH // world, (rank + 1) * BATCH // world), [], []
    for _ in range(2):
        before = counters["stats"]["unique_graphs"]
        for length in range(2, tokens.shape[1] + 1):
            cut = torch.zeros_like(tokens).index_copy_(1, torch.arange(length), tokens[:, -length:])
            losses.append(take_step(trainer, images[mine], cut[mine])["loss"])
        with torch.no_grad():
            trainer.evaluate([lambda engine, meet: {"rows": float(len(engine(images[:3], None)[0]))}])
        graphs.append(counters["stats"]["unique_graphs"] - before)
    return losses, graphs


@pytest.mark.parametrize(
    ("engine", "world", "backend"),
    [
        (Engine(compile="step"), 1, "eager"),
        pytest.param(Engine(compile="towers", accumulation=2, zero_stage=1), 2, "aot_eager", marks=pytest.mark.slow),
        pytest.param(Engine(compile="step"), 2, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_equal_plain_ones_and_nothing_is_compiled_after_all_lengths(engine, world, backend):
    plain, none = run_ranks(world, compiled_steps, replace(engine, compile=None), backend)[0]
    losses, graphs = run_ranks(world, compiled_steps, engine, backend)[0]
    assert none == [0, 0]
    # Of images and texts of two lengths, with and without gradient, and of the loss.
    assert graphs == [3 * engine.accumulation + (engine.compile == "step"), 0]
    np.testing.assert_allclose(losses, plain, rtol=1e-4)


def seen_tf32(rank, world, tf32, half):
    """Whether TF32 was allowed in a block's forward pass, in the loss, in the block's backward pass, and afterwards."""
    seen = []

    def note(*_):
        seen.append(torch.backends.cuda.matmul.allow_tf32)

    class Loss(PCMEPlusPlus):
        def __call__(self, pairs):
            note()
            return super().__call__(pairs)

    trainer = trainer_of(replace(CONFIG, loss=Loss(), engine=Engine(zero_stage=0, tf32=tf32)), tiny())
    trainer.engine.module.half = half
    block = trainer.engine.module.model.visual.transformer.resblocks[0]
    block.register_forward_hook(note)
    block.register_full_backward_hook(note)
    take_step(trainer, *BATCHES[0])
    note()
    return seen


def test_tf32_is_for_the_products_of_a_bf16_model_and_for_the_loss_only_if_asked_for():
    for tf32, expected in ((None, [False] * 4), ("heads", [True, False, True, False]), ("all", [True] * 3 + [False])):
        assert run_ranks(1, seen_tf32, tf32, True) == [expected]
    assert run_ranks(1, seen_tf32, "all", False) == [[False] * 4]  # fp32 is exact


def norm_of_a_step(rank, world, stage, dtype):
    trainer = trainer_of(replace(CONFIG, engine=Engine(zero_stage=stage, gradient_dtype=dtype)), tiny())
    images, tokens = BATCHES[0]
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return take_step(trainer, images[mine], tokens[mine])["gradient_norm"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_can_be_exchanged_in_bf16(stage):
    exact, rounded = (run_ranks(2, norm_of_a_step, stage, dtype)[0] for dtype in ("fp32", "bf16"))
    assert rounded == pytest.approx(exact, rel=2e-3)
    assert rounded != exact


def steps_of_collections(rank, world, every, last):
    trainer, when = trainer_of(CONFIG, tiny()), []
    trainer.last, pretrain.trainer.COLLECT_EVERY = last, every
    images, tokens = BATCHES[0]

    def load():
        assert [[] for _ in range(10**5)]  # enough for a collection, if Python chose the moment
        return SimpleNamespace(images=images, tokens=tokens, keys=[])

    trainer.load = load
    gc.callbacks.append(lambda phase, _: when.extend([trainer.step] if phase == "start" else []))
    trainer.fit()
    return [step for step in when if 1 < step < last], gc.isenabled()


def test_after_the_first_step_garbage_is_collected_in_fixed_steps():
    assert run_ranks(1, steps_of_collections, 3, 8) == [([3, 6], True)]

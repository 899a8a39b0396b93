"""Every method's training on another device than the host: no tensor is left behind, and the host seldom waits."""

from contextlib import nullcontext

import numpy as np
import pytest
from accelerate import Accelerator

from finetune.methods import METHODS
from finetune.trainer import State
from probemb.data.captions.find import find_captions
from tests.finetune import test_trainer
from tests.finetune.test_trainer import TRAINED, WORDS, configured, forget_accelerator, make_trainer, tokenizer
from tests.pretended_gpu import PretendedGPU, needs_pretended_gpu
from tests.ranks import run_ranks
from tools.make_scenes import Plan, make

STEPS = 4  # two epochs of two
WAITS = (
    "probemb/distributed.py:any_rank"  # once a step, before the weights change: whether all is finite, and who stops
)
AT_LOGS = {
    f"probemb/{where}"
    for where in ("runs/window.py:read", "distributed.py:mean_over_ranks", "distributed.py:max_over_ranks")
}
CROSS = {
    f"probemb/{where}"
    for where in ("cross_attention.py:_full", "cross_attention.py:_by_length", "token_products.py:_parts")
}
WORDS_SAID = {
    f"probemb/models/{where}" for where in ("autoencoder.py:nll", "towers/open_clip/text_transformer.py:trim")
} | {"autograd aten.index_put.default"}
MORE = {  # shapes that depend on the data
    "ncr": {  # once an epoch
        "finetune/methods/noisy.py:begin_epoch",
        "probemb/losses/noisy/ncr.py:clean_probability",
        "probemb/losses/noisy/ncr.py:split_clean",
    },
    "scan": CROSS,
    "jwae-scan": CROSS | WORDS_SAID | {"finetune/methods/jwae_scan.py:<genexpr>"},
    **dict.fromkeys(("mse", "mmd-mse", "jwae-mse", "jwae-mh", "vae-mh"), WORDS_SAID),
}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    out = tmp_path_factory.mktemp("few") / "world"
    make(Plan(train=8, val=0, classes_images=0, size=32, shard_size=8, captions=3), out, workers=1)
    tokenizer()
    return out


def trained(rank, world, few, names):
    """By name: losses and weights on the CPU and on the pretended GPU, and where the host waited."""
    gpu = PretendedGPU()  # before the first backward pass of the process, which looks for devices
    return {name: (fitted(few, name), *fitted(few, name, gpu)) for name in names}


def fitted(few, name, gpu=None):
    told: list[float] = []
    words = name.replace("FEW", str(few)).split()
    config = configured(words[0], *WORDS, *words[1:], "--log_every=100")
    forget_accelerator()
    with pytest.MonkeyPatch.context() as patch, gpu or nullcontext():
        if gpu is not None:
            patch.setattr(Accelerator, "device", property(lambda self: gpu.device))
            patch.setattr(Accelerator, "prepare_model", lambda self, module: module)
            patch.setattr(test_trainer, "State", lambda joint, optimizer: moved(gpu, joint, optimizer))
            gpu.waits.clear()
        report = {"report": lambda step, values: told.append(values["loss"])}
        trainer = make_trainer(config, find_captions(few, "train"), double=False, **report)
        trainer.fit()
        waits = {} if gpu is None else dict(gpu.waits)
        weights = {key: value.cpu().numpy() for key, value in trainer.joint.state_dict().items()}
    return (told, weights) if gpu is None else ((told, weights), waits)


def moved(gpu, joint, optimizer):
    aside = joint.objective.aside_optimizer
    gpu.move(joint, optimizer, *([aside] if aside else []))
    return State(joint, optimizer)


@pytest.fixture(scope="module")
def found(few):
    """What one process found for all methods, or for all slow ones."""
    made = {}

    def of(name):
        slow = name.split()[0] in ALIKE
        if slow not in made:
            names = [one for one in TRAINED if (one.split()[0] in ALIKE) == slow]
            made[slow] = run_ranks(1, trained, few, names, fresh=True)[0]
        return made[slow][name]

    return of


ALIKE = {
    "vse",
    "vse0",
    "vsepp",
    "order",
    "pvse",
    "prob-vsrn",
    "mse",
    "mmd-mse",
    "jwae-mse",
    "jwae-mh",
}  # as others here


@needs_pretended_gpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.split()[0] in ALIKE else ()) for name in TRAINED]
)
def test_a_method_trains_on_the_device(name, found):
    method = name.split()[0]
    (losses, expected), (told, state), waits = found(name)
    np.testing.assert_allclose(told, losses, rtol=1e-3)
    for key, value in expected.items():
        np.testing.assert_allclose(state[key], value, rtol=0, atol=2e-3, err_msg=key)
    networks = METHODS[method].networks
    assert waits.pop(WAITS) == STEPS * networks
    assert all(waits.pop(where) <= 2 * networks for where in AT_LOGS)
    assert not set(waits) - MORE.get(method, set()), waits

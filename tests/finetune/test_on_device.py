"""Training on another device than the host: no tensor is left behind, and the host seldom waits."""

from contextlib import nullcontext

import numpy as np
import pytest
from accelerate import Accelerator

from finetune.methods import METHODS
from tests.finetune.conftest import forget_accelerator, world
from tests.finetune.test_trainer import AUGMENTED, TRAINED, tokenizer
from tests.finetune.trainers import configured, make_trainer
from tests.pretended_gpu import PretendedGPU, needs_pretended_gpu
from tests.ranks import run_ranks

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
        "probemb/losses/noisy.py:clean_probability",
        "probemb/losses/noisy.py:split_clean",
    },
    "scan": CROSS,
    "jwae-scan": CROSS | WORDS_SAID | {"finetune/methods/autoencoders.py:<genexpr>"},
    **dict.fromkeys(("jwae-mse", "jwae-mh", "vae-mh"), WORDS_SAID),
}


def trained(rank, ranks, data, names):
    """By name: losses and weights on the CPU and on the pretended GPU, and where the host waited."""
    gpu = PretendedGPU()  # before the first backward pass of the process, which looks for devices
    return {name: (fitted(data, name), *fitted(data, name, gpu)) for name in names}


def fitted(data, name, gpu=None):
    """With Adam: timm's AdamP asks the device about every matrix."""
    told: list[float] = []
    own = [word.replace("FEW", str(data)) for word in TRAINED[name]]
    config = configured(
        name.split()[0], data, *AUGMENTED, *own, "--log_every=100", "--optimizer.name=adam", "--optimizer.lr=1e-3"
    )

    def move(state):
        gpu.move(state.joint, *state.optimizers)
        gpu.waits.clear()

    forget_accelerator()
    with pytest.MonkeyPatch.context() as patch, gpu or nullcontext():
        if gpu is not None:
            patch.setattr(Accelerator, "device", property(lambda self: gpu.device))
            patch.setattr(Accelerator, "prepare_model", lambda self, module: module)
        report = {"report": lambda step, values: told.append(values["loss"])}
        trainer = make_trainer(config, double=False, move=move if gpu else None, **report)
        trainer.fit()
        waits = {} if gpu is None else dict(gpu.waits)
        weights = {key: value.cpu().numpy() for key, value in trainer.joint.state_dict().items()}
    return (told, weights) if gpu is None else ((told, weights), waits)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one fresh process found for all methods."""
    data = world(tmp_path_factory, train=8, shard_size=8, captions=3)
    tokenizer()
    return run_ranks(1, trained, data, tuple(TRAINED), fresh=True)[0]


@pytest.mark.slow
@needs_pretended_gpu
@pytest.mark.parametrize("name", TRAINED)
def test_a_method_trains_on_the_device(name, found):
    method = name.split()[0]
    (losses, expected), (told, state), waits = found[name]
    np.testing.assert_allclose(told, losses, rtol=1e-3)
    for key, value in expected.items():
        np.testing.assert_allclose(state[key], value, rtol=0, atol=2e-3, err_msg=key)
    networks = METHODS[method].networks
    assert waits.pop(WAITS) == STEPS * networks
    assert all(waits.pop(where) <= 2 * networks for where in AT_LOGS)
    assert not set(waits) - MORE.get(method, set()), waits

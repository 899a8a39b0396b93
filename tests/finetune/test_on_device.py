"""Training on another device than the host: no tensor is left behind."""

from contextlib import nullcontext

import numpy as np
import pytest
from accelerate import Accelerator

from tests.finetune.conftest import forget_accelerator, world
from tests.finetune.test_trainer import AUGMENTED, TRAINED, tokenizer
from tests.finetune.trainers import configured, make_trainer
from tests.pretended_gpu import PretendedGPU, needs_pretended_gpu
from tests.ranks import run_ranks


def trained(rank, ranks, data, names):
    """By name: losses and weights on the CPU and on the pretended GPU."""
    gpu = PretendedGPU()  # before the first backward pass of the process, which looks for devices
    return {name: (fitted(data, name), fitted(data, name, gpu)) for name in names}


def fitted(data, name, gpu=None):
    """With Adam: timm's AdamP asks the device about every matrix."""
    told: list[float] = []
    own = [word.replace("FEW", str(data)) for word in TRAINED[name]]
    config = configured(
        name.split()[0], data, *AUGMENTED, *own, "--log_every=100", "--optimizer.name=adam", "--optimizer.lr=1e-3"
    )

    def move(state):
        gpu.move(state.joint, *state.optimizers)

    forget_accelerator()
    with pytest.MonkeyPatch.context() as patch, gpu or nullcontext():
        if gpu is not None:
            patch.setattr(Accelerator, "device", property(lambda self: gpu.device))
            patch.setattr(Accelerator, "prepare_model", lambda self, module: module)
        report = {"report": lambda step, values: told.append(values["loss"])}
        trainer = make_trainer(config, double=False, move=move if gpu else None, **report)
        trainer.fit()
        weights = {key: value.cpu().numpy() for key, value in trainer.joint.state_dict().items()}
    return told, weights


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of one fresh process for all methods."""
    data = world(tmp_path_factory, train=8, shard_size=8, captions=3)
    tokenizer()
    return run_ranks(1, trained, data, tuple(TRAINED), fresh=True)[0]


@pytest.mark.slow
@needs_pretended_gpu
@pytest.mark.parametrize("name", TRAINED)
def test_a_method_trains_on_the_device(name, found):
    (losses, expected), (told, state) = found[name]
    np.testing.assert_allclose(told, losses, rtol=1e-3)
    for key, value in expected.items():
        np.testing.assert_allclose(state[key], value, rtol=0, atol=2e-3, err_msg=key)

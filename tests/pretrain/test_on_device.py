"""A step of every objective on another device than the host: no tensor is left behind."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from pretrain.config import Config, Engine, Model
from pretrain.engine.engine import Towers
from pretrain.masking import draw_masks
from pretrain.objectives import CLIP, PCMEPlusPlus, ProLIP, SigLIP
from pretrain.trainer import loss_and_terms
from probemb.data.words import write_vocabulary
from tests.pretended_gpu import PretendedGPU, needs_pretended_gpu
from tests.ranks import run_ranks

BATCH = 16  # two masked copies
CASES = {
    "pcmepp": (PCMEPlusPlus(exchange="ring"), "ViT-Micro-32"),
    "pcmepp, all pairs": (PCMEPlusPlus(pseudo_positive=0.1, vib=1e-2), "ViT-Micro-32"),
    "pcmepp, words": (PCMEPlusPlus(), "scenes-cnn-gru"),
    "clip": (CLIP(exchange="ring"), "ViT-Micro-32"),
    "siglip": (SigLIP(), "ViT-Micro-32"),
    "prolip": (ProLIP(vib=1e-2, inclusion=1e-2, masked_inclusion=1e-3), "ViT-Micro-32"),
}


def stepped(rank, world, vocabulary):
    """By case: loss and gradients on the CPU and on the pretended GPU."""
    gpu = PretendedGPU()  # before the first backward pass of the process, which looks for devices
    return {case: step_of(case, vocabulary, gpu) for case in CASES}


def step_of(case, vocabulary, device):
    options, name = CASES[case]
    model = Model(name=name, n_unc_layers=None)
    if name.startswith("ViT"):
        model = replace(model, patch_dropout=0.25)
    else:
        model = replace(model, n_unc_layers=0, vocabulary=str(vocabulary))
    config = Config(objective=case.partition(",")[0], loss=options, model=model, engine=Engine(), batch_size=BATCH)
    found = []
    for gpu in (None, device):
        torch.manual_seed(0)
        towers = Towers(config.create_model(), "fp32")
        size = towers.model.image_size
        images = torch.randint(256, (BATCH, 3, size, size), dtype=torch.uint8)
        tokens = torch.randint(1, 30, (BATCH, towers.model.context_length))
        tokens[:, -4:] = 0
        tokens[:, -5] = 49407 if name.startswith("ViT") else 1
        with gpu or nullcontext():
            if gpu:
                gpu.move(towers)
                images, tokens = images.to(gpu.device), tokens.to(gpu.device)
            masks = draw_masks(config, towers.model, images, tokens, samples=0)
            loss, terms = loss_and_terms(options, towers(images, tokens, *masks))
            loss.backward()
            grads = {key: None if p.grad is None else p.grad.cpu().numpy() for key, p in towers.named_parameters()}
            found.append((loss.item(), sorted(terms), grads))
    return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    vocabulary = tmp_path_factory.mktemp("words") / "vocabulary.txt"
    write_vocabulary(vocabulary, [(f"word{i}", 5) for i in range(40)])
    return run_ranks(1, stepped, vocabulary, fresh=True)[0]


@needs_pretended_gpu
@pytest.mark.parametrize("case", CASES)
def test_a_step_runs_on_the_device(case, steps):
    (loss, terms, expected), (found, told, grads) = steps[case]
    assert found == pytest.approx(loss, rel=1e-4)
    assert told == terms
    for key, grad in expected.items():
        assert (grads[key] is None) == (grad is None)
        if grad is not None:
            np.testing.assert_allclose(grads[key], grad, rtol=0, atol=1e-4 * (1 + abs(grad).max()), err_msg=key)
    assert sum(grad is not None for grad in expected.values()) > len(expected) / 2

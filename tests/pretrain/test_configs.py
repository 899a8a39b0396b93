"""The configurations that the project has are accepted, and make the models that they name."""

from pathlib import Path

import pytest
import torch

from pretrain.config import Config
from pretrain.objectives import OBJECTIVES
from probemb.cli.configuration import parse_config

CONFIGS = sorted((Path(__file__).parents[2] / "pretrain/configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_is_accepted(path):
    parse_config(Config, "python -m pretrain.run", "", ["--config", str(path), "--out", "run"]).check(1)


def test_prolip_is_the_papers_architecture():
    path = next(path for path in CONFIGS if path.stem == "vit_b16_datacomp_prolip")
    config = parse_config(Config, "python -m pretrain.run", "", ["--config", str(path)])
    with torch.device("meta"):
        model = config.create_model()
    tower = model.config["architecture"]["text_cfg"]
    assert (tower["hf_tokenizer_name"], tower["pad_id"], model.context_length) == ("timm/ViT-B-16-SigLIP", 1, 64)
    image = model.encode_image(torch.empty(2, 3, 224, 224, device="meta"))
    text = model.encode_text(torch.ones(2, 64, dtype=torch.long, device="meta"))
    assert image.shape == text.shape == (2, 768)
    assert model.visual.uncertainty_token.shape == model.text.uncertainty_token.shape == (768,)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("path", [path for path in CONFIGS if "b16" in path.stem], ids=lambda path: path.stem)
def test_starts_with_every_objective(path, objective, capsys):
    """Options of the objective that the file names do not count for another one, and a line says so."""
    config = parse_config(Config, "python -m pretrain.run", "", ["--config", str(path), "--objective", objective])
    config.check(8)
    own = parse_config(Config, "python -m pretrain.run", "", ["--config", str(path)]).objective
    assert ("leaves out what" in capsys.readouterr().err) == (objective != own)
    if objective != own:
        assert config.loss == OBJECTIVES[objective]()
    with torch.device("meta"):
        model = config.create_model()
    assert model.probabilistic == OBJECTIVES[objective].probabilistic

"""VSRN and its caption loss on files of regions: by hand, ranks, exact resume, checkpoints, refusals."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from finetune.methods import METHODS, Batch
from finetune.methods.captions import n_words
from finetune.run import add_new_settings
from probemb import Gaussian, load_model
from probemb.errors import UserError
from probemb.losses import prob_triplet_loss, triplet_loss
from probemb.models import Encoded, create_model
from tests.finetune.region_files import WORDS, write_regions
from tests.finetune.runs import ONE_EPOCH, Job, checkpoint, metrics, run_here, saved
from tests.finetune.test_trainer import configured
from tests.losses.points import close, pairs, same_images

N = 6


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    return write_regions(tmp_path_factory.mktemp("regions"), train=24)


def options(regions, out, method="vsrn", caption_weight=1, **more):
    decoder = {"loss.hidden": 12, "loss.word_width": 8} if caption_weight else {}
    return {
        "method": method, "data.path": regions, "out": out, "model.name": "vsrn-scenes-gru", "model.embed_dim": "null",
        "batch-size": 24, "loss.caption_weight": caption_weight, "optimizer.freeze-epochs": 0, **decoder, **more,
    }  # fmt: skip


@pytest.mark.parametrize("method", ["vsrn", "prob-vsrn"])
def test_the_loss_is_the_triplets_and_the_captions(method):
    torch.manual_seed(0)
    config = configured(method, "--loss.caption_weight=0.7", "--loss.hidden=6", "--loss.word_width=5")
    model = create_model(
        "vsrn-scenes-gru", vocabulary=list(WORDS), head="clip", **METHODS[method].model_options(config)
    )
    made = METHODS[method](config, model, None)
    made.module.double()
    g = torch.Generator().manual_seed(1)
    tokens = torch.randn(N, 6, 128, generator=g, dtype=torch.float64).requires_grad_()
    mask = torch.arange(6) < torch.tensor([6, 3, 3, 1, 6, 2])[:, None]
    image, text = (Gaussian(one.mean, one.log_var.clamp(-2, 2)) for one in pairs(N))
    words = torch.randint(2, 8, (N, 5), generator=g).masked_fill(torch.arange(5) >= torch.arange(5, -1, -1)[:, None], 0)
    batch = Batch(
        Encoded(image, tokens, mask), Encoded(text), same_images(N), torch.arange(N), torch.arange(N), 1, 0, g,
        words=torch.cat([words, torch.zeros(N, 9, dtype=torch.int64)], 1),
    )  # fmt: skip
    out = made.loss(batch, model)
    decoder, said = made.module.decoders["caption"], []
    for row in range(N):  # alone, without the others' padding
        length = max(1, int((words[row] != 0).sum()))
        one = type(decoder).log_probabilities(decoder, _tokens(tokens, mask, row), words[row : row + 1, :length])
        said.append(-sum(one[0, m, w] for m, w in enumerate(words[row, :length].tolist())))
    if method == "vsrn":
        expected = triplet_loss(image.mean @ text.mean.T, same_images(N), 0.2).loss
    else:
        expected = prob_triplet_loss(image, text, same_images(N), "wasserstein2", 0.1, "hardest").loss
    close(out.terms["caption"], (sum(said) / N).detach())
    close(out.terms["triplet"], expected)
    close(out.loss, (expected + 0.7 * sum(said) / N).detach())
    out.loss.backward()
    assert (tokens.grad.abs().sum(-1) > 0).equal(mask)
    assert all(p.grad.abs().sum() > 0 for p in made.module.parameters())


def _tokens(tokens, mask, row):
    from probemb.cross_attention import Tokens

    return Tokens(tokens[row : row + 1, mask[row]], torch.ones(1, int(mask[row].sum()), dtype=torch.bool))


def test_captions_are_learned_and_the_model_has_no_decoder(regions, tmp_path):
    more = {"loss.caption_weight": 30, "loss.hidden": 32, "optimizer.lr": 0.006, "batch-size": 12, "swa-epochs": 0}
    assert run_here(options(regions, tmp_path / "run", epochs=4, **more)) == 0
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    first, last = (sum(line["caption"] for line in some) for some in (lines[:10], lines[-10:]))
    assert last < 0.9 * first
    assert lines[0]["loss"] == pytest.approx(lines[0]["triplet"] + 30 * lines[0]["caption"], rel=1e-5)
    assert not [name for name in saved(tmp_path / "run") if "decoder" in name]
    model = load_model(tmp_path / "run").model
    assert model.ranking == "mean"
    assert model.encode_image(torch.randn(2, 6, 437)).mean.shape == (2, 128)


@pytest.mark.parametrize("method", ["vsrn", "prob-vsrn"])
def test_resumes_bit_for_bit_in_the_middle_of_an_epoch(method, regions, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    more = {"save-every": 2, "keep-checkpoints": 9}
    assert run_here(options(regions, whole, method, **more)) == 0
    shutil.copytree(whole, part)
    kept = sorted(path.name for path in (part / "checkpoints").glob("step-*"))
    assert "step-2" in kept
    for later in kept:
        if later != "step-2":
            shutil.rmtree(part / "checkpoints" / later)
    assert run_here(options(regions, part, method, **more), "--resume") == 0
    assert checkpoint(part, 10) == checkpoint(whole, 10)
    assert any("decoders.caption" in key for key in checkpoint(whole, 10)["adam_steps"])


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_equal_one(regions, tmp_path, ranks):
    settings = {**ONE_EPOCH, "data.validation": "null", "optimizer.name": "adam"}
    assert run_here(options(regions, tmp_path / "one", **settings)) == 0
    job = Job(options(regions, tmp_path / "many", **settings), ranks=ranks, output=tmp_path / "log")
    assert job.wait() == [0] * ranks, job.text()
    one, many = ([line for line in metrics(tmp_path / name) if "loss" in line] for name in ("one", "many"))
    for term in ("loss", "caption", "triplet", "gradient_norm"):
        assert [line[term] for line in many] == pytest.approx([line[term] for line in one], rel=1e-3)


def test_without_the_weight_there_is_no_decoder(regions, tmp_path):
    assert run_here(options(regions, tmp_path / "run", caption_weight=0, **ONE_EPOCH)) == 0
    (*_, line) = (line for line in metrics(tmp_path / "run") if "loss" in line)
    assert "caption" not in line
    assert METHODS["vsrn"].Options().caption_weight == 1.0
    assert METHODS["prob-vsrn"].Options().caption_weight == 0.0


def test_an_earlier_run_resumes_without_the_captions():
    shared = {"data": {}, "optimizer": {}, "ranking": None}
    saved_config = {**shared, "method": "vsrn", "loss": {"margin": 0.2}}
    add_new_settings(saved_config)
    assert saved_config["loss"]["caption_weight"] == 0.0


@pytest.mark.parametrize("method", ["vsrn", "prob-vsrn"])
def test_pixels_have_no_regions_to_reason_over(method, scenes, tmp_path):
    settings = options(scenes, tmp_path / "run", method, 0, **{"model.name": "ViT-Micro-32", "model.embed_dim": 16})
    with pytest.raises(UserError, match=f"{method} reasons over .* regions, and ViT-Micro-32 reads none") as error:
        run_here(settings)
    assert "vsrn-regions-gru" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_text_tower_without_words_is_refused():
    architecture = {"text_cfg": {"hf_model_name": "roberta-base"}}
    with pytest.raises(UserError, match="from Hugging Face, and a decoder of captions needs") as error:
        n_words(SimpleNamespace(config={"name": "roberta-ViT-B-32", "architecture": architecture}))
    assert "Choose another model" in str(error.value)
    assert n_words(create_model("vsrn-scenes-gru", vocabulary=list(WORDS))) == 2 + len(WORDS)

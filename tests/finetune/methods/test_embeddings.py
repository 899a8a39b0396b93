"""VSE0, VSE++, order embeddings and PVSE: what they minimise, and how their models are ranked."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from finetune.config import Config, with_method_file
from finetune.methods import METHODS, Batch
from probemb import Gaussian, load_model
from probemb.cli.configuration import parse_config
from probemb.cross_attention import CrossAttention, unit_tokens
from probemb.losses import diversity, mmd, multi_instance_similarity, order_similarity, scan_loss, triplet_loss
from probemb.models import Encoded
from tests.finetune.runs import ONE_EPOCH, metrics, run_here
from zeroshot.retrieval import main as retrieval


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def batch(k: int = 0, n: int = 6, d: int = 5) -> Batch:
    """Pairs of which the first two are of one image; with k, of k embeddings and as many residuals."""
    g = torch.Generator().manual_seed(0)
    shape = (n, k, d) if k else (n, d)
    means = [F.normalize(torch.randn(shape, generator=g), dim=-1) for _ in range(2)]
    residuals = [torch.rand(shape, generator=g) if k else None for _ in range(2)]
    image, text = (Encoded(Gaussian(m, torch.full_like(m, -30.0)), r) for m, r in zip(means, residuals))
    match, index = torch.eye(n), torch.arange(n)
    match[0, 1] = match[1, 0] = 1
    return Batch(image, text, match, index, index, 5, 0, g)


def method(name: str, *words: str):
    config = parse_config(Config, "test", "", with_method_file(["--method", name, *words]))
    METHODS[name].check(config)
    return METHODS[name](config, None, None)


@pytest.mark.parametrize(("name", "hardest"), [("vse0", False), ("vsepp", True)])
def test_vse_is_the_triplet_loss_of_cosines(name, hardest):
    b = batch()
    expected = triplet_loss(b.image.mean @ b.text.mean.T, b.match, 0.2, hardest).loss
    torch.testing.assert_close(method(name).loss(b, None).loss, expected)


@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("squared", [True, False])
def test_order_is_the_triplet_loss_of_what_a_caption_exceeds_its_image_by(hardest, squared):
    b = batch()
    words = () if squared and not hardest else (f"--loss.hardest={hardest}", f"--loss.squared={squared}")
    expected = triplet_loss(order_similarity(b.image.mean, b.text.mean, True, squared), b.match, 0.05, hardest).loss
    torch.testing.assert_close(method("order", *words).loss(b, None).loss, expected)


@pytest.mark.parametrize("kernel", ["rbf", "unsquared"])
def test_pvse_is_its_three_parts(kernel):
    b = batch(k=2)
    similarity = multi_instance_similarity(b.image.mean, b.text.mean)
    points = [g.mean.flatten(0, 1) for g in (b.image, b.text)]
    expected = triplet_loss(similarity, b.match, 0.1, reduce="mean").loss
    expected = expected + 0.1 * sum(diversity(one.tokens) for one in (b.images, b.texts))
    expected = expected + 0.01 * mmd(*points, 0.5, kernel)
    torch.testing.assert_close(method("pvse", f"--loss.kernel={kernel}").loss(b, None).loss, expected)


def test_pvse_begins_with_all_negatives_where_asked():
    b = batch(k=2)
    similarity = multi_instance_similarity(b.image.mean, b.text.mean)
    made = method("pvse", "--loss.warmup_epochs=2", "--loss.diversity=0", "--loss.mmd=0")
    for epoch, hardest in ((0, False), (1, False), (2, True)):
        b.epoch = epoch
        expected = triplet_loss(similarity, b.match, 0.1, hardest, "mean").loss
        torch.testing.assert_close(made.loss(b, None).loss, expected)


def test_vsepp_begins_with_all_negatives_where_asked():
    b = batch()
    made = method("vsepp", "--loss.warmup_epochs=2")
    for epoch, hardest in ((0, False), (1, False), (2, True)):
        b.epoch = epoch
        expected = triplet_loss(b.image.mean @ b.text.mean.T, b.match, 0.2, hardest).loss
        torch.testing.assert_close(made.loss(b, None).loss, expected)


def test_scan_begins_with_all_negatives_where_asked():
    b, g, mask = batch(), torch.Generator().manual_seed(1), torch.ones(6, 3, dtype=torch.bool)
    b.images, b.texts = (
        replace(side, tokens=torch.randn(6, 3, 5, generator=g), mask=mask) for side in (b.images, b.texts)
    )
    tokens = [unit_tokens(side.tokens, side.mask) for side in (b.images, b.texts)]
    made = method("scan", "--loss.warmup_epochs=2")
    losses = []
    for epoch, hardest in ((1, False), (2, True)):
        b.epoch = epoch
        losses.append(made.loss(b, None).loss)
        expected = scan_loss(*tokens, b.match, CrossAttention("t2i", lambda_softmax=9.0, lambda_lse=6.0), 0.2, hardest)
        torch.testing.assert_close(losses[-1], expected.loss)
    assert losses[0] > losses[1]


RANKED = [("order", 0, "order"), ("pvse", 4, "multi-instance"), ("pvse", 1, "mean"), ("vsepp", 0, "mean")]


@pytest.mark.parametrize(("name", "k", "ranking"), RANKED)
def test_validation_and_retrieval_rank_as_the_method_compares(name, k, ranking, scenes, tmp_path):
    out, measured = tmp_path / "run", tmp_path / "measured"
    more = {"loss.embeddings": k} if k else {}
    assert run_here({"method": name, "data.path": scenes, "out": out, **more, **ONE_EPOCH}) == 0
    (validated,) = (line for line in metrics(out) if "rsum" in line)
    model = load_model(out).model
    assert model.ranking == ranking
    assert model.n_embeddings == max(k, 1)
    assert retrieval(["--model", str(out), "--data", str(scenes), "--split", "val", "--out", str(measured)]) == 0
    results = json.loads((measured / "results.json").read_text())
    rows = {row["ranking"]: row for row in results["rows"] if row["positives"] == "own captions"}
    assert rows[ranking]["rsum"] == pytest.approx(validated["rsum"])
    assert len({row["positives"] for row in results["rows"]}) == 2  # also all true captions
    if k > 1:
        assert set(rows) == {"multi-instance"}

"""A model that was trained with MPC on composed scenes, embedded, indexed and searched by the project's commands."""

import pytest
import torch
from torch.nn import functional as F

from probemb.data.compositions.find import find_compositions
from probemb.search.embeddings import open_embeddings
from tests.finetune.runs import ONE_EPOCH, run_here
from tests.searching import open_searcher
from tools.build_index import main as build
from tools.embed import main as embed
from tools.search.page import describe
from tools.search.query import SearchRequest


@pytest.mark.slow
def test_its_composer_composes(composed_scenes, tmp_path):
    data, run = composed_scenes / "compositions", tmp_path / "run"
    options = {
        "method": "mpc", "data.path": data, "out": run, "model.name": "scenes-cnn-gru", "model.head": "clip",
        "model.embed_dim": "null", "batch-size": 64, "compose.queries": 40, "loss.temperature": 20, **ONE_EPOCH,
    }  # fmt: skip
    assert run_here(options) == 0
    assert embed(["--model", str(run), "--data", str(data / "test"), "--out", str(tmp_path / "embedded")]) == 0
    assert build(["--embeddings", str(tmp_path / "embedded"), "--tolerance", "0", "--out", str(tmp_path / "x")]) == 0
    found = find_compositions(data, "test")
    texts = [*(found.concepts[one] for one in found.tuples[0]), "dark picture"]
    searcher = open_searcher(tmp_path / "x")
    request = SearchRequest(texts, weights=[1, 2, -0.5], top=len(searcher.index))
    answer = searcher.answer(request)
    model, tokenizer, _ = searcher.encoder.loaded
    with torch.inference_mode():
        composed = model.composer(model.encode_text(tokenizer(texts))[None], [1, 2, -0.5])
    assert answer["query"]["composer"] == "product"
    assert answer["query"]["log_normaliser"] == pytest.approx(float(composed.log_normaliser), rel=1e-4)
    assert {one["match"] for one in answer["results"]} == {None}  # it learned no probability of pairs
    assert not describe(searcher)["matches"]
    embeddings = open_embeddings(tmp_path / "embedded")
    means = torch.cat([torch.from_numpy(embeddings.read(part)[0]).float() for part in embeddings.partitions("image")])
    cosine = F.cosine_similarity(composed.gaussian.mean, means)
    ranked = cosine[[one["row"] for one in answer["results"]]]
    torch.testing.assert_close(ranked, cosine.sort(descending=True).values, rtol=0, atol=2e-4)

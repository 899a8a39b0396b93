"""The mean of word vectors: padding, unknown words, vectors that are no weights, saving, and both heads."""

import numpy as np
import pytest
import torch

from probemb.errors import UserError
from probemb.models.heads import HeadConfig
from probemb.models.towers.word_mean import WordMean

VOCABULARY = ["a", "red", "blue", "dog", "cat", "of"]
TOKENS = torch.tensor([[2, 3, 5, 0, 0, 0], [2, 4, 6, 7, 2, 3], [1, 5, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]])


def tower(probabilistic=True, kind="mlp") -> WordMean:
    torch.manual_seed(0)
    return WordMean(VOCABULARY, 0, HeadConfig(kind, 3, probabilistic), width=5, context_length=6)


def test_the_mean_is_of_known_words_alone():
    model = tower()
    mean, unc = model.features(TOKENS)
    for row, text in enumerate(TOKENS.tolist()):
        known = [model.vectors[word] for word in text if word > 1]
        expected = torch.stack(known).mean(0) if known else torch.zeros(5)
        torch.testing.assert_close(mean.pooled[row], expected)
    assert torch.equal(unc.pooled, mean.pooled)
    assert mean.mask.sum(1).tolist() == [3, 6, 3, 1]


def test_vectors_are_no_parameters_and_all_others_learn():
    model = tower()
    (model(TOKENS)[0][:, 0] + model(TOKENS)[1][:, 0]).sum().backward()
    assert all("head" in name and p.grad is not None for name, p in model.named_parameters())
    assert {model.place(name).part for name, _ in model.named_parameters()} == {"head"}
    assert not model.vectors[:2].any()
    before = model.vectors.clone()
    assert model.fill_embedding({"dog": np.arange(5, dtype=np.float32), "bird": np.ones(5, np.float32)}) == 1
    assert model.vectors[5].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(model.vectors[[0, 1, 2, 3, 4, 6, 7]], before[[0, 1, 2, 3, 4, 6, 7]])
    with pytest.raises(UserError, match="2 numbers, the model's 5"):
        model.fill_embedding({"dog": np.ones(2, np.float32)})

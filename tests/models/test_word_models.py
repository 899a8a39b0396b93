"""Models that read words: made with a vocabulary, saved with it, started from word vectors."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from probemb.errors import UserError
from probemb.models import create_model, fill_word_vectors, save_model

NAME, WORDS = "scenes-cnn-gru", ["a", "red", "circle", "photo", "of"]


def make(**options):
    torch.manual_seed(0)
    return create_model(NAME, **{"n_unc_layers": 1, "vocabulary": WORDS, **options})


def test_vocabulary_comes_from_a_file_or_the_pretrained_run(tmp_path):
    (tmp_path / "v.txt").write_text("".join(f"{word}\t9\n" for word in WORDS))
    model = make(vocabulary=tmp_path / "v.txt")
    assert model.config["architecture"]["text_cfg"]["vocabulary"] == WORDS
    save_model(model, tmp_path / "run")
    again = make(vocabulary=None, pretrained=str(tmp_path / "run"))
    assert_close(again.state_dict(), model.state_dict())
    with pytest.raises(UserError, match="does not fit"):
        make(vocabulary=["a"], pretrained=str(tmp_path / "run"))


def test_word_vectors(tmp_path):
    model = make()
    vector = np.linspace(-1, 1, 96).round(4)
    (tmp_path / "v.txt").write_text(f"red {' '.join(map(str, vector))}\nblue {' '.join(map(str, vector))}\n")
    assert fill_word_vectors(model, tmp_path / "v.txt").startswith("1 of 5 words start from a vector")
    assert_close(model.text.embedding.weight[3].detach(), torch.tensor(vector, dtype=torch.float32))
    (tmp_path / "other.txt").write_text(f"rouge {' '.join(map(str, vector))}\n")
    with pytest.raises(UserError, match="a vector of none of the 5 words"):
        fill_word_vectors(model, tmp_path / "other.txt")
    (tmp_path / "narrow.txt").write_text("red 1 2\n")
    with pytest.raises(UserError, match="2 numbers, the model's 96") as caught:
        fill_word_vectors(model, tmp_path / "narrow.txt")
    assert "Name vectors of 96 numbers" in caught.value.remedy

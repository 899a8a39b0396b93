"""Models of whole words: vocabularies, tokens, word vectors, and the towers that read them."""

import time

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

from probemb.models import create_model, fill_word_vectors, save_model
from probemb.models.options import ModelOptions
from probemb.models.towers.words import WordGRU, WordMean, WordTokenizer


def test_ids_follow_the_vocabulary():
    tokenizer = WordTokenizer(["a", "red", "dog"], 5)
    expected = [[2, 3, 4, 0, 0], [2, 1, 4, 0, 0], [1, 0, 0, 0, 0], [2, 2, 2, 2, 2]]
    assert tokenizer(["A red dog.", "a blue dog", "", "a a a a a a red"]).tolist() == expected
    assert tokenizer("dog").tolist() == [[4, 0, 0, 0, 0]]
    assert tokenizer([]).shape == (0, 5)
    assert tokenizer.unknown_words(["A blue dog.", "a pale, blue cat red dog unread", ""]) == ["blue", "pale", "cat"]


def test_hostile_texts_take_bounded_time():
    tokenizer = WordTokenizer(["a"], 8)
    texts = ["x" * 10**7, "a " * 10**6, "\ud800 \0 a", "'" * 10**6]
    began = time.perf_counter()
    tokens = tokenizer(texts)
    assert time.perf_counter() - began < 1
    assert torch.equal(tokens[2], torch.tensor([2, 0, 0, 0, 0, 0, 0, 0]))
    assert tokens[0].tolist() == [1] + [0] * 7


NAME, WORDS = "scenes-cnn-gru", ["a", "red", "circle", "photo", "of"]


def make(**options):
    return create_model(NAME, **{"n_unc_layers": 1, "vocabulary": WORDS, **options})


def test_vocabulary_comes_from_a_file_or_the_pretrained_run(tmp_path):
    (tmp_path / "v.txt").write_text("".join(f"{word}\t9\n" for word in WORDS))
    model = make(vocabulary=tmp_path / "v.txt")
    assert model.config["architecture"]["text_cfg"]["vocabulary"] == WORDS
    save_model(model, tmp_path / "run")
    again = make(vocabulary=None, pretrained=str(tmp_path / "run"))
    assert_close(again.state_dict(), model.state_dict())


def test_word_vectors(tmp_path):
    model = make()
    vector = np.linspace(-1, 1, 96).round(4)
    (tmp_path / "v.txt").write_text(f"red {' '.join(map(str, vector))}\nblue {' '.join(map(str, vector))}\n")
    assert fill_word_vectors(model, tmp_path / "v.txt").startswith("1 of 5 words start from a vector")
    assert_close(model.text.embedding.weight[3].detach(), torch.tensor(vector, dtype=torch.float32))


VOCABULARY = ["a", "red", "blue", "dog", "cat", "of"]
TOKENS = torch.tensor([[2, 3, 5, 0, 0, 0], [2, 4, 6, 7, 2, 3], [1, 0, 0, 0, 0, 0]])


def test_equals_packed_sequences_of_torch():
    torch.manual_seed(0)
    ours = WordGRU(VOCABULARY, ModelOptions(embed_dim=3), 1, width=5, hidden=4, layers=2, context_length=6)
    packed = torch.nn.GRU(5, 4, num_layers=2, bidirectional=True, batch_first=True)
    state = {}
    for depth, layer in enumerate(ours.layers):
        for suffix, gru in (("", layer.forwards), ("_reverse", layer.backwards)):
            state |= {f"{key[:-1]}{depth}{suffix}": value for key, value in gru.state_dict().items()}
    packed.load_state_dict(state)
    length = (TOKENS != 0).sum(1)
    x = pack_padded_sequence(ours.embedding(TOKENS), length, batch_first=True, enforce_sorted=False)
    expected, last = packed(x)
    expected = pad_packed_sequence(expected, batch_first=True)[0]
    mean, _ = ours.features(TOKENS)
    words = TOKENS != 0
    torch.testing.assert_close(mean.tokens[words], expected[words])
    torch.testing.assert_close(mean.pooled, torch.cat([last[-2], last[-1]], 1))
    assert torch.equal(mean.mask, words)


def test_the_mean_is_of_known_words_alone_and_vectors_do_not_learn():
    torch.manual_seed(0)
    model = WordMean(VOCABULARY, ModelOptions(head="mlp", embed_dim=3), 0, 5, 6)
    tokens = torch.cat([TOKENS, torch.tensor([[1, 5, 1, 0, 0, 0]])])
    mean, unc = model.features(tokens)
    for row, text in enumerate(tokens.tolist()):
        known = [model.vectors[word] for word in text if word > 1]
        expected = torch.stack(known).mean(0) if known else torch.zeros(5)
        torch.testing.assert_close(mean.pooled[row], expected)
    assert torch.equal(unc.pooled, mean.pooled)
    assert mean.mask.sum(1).tolist() == [3, 6, 1, 3]
    sum(x[:, 0].sum() for x in model(tokens)[:2]).backward()
    assert all("head" in name and p.grad is not None for name, p in model.named_parameters())
    assert {model.place(name).part for name, _ in model.named_parameters()} == {"head"}
    assert not model.vectors[:2].any()

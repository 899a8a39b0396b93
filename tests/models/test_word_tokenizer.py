"""The tokenizer of whole words."""

import time

import torch

from probemb.models.word_tokenizer import WordTokenizer


def test_ids_follow_the_vocabulary():
    tokenizer = WordTokenizer(["a", "red", "dog"], 5)
    expected = [[2, 3, 4, 0, 0], [2, 1, 4, 0, 0], [1, 0, 0, 0, 0], [2, 2, 2, 2, 2]]
    assert tokenizer(["A red dog.", "a blue dog", "", "a a a a a a red"]).tolist() == expected
    assert tokenizer("dog").tolist() == [[4, 0, 0, 0, 0]]
    assert tokenizer([]).shape == (0, 5)
    assert tokenizer.word_ends().shape == (5,)
    assert tokenizer.unknown_words(["A blue dog.", "a pale, blue cat red dog unread", ""]) == ["blue", "pale", "cat"]


def test_hostile_texts_take_bounded_time():
    tokenizer = WordTokenizer(["a"], 8)
    texts = ["x" * 10**7, "a " * 10**6, "\ud800 \0 a", "'" * 10**6]
    began = time.perf_counter()
    tokens = tokenizer(texts)
    assert time.perf_counter() - began < 1
    assert torch.equal(tokens[2], torch.tensor([2, 0, 0, 0, 0, 0, 0, 0]))
    assert tokens[0].tolist() == [1] + [0] * 7

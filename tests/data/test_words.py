"""Words of a text, vocabulary files, and word vectors."""

import gzip

import numpy as np
import pytest

from probemb.data.words import count_words, frequent_words, read_vectors, split_words
from probemb.errors import UserError


def test_words_of_a_text_and_their_counts_in_order():
    words = ["a", "man's", "red", "blue", "dog", "no", "2", "don't"]
    assert split_words("A man's Red-Blue dog, no. 2: don't!") == words
    assert split_words("one two three", 2) == ["one", "two"]
    assert split_words("'' … !") == []
    counts = count_words(["b a", "a c", "c"])
    assert counts == {"a": 2, "b": 1, "c": 2}
    assert frequent_words(counts) == [("a", 2), ("c", 2), ("b", 1)]
    assert frequent_words(counts, min_count=2, max_words=1) == [("a", 2)]


def test_vectors(tmp_path):
    text = b"dog 1 -2.5\n. . 3 4\ncat 5e-1 6\ndog 7 8\n"
    path = tmp_path / "v.txt.gz"
    path.write_bytes(gzip.compress(text))
    found = read_vectors(path, ["cat", "dog", "bird"])
    assert sorted(found) == ["cat", "dog"]
    np.testing.assert_array_equal(found["dog"], np.float32([1, -2.5]))
    np.testing.assert_array_equal(found["cat"], np.float32([0.5, 6]))
    path.write_bytes(gzip.compress(text)[:-9])
    with pytest.raises(UserError, match="is not a file in GloVe's text format"):
        read_vectors(path, ["cat"])

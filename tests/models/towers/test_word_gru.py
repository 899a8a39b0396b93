"""The GRU over words: exact for padded batches, equal to packed sequences, word vectors."""

import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from probemb.models.heads import HeadConfig
from probemb.models.towers.word_gru import GRUShape, WordGRU

VOCABULARY = ["a", "red", "blue", "dog", "cat", "of"]
TOKENS = torch.tensor([[2, 3, 5, 0, 0, 0], [2, 4, 6, 7, 2, 3], [1, 0, 0, 0, 0, 0]])


def tower(n_unc_layers=1, kind="clip", **options) -> WordGRU:
    torch.manual_seed(0)
    settings = {"width": 5, "hidden": 4, "layers": 2, "context_length": 6, **options}
    return WordGRU(VOCABULARY, n_unc_layers, HeadConfig(kind, 3), GRUShape(**settings))


def test_equals_packed_sequences_of_torch():
    ours = tower()
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


def test_averaged_directions_are_the_mean_of_both():
    both, averaged = tower(kind="average"), tower(kind="average", directions="averaged")
    averaged.load_state_dict({k: v for k, v in both.state_dict().items() if "head" not in k}, strict=False)
    expected, _ = both.features(TOKENS)
    found, _ = averaged.features(TOKENS)
    for x, y in ((found.tokens, expected.tokens), (found.pooled, expected.pooled)):
        forwards, backwards = y.chunk(2, -1)
        torch.testing.assert_close(x, (forwards + backwards) / 2)

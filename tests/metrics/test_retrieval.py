"""Metrics against their definitions written out query by query."""

import pytest
import torch

from probemb.distances import match_probability_of_samples
from probemb.metrics import retrieval as metrics
from probemb.metrics.retrieval import Positives, mean_metrics, query_metrics, ranking, score_metrics


def case(q=40, g=60, seed=0, ties=False):
    r = torch.Generator().manual_seed(seed)
    scores = torch.randn(q, g, generator=r)
    if ties:
        scores = scores.round()
    match = torch.rand(q, g, generator=r) < 0.08
    match[3] = False  # a query without any match is left out
    return scores, match


def naive(scores, match, k):
    recall, precision, average = [], [], []
    for s, m in zip(scores, match):
        if not m.any():
            continue
        order = sorted(range(len(s)), key=lambda j: (-s[j].item(), j))
        hit = [bool(m[j]) for j in order]
        r = int(m.sum())
        recall.append(any(hit[:k]))
        precision.append(sum(hit[:r]) / r)
        average.append(sum(sum(hit[: i + 1]) / (i + 1) for i in range(r) if hit[i]) / r)
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    return mean(recall), mean(precision), mean(average)


def measured(scores, match, ks=(1, 5, 10)):
    return mean_metrics(score_metrics(lambda rows: scores[rows], Positives.from_matrix(match), ks))


@pytest.mark.parametrize(("k", "ties"), [(1, False), (5, True), (10, True)])
def test_equal_their_definitions(k, ties, monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 500)  # several blocks
    scores, match = case(ties=ties)
    found = measured(scores, match, (k,))
    assert [found[f"r@{k}"], found["r_precision"], found["map_at_r"]] == pytest.approx(naive(scores, match, k))


@pytest.mark.parametrize(("ties", "block"), [(True, 190), (False, 10**9)])
def test_lists_of_both_directions_equal_whole_stable_sorts(ties, block, monkeypatch):
    monkeypatch.setattr(metrics, "COLUMN_ELEMENTS", 40)
    monkeypatch.setattr(metrics, "BLOCK_ELEMENTS", block)
    scores, _ = case(q=23, g=31, ties=ties)
    rows, columns = metrics.rank_both(lambda part: scores[part], 23, 31, (7, 4))
    assert torch.equal(rows, scores.argsort(dim=1, descending=True, stable=True)[:, :7])
    assert torch.equal(columns, scores.T.argsort(dim=1, descending=True, stable=True)[:, :4])
    whole, _ = metrics.rank_both(lambda part: scores[part], 23, 31, (1000, 1000))
    assert whole.shape == (23, 31)
    with pytest.raises(ValueError, match="NaN"):
        metrics.rank_both(lambda part: scores[part] / 0 * 0, 23, 31, (3, 3))


def test_lists_and_pairs_give_what_the_matrix_gives():
    scores, match = case()
    positives = Positives.from_matrix(match)
    for s, m, p in ((scores, match, positives), (scores.T, match.T, positives.transposed())):
        per_query = query_metrics(metrics.ranking(s, 20), p)
        assert mean_metrics(per_query) == pytest.approx(measured(s, m), abs=1e-12)
    assert torch.isnan(query_metrics(metrics.ranking(scores, 20), positives)["r@1"][3])


def test_nothing_found_is_no_match():
    positives = Positives.from_pairs(torch.tensor([1]), torch.tensor([2]), 2, 3)
    assert positives.hits(torch.tensor([[-1, 2, 0], [-1, 2, 0]])).tolist() == [[False] * 3, [False, True, False]]


def test_positives_of_classes():
    r = torch.Generator().manual_seed(0)
    queries, gallery = torch.randint(6, (9,), generator=r), torch.randint(1, 7, (20,), generator=r)
    found = Positives.of_classes(queries, gallery)
    expected = Positives.from_matrix(queries[:, None] == gallery[None, :])
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.counts, expected.counts)
    assert 0 in found.counts


def test_recalls_equal_pcme(tensors):
    ref = tensors("04d_pcme_recall")
    by_samples = match_probability_of_samples(ref["q_samples"], ref["g_samples"], ref["mp_scale"], ref["mp_shift"])
    match = ref["q_labels"][:, None] == ref["g_labels"][None, :]
    for name, scores in (("matmul", ref["q"] @ ref["g"].T), ("matching_prob", by_samples)):
        for way, s, m in (("i2t", scores, match), ("t2i", scores.T, match.T)):
            recalls = measured(s, m)
            for k in (1, 5, 10):
                assert 100 * recalls[f"r@{k}"] == pytest.approx(ref[f"{name}__{way}__recall_{k}"].item(), abs=1e-9)
            total = 100 * sum(recalls[f"r@{k}"] for k in (1, 5, 10))
            assert total == pytest.approx(ref[f"{name}__{way}__rsum"].item(), abs=1e-9)
            found = ranking(s, s.shape[1])
            ranks = 1 + Positives.from_matrix(m).hits(found).int().argmax(1).double()
            assert ranks.quantile(0.5).floor() == pytest.approx(ref[f"{name}__{way}__medr"].item(), abs=1e-9)
            assert ranks.mean().item() == pytest.approx(ref[f"{name}__{way}__meanr"].item(), abs=1e-9)

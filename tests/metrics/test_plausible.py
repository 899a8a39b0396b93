"""PMRP against its definition and both published variants."""

import pytest
import torch

from probemb.metrics.plausible import plausible_match_r_precision


def case(seed=0, n=20, captions=3):
    r = torch.Generator().manual_seed(seed)
    labels = (torch.rand(n, 6, generator=r) < 0.3).int()
    labels[4] = 0  # an image without any label
    owner = torch.arange(n).repeat_interleave(captions)
    return torch.randn(n, n * captions, generator=r), labels, owner


def found(scores, query_labels, gallery_labels, **options):
    return plausible_match_r_precision(lambda rows: scores[rows], query_labels, gallery_labels, **options)


def naive(scores, query_labels, gallery_labels, zeta, dropped):
    """(R-Precision, R@1) of each query, written out."""
    out = []
    for row, label in zip(scores, query_labels):
        if not label.any():
            continue
        order = row.argsort(descending=True).tolist()
        if dropped:
            order = [j for j in order if gallery_labels[j].any()]
        hit = [bool(gallery_labels[j].any()) and int((gallery_labels[j] != label).sum()) <= zeta for j in order]
        out.append((sum(hit[: sum(hit)]) / sum(hit), hit[0]))
    return [sum(values) / len(values) for values in zip(*out)]


@pytest.mark.parametrize("variant", ["pcme", "eccv-caption"])
@pytest.mark.parametrize("way", ["i2t", "t2i"])
def test_equals_its_definition(variant, way, monkeypatch):
    monkeypatch.setattr("probemb.metrics.plausible.SORT_ELEMENTS", 200)
    scores, labels, owner = case()
    sides = (labels, labels[owner]) if way == "i2t" else (labels[owner], labels)
    scores = scores if way == "i2t" else scores.T
    got = found(scores, *sides, variant=variant)
    want = [naive(scores, *sides, zeta, variant == "pcme") for zeta in (0, 1, 2)]
    for zeta in (0, 1, 2):
        assert got["per_zeta"][zeta]["r_precision"] == pytest.approx(want[zeta][0], abs=1e-12)
        assert got["per_zeta"][zeta]["r@1"] == pytest.approx(want[zeta][1], abs=1e-12)
    assert got["pmrp"] == pytest.approx(sum(w[0] for w in want) / 3, abs=1e-12)
    assert got["per_query"]["pmrp"].nanmean().item() == pytest.approx(got["pmrp"], abs=1e-12)


@pytest.mark.parametrize("variant", ["pcme", "eccv-caption"])
def test_ties_rank_by_gallery_index(variant):
    scores, labels, owner = case(1)
    scores = scores.mul(2).round()  # hardly ten values in a row of sixty
    got = found(scores, labels, labels[owner], variant=variant)["per_zeta"]
    scores = scores - 1e-3 * torch.arange(scores.shape[1])  # the same, untied
    for zeta in (0, 1, 2):
        want = naive(scores, labels, labels[owner], zeta, variant == "pcme")
        assert (got[zeta]["r_precision"], got[zeta]["r@1"]) == pytest.approx(want, abs=1e-12)


def test_equals_both_published_variants(parity):
    ref = parity("05a_pmrp")
    labels, scores = torch.from_numpy(ref["labels"]), torch.from_numpy(ref["sims"])
    owner = torch.from_numpy(ref["caption_image_index"])
    for way, s, sides in (("i2t", scores, (labels, labels[owner])), ("t2i", scores.T, (labels[owner], labels))):
        pcme = found(s, *sides)
        other = found(s, *sides, variant="eccv-caption")
        assert 100 * pcme["pmrp"] == pytest.approx(float(ref[f"pcme__{way}__PMRP_mean"]), abs=1e-9)
        assert 100 * pcme["pmr1"] == pytest.approx(float(ref[f"pcme__{way}__PMR1_mean"]), abs=1e-9)
        for zeta in (0, 1, 2):
            want = ref[f"pcme__{way}__zeta{zeta}__rprecision"]
            assert 100 * pcme["per_zeta"][zeta]["r_precision"] == pytest.approx(float(want), abs=1e-9)
            one = found(s, *sides, zetas=(zeta,))["per_query"]
            for mine, theirs in (("pmrp", "rprecision"), ("pmr1", "r1")):
                values = one[mine][~one[mine].isnan()]
                per_query = torch.from_numpy(ref[f"pcme__{way}__zeta{zeta}__{theirs}_per_query"]).double()
                torch.testing.assert_close(values, per_query, rtol=0, atol=1e-9)
            want = ref[f"eccv_caption__{way}__zeta{zeta}__pmrp"]
            assert other["per_zeta"][zeta]["r_precision"] == pytest.approx(float(want), abs=1e-9)

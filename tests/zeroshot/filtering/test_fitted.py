"""Thresholds and weights that are chosen on images: few-shot rows use none of the images that they score."""

import pytest
import torch

from probemb.evaluation.classification import class_vectors, true_ranks
from probemb.gaussian import Gaussian
from tests.zeroshot.filtering.test_evaluation import rows_of, world
from zeroshot.filtering.evaluation import evaluate_embeddings
from zeroshot.filtering.filters import FILTERS, REWEIGHTED, FilterOptions, Selection, choosing, stratified_folds
from zeroshot.filtering.reweighting import few_of_each, fit_labelled
from zeroshot.filtering.rows import SelectionData, shots_notice
from zeroshot.filtering.thresholds import SETTINGS, candidates


@pytest.mark.parametrize("name", SETTINGS)
def test_a_threshold_is_chosen_on_the_other_folds(name):
    images, labels, names, prompts = world()
    u, folds = prompts.uncertainty(), stratified_folds(labels.tolist(), names, 3)
    ranks = torch.stack(
        [
            true_ranks(
                images, class_vectors(prompts.mean, FILTERS[name](u, FilterOptions(**{SETTINGS[name]: v}))), labels
            )
            for v in candidates(name, u)
        ],
        dim=1,
    )
    right = 0
    for fold in range(3):
        hits = (ranks[folds != fold] < 1).double().mean(0).tolist()
        best = max(g for g, share in enumerate(hits) if share >= max(hits) - 1e-9)
        right += int((ranks[folds == fold, best] < 1).sum())
    found = evaluate_embeddings(images, labels, names, prompts, [name], selection=Selection("folds", 3)).rows
    assert [row.note for row in found] == ["oracle", "few-shot (folds:3)"]
    assert found[1].top1 == pytest.approx(right / len(labels))
    assert found[0].top1 == pytest.approx((ranks < 1).double().mean(0).max().item())
    assert found[0].title.startswith(name)


def test_a_given_setting_is_no_oracle():
    for name, option in SETTINGS.items():
        options = FilterOptions(**{option: 0.5})
        (row,) = evaluate_embeddings(*world(), [name], options=options).rows
        assert row.note == f"zero-shot, {option} given"
        assert choosing([name], options) == []
        assert choosing([name], FilterOptions()) == [name]


def test_few_shots_come_from_the_other_folds():
    images, labels, names, prompts = world()
    folds, right = stratified_folds(labels.tolist(), names, 3), 0
    for fold in range(3):
        others = (folds != fold).nonzero().flatten()
        few = others[few_of_each(labels[others].tolist(), [names[i] for i in others], 4)]
        weights = fit_labelled(images[few], labels[few], prompts, 3.0).weights
        mine = folds == fold
        right += int((true_ranks(images[mine], class_vectors(prompts.mean, weights), labels[mine]) < 1).sum())
    found = rows_of(
        evaluate_embeddings(
            images, labels, names, prompts, ["reweighted"], options=FilterOptions(shots=4, prior=3.0),
            selection=Selection("folds", 3),
        )
    )  # fmt: skip
    assert list(found) == [("reweighted, 4 shots", "oracle"), ("reweighted, 4 shots", "few-shot (folds:3)")]
    assert found["reweighted, 4 shots", "few-shot (folds:3)"].top1 == pytest.approx(right / len(labels))


def test_classes_with_fewer_images_than_shots_are_told():
    images, labels, names, prompts = world()
    kept = [i for i in range(len(labels)) if labels[i] != 2][:-1]  # a class without images, and one that lacks one
    images, labels, names = images[kept], labels[kept], [names[i] for i in kept]
    counts = torch.bincount(labels, minlength=6)
    found = evaluate_embeddings(
        images, labels, names, prompts, ["reweighted"], options=FilterOptions(shots=100),
        selection=Selection("folds", 2),
    )  # fmt: skip
    oracle, few_shot = found.rows
    assert oracle.title == f"reweighted, up to 100 shots (mean {len(labels) / 6:.1f})"
    assert oracle.shots == {
        "asked": 100, "mean": len(labels) / 6, "fewest": 0, "most": int(counts.max()), "classes_without": 1,
    }  # fmt: skip
    assert few_shot.shots["mean"] == pytest.approx(len(labels) / 12)  # each fold is fitted to the other one
    assert found.reweighted["reweighted, oracle"].counts.tolist() == counts.tolist()
    notice = shots_notice(found.rows)
    assert notice.startswith("--shots 100 is more than there are images of every class: oracle 0 to ")
    assert "1 without any; few-shot (folds:2) 0 to " in notice
    whole = evaluate_embeddings(*world(), ["reweighted"], options=FilterOptions(shots=2))
    assert [row.title for row in whole.rows] == ["reweighted, 2 shots"]
    assert shots_notice(whole.rows) is None


def test_other_images_decide_alone_and_unlabelled_ones_without_labels():
    images, labels, names, prompts = world()
    other, other_labels, other_names, _ = world(per_class=7)

    def fitted(labels, other_labels):
        data = SelectionData(other, other_labels, other_names)
        found = evaluate_embeddings(
            images, labels, names, prompts, list(REWEIGHTED), selection=Selection("train"), select_data=data
        )
        return {name: one.weights for name, one in found.reweighted.items()}

    first, moved = fitted(labels, other_labels), fitted(labels.roll(5), other_labels)
    wrong = fitted(labels, other_labels.roll(5))
    assert list(first) == [
        "reweighted, oracle", "reweighted, few-shot (train)",
        "reweighted-unlabelled, transductive", "reweighted-unlabelled, unlabelled (train)",
    ]  # fmt: skip
    assert [torch.equal(first[name], moved[name]) for name in first] == [False, True, True, True]
    assert [torch.equal(first[name], wrong[name]) for name in first] == [True, False, True, True]


def test_re_weighting_finds_the_prompts_that_fit():
    """Of each class, prompt 3 alone is where its images are; the others are elsewhere, and all are equally wide."""
    images, labels, names, prompts = world(per_class=40)
    prompts = Gaussian(prompts.mean.clone(), torch.full_like(prompts.log_var, 0.2).log())
    prompts.mean[:, 3] = torch.stack([images[labels == c].mean(0) for c in range(6)])
    rows = rows_of(
        evaluate_embeddings(images, labels, names, prompts, ["all", "reweighted"], selection=Selection("folds", 5))
    )
    assert rows["reweighted, 16 shots", "few-shot (folds:5)"].gain > 0.05

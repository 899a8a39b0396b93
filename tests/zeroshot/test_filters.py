"""Filters as weights, how K is chosen, and from embeddings to numbers: against plain loops."""

import pytest
import torch

from probemb.evaluation.classification import class_accuracy, normalise, prefix_vectors, true_ranks
from probemb.gaussian import Gaussian
from zeroshot.evaluations import filters

U = torch.tensor([[3.0, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
DEFAULTS = {"single": 0, "temperature": 1.0, "shots": 16, "unlabelled": 2000, "prior": 10.0}
weights = {name: one.weights for name, one in filters.FILTERS.items()}


def test_soft_weights_fall_with_uncertainty_and_are_equal_for_equal_prompts():
    for found in (weights["weighted"](U, 1.0), weights["inverse-variance"](U)):
        assert found[0, 1] > found[0, 2] > found[0, 0] > found[0, 3]
        torch.testing.assert_close(found[1], torch.full((4,), 0.25))
    torch.testing.assert_close(weights["inverse-variance"](U)[0], torch.tensor([1 / 3, 1, 1 / 2, 1 / 4]) / (25 / 12))
    torch.testing.assert_close(weights["weighted"](U * 1000 + 5, 1.0), weights["weighted"](U, 1.0))
    z = (U[0] - 2.5) / 1.25**0.5
    torch.testing.assert_close(weights["weighted"](U, 0.5)[0], torch.softmax(-z / 0.5, 0))
    certain = weights["inverse-variance"](torch.tensor([[0.0, 0.0, 1.0]]))
    torch.testing.assert_close(certain, torch.tensor([[0.5, 0.5, 0.0]]))


def uncertainties(n_classes=7, n_prompts=12):
    u = torch.rand(n_classes, n_prompts, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return u + torch.linspace(0, 1.5, n_classes, dtype=torch.float64)[:, None]


def loops(u, limits):
    rows = []
    for row, limit in zip(u.tolist(), limits):
        kept = [x <= limit for x in row]
        if not any(kept):
            kept = [p == row.index(min(row)) for p in range(len(row))]
        rows.append([k / sum(kept) for k in kept])
    return torch.tensor(rows, dtype=torch.float64)


def test_thresholds_are_those_of_plain_loops():
    u = uncertainties()
    for c in (-3.0, 0.0, 1.25):
        limits = [sum(r) / 12 + c * (sum((x - sum(r) / 12) ** 2 for x in r) / 12) ** 0.5 for r in u.tolist()]
        torch.testing.assert_close(weights["class-deviation"](u, c), loops(u, limits))
    for limit in (0.01, 1.4):
        torch.testing.assert_close(weights["threshold"](u, limit), loops(u, [limit] * 7))
    ordered = sorted(u.flatten().tolist())
    for share in (0.05, 0.5, 1.0):
        limit = ordered[round(share * len(ordered)) - 1]
        torch.testing.assert_close(weights["quantile"](u, share), loops(u, [limit] * 7))
    for value in torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist():  # equal prompts are all kept
        equal = torch.full((1, 80), value)
        torch.testing.assert_close(weights["class-deviation"](equal, 0.0), torch.full_like(equal, 1 / 80))


def test_folds_are_balanced_independent_of_the_order_and_keep_groups_together():
    labels, names, groups = [i % 4 for i in range(43)], [f"image-{i}" for i in range(43)], list(range(43))
    folds = filters.stratified_folds(labels, names, 5)
    sizes = torch.bincount(folds, minlength=5)
    assert sizes.max() - sizes.min() <= 1
    for label in range(4):
        per_fold = torch.bincount(folds[torch.tensor(labels) == label], minlength=5)
        assert per_fold.max() - per_fold.min() <= 1
    groups[17], groups[30], groups[31] = 5, 2, 2  # of the same class, and of others
    grouped = filters.stratified_folds(labels, names, 5, groups)
    assert grouped[17] == grouped[5]
    assert grouped[30] == grouped[31] == grouped[2]
    order = torch.randperm(43, generator=torch.Generator().manual_seed(0)).tolist()
    turned = [[values[i] for i in order] for values in (labels, names, groups)]
    again = filters.stratified_folds(*turned[:2], 5, turned[2])
    assert torch.equal(again, grouped[order])


# ----------------------------------------------------------------------------------------------------- evaluation


def world(n_classes=6, n_prompts=9, dim=8, per_class=12, seed=0):
    """Prompts that get noisier with their uncertainty, differently for each class; images around their class."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    centre = normalise(normal(n_classes, dim))
    spread = torch.linspace(0.2, 3.0, n_prompts) * torch.linspace(0.3, 2.0, n_classes)[:, None]
    mean = normalise(centre[:, None] + spread[:, :, None] * normal(n_classes, n_prompts, dim))
    log_var = spread.log()[:, :, None].expand(n_classes, n_prompts, dim).contiguous()
    labels = torch.arange(n_classes).repeat_interleave(per_class)
    images = normalise(centre[labels] + 0.45 * normal(len(labels), dim))
    return filters.LabelledMeans(images, labels, [f"{i}" for i in range(len(labels))]), Gaussian(mean, log_var)


def only(images, some):
    names = [name for name, kept in zip(images.names, some.tolist()) if kept]
    return filters.LabelledMeans(images.mean[some], images.labels[some], names)


def evaluated(images, prompts, names, folds=0, other=None, **options):
    splits = filters.fold_splits(images, folds) if folds else []
    source = f"folds:{folds}" if folds else "train"
    if other is not None:
        splits = [(other, torch.ones(len(images.labels), dtype=torch.bool))]
    return filters.Evaluation(images, prompts, names, DEFAULTS | options, splits, source)


def rows_of(evaluation):
    return {(row["title"], row["note"]): row for row in evaluation.rows}


def accuracy_of(images, vectors):
    return ((images.mean @ normalise(vectors).T).argmax(1) == images.labels).double()


@pytest.fixture(scope="module")
def every():
    return evaluated(*world(), list(filters.FILTERS), folds=5)


def test_accuracies_have_standard_errors_and_a_mean_over_classes():
    from sklearn.metrics import balanced_accuracy_score

    images, prompts = world()
    some = (torch.arange(72) % 12 < images.labels + 2) & (images.labels != 3)  # 2 to 7 images a class, none of one
    images = only(images, some)
    found = evaluated(images, prompts, ["single", "all", "weighted"])
    answer = (images.mean @ normalise(prompts.mean.mean(1)).T).argmax(1)
    row, right = rows_of(found)["all", "zero-shot"], (answer == images.labels).double()
    with pytest.warns(UserWarning, match="not in y_true"):  # one class has no images
        balanced = balanced_accuracy_score(images.labels, torch.where(right > 0, answer, 3))
    assert row["mean_per_class_recall"] == pytest.approx(balanced) != pytest.approx(row["top1"])
    assert row["top1_se"] == pytest.approx(right.std().item() / len(right) ** 0.5)
    weighed = torch.einsum("cp,cpd->cd", weights["weighted"](prompts.uncertainty(), 1.0), prompts.mean)
    difference = accuracy_of(images, weighed) - right  # paired over images
    gain_se = rows_of(found)["weighted", "zero-shot"]["gain_se"]
    assert gain_se == pytest.approx(difference.std().item() / len(right) ** 0.5)
    assert found.by_class(found.all.ranks)[3].isnan()
    assert evaluated(images, prompts, ["best-topk"]).oracle.kept[3] == 9


def test_the_curve_is_the_naive_evaluation_of_each_k(every):
    images, prompts = world()
    u, rows = prompts.uncertainty(), rows_of(every)
    for k in range(1, 10):
        vectors = torch.stack([prompts.mean[c][u[c].argsort()[:k]].mean(0) for c in range(6)])
        assert every.curve(1)[k - 1] == pytest.approx(accuracy_of(images, vectors).mean().item())
    assert every.curve(1)[-1] == pytest.approx(rows["all", "zero-shot"]["top1"])
    assert rows["topk", "oracle"]["top1"] == pytest.approx(every.curve(1).max().item())
    assert rows["topk", "oracle"]["top1"] >= rows["topk", "few-shot (folds:5)"]["top1"]


def test_best_topk_is_a_real_classifier_and_has_an_upper_bound(every):
    images, prompts = world()
    u, rows = prompts.uncertainty(), rows_of(every)
    vectors = torch.stack([prompts.mean[c][u[c].argsort()[: every.oracle.kept[c]]].mean(0) for c in range(6)])
    assert rows["best-topk", "oracle"]["top1"] == pytest.approx(accuracy_of(images, vectors).mean().item())
    assert len(set(every.oracle.kept.tolist())) > 1
    best = every.by_class(every.candidates("topk").ranks).max(dim=1).values
    bound = float((best * every.counts).sum() / every.counts.sum())
    assert rows[filters.UPPER_BOUND, "oracle, upper bound"]["top1"] == pytest.approx(bound)
    assert bound >= rows["topk", "oracle"]["top1"]


def test_folds_choose_without_the_images_they_score(every):
    images, prompts = world()
    prefixes = prefix_vectors(prompts.mean, prompts.uncertainty())
    ranks, folds = (
        true_ranks(images.mean, prefixes, images.labels),
        filters.stratified_folds(images.labels, images.names, 5),
    )
    right = 0
    for fold in range(5):
        others = folds != fold
        k = filters.best_settings(class_accuracy(ranks[others], images.labels[others], 6)) + 1
        vectors = torch.stack([prefixes[k[c] - 1, c] for c in range(6)])
        right += int(accuracy_of(only(images, ~others), vectors).sum())
    assert rows_of(every)["best-topk", "few-shot (folds:5)"]["top1"] == pytest.approx(right / 72)


def test_other_images_decide_alone_and_unlabelled_ones_without_labels():
    images, prompts = world()
    other = world(per_class=7)[0]
    names = ["topk", "reweighted", "reweighted-unlabelled"]

    def fitted(labels, other_labels):
        found = evaluated(images._replace(labels=labels), prompts, names, other=other._replace(labels=other_labels))
        return {name: one.weights for name, one in found.reweighted.items()}, found

    (first, found), (moved, _) = fitted(images.labels, other.labels), fitted(images.labels.roll(5), other.labels)
    wrong, _ = fitted(images.labels, other.labels.roll(5))
    assert list(first) == [
        "reweighted, oracle", "reweighted, few-shot (train)",
        "reweighted-unlabelled, transductive", "reweighted-unlabelled, unlabelled (train)",
    ]  # fmt: skip
    assert [torch.equal(first[name], moved[name]) for name in first] == [False, True, True, True]
    assert [torch.equal(first[name], wrong[name]) for name in first] == [True, False, True, True]
    row = rows_of(found)["topk", "few-shot (train)"]
    assert row["top1"] == pytest.approx(found.curve(1)[int(row["k"]) - 1].item())

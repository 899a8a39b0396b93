"""From embeddings to numbers: oracle and few-shot choices of K, and correlations."""

import pytest
import torch

from probemb.errors import UserError
from probemb.evaluation.classification import normalise
from probemb.gaussian import Gaussian
from zeroshot.filtering.evaluation import evaluate_embeddings
from zeroshot.filtering.filters import FILTERS, REWEIGHTED, FilterOptions, Selection
from zeroshot.filtering.rows import UPPER_BOUND, Row, SelectionData, paired_standard_error


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
    return images, labels, [f"{i}" for i in range(len(labels))], Gaussian(mean, log_var)


def rows_of(evaluation):
    return {(row.title, row.note): row for row in evaluation.rows}


@pytest.fixture(scope="module")
def every():
    return evaluate_embeddings(*world(), [*FILTERS, *REWEIGHTED], selection=Selection("folds", 5))


def test_every_filter_has_its_row_and_gains_are_over_all(every):
    assert [row.filter for row in every.rows] == [
        "single", "all", "topk", "topk", "best-topk", "best-topk", "best-topk", "weighted", "inverse-variance",
        *[n for n in ("class-deviation", "threshold", "quantile", "reweighted", "reweighted-unlabelled") for _ in "oh"],
    ]  # fmt: skip
    base = rows_of(every)["all", "zero-shot"].top1
    for row in every.rows:
        assert row.gain == pytest.approx(row.top1 - base)
        assert 0 <= row.top1 <= row.top5 <= 1


def test_standard_errors_of_gains_are_paired_over_images(every):
    images, labels, _, prompts = world()
    u = prompts.uncertainty()

    def correct(weights):
        vectors = normalise(torch.einsum("cp,cpd->cd", weights, prompts.mean))
        return ((images @ vectors.T).argmax(1) == labels).double()

    rows = rows_of(every)
    assert rows["all", "zero-shot"].gain_se == 0
    difference = correct(FILTERS["weighted"](u, FilterOptions())) - correct(torch.full_like(u, 1 / 9))
    assert rows["weighted", "zero-shot"].gain_se == pytest.approx(difference.std().item() / 72**0.5)
    draws = torch.randint(72, (4000, 72), generator=torch.Generator().manual_seed(0))
    bootstrap = difference[draws].mean(dim=1).std().item()
    assert bootstrap > 0
    assert rows["weighted", "zero-shot"].gain_se == pytest.approx(bootstrap, rel=0.05)


def test_accuracies_have_standard_errors_and_a_mean_over_classes():
    from sklearn.metrics import balanced_accuracy_score

    images, labels, names, prompts = world()
    some = (torch.arange(len(labels)) % 12 < labels + 2) & (labels != 3)  # 2 to 7 images a class, and none of one
    images, labels, names = images[some], labels[some], [name for name, kept in zip(names, some) if kept]
    found = rows_of(evaluate_embeddings(images, labels, names, prompts, ["single", "all"]))
    for name, weights in ("single", torch.eye(9)[0].expand(6, 9)), ("all", torch.full((6, 9), 1 / 9)):
        answer = (images @ normalise(torch.einsum("cp,cpd->cd", weights, prompts.mean)).T).argmax(1)
        row, right = found[name, "zero-shot"], (answer == labels).double()
        with pytest.warns(UserWarning, match="not in y_true"):  # one class has no images
            balanced = balanced_accuracy_score(labels, torch.where(right > 0, answer, 3))
        assert row.mean_per_class_recall == pytest.approx(balanced)
        assert row.mean_per_class_recall != pytest.approx(row.top1)
        assert row.top1_se == pytest.approx(right.std().item() / len(right) ** 0.5)
        assert row.top1_text == f"{100 * right.mean():.2f} ± {100 * row.top1_se:.2f}"


@pytest.mark.parametrize(
    ("k", "varies", "text"),
    [(80.0, False, "80"), (4.0, True, "mean 4.0"), (34.2, True, "mean 34.2"), (None, False, "soft")],
)
def test_k_is_called_a_mean_where_it_differs(k, varies, text):
    row = Row("quantile", "quantile", k, 0.5, 0.9, 0.01, 0.5, 0.0, 0.1, "zero-shot", k_varies=varies)
    assert row.k_text == text


def test_only_gains_beyond_two_standard_errors_are_marked():
    def row(gain, se):
        return Row("weighted", "weighted", None, 0.5, 0.9, 0.01, 0.5, gain, se, "zero-shot")

    assert [row(*pair).verdict for pair in ((0.1, 0.04), (0.1, 0.05), (-0.1, 0.04), (-0.1, 0.2), (0.0, 0.0))] == [
        "up", "", "down", "", ""
    ]  # fmt: skip
    assert row(0.0123, 0.004).gain_text == "+1.23 ± 0.40"
    assert (row(0.1, None).verdict, row(0.1, None).gain_text) == ("", "+10.00")
    assert paired_standard_error(torch.tensor([True]), torch.tensor([False])) is None


def test_the_curve_is_the_naive_evaluation_of_each_k(every):
    images, labels, _, prompts = world()
    u = prompts.uncertainty()
    for k in range(1, 10):
        vectors = normalise(torch.stack([prompts.mean[c][u[c].argsort()[:k]].mean(0) for c in range(6)]))
        hits = ((images @ vectors.T).argmax(1) == labels).double().mean()
        assert every.curve1[k - 1] == pytest.approx(hits.item())
    assert every.curve1[-1] == pytest.approx(rows_of(every)["all", "zero-shot"].top1)


def test_oracles_are_labelled_and_at_least_as_good_as_what_they_choose_from(every):
    rows = rows_of(every)
    topk, bound = rows["topk", "oracle"], rows[UPPER_BOUND, "oracle, upper bound"]
    assert topk.top1 == pytest.approx(every.curve1.max().item())
    assert topk.top1 >= rows["topk", "few-shot (folds:5)"].top1
    assert topk.top1 >= rows["all", "zero-shot"].top1
    assert bound.top1 >= topk.top1


def test_best_topk_is_a_real_classifier_with_each_class_own_k(every):
    images, labels, _, prompts = world()
    u = prompts.uncertainty()
    vectors = normalise(torch.stack([prompts.mean[c][u[c].argsort()[: every.oracle_k[c]]].mean(0) for c in range(6)]))
    hits = (images @ vectors.T).argmax(1) == labels
    assert rows_of(every)["best-topk", "oracle"].top1 == pytest.approx(hits.double().mean().item())
    assert len(set(every.oracle_k.tolist())) > 1


def test_the_upper_bound_is_the_mean_of_the_best_of_each_class(every):
    bound = rows_of(every)[UPPER_BOUND, "oracle, upper bound"]
    assert bound.top1 == pytest.approx(
        (every.oracle_max_over_k * every.counts).sum().item() / every.counts.sum().item()
    )


def test_folds_choose_k_without_the_images_they_score():
    images, labels, names, prompts = world()
    few_shot = rows_of(
        evaluate_embeddings(images, labels, names, prompts, ["best-topk"], selection=Selection("folds", 5))
    )
    row = few_shot["best-topk", "few-shot (folds:5)"]
    from probemb.evaluation.classification import class_accuracy, prefix_vectors, true_ranks
    from zeroshot.filtering.filters import best_class_k, stratified_folds

    prefixes = prefix_vectors(prompts.mean, prompts.uncertainty())
    ranks, folds = true_ranks(images, prefixes, labels), stratified_folds(labels.tolist(), names, 5)
    right = 0
    for fold in range(5):
        others = folds != fold
        k = best_class_k(class_accuracy(ranks[others], labels[others], 6))
        vectors = torch.stack([prefixes[k[c] - 1, c] for c in range(6)])
        right += int(((images[~others] @ vectors.T).argmax(1) == labels[~others]).sum())
    assert row.top1 == pytest.approx(right / len(labels))


def test_k_chosen_on_other_images_is_scored_on_these():
    images, labels, names, prompts = world()
    other_images, other_labels, other_names, _ = world(seed=0, per_class=30)
    evaluation = evaluate_embeddings(
        images, labels, names, prompts, ["topk", "best-topk"],
        selection=Selection("train"), select_data=SelectionData(other_images, other_labels, other_names),
    )  # fmt: skip
    rows = rows_of(evaluation)
    k = int(rows["topk", "few-shot (train)"].k)
    assert rows["topk", "few-shot (train)"].top1 == pytest.approx(evaluation.curve1[k - 1].item())
    assert ("best-topk", "few-shot (train)") in rows


def test_a_given_k_is_no_oracle():
    evaluation = evaluate_embeddings(*world(), ["topk"], options=FilterOptions(k=4))
    assert [(row.k, row.note) for row in evaluation.rows] == [(4, "zero-shot, K given")]
    assert evaluation.curve1 is None
    reference = evaluate_embeddings(*world(), ["topk"])
    assert evaluation.rows[0].top1 == pytest.approx(reference.curve1[3].item())


def test_classes_without_images_keep_all_prompts_and_have_no_accuracy():
    images, labels, names, prompts = world()
    keep = labels != 2
    names = [name for name, k in zip(names, keep.tolist()) if k]
    evaluation = evaluate_embeddings(images[keep], labels[keep], names, prompts, ["best-topk"])
    assert evaluation.oracle_k[2] == 9
    assert evaluation.class_all[2].isnan()
    assert evaluation.counts[2] == 0


def test_one_image_a_class_allows_no_folds():
    with pytest.raises(UserError, match="no class has more than one image"):
        evaluate_embeddings(*world(per_class=1), ["best-topk"], selection=Selection("folds", 5))

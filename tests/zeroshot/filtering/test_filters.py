"""Filters as weights, and how K is chosen."""

import pytest
import torch

from probemb.errors import UserError
from zeroshot.filtering.filters import (
    FILTERS,
    REWEIGHTED,
    FilterOptions,
    best_class_k,
    best_common_k,
    filter_names,
    parse_selection,
    stratified_folds,
)

U = torch.tensor([[3.0, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0]])


@pytest.mark.parametrize("name", FILTERS)
def test_weights_of_every_filter_sum_to_one_and_are_not_negative(name):
    k = torch.tensor([2, 3]) if name == "best-topk" else 3
    weights = FILTERS[name](U, FilterOptions(single=1, k=k))
    assert weights.shape == U.shape
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(2))


def test_single_keeps_one_prompt_and_all_keeps_each_equally():
    assert FILTERS["single"](U, FilterOptions(single=2)).tolist() == [[0, 0, 1, 0]] * 2
    assert FILTERS["all"](U, FilterOptions()).tolist() == [[0.25] * 4] * 2


def test_topk_keeps_the_most_certain_and_ties_keep_the_order():
    assert FILTERS["topk"](U, FilterOptions(k=2)).tolist() == [[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0]]
    assert FILTERS["topk"](U, FilterOptions()).tolist() == FILTERS["all"](U, FilterOptions()).tolist()


def test_best_topk_takes_a_k_for_each_class():
    weights = FILTERS["best-topk"](U, FilterOptions(k=torch.tensor([1, 4])))
    assert weights.tolist() == [[0, 1, 0, 0], [0.25] * 4]


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_out_of_range_is_refused(k):
    with pytest.raises(UserError, match="between 1 and the number of prompts, 4"):
        FILTERS["topk"](U, FilterOptions(k=k))


def test_soft_weights_fall_with_uncertainty_and_are_equal_for_equal_prompts():
    for name in ("weighted", "inverse-variance"):
        weights = FILTERS[name](U, FilterOptions())
        assert weights[0, 1] > weights[0, 2] > weights[0, 0] > weights[0, 3]
        torch.testing.assert_close(weights[1], torch.full((4,), 0.25))
    torch.testing.assert_close(
        FILTERS["inverse-variance"](U, FilterOptions())[0], torch.tensor([1 / 3, 1, 1 / 2, 1 / 4]) / (25 / 12)
    )


def test_weighted_does_not_depend_on_the_scale_of_u_and_obeys_the_temperature():
    weighted = FILTERS["weighted"]
    torch.testing.assert_close(weighted(U * 1000 + 5, FilterOptions()), weighted(U, FilterOptions()))
    z = (U[0] - 2.5) / 1.25**0.5
    torch.testing.assert_close(weighted(U, FilterOptions(temperature=0.5))[0], torch.softmax(-z / 0.5, 0))


def test_an_unknown_filter_gets_the_nearest_name():
    assert filter_names("every") == [*FILTERS, *REWEIGHTED]
    assert filter_names("best-topk") == ["single", "all", "best-topk"]
    assert filter_names("topk,best-topk") == ["single", "all", "topk", "best-topk"]
    with pytest.raises(UserError, match="Did you mean 'best-topk'"):
        filter_names("best-top")


def test_ties_between_k_go_to_more_prompts():
    assert best_class_k(torch.tensor([[0.5, 0.7, 0.7, 0.1], [0.0, 0.0, 0.0, 0.0], [0.9, 0.2, 0.1, 0.3]])).tolist() == [
        3,
        4,
        1,
    ]
    assert best_class_k(torch.full((1, 4), torch.nan)).tolist() == [4]
    assert best_common_k(torch.tensor([[0, 0, 3], [0, 1, 0]])) == 1


def test_selection_is_read():
    assert parse_selection("oracle").on == "oracle"
    assert parse_selection("folds:3").folds == 3
    assert parse_selection("folds").label == "folds:5"
    for wrong in ("fold:5", "folds:1", "folds:x", "test", ""):
        with pytest.raises(UserError, match="not a way to choose K"):
            parse_selection(wrong)


def test_folds_are_balanced_deterministic_and_independent_of_the_order():
    labels = [i % 4 for i in range(43)]
    names = [f"image-{i}" for i in range(43)]
    folds = stratified_folds(labels, names, 5)
    assert torch.equal(folds, stratified_folds(labels, names, 5))
    sizes = torch.bincount(folds, minlength=5)
    assert sizes.max() - sizes.min() <= 1
    for label in range(4):
        per_fold = torch.bincount(folds[torch.tensor(labels) == label], minlength=5)
        assert per_fold.max() - per_fold.min() <= 1
    shuffled = torch.randperm(43, generator=torch.Generator().manual_seed(0)).tolist()
    again = stratified_folds([labels[i] for i in shuffled], [names[i] for i in shuffled], 5)
    assert torch.equal(again, folds[torch.tensor(shuffled)])


def test_images_of_one_group_share_a_fold():
    labels, names = [i % 4 for i in range(40)], [f"{i}" for i in range(40)]
    groups = list(range(40))
    groups[17], groups[30], groups[31] = 5, 2, 2  # of the same class, and of others
    folds = stratified_folds(labels, names, 5, groups)
    assert folds[17] == folds[5]
    assert folds[30] == folds[31] == folds[2]
    assert folds.bincount(minlength=5).min() >= 6
    assert torch.equal(stratified_folds(labels, names, 5), stratified_folds(labels, names, 5, range(40)))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    again = stratified_folds([labels[i] for i in order], [names[i] for i in order], 5, [groups[i] for i in order])
    assert torch.equal(again, folds[order])
    with pytest.raises(UserError, match="no class has more than one image"):
        stratified_folds([0, 0, 1], ["a", "b", "c"], 2, [0, 0, 2])


def test_folds_need_two_images_in_some_class_and_one_for_each_fold():
    with pytest.raises(UserError, match="no class has more than one image"):
        stratified_folds([0, 1, 2], ["a", "b", "c"], 2)
    with pytest.raises(UserError, match="at least 5 images"):
        stratified_folds([0, 0, 1], ["a", "b", "c"], 5)


def test_certain_prompts_have_finite_weights():
    weights = FILTERS["inverse-variance"](torch.tensor([[0.0, 0.0, 1.0]]), FilterOptions())
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5, 0.0]]))

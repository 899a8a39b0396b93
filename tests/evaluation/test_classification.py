"""The shared core of zero-shot classification against its plain definitions."""

import pytest
import torch

from probemb.evaluation.classification import (
    accuracy,
    class_accuracy,
    confidences,
    normalise,
    prefix_vectors,
    true_ranks,
)


def random_prompts(n_classes=7, n_prompts=11, dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = normalise(torch.randn(n_classes, n_prompts, dim, generator=generator))
    return mean, torch.rand(n_classes, n_prompts, generator=generator) + 0.1


def random_images(n=50, dim=6, n_classes=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = normalise(torch.randn(n, dim, generator=generator))
    return images, torch.randint(n_classes, (n,), generator=generator)


def test_prefix_vectors_equal_the_mean_of_the_k_most_certain_prompts_one_k_at_a_time():
    mean, u = random_prompts()
    prefixes = prefix_vectors(mean, u, class_chunk=3)
    for k in range(1, u.shape[1] + 1):
        for c in range(u.shape[0]):
            most_certain = sorted(range(u.shape[1]), key=lambda p: float(u[c, p]))[:k]
            naive = torch.stack([mean[c, p] for p in most_certain]).mean(0)
            torch.testing.assert_close(prefixes[k - 1, c], naive / naive.norm(), atol=1e-6, rtol=0)


def test_ranks_count_the_classes_above_the_true_one_whatever_the_chunks():
    mean, u = random_prompts()
    prefixes = prefix_vectors(mean, u)
    images, labels = random_images()
    ranks = true_ranks(images, prefixes, labels, max_scores=100)
    assert ranks.shape == (50, 11)
    for i in range(50):
        for k in range(11):
            scores = prefixes[k] @ images[i]
            assert ranks[i, k] == sorted(scores.tolist(), reverse=True).index(scores[labels[i]].item())


def test_of_two_classes_with_one_vector_the_first_wins_as_under_argmax():
    vector = torch.tensor([1.0, 0.0])
    vectors = torch.stack([vector, vector, torch.tensor([0.0, 1.0])])
    assert true_ranks(vector[None].repeat(3, 1), vectors, torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]


def test_accuracy_and_class_accuracy():
    ranks = torch.tensor([[0, 4], [1, 0], [0, 0], [7, 5]])
    assert accuracy(ranks).tolist() == [0.5, 0.5]
    assert accuracy(ranks, 5).tolist() == [0.75, 0.75]
    per_class = class_accuracy(ranks, torch.tensor([0, 0, 2, 2]), 3)
    assert per_class[0].tolist() == [0.5, 0.5]
    assert per_class[1].isnan().all()
    assert per_class[2].tolist() == [0.5, 0.5]


def test_an_embedding_that_is_not_finite_is_never_right():
    images = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]])
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    assert true_ranks(images, vectors, torch.tensor([0, 0])).tolist()[0] == 0
    assert true_ranks(images, vectors, torch.tensor([0, 0])).tolist()[1] >= 2


def test_confidence_is_the_largest_probability_of_the_softmax_in_blocks_too():
    generator = torch.Generator().manual_seed(0)
    images, vectors = (normalise(torch.randn(n, 6, generator=generator)) for n in (11, 4))
    expected = [max(torch.softmax(7.0 * (vectors @ image), 0).tolist()) for image in images]
    assert confidences(images, vectors, 7.0, max_scores=9).tolist() == pytest.approx(expected)

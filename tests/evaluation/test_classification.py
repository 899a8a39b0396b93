"""The shared core of zero-shot classification against its plain definitions."""

import pytest
import torch

from probemb.errors import UserError
from probemb.evaluation import classification as classify
from probemb.gaussian import Gaussian


def random_prompts(n_classes=7, n_prompts=11, dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = classify.normalise(torch.randn(n_classes, n_prompts, dim, generator=generator))
    return mean, torch.rand(n_classes, n_prompts, generator=generator) + 0.1


def random_images(n=50, dim=6, n_classes=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = classify.normalise(torch.randn(n, dim, generator=generator))
    return images, torch.randint(n_classes, (n,), generator=generator)


def test_the_openai_prompts_are_80_and_hold_the_single_one():
    templates = classify.imagenet_templates()
    assert len(templates) == len(set(templates)) == 80
    assert classify.SINGLE_TEMPLATE in templates
    assert all(t.count("{}") == 1 for t in templates)
    assert len(classify.imagenet_class_names()) == 1000


def test_prompt_texts_are_class_major():
    assert classify.prompt_texts(["cat", "{}"], ["a {}.", "the {}"]) == ["a cat.", "the cat", "a {}.", "the {}"]


def test_prefix_vectors_equal_the_mean_of_the_k_most_certain_prompts_one_k_at_a_time():
    mean, u = random_prompts()
    prefixes = classify.prefix_vectors(mean, u, class_chunk=3)
    for k in range(1, u.shape[1] + 1):
        for c in range(u.shape[0]):
            most_certain = sorted(range(u.shape[1]), key=lambda p: float(u[c, p]))[:k]
            naive = torch.stack([mean[c, p] for p in most_certain]).mean(0)
            torch.testing.assert_close(prefixes[k - 1, c], naive / naive.norm(), atol=1e-6, rtol=0)


def test_prefix_of_all_prompts_is_the_plain_ensemble():
    mean, u = random_prompts()
    weights = torch.full(u.shape, 1 / u.shape[1])
    assert torch.equal(classify.prefix_vectors(mean, u)[-1], classify.class_vectors(mean, weights))


def test_prefix_vectors_break_ties_by_the_order_of_the_templates():
    mean, _ = random_prompts(n_classes=1, n_prompts=4)
    prefixes = classify.prefix_vectors(mean, torch.ones(1, 4))
    torch.testing.assert_close(prefixes[0, 0], mean[0, 0])


@pytest.mark.parametrize("max_scores", [20_000_000, 100, 1])
def test_ranks_count_the_classes_above_the_true_one_whatever_the_chunks(max_scores):
    mean, u = random_prompts()
    prefixes = classify.prefix_vectors(mean, u)
    images, labels = random_images()
    ranks = classify.true_ranks(images, prefixes, labels, max_scores=max_scores)
    assert ranks.shape == (50, 11)
    for i in range(50):
        for k in range(11):
            scores = prefixes[k] @ images[i]
            assert ranks[i, k] == sorted(scores.tolist(), reverse=True).index(scores[labels[i]].item())


def test_ranks_of_one_classifier_have_one_dimension():
    images, labels = random_images()
    vectors = classify.normalise(torch.randn(7, 6))
    stacked = classify.true_ranks(images, vectors.unsqueeze(0), labels)
    assert torch.equal(classify.true_ranks(images, vectors, labels), stacked[:, 0])


def test_of_two_classes_with_one_vector_the_first_wins_as_under_argmax():
    vector = torch.tensor([1.0, 0.0])
    vectors = torch.stack([vector, vector, torch.tensor([0.0, 1.0])])
    assert classify.true_ranks(vector[None].repeat(3, 1), vectors, torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]


def test_accuracy_and_class_accuracy():
    ranks = torch.tensor([[0, 4], [1, 0], [0, 0], [7, 5]])
    assert classify.accuracy(ranks).tolist() == [0.5, 0.5]
    assert classify.accuracy(ranks, 5).tolist() == [0.75, 0.75]
    per_class = classify.class_accuracy(ranks, torch.tensor([0, 0, 2, 2]), 3)
    assert per_class[0].tolist() == [0.5, 0.5]
    assert per_class[1].isnan().all()
    assert per_class[2].tolist() == [0.5, 0.5]


class CountingEncoder:
    """A causal stand-in for a text tower: depends on the tokens up to the end token only."""

    def __init__(self):
        self.encoded, self.columns = 0, 0

    def __call__(self, tokens):
        self.encoded += len(tokens)
        self.columns += tokens.numel()
        weights = torch.arange(1, tokens.shape[1] + 1, dtype=torch.float32)
        mean = torch.stack([(tokens * weights).sum(1), tokens.float().sum(1)], 1)
        return Gaussian(mean, -mean)


def test_texts_are_encoded_once_each_cut_behind_the_longest_and_come_back_in_order():
    tokens = torch.tensor([[1, 5, 9, 0, 0], [1, 9, 0, 0, 0], [1, 5, 9, 0, 0], [1, 2, 3, 9, 0]])
    encoder, told = CountingEncoder(), []
    found = classify.encode_texts(
        encoder, tokens, batch_size=2, cut=lambda t: t[:, : int(t.count_nonzero(dim=1).max())], progress=told.append
    )
    expected = CountingEncoder()(tokens)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.log_var, expected.log_var)
    assert encoder.encoded == 3
    assert encoder.columns == 2 * 3 + 4
    assert sum(told) == 4


def test_cut_texts_embed_the_same_under_the_real_model():
    from probemb.models import create_model, create_tokenizer

    torch.manual_seed(0)
    model = create_model("ViT-Micro-32").eval()
    tokens = create_tokenizer(model)(["a cat", "a photo of the small cat", "two dogs in the rain by the sea"])
    found = classify.encode_texts(model.encode_text, tokens, batch_size=1, cut=model.cut_padding)
    with torch.no_grad():
        whole = model.encode_text(tokens)
    torch.testing.assert_close(found.mean, whole.mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.log_var, whole.log_var, atol=1e-5, rtol=0)


def test_embeddings_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="not finite"):
        classify.encode_images(lambda x: Gaussian(x / 0, x), [torch.ones(2, 3)])
    with pytest.raises(UserError, match="nothing to encode"):
        classify.encode_images(lambda x: Gaussian(x, x), [])


def test_ranks_of_a_perfect_and_of_a_constant_model():
    names, labels = torch.eye(8), torch.arange(8)
    vectors = classify.class_vectors(names[:, None, :].repeat(1, 3, 1), torch.full((8, 3), 1 / 3))
    assert classify.accuracy(classify.true_ranks(names, vectors, labels)) == 1.0
    constant = names[:1].repeat(8, 1)
    assert classify.accuracy(classify.true_ranks(constant, vectors, labels)) == 1 / 8


def test_an_embedding_that_is_not_finite_is_never_right():
    images = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]])
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    assert classify.true_ranks(images, vectors, torch.tensor([0, 0])).tolist()[0] == 0
    assert classify.true_ranks(images, vectors, torch.tensor([0, 0])).tolist()[1] >= 2

"""Set algebra, ellipses, unions of crops, hierarchies and continuity, against loops, samples, authors' numbers."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from probemb import Gaussian, distances
from probemb.data.boxes import CropTriplet, crop_triplets, find_phrases
from probemb.data.captions.find import find_captions
from probemb.evaluation import analyses
from probemb.evaluation.embedding import EmbeddedPairs, Embedder
from probemb.evaluation.localisation import crop
from probemb.evaluation.rankings import RankingOptions
from probemb.evaluation.uncertainty import geometric_sigma
from probemb.models import create_model, create_tokenizer, create_transforms
from tools.make_scenes.captions import draw_captions, match_matrix
from tools.make_scenes.world import scene

N, D = 12, 6


def normals(n=N, log_var=-2.0, seed=0) -> Gaussian:
    r = torch.Generator().manual_seed(seed)
    return Gaussian(torch.randn(n, D, generator=r), log_var + 0.3 * torch.randn(n, D, generator=r))


def test_coverage_is_the_share_of_samples_in_the_central_interval():
    a, b = normals(3, seed=1), normals(3, seed=2)
    z = a.sample(200_000, torch.Generator().manual_seed(3))
    edge = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.95))
    inside = ((z - b.mean[:, None]).abs() <= edge * b.std[:, None]).double().mean((1, 2))
    torch.testing.assert_close(analyses.coverage(a, b), inside, rtol=0, atol=3e-3)
    torch.testing.assert_close(analyses.coverage(a, a), torch.full((3,), 0.9).double())
    wide = Gaussian(a.mean, a.log_var + 10)
    assert (analyses.coverage(a, wide) > 0.999).all()
    assert (analyses.coverage(wide, a) < 0.02).all()


def test_an_embedding_of_the_intersection_covers_it_and_one_of_something_else_does_not():
    a, b = normals(seed=1), normals(seed=2)
    precision = a.log_var.neg().exp() + b.log_var.neg().exp()
    middle = (a.mean / a.var + b.mean / b.var) / precision
    found = analyses.mixing(Gaussian(middle, -precision.log()), a, b)
    assert found["covers"] == pytest.approx(0.9, abs=1e-6)
    assert found["covers_other"] < 0.5
    assert (found["own_is_closest"], found["between"], found["wider"]) == (1, 1, 0)
    assert (found["chance"], found["pairs"]) == (1 / N, N)
    elsewhere = analyses.mixing(Gaussian(middle.roll(2, 0), a.log_var + 1), a, b)
    assert elsewhere["covers_other"] > elsewhere["covers"]
    assert (elsewhere["own_is_closest"], elsewhere["wider"]) == (0, 1)


def test_wider_ones_around_the_whole_include_it_and_others_do_not():
    whole = normals()
    rows = analyses.erasing(whole, [Gaussian(whole.mean, whole.log_var + step) for step in (0.5, 2.0)], (0.1, 0.5))
    assert [row["share"] for row in rows] == [0.1, 0.5]
    for row, step in zip(rows, (0.5, 2.0)):
        assert row["sigma"] == pytest.approx(float(geometric_sigma(whole).mean()) * math.exp(step / 2))
        assert (row["wider"], row["lies_in"]) == (1, 1)
        assert row["covers"] > 0.9 > row["covered"]
        assert row["covers_other"] < row["covers"]
    (row,) = analyses.erasing(whole, [Gaussian(whole.mean, whole.log_var - 1)], (0.3,))
    assert (row["wider"], row["lies_in"]) == (0, 0)


def spread_normals(n=40, d=7, seed=0) -> Gaussian:
    r = torch.Generator().manual_seed(seed)
    spread = torch.linspace(3, 0.1, d)
    return Gaussian(torch.randn(n, d, generator=r) * spread, torch.randn(n, d, generator=r) - 1)


def test_the_plane_has_the_largest_variance():
    points = spread_normals().mean.double()
    plane = analyses.plane_of(points)
    values, vectors = torch.linalg.eigh(torch.cov(points.T))
    assert plane.share == pytest.approx(float(values[-2:].sum() / values.sum()))
    assert (plane.axes * vectors[:, [-1, -2]]).sum(0).abs().tolist() == pytest.approx([1, 1])
    torch.testing.assert_close(plane.axes.T @ plane.axes, torch.eye(2).double())
    assert (analyses.plane_of(-points).axes - plane.axes).abs().max() < 1e-9  # signs are fixed


def test_they_hold_their_share_of_the_samples():
    g = spread_normals()
    plane = analyses.plane_of(g.mean)
    found = analyses.ellipses(g, plane, 0.9)
    for row in range(3):
        samples = g[[row]].sample(100_000, torch.Generator().manual_seed(row))[0].double()
        gap = (samples - plane.origin) @ plane.axes - found.centre[row]
        cos, sin = found.angle[row].cos(), found.angle[row].sin()
        turned = torch.stack([gap @ torch.stack([cos, sin]), gap @ torch.stack([-sin, cos])], 1)
        inside = (turned / found.radii[row]).square().sum(1) <= 1
        assert float(inside.double().mean()) == pytest.approx(0.9, abs=6e-3)


BOX = (0.0, 0.0, 1.0, 1.0)


def drawn(seed, *shape):
    r = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(*shape, generator=r), dim=-1)
    return Gaussian(mean, torch.randn(*shape, generator=r) - 2)


def some(shape=(N, D)):
    triplets = [CropTriplet(i, (BOX, BOX, BOX), ("a", "b", "a and b")) for i in range(shape[0])]
    images = {item: drawn(i, *shape) for i, item in enumerate("ABC")}
    return analyses.EmbeddedTriplets(images, {item: drawn(5 + i, *shape) for i, item in enumerate("ABC")}, triplets)


def test_selection_against_loops(monkeypatch):
    monkeypatch.setattr(analyses, "BLOCK", 4)
    found = some()

    def right(own, other):
        return [bool(a > b) for a, b in zip(*(-distances.csd(i, c).diagonal() for i, c in (own, other)))]

    (a, c), (of_a, of_c) = ((side["A"], side["C"]) for side in (found.images, found.captions))
    expected = dict(zip(analyses.TASKS, (
        right((a, of_a), (a, of_c)), right((c, of_c), (c, of_a)),
        right((a, of_a), (c, of_a)), right((c, of_c), (a, of_c)),
    )))  # fmt: skip
    measured = analyses.binary_selection(found, "csd", RankingOptions())
    for task, values in expected.items():
        assert measured[task]["value"] == pytest.approx(sum(values) / N)
        assert measured[task]["se"] == pytest.approx(float(torch.tensor(values).double().std()) / N**0.5)
    assert measured["mean"]["value"] == pytest.approx(sum(map(sum, expected.values())) / (4 * N))


def test_uncertainty_against_loops():
    found = some()
    u = {item: torch.stack([torch.logdet(torch.diag(v)) for v in g.var]).double() for item, g in found.images.items()}
    measured, difference = analyses.union_uncertainty(found)["log-det"]["images"], u["C"] - u["A"]
    for item in "ABC":
        assert measured[item]["value"] == pytest.approx(float(u[item].mean()), rel=1e-5)
    assert measured["difference"]["value"] == pytest.approx(float(difference.mean()), rel=1e-4, abs=1e-6)
    assert measured["difference"]["se"] == pytest.approx(float(difference.std()) / N**0.5, rel=1e-4)
    assert measured["larger"]["value"] == pytest.approx(float((difference > 0).double().mean()))


@pytest.fixture
def phrases(boxed_scenes):
    return find_phrases(boxed_scenes / "visual_genome")


@pytest.fixture(scope="module")
def embedder():
    torch.manual_seed(0)
    model = create_model("ViT-Micro-32").eval().requires_grad_(False)
    return Embedder(model, create_tokenizer(model), create_transforms(model).evaluate, batch_size=4)


def test_every_crop_is_its_own_and_embedded_once(phrases, embedder):
    thresholds = (0.05, 0.4, 0.9)
    seen = []

    class Counting(Embedder):
        def pixels(self, batches):
            batches = list(batches)
            seen.extend(len(batch) for batch in batches)
            return super().pixels(batches)

    counting = Counting(embedder.model, embedder.tokenizer, embedder.transform, batch_size=4)
    found, bad = analyses.embed_triplets(counting, phrases, thresholds)
    assert not bad
    distinct = {(one.image, box) for t in thresholds for one in crop_triplets(phrases, t) for box in one.boxes}
    assert sum(seen) == len(distinct)
    assert list(found) == [t for t in thresholds if crop_triplets(phrases, t)]
    for threshold, one in found.items():
        assert one.triplets == crop_triplets(phrases, threshold)
        for row, triplet in enumerate(one.triplets):
            picture = phrases.images.open(triplet.image)
            for item, box, caption in zip("ABC", triplet.boxes, triplet.captions):
                image = embedder.model.encode_image(embedder.transform(crop(picture, box))[None])
                text = embedder.model.encode_text(embedder.tokenizer([caption]))
                torch.testing.assert_close(one.images[item].mean[row], image.mean[0], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(one.captions[item].log_var[row], text.log_var[0], rtol=1e-4, atol=1e-4)


def test_the_walk_is_prolips(tensors):
    authors = tensors("27_hierarcaps")
    images, texts = authors["image_mean_f32"].double(), authors["text_mean_f32"].double().flatten(0, 1)
    numbers, root = authors["caption_ids"], authors["root_mean_f32"].double()
    walk = analyses.hierarchy_walk(images, texts, numbers.flatten(), root.expand_as(images))
    found = analyses.hierarchy_score(walk, numbers)
    assert [100 * x for x in found.values()] == pytest.approx(authors["det__precision_recall_any"].tolist())
    # The public code's root: the log of the integral of p_image^2 p_text alone, its log-determinant counted twice.
    s1, s2 = authors["image_log_var_f32"].double()[:, None], authors["text_log_var_f32"].double().flatten(0, 1)
    i1, i2 = (-s1).exp(), (-s2).exp()
    best = []
    for rows in torch.arange(len(images)).split(50):
        m1, a = images[rows, None], i1[rows] + i2 / 2
        b = 2 * m1 * i1[rows] + texts * i2
        c = m1.square() * i1[rows] + texts.square() * i2 / 2
        one_sided = (-2 * s1[rows] - s2 - a.log() / 2 + b.square() / (4 * a) - c).sum(-1)
        best.append(one_sided.argmax(1))
    chosen = texts[torch.cat(best)]
    for name, roots in (("unc", chosen), ("unc_with_root", normalize(chosen + root, dim=1))):
        found = analyses.hierarchy_score(analyses.hierarchy_walk(images, texts, numbers.flatten(), roots), numbers)
        expected = authors[f"{name}__precision_recall_any"].tolist()
        assert [100 * x for x in found.values()] == pytest.approx(expected), name


def test_the_radii_are_hierarcaps(tensors):
    authors = tensors("27_hierarcaps")
    rows, image_of_row = authors["original__rows"], authors["original__image_of_row"]
    texts = authors["text_mean_f32"].double()[rows]
    images, root = authors["image_mean_f32"].double()[image_of_row], authors["root_mean_f32"].double()
    correlation, precision, recall = authors["original__dcorr_precision_recall"].tolist()
    assert analyses.level_correlation((texts - root).norm(dim=-1)) == pytest.approx(correlation)
    numbers = authors["caption_ids"][rows]
    found, precisions, recalls = analyses.within_radius(images, texts.flatten(0, 1), numbers.flatten(), root), [], []
    for seen, image in zip(found, image_of_row):  # two chains an image there, of which a hit of either counts
        hit = torch.isin(numbers[image_of_row == image], seen)
        recalls.append(hit.any(0).double().mean())
        precisions.append(torch.isin(seen, numbers[image_of_row == image]).double().mean())
    assert float(sum(precisions) / 80) == pytest.approx(precision)
    assert float(sum(recalls) / 80) == pytest.approx(recall)


def on_an_arc(n=7, angle=math.pi / 2):
    """Images and captions whose codes lie on an arc, in order, of any length."""
    a = torch.linspace(0, angle, n)
    codes = torch.stack([a.cos(), a.sin()], 1) * torch.linspace(1, 3, n)[:, None]
    gaussian = Gaussian(codes, torch.zeros_like(codes))
    return EmbeddedPairs(gaussian, gaussian, torch.arange(n), list(range(n)), [])


def test_a_walk_along_an_arc_meets_everything_on_it_in_order():
    found = analyses.walk_between(on_an_arc(), 0, 6, 60)
    assert list(dict.fromkeys(found.images)) == list(range(7)) == list(dict.fromkeys(found.captions))
    assert found.images[0] == 0 and found.images[-1] == 6  # noqa: PT018
    assert min(found.cosines) > math.cos(math.pi / 12) - 1e-6
    assert set(analyses.walk_between(on_an_arc(), 2, 3, 5).images[1:-1]) == {1, 4}  # not the ends, which are nearer


def test_walks_are_measured_by_hand():
    likeness = torch.tensor([[1.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 1.0]])
    pairs = on_an_arc(3)
    one = analyses.walk_between(pairs, 0, 2, 5)
    assert (one.images[0], one.images[2], one.images[-1]) == (0, 1, 2)
    found = analyses.of_walks(likeness, [one, analyses.walk_between(pairs, 2, 0, 5)])
    assert found["consecutive"] == pytest.approx((0.5 + 0.3) / 2)
    assert found["images"] == 3
    assert found["to_start"][0] == found["to_end"][-1] == 1
    assert found["to_start"][2] == pytest.approx((0.5 + 0.3) / 2)
    assert found["to_start"][-1] == pytest.approx(0.1)
    still = analyses.Walk(0, 0, [0, 0, 0], [0, 0, 0], [1.0, 1.0, 1.0])
    assert analyses.of_walks(likeness, [still])["consecutive"] is None


def test_neighbours_lie_between_random_and_the_most_similar():
    near = analyses.nearest_images(on_an_arc(7).images.mean, 2)
    assert [set(row) for row in near.tolist()] == [{1, 2}, {0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 6}, {4, 5}]
    distance = (torch.arange(7.0)[:, None] - torch.arange(7.0)).abs()
    likeness = 1 - distance / 6
    found = analyses.of_neighbours(likeness, near)
    assert found["most"] == pytest.approx(found["likeness"])  # the arc is in the likeness' order
    pairs = [1 - abs(i - j) / 6 for i in range(7) for j in range(7) if i != j]
    assert found["random"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    assert analyses.of_neighbours(likeness, near.flip(0))["likeness"] < found["likeness"]


def test_likeness_of_scenes_is_the_share_of_captions_that_are_true(captioned):
    data = find_captions(captioned)
    kept = [3, 0, 7, 11]
    found = analyses.likeness_of(data.only(kept))
    for row, i in enumerate(kept):
        for column, j in enumerate(kept):
            stated = [caption.predicate for caption in draw_captions(scene("test", i), 3)]
            true = match_matrix([scene("test", j)], stated)
            assert found[row, column] == pytest.approx(true.mean())
    assert (found.diagonal() == 1).all()

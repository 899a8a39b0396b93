import torch

from probemb.losses import output as labels


def test_smoothing_and_mixing_equal_their_definition():
    eye, lam, partner = torch.eye(3), torch.tensor([0.75, 1.0, 0.5]), torch.tensor([1, 2, 0])
    torch.testing.assert_close(labels.smooth(eye, 0.1), 0.9 * eye + 0.1 * (1 - eye))
    assert labels.mixed(eye, lam, partner).tolist() == [[0.75, 0.25, 0], [0, 1, 0], [0.5, 0, 0.5]]


def test_pseudo_positives_are_the_columns_at_least_as_close_as_the_positive():
    distance = torch.tensor([[1.0, 0.5, 2.0], [3.0, 2.0, 2.0], [0.0, 9.0, 1.0]])
    found, n = labels.pseudo_positives(distance, torch.eye(3))
    assert found.tolist() == [[1, 1, 0], [0, 1, 1], [1, 0, 1]]
    assert n == 3


def test_authors_labels(tensors):
    v = tensors("01_pcmepp_csd_loss")
    n = len(v["mix_lambda"])
    partner = torch.arange(n).flip(0)
    for name, amount in (("matched_soft", 1e-4), ("matched_soft10", 0.1)):
        mixed = labels.mixed(labels.smooth(torch.eye(n, dtype=torch.float64), amount), v["mix_lambda"], partner)
        torch.testing.assert_close(mixed, v[name], rtol=1e-6, atol=1e-7)  # the reference mixes in float32
    for family in ("csd", "wdist"):
        for case in ("eye", "soft", "multi"):
            for direction, transpose in (("i2t", False), ("t2i", True)):
                distance, match = v[f"{family}__distance"], v[f"matched_{case}"]
                if transpose:
                    distance, match = distance.T, match.T
                found, n = labels.pseudo_positives(distance, match)
                torch.testing.assert_close(found, v[f"{family}__pseudo_matched_{direction}_{case}"], rtol=0, atol=0)
                assert n == v[f"{family}__n_pseudo_{direction}_{case}"]

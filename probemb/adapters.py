"""Adapters: an uncertainty for the embeddings of a trained dual encoder, whose weights stay as they are.

Each maps frozen unit embeddings x (B, D) to a Gaussian (B, D); those with `moves` have other means than x.
Their losses are functions beside them, but for those of PCME++ and ProLIP (`probemb.losses`).
Letters: B or N items, M items of the other modality, P inputs of a projection, D embedding, K classes.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.gaussian import Gaussian

EPS = 1e-4  # added to 1/α and β, as in ProbVLM's code
ROWS = 256  # items whose products with a block are in memory at once
PSEUDO_DATA = 10.0  # how many times the pairs count; the authors' τ


def mlp(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU between them; dropout before the last one."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += ([nn.ReLU()] if i else []) + ([nn.Dropout(dropout)] if dropout and i == len(widths) - 2 else [])
        layers.append(nn.Linear(a, b))
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------------------------ Gaussian


class GaussianAdapter(nn.Module):
    """A residual mean and a log-variance, for the losses of PCME++ and ProLIP.

    The residual's last layer starts at 0, so that the means start as the frozen embeddings.
    """

    moves = True  # the means

    def __init__(self, dim: int, hidden: int = 512, log_var_start: float = -6.0):
        super().__init__()
        self.residual, self.log_var = mlp(dim, hidden, dim), mlp(dim, hidden, dim)
        for layer, bias in ((self.residual[-1], 0.0), (self.log_var[-1], log_var_start)):
            nn.init.zeros_(layer.weight)
            nn.init.constant_(layer.bias, bias)

    def forward(self, x: Tensor) -> Gaussian:
        return Gaussian(F.normalize(x + self.residual(x), dim=-1), self.log_var(x))


# ---------------------------------------------------------------------------------------------------------- loss order


class OrderAdapter(nn.Module):
    """One uncertainty an item, in the order of its loss; the mean is the frozen embedding.

    Source: Pretrained Visual Uncertainties (Kirchhof et al., arXiv 2402.16569).
    """

    def __init__(self, dim: int, hidden: int = 512):
        super().__init__()
        self.score = mlp(dim, hidden, hidden, 1)

    def forward(self, x: Tensor) -> Gaussian:
        """u = exp(score), equally in every dimension: orders are all that the loss knows."""
        return Gaussian(x, (self.score(x) - math.log(x.shape[-1])).expand_as(x))


def order_loss(u: Tensor, loss: Tensor, margin: float = 0.1, leeway: float = 0.0) -> Tensor:
    """Hinge on the order of u (B,) in disjoint pairs of neighbours, by the items' own losses (B,).

    Pairs whose losses are closer than `leeway` cost the constant margin; a tie counts as if the first had the smaller
    loss. Source: Pretrained Visual Uncertainties' code.
    """
    first, second = loss[:-1:2], loss[1::2]
    sign = torch.where(first > second, 1.0, -1.0).to(u.dtype)
    sign = torch.where((first - second).abs() < leeway, 0.0, sign)
    return (margin - sign * (u[:-1:2] - u[1::2])).clamp_min(0).mean()


# ------------------------------------------------------------------------------------------------------------- AsymVLM


class SphericalAdapter(nn.Module):
    """Texts as distributions on the sphere: η (B, D), its direction the mean, its length the concentration κ.

    Images stay points. start: η is that many times x at first, and the network its residual; the mean is x, and κ alone
    is taken: by the cosine of the learned directions, vague texts come close to all images. None: η is the network
    alone, and the mean its direction, as published. Source: AsymVLM (Li et al., arXiv 2505.11029).
    """

    def __init__(self, dim: int, hidden: int = 1024, form: str = "power-spherical", start: float | None = None):
        super().__init__()
        self.form, self.start, self.moves = form, start, start is None
        self.network = mlp(dim, hidden, hidden, hidden, dim)
        if start is not None:
            for parameter in self.network[-1].parameters():
                nn.init.zeros_(parameter)

    def eta(self, x: Tensor) -> Tensor:
        found = self.network(x)
        return found if self.start is None else self.start * (x + found)

    def forward(self, x: Tensor) -> Gaussian:
        """The mean direction, and E‖Z - mean‖² = 2 (1 - E cos) spread over the dimensions."""
        eta = self.eta(x)
        kappa, d = eta.norm(dim=-1, keepdim=True), x.shape[-1]
        if self.form == "power-spherical":
            below = (d - 1) / (d - 1 + kappa)  # 1 - E cos
        else:
            below = 1 - bessel_ratio(kappa, d)
        return Gaussian(eta / kappa if self.moves else x, (2 * below / d).log().expand_as(x))


def bessel_ratio(kappa: Tensor, d: int, steps: int = 64) -> Tensor:
    """I_{d/2}(κ) / I_{d/2-1}(κ), the expected cosine of a von Mises-Fisher distribution: Amos' bound (1974) of a higher
    order, taken down by the recurrence of Bessel functions.
    """
    order = d / 2 - 1 + steps
    ratio = kappa / (order + 0.5 + ((order + 1.5) ** 2 + kappa.square()).sqrt())
    for above in range(steps):
        ratio = kappa / (2 * (order - above) + kappa * ratio)
    return ratio


def von_mises_fisher(x: Tensor, eta: Tensor) -> Tensor:
    """Log-densities of unit x (N, D) under texts η (M, D), (N, M), up to a constant: κ x·μ + log C(κ) ≈.

    The normaliser's approximation is AsymVLM's, within 0.1 of the exact one.
    """
    kappa, d = eta.norm(dim=-1), eta.shape[-1]
    h = (d - 1) / 2
    log_c = 0.0
    for m in (d - 1, d + 1):
        rho = ((m / 2) ** 2 + kappa.square()).sqrt()
        log_c = log_c + (d - 1) / 4 * (h + rho).log() - rho / 2
    return x @ eta.T + log_c


def power_spherical(x: Tensor, eta: Tensor) -> Tensor:
    """Log-densities of unit x (N, D) under texts η (M, D), (N, M). Source: De Cao & Aziz 2020; AsymVLM."""
    kappa, d = eta.norm(dim=-1), eta.shape[-1]
    beta = (d - 1) / 2
    alpha = beta + kappa
    log_norm = (alpha + beta) * math.log(2) + beta * math.log(math.pi) + alpha.lgamma() - (alpha + beta).lgamma()
    cosine = (x @ F.normalize(eta, dim=-1).T).clamp_min(-1 + 1e-6)
    return kappa * cosine.log1p() - log_norm


def asym_loss(image: Tensor, eta: Tensor, temperature: Tensor | float, form: str = "power-spherical") -> Tensor:
    """Symmetric cross entropy over the log-densities of images (B, D), not necessarily unit, under texts η (B, D)."""
    density = power_spherical if form == "power-spherical" else von_mises_fisher
    logits = temperature * density(F.normalize(image, dim=-1), eta)
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


# ------------------------------------------------------------------------------------------------------------- ProbVLM


class ProbVLMAdapter(nn.Module):
    """A generalised Gaussian per dimension around a reconstruction of x. Source: ProbVLM (arXiv 2307.00398).

    heads: "softplus", with β at least `least_beta`, or "relu" as published, whose dead units have β = 0. Without a
    bound, training drives β towards 0, where the variance Γ(3/β)/Γ(1/β) has none.
    """

    def __init__(
        self, dim: int, hidden: int = 256, dropout: float = 0.1, heads: str = "softplus", least_beta: float = 0.5
    ):
        super().__init__()
        self.trunk = mlp(dim, hidden, hidden, dim, dropout=dropout)
        self.mean, self.inverse_alpha, self.beta = (mlp(dim, dim, dim) for _ in range(3))
        self.positive, self.least_beta = (F.softplus, least_beta) if heads == "softplus" else (F.relu, 0.0)

    def parameters_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, 1/α and β, (B, D) each."""
        h = self.trunk(x) + x
        return self.mean(h), self.positive(self.inverse_alpha(h)), self.least_beta + self.positive(self.beta(h))

    def forward(self, x: Tensor) -> Gaussian:
        """The frozen embedding with the aleatoric variance; see `epistemic` for the other part."""
        _, inverse_alpha, beta = self.parameters_of(x)
        log_variance = published_probvlm_log_variance if self.positive is F.relu else generalized_log_variance
        return Gaussian(x, log_variance(inverse_alpha, beta))

    @torch.no_grad()
    def epistemic(self, x: Tensor, passes: int = 16) -> Tensor:
        """Variance of the mean over passes with dropout, (B, D), to be added to the aleatoric one for the total."""
        training = self.training
        self.train()
        found = torch.stack([self.parameters_of(x)[0] for _ in range(passes)])
        self.train(training)
        return found.var(0, correction=0)


def generalized_log_variance(inverse_alpha: Tensor, beta: Tensor) -> Tensor:
    """log of α² Γ(3/β) / Γ(1/β), both parameters raised by EPS."""
    a, b = inverse_alpha + EPS, beta + EPS
    return (3 / b).lgamma() - (1 / b).lgamma() - 2 * a.log()


def published_probvlm_log_variance(inverse_alpha: Tensor, beta: Tensor) -> Tensor:
    """As the public code bounds it, where β = 0 still is a variance of 2e25: the sum counts dead units."""
    b = (beta + 0.1).clamp(0.1, 5)
    return (3 / b).lgamma() - (1 / b).lgamma() + 2 * (1 / (inverse_alpha + 1e-5)).clamp(1e-4, 5).log()


def generalized_gaussian_nll(mean: Tensor, inverse_alpha: Tensor, beta: Tensor, target: Tensor) -> Tensor:
    """Elementwise (|x - mean| / α)^β - log(β / α) + log Γ(1/β), a constant short. Source: ProbVLM Eq. 3."""
    a, b = inverse_alpha + EPS, beta + EPS
    apart = (mean - target).abs() * a
    power = torch.where(apart > 0, apart.clamp_min(1e-12).pow(b), 0.0)  # whose gradient at 0 would be infinite
    return power - a.log() - b.log() + (1 / b).lgamma()


def published_probvlm_nll(mean, inverse_alpha, beta, target, weights: tuple[float, float] = (1.0, 0.05)) -> Tensor:
    """The public code's loss, (): it multiplies by β where Eq. 3 raises to its power, beside a mean absolute error."""
    a, b = inverse_alpha + EPS, beta + EPS
    apart = (mean - target).abs()
    density = (apart * a * b).clamp(1e-4, 1e3) - a.log() + (1 / b).lgamma() - b.log()
    return weights[0] * apart.mean() + weights[1] * density.mean()


def probvlm_loss(image, text, image_x: Tensor, text_x: Tensor, cross: float = 1e-4, nll=None) -> Tensor:
    """Own reconstructions, and `cross` of the other modality's; image, text: parameters (mean, 1/α, β)."""
    nll = nll or (lambda *arguments: generalized_gaussian_nll(*arguments).mean())
    own = nll(*image, image_x) + nll(*text, text_x)
    return own + cross * (nll(*image, text_x) + nll(*text, image_x))


# ---------------------------------------------------------------------------------------------------------------- ViLU


class FailurePredictor(nn.Module):
    """Logit that a zero-shot prediction is right, from the image, the predicted and the attended text.

    It needs labelled errors of its task. Source: ViLU (Lafon et al., arXiv 2507.07620), as its code has it.
    """

    def __init__(self, dim: int, widths: tuple[int, ...] = (512, 256, 128)):
        super().__init__()
        self.query, self.key = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        for layer in (self.query, self.key):
            nn.init.eye_(layer.weight)
        self.mlp = mlp(3 * dim, *widths, 1)

    def forward(self, image: Tensor, texts: Tensor, scale: float, projected: bool = True) -> Tensor:
        """(B,) for unit images (B, D) and class texts (K, D); not `projected`: attention without its matrices."""
        predicted = texts[(image @ texts.T).argmax(1)]
        query, key = (self.query(image), self.key(texts)) if projected else (image, texts)
        attended = (scale * query @ key.T).softmax(1) @ key
        return self.mlp(torch.cat([image, attended, predicted], 1))[:, 0]


def failure_loss(logit: Tensor, correct: Tensor, error_weight: float | None = None) -> Tensor:
    """Cross entropy of being right, errors weighted: by log(1 + acc / (1 - acc)) of the batch if no number is given."""
    correct = correct.to(logit.dtype)
    if error_weight is None:
        accuracy = correct.mean().clamp_max(1 - 1e-6)
        error_weight = torch.log1p(accuracy / (1 - accuracy))
    weight = torch.where(correct > 0, 1.0, error_weight)
    return F.binary_cross_entropy_with_logits(logit, correct, weight=weight)


def train_failure_predictor(
    image: Tensor, texts: Tensor, scale: float, correct: Tensor, steps: int, batch: int = 128, lr: float = 1e-3
) -> FailurePredictor:
    """A predictor trained on unit images (N, D) whose zero-shot predictions are `correct` (N,) or not.

    The attention's matrices are trained in the second half of the steps. The authors' batch, with AdamW for their SGD.
    """
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        torch.manual_seed(0)
        net = FailurePredictor(image.shape[1])
        optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            rows = torch.randint(len(image), (min(batch, len(image)),))
            loss = failure_loss(net(image[rows], texts, scale, projected=step >= steps // 2), correct[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


# ---------------------------------------------------------------------------------------------------- Laplace posterior
# Uncertainty without any training. Everything before a tower's last projection W stays fixed; W has a normal posterior
# around its trained value, whose precision is made of two Kronecker factors: the inputs' second moments A, and the
# loss' curvature B in the outputs. Its variance is epistemic: it tells how far an item is from those that the factors
# saw, not how many things it could match. Source: BayesVLM (Baumann et al., arXiv 2412.06014), whose public code
# maximises another function than the evidence and drops the items that fill no block from B; here both factors see
# every item.


def curvature(embeds: Tensor, others: Tensor, scale: float, bias: float | None = None) -> Tensor:
    """Sum over items of the Gauss-Newton curvature of the contrastive loss in their raw embeddings, (D, D).

    embeds: (N, D) of one modality, not normalised; others: (M, D) of the other, which stay fixed. With a bias the loss
    is the sigmoid loss, else the softmax from embeds to others. No (N, D, D) stack is formed.
    """
    norm = embeds.norm(dim=1, keepdim=True)
    unit, other = embeds / norm, F.normalize(others, dim=1)
    cosine = unit @ other.T  # (N, M)
    if bias is None:
        weight = (scale * cosine).softmax(1)
    else:
        probability = (scale * cosine + bias).sigmoid()
        weight = probability * (1 - probability)
    # J = (I - u u') / norm takes y to (y - c u) / norm, so the sum over pairs is a few products.
    scaled = weight / norm.square()
    cross = other.T @ (scaled * cosine).T @ unit  # (D, D)
    total = other.T @ (scaled.sum(0)[:, None] * other) - cross - cross.T
    total += unit.T @ ((scaled * cosine.square()).sum(1, keepdim=True) * unit)
    if bias is None:
        mean = weight @ other
        mean = (mean - (unit * mean).sum(1, keepdim=True) * unit) / norm
        total -= mean.T @ mean
    return scale**2 * total


def kronecker_factors(
    inputs: Tensor, embeds: Tensor, others: Tensor, scale: float, bias: float | None = None, block: int = 32_768
) -> tuple[Tensor, Tensor]:
    """A (P, P) and B (D, D) of N pairs, float64: A kron B is about the sum of a a' kron H over the items.

    inputs: (N, P), with a trailing 1 where the projection has a bias; embeds, others: (N, D) of the pairs. Items meet
    those of their block alone, as in a batch of the loss; blocks are of one size.
    """
    a, b = (torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device) for x in (inputs, embeds))
    for rows in torch.arange(len(embeds)).tensor_split(-(-len(embeds) // block)):
        other = others[rows].double()
        for some in rows.split(ROWS):
            x = inputs[some].double()
            a += x.T @ x
            b += curvature(embeds[some].double(), other, scale, bias)
    return a / math.sqrt(len(inputs)), b / math.sqrt(len(embeds))


def fit_prior(
    a: Tensor, b: Tensor, weight_norm2: float, pseudo_data: float = PSEUDO_DATA, exact: bool = False
) -> float:
    """The prior precision λ with the largest evidence; a (P,), b (D,): eigenvalues of the factors.

    The evidence ½ (P D log λ - λ |W|² - log det of the posterior's precision) is concave in log λ. weight_norm2: |W|²,
    of the bias too; pseudo_data, exact: as of `LaplaceProjection`.
    """

    def slope(log_prior: float) -> float:
        """Twice the derivative: each direction counts by how much of its precision is data."""
        prior = math.exp(log_prior)
        if exact:
            data = pseudo_data * a[:, None] * b
            known = (data / (data + prior)).sum()
        else:
            of_a, of_b = (math.sqrt(pseudo_data) * x for x in (a, b))
            root = math.sqrt(prior)
            known = (len(b) * (of_a / (of_a + root)).sum() + len(a) * (of_b / (of_b + root)).sum()) / 2
        return known.item() - prior * weight_norm2

    return math.exp(brentq(slope, -60, 60, xtol=1e-12))


class LaplaceProjection(nn.Module):
    """The posterior of one projection, in the eigenbases of its factors, and the embeddings that it gives.

    exact: the precision is τ A kron B + λ I; else the published (√τ A + √λ I) kron (√τ B + √λ I), which adds cross
    terms: the covariances of all items then differ by one factor alone.
    """

    def __init__(self, dim: int, inputs: int, exact: bool = False, pseudo_data: float = PSEUDO_DATA):
        super().__init__()
        self.exact, self.pseudo_data = exact, pseudo_data
        for name, shape in (("a_values", (inputs,)), ("a_vectors", (inputs, inputs)), ("prior", ()),
                            ("b_values", (dim,)), ("b_vectors", (dim, dim))):  # fmt: skip
            self.register_buffer(name, torch.zeros(shape))

    def fit(self, a: Tensor, b: Tensor, weight_norm2: float) -> LaplaceProjection:
        """Take `kronecker_factors` (P, P) and (D, D), and the squared norm of the projection's parameters."""
        (a, a_vectors), (b, b_vectors) = (torch.linalg.eigh(x.double()) for x in (a, b))
        a, b = a.clamp_min(0), b.clamp_min(0)
        prior = a.new_tensor(fit_prior(a, b, weight_norm2, self.pseudo_data, self.exact))
        state = {"a_values": a, "a_vectors": a_vectors, "b_values": b, "b_vectors": b_vectors, "prior": prior}
        self.load_state_dict(state)
        return self

    def log_var(self, inputs: Tensor) -> Tensor:
        """Log-variances of the outputs, (N, D), for inputs (N, P) with the trailing 1 of a bias."""
        squares = (inputs.to(self.a_vectors) @ self.a_vectors).square()  # (N, P)
        b_squares = self.b_vectors.square()  # (D, D): output x eigenvector
        if self.exact:
            precision = self.pseudo_data * self.a_values[:, None] * self.b_values + self.prior  # (P, D)
            return ((squares @ precision.reciprocal()) @ b_squares.T).log()
        root, prior = math.sqrt(self.pseudo_data), self.prior.sqrt()
        of_item = (squares / (root * self.a_values + prior)).sum(1)
        of_output = (b_squares / (root * self.b_values + prior)).sum(1)
        return of_item.log()[:, None] + of_output.log()

    def forward(self, raw: Tensor, inputs: Tensor) -> Gaussian:
        """Raw embeddings (N, D) and their inputs as normals that CSD ranks as the mean of their `prob_cosine`."""
        return expected_unit(Gaussian(raw, self.log_var(inputs).to(raw.dtype)))


def prob_cosine(x: Gaussian, y: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean and variance of the cosine of two normals, (N, M) each. Source: BayesVLM, ProbCosine.

    The expected squared norms stand for the squared norms.
    """
    x, y = x.float(), y.float()
    x2, y2 = (g.mean.square() + g.var for g in (x, y))  # second moments
    norm = x2.sum(1)[:, None] * y2.sum(1)
    return x.mean @ y.mean.T / norm.sqrt(), (x2 @ y.var.T + x.var @ y.mean.square().T) / norm


def expected_unit(x: Gaussian) -> Gaussian:
    """x over the root of its expected squared norm: CSD of two of these ranks as the mean of their `prob_cosine`."""
    log_norm = (x.mean.square() + x.var).sum(-1, keepdim=True).log()
    return Gaussian(x.mean * (-0.5 * log_norm).exp(), x.log_var - log_norm)


def probit_softmax(mean: Tensor, var: Tensor) -> Tensor:
    """Softmax of normal logits, (..., K), by the probit approximation. Source: MacKay 1992; BayesVLM."""
    return (mean / (1 + math.pi * var / 8).sqrt()).softmax(-1)

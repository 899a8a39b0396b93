"""MPC's composition and retrieval against the broadcasts of the published style, written out.

python -m tools.bench.methods.composition --queries 1000 --targets 100000

The written-out forms are timed on a part of the work and extrapolated to all of it: they are sums over queries (and
targets) of the same work, and would not fit in memory or take hours.
"""

from __future__ import annotations

from probemb.cli.command import Parser, run_command

TARGET = "at most 0.02 of the written-out form's time"
SAMPLES = 7


def main() -> None:
    parser = Parser(prog="python -m tools.bench.methods.composition", description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--targets", type=int, default=100_000)
    parser.add_argument("--parts", type=int, default=4, help="k of a query")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--top", type=int, default=50, help="length of a query's list")
    parser.add_argument("--composed", type=int, default=8, help="queries that the written-out composition is timed on")
    parser.add_argument("--slice", type=int, default=5_000, help="targets of one query, likewise of its similarity")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    import torch

    from tools.bench.timing import peak_memory, report, time_in_turn

    n, t, d = options.queries, options.targets, options.dim
    makers = {name: lambda by=by: retrieval(options, by) for name, by in RETRIEVALS.items()}
    memory = {name: {"peak": f"{peak_memory(make) / 2**20:,.0f} MiB"} for name, make in makers.items()}
    with torch.no_grad():
        check()
        seconds = time_in_turn(composition(options), options.repeats)
        seconds["written out"] = [s * n / options.composed for s in seconds["written out"]]
        title = f"composition of {n:,} queries of {options.parts} parts, D = {d}"
        extra = {"written out": {"extrapolated from": f"{options.composed} queries"}}
        report(title, seconds, "written out", TARGET, extra)

        variants = {name: make() for name, make in makers.items()} | {"written out": broadcast_slice(options)}
        seconds = time_in_turn(variants, options.repeats)
        seconds["written out"] = [s * n * t / options.slice for s in seconds["written out"]]
        title = f"similarity of {n:,} queries and {t:,} targets and the {options.top} closest of each, D = {d}"
        extra = {**memory, "written out": {"extrapolated from": f"1 query x {options.slice:,} targets, not ranked"}}
        report(title, seconds, "written out", TARGET, extra)


RETRIEVALS = {"probemb, expected log-density": "density", "probemb, cosine": "cosine"}


def draw(*shape: int, seed: int = 0):
    """Random embeddings: means of the length that LayerNorm gives them."""
    import torch

    from probemb import Gaussian
    from tools.bench.timing import device

    g = torch.Generator().manual_seed(seed)
    mean, log_var = torch.randn(*shape, generator=g), torch.randn(*shape, generator=g).sub_(1)
    return Gaussian(mean.to(device()), log_var.to(device()))


def composition(options) -> dict:
    """The product of k normals: all queries at once, and written out for some of them."""
    from probemb.compose import compose

    parts = draw(options.parts, options.queries, options.dim)
    some = parts[:, : options.composed]
    return {"probemb": lambda: compose(parts), "written out": lambda: composition_written_out(some)}


def composition_written_out(parts):
    """Pair by pair with (N, D, D) covariance matrices and a multivariate normal, as the public code has it."""
    import torch
    from torch.distributions import MultivariateNormal

    mean, log_var = parts.mean[0], parts.log_var[0]
    log_z = torch.zeros_like(mean[:, 0])
    for other_mean, other_log_var in zip(parts.mean[1:], parts.log_var[1:]):
        var, other_var = log_var.exp(), other_log_var.exp()
        composed = torch.diag_embed(1 / (1 / var + 1 / other_var))
        weighted = torch.diag_embed(1 / var) @ mean[..., None] + torch.diag_embed(1 / other_var) @ other_mean[..., None]
        log_z = log_z + MultivariateNormal(other_mean, torch.diag_embed(var + other_var)).log_prob(mean)
        mean, log_var = (composed @ weighted)[..., 0], composed.diagonal(dim1=-2, dim2=-1).log()
    return mean, log_var, log_z


def retrieval(options, by: str):
    """A closure that scores all targets for queries that are composed already, and finds the closest of each."""
    from probemb.compose import compose
    from probemb.evaluation.composed import composed_scores
    from probemb.metrics import closest_items

    query = compose(draw(options.parts, options.queries, options.dim))
    gallery = draw(options.targets, options.dim, seed=1)
    shape = options.queries, options.targets
    return lambda: closest_items(composed_scores(query, gallery, by), *shape, options.top)


def broadcast_slice(options):
    """A closure of the written-out similarity of one query and some targets."""
    from probemb.compose import compose

    query = compose(draw(options.parts, 1, options.dim))
    z_TJD = draw(options.slice, options.dim, seed=1).sample(SAMPLES)
    return lambda: similarity_written_out(query, z_TJD)


def similarity_written_out(query, z_TJD):
    """Eq. 6 with the (N, T, J, D) differences of the compositions and the targets' samples."""
    import math

    g = query.gaussian
    gap = z_TJD[None] - g.mean[:, None, None]
    exponent = -0.5 * (gap**2 * (-g.log_var).exp()[:, None, None]).sum(-1).mean(-1)
    constant = -0.5 * g.mean.shape[1] * math.log(2 * math.pi) - 0.5 * g.log_var.sum(-1)
    return exponent + (constant + query.log_normaliser)[:, None]


def check() -> None:
    """The written-out forms compute the same numbers: only then is a comparison of their speed fair."""
    import torch

    from probemb.compose import compose
    from probemb.losses import sampled_similarity

    parts, targets = draw(4, 3, 32), draw(20, 32, seed=1)
    product = compose(parts)
    written_out = composition_written_out(parts)
    for found, expected in zip(written_out, (product.gaussian.mean, product.gaussian.log_var, product.log_normaliser)):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    z_TJD = targets.sample(SAMPLES)
    torch.testing.assert_close(
        similarity_written_out(product, z_TJD), sampled_similarity(product, z_TJD), rtol=1e-3, atol=1e-2
    )


if __name__ == "__main__":
    run_command(main)

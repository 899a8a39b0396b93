"""A training step of every finetuning method against VSE's, on frozen image features as `data.cache_features` keeps.

    python -m tools.bench.methods.steps --batch 128
    python -m tools.bench.methods.steps --methods vse,pcme,scan

A step is the text tower, both heads, the loss, backward and the optimizers, with the same D for every method; the
methods take turns in one run. Those that reason over regions are timed with all that they have, from regions to the
captions' decoder, on another architecture (`REGIONS`), beside `vse` on it. Methods that compose queries have their own
bench.
"""

from __future__ import annotations

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError, nearest

PEER = "vse"
OWN_COST = ("scan", "jwae-scan")  # attention over all pairs: their ratio is stated, not limited
SMALL = "scenes-cnn-gru"
REGIONS = "vsrn-grid-gru"  # regions and words of about the widths of effnet-lite0-gru
ON_REGIONS = f"{PEER} on regions"
WORDS, LENGTH, CAPTIONS = 2000, 16, 5


def main() -> None:
    parser = Parser(prog="python -m tools.bench.methods.steps", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", default="all", help="names separated by commas (default: all)")
    parser.add_argument("--model", default="effnet-lite0-gru", help=f"architecture, such as {SMALL}")
    options = parser.parse_args()

    from finetune.methods.registry import METHODS
    from tools.bench.timing import report, time_in_turn

    names = [name for name in METHODS if METHODS[name].trained and not METHODS[name].composes]
    if options.methods != "all":
        chosen = options.methods.split(",")
        for name in chosen:
            if name not in names:
                raise UserError(f"There is no method '{name}' to time.{nearest(name, names)}", "Leave --methods out.")
        names = list(dict.fromkeys([PEER, *chosen]))
    on_regions = {name for name in names if METHODS[name].over_regions}
    variants = {name: step(name, REGIONS if name in on_regions else options.model, options.batch) for name in names}
    if on_regions:
        variants[ON_REGIONS] = step(PEER, REGIONS, options.batch)
    title = f"training step of {options.model} on frozen features, B = {options.batch}"
    target = f"at most 2 times {PEER}'s step, {' and '.join(OWN_COST)} excepted"
    report(title, time_in_turn(variants, options.repeats, warmup=2), PEER, target)


def step(name: str, architecture: str, b: int):
    """A closure of one step of a method, all of it by finetune's own parts."""
    import torch

    from finetune.config import Config, with_method_file
    from finetune.methods import METHODS, Batch
    from finetune.network import Network, of_all_ranks
    from finetune.recipe import make_optimizer
    from probemb import labels
    from probemb.cli.configuration import parse_config
    from probemb.data.captions.dataset import CaptionDataset
    from probemb.models import create_model
    from probemb.models.architectures import read_architecture
    from tools.bench.timing import device

    argv = ["--method", name, "--data.path", "none", "--model.lock-image", "true", "--size-augment", "0"]
    config = parse_config(Config, "finetune", "", with_method_file([*argv, "--mix.ratio", "0"]))
    method_class, torch_device = METHODS[name], device()
    torch.manual_seed(0)
    head = config.model.head if getattr(method_class, "wants_tokens", False) or config.model.head == "pie" else "clip"
    words = [f"w{i}" for i in range(WORDS)]
    branch = config.model.n_unc_layers  # [0, 1] of prob-vsepp: the text's variance has a GRU of its own
    if method_class.over_regions:
        branch = int(method_class.probabilistic)
    elif not isinstance(branch, tuple):
        branch = 0
    networks = [
        create_model(
            architecture, embed_dim=read_architecture(architecture)["embed_dim"], head=head, n_unc_layers=branch,
            vocabulary=words, init_scale=5.0, init_shift=5.0, **method_class.model_options(config),
        )
        for _ in range(method_class.networks)
    ]  # fmt: skip
    model = networks[0]
    shape = getattr(model.image_tower, "region_shape", None)
    if shape is None:
        height, width = model.image_tower.image_size
        layout = model.image_tower.layout(torch.linspace(-1, 1, 6 * height * width).view(2, 3, height, width))
        shape = (layout.width,)
        for network in networks:
            network.image_tower.feature_layout = layout
    captions = CaptionDataset([[f"w{i} w{j}" for j in range(CAPTIONS)] for i in range(b)], list(range(b)))
    method = method_class(config, model, captions)
    optimizer = make_optimizer(config, networks, method)
    wrapped = Network(model, method).to(torch_device).train()
    method.aside.to(torch_device)
    for network in networks[1:]:
        network.to(torch_device)
    method.freeze(model, epoch=1, first_phase=True)
    method.begin_epoch(1)
    images = torch.randn(b, *shape, device=torch_device)
    tokens = torch.randint(2, WORDS, (b, LENGTH), device=torch_device)
    number = torch.arange(b)
    match = labels.same_image(number, number).to(torch_device)

    def run() -> None:
        generator = torch.Generator(torch_device).manual_seed(0)
        encoded = of_all_ranks(wrapped(images, tokens, None))
        by_other = None
        if len(networks) > 1:
            with torch.no_grad():
                other = of_all_ranks((*networks[1].image_tower(images), *networks[1].text_tower(tokens)))
            by_other = lambda: other  # noqa: E731
        batch = Batch(*encoded, match, number, number * CAPTIONS, 1, 1, generator, by_other=by_other, words=tokens)
        out = method.loss(batch, model)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        optimizer.step()
        method.after_step(batch, model)

    return run


if __name__ == "__main__":
    run_command(main)

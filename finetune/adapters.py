"""The work of `finetune.adapt`: pairs of embeddings, training of an adapter on them, and the model that it makes.

Letters: N images, M captions, B pairs of a batch, D embedding, P inputs of the last projection.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finetune.adapt import LOSSES, AdaptConfig
from probemb.adapters import asym_loss, kronecker_factors, order_loss, probvlm_loss, published_probvlm_nll
from probemb.data.labelled import ZeroShotSet, zero_shot_set
from probemb.errors import UserError
from probemb.evaluation.classification import accuracy, class_vectors, true_ranks
from probemb.evaluation.embedding import Embedder, embed_classes
from probemb.files import replace_text
from probemb.gaussian import Gaussian
from probemb.losses.clip import clip_loss
from probemb.losses.match import pairwise_match_loss
from probemb.losses.prolip import prolip_loss
from probemb.metrics.selective import fit_temperature
from probemb.models import POINT_LOG_VAR, DualEncoder, load_model, save_model, weights_sha256
from probemb.models.adapter import ADAPTERS, Adapter, last_projection
from probemb.options import to_dict, to_yaml
from probemb.progress import progress
from probemb.search.embeddings import Embeddings, open_embeddings

FEWEST_HELD_OUT, MOST_HELD_OUT = 200, 5_000  # images; a fifth of few
FEWEST = 16  # images to train on
BATCH = 1024
BLOCK = 32_768  # of method laplace
PROLIP_BIAS = -10.0  # where the base has none
PAIRS = 1 << 22  # that temperatures are fitted to; of more queries some are drawn


class Pairs(NamedTuple):
    """Frozen embeddings of images (N, D) and captions (M, D), unit rows; owner: (M,) the row of a caption's image.

    layer: of images and of captions the last projection's results, not yet unit (rows, D), and its inputs (rows, P);
    None where they were not read.
    """

    images: Tensor
    texts: Tensor
    owner: Tensor
    layer: Sequence[Sequence[Tensor]] | None = None

    def draw(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """The row of a random caption of each of these images."""
        counts = torch.bincount(self.owner, minlength=len(self.images))
        first = counts.cumsum(0) - counts
        return first[rows] + (torch.rand(len(rows), generator=generator) * counts[rows]).long()

    def of_images(self, rows: Tensor) -> Self:
        """The images of the rows, in ascending order, and their captions."""
        place = torch.full((len(self.images),), -1)
        place[rows] = torch.arange(len(rows))
        keep = place[self.owner] >= 0
        layer = self.layer and [[x[i] for x in side] for side, i in zip(self.layer, (rows, keep))]
        return Pairs(self.images[rows], self.texts[keep], place[self.owner[keep]], layer)


def read_pairs(folder: Embeddings, with_inputs: bool) -> Pairs:
    """All pairs of a folder; images without captions are left out. Raises UserError: there are none, or no inputs."""
    found: dict[str, list] = {"image": [], "text": []}
    keys: dict[str, list[tuple[str, str]]] = {"image": [], "text": []}
    for kind, rows in found.items():
        for part in folder.partitions(kind):
            items = folder.read_items(part)
            if not len(items):  # such as of a shard without captions, which has no inputs either
                continue
            keys[kind] += zip(items["shard"].to_pylist(), items["key"].to_pylist())
            arrays = (folder.read(part)[0], *(folder.read_inputs(part) if with_inputs else ()))
            rows.append([torch.from_numpy(x).float() for x in arrays])
    place = {key: row for row, key in enumerate(keys["image"])}
    owner = torch.tensor([place.get(key, -1) for key in keys["text"]], dtype=torch.long)
    if not (owner >= 0).any():
        remedy = "Embed both: python -m tools.embed without --items."
        raise UserError(f"{folder.folder} holds no images with captions.", remedy)
    images, texts = ([torch.cat(column) for column in zip(*rows)] for rows in found.values())
    known = owner.argsort(stable=True)[(owner < 0).sum() :]
    texts, owner = [x[known] for x in texts], owner[known]
    layer = [images[1:], texts[1:]] if with_inputs else None
    pairs = Pairs(F.normalize(images[0], dim=1), F.normalize(texts[0], dim=1), owner, layer)
    return pairs.of_images(owner.unique())


# ------------------------------------------------------------------------------------------------------------ training


def adapt(config: AdaptConfig) -> None:
    """Adapt, save, and print the recall before and after. Raises UserError."""
    out = Path(config.out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} already exists.", "Name a new folder with --out.")
    folder = open_embeddings(config.embeddings)
    base, *inputs = load_model(folder.model)
    labelled = zero_shot_set(config.classes, "single", without="leave --classes out") if config.classes else None
    if weights_sha256(base) != folder.weights:
        what = f"{folder.model} is not the model that {folder.folder} was embedded with."
        raise UserError(what, "Embed the data again.")
    if base.adapter is not None:
        raise UserError(f"{folder.model} already has an adapter.", "Embed with the model that it was made from.")
    pairs = read_pairs(folder, config.method == "laplace")
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(len(pairs.images), generator=generator)
    fewest = min(FEWEST_HELD_OUT, len(order) // 5)
    n = min(MOST_HELD_OUT, max(fewest, round(config.validation * len(order)))) if config.validation else 0
    held_out, train = pairs.of_images(order[:n].sort().values), pairs.of_images(order[n:].sort().values)
    if len(train.images) < FEWEST:
        what = f"{folder.folder} has {len(order)} images with captions, which leaves {len(train.images)} to train on."
        raise UserError(what, "Embed more: a thousand images or so.")
    torch.manual_seed(config.seed)
    options, start = adapter_options(config, base, train), time.monotonic()
    adapter = Adapter(options, folder.dim)
    scalars = nn.ParameterDict({"logit_scale": base.logit_scale.detach().reshape(()).clone()})
    with torch.enable_grad():
        if config.method == "laplace":
            fit_laplace(config, adapter, base, train, generator)
        else:
            fit(config, adapter, scalars, base, train, generator)
    if config.method == "gaussian" and n:
        half = torch.arange(n // 2)
        share = shrink(adapter.requires_grad_(False), held_out.of_images(half))
        print(f"kept {share:.0%} of the change in the means, chosen by recall on {len(half):,} held-out images")
        held_out, n = held_out.of_images(torch.arange(n // 2, n)), n - n // 2
    results = {"config": to_dict(config), "images": len(train.images), "captions": len(train.texts)}
    results["seconds"] = round(time.monotonic() - start, 1)
    results["parameters"] = sum(x.numel() for x in adapter.state_dict().values())
    if n:
        before, start = recall(held_out, *held_out[:2]), time.monotonic()
        found = embed(adapter, held_out)
        took = 1000 * (time.monotonic() - start) / sum(map(len, found))
        after = recall(held_out, *(F.normalize(g.mean, dim=1) for g in found))
        results |= {"held_out": n, "before": before, "after": after, "milliseconds_per_item": round(took, 4)}
        print(f"{results['parameters']:,} more parameters, {took:.2g} ms per item")
        for key, value in before.items():
            print(f"{key:8} {value:6.2f} -> {after[key]:6.2f}   ({n:,} held-out images)")
        options["temperature"] = temperatures(held_out, *found)
        of_images, of_captions = (f"{t:.3g} u^{power:.3g}" for t, power in options["temperature"])
        print(f"temperatures of the cosines: {of_images} of images, {of_captions} of captions")
    model = adapted_model(base, options, adapter, scalars)
    if labelled:
        before, after = (zero_shot(one, *inputs, labelled) for one in (base, model))
        results["zero_shot"] = {"images": len(labelled.images), "before": before, "after": after}
        print(f"top-1    {before:6.2f} -> {after:6.2f}   ({len(labelled.images):,} images of {config.classes})")
    save_model(model, out / "model")
    replace_text(out / "config.yaml", to_yaml(config))
    replace_text(out / "results.json", json.dumps(results, indent=1) + "\n")
    print(f"saved in {out}, after {results['seconds']:,} s")


def loss_name(config: AdaptConfig) -> str | None:
    """The loss of a method that has several: --loss, or the method's default."""
    return config.loss or next(iter(LOSSES[config.method]), None)


def adapter_options(config: AdaptConfig, base: DualEncoder, pairs: Pairs) -> dict:
    """`config["adapter"]` of the new model."""
    options: dict = {"method": config.method}
    if config.method == "laplace":
        widths = [inputs.shape[1] for _, inputs in pairs.layer]
        return options | {"inputs": widths, "exact": config.exact, "pseudo_data": config.pseudo_data}
    if config.hidden:
        options["hidden"] = config.hidden
    if config.method == "asymvlm":
        # The log-densities then start as the frozen logits: κ cos is the vMF's, and κ log(1 + cos) about half as steep.
        steep = 1 if loss_name(config) == "von-mises-fisher" else 2
        start = None if config.directions else steep * float(base.inverse_temperature())
        options |= {"form": loss_name(config), "start": start}
    if loss_name(config) == "published":
        options["heads"] = "relu"
    return options


def fit_laplace(config: AdaptConfig, adapter: Adapter, base: DualEncoder, pairs: Pairs, generator) -> None:
    """The posteriors of both projections, from a random caption of each image."""
    scale = float(base.inverse_temperature())
    bias = float(base.logit_bias) if base.options.match == "cosine" else None
    order = torch.randperm(len(pairs.images), generator=generator)
    sides = zip(pairs.layer, (order, pairs.draw(order, generator)))
    images, texts = ([x[rows] for x in layer] for layer, rows in sides)
    for module, tower, (raw, inputs), (others, _) in (
        (adapter.image, base.visual, images, texts), (adapter.text, base.text, texts, images),
    ):  # fmt: skip
        factors = kronecker_factors(inputs, raw, others, scale, bias, config.batch_size or BLOCK)
        module.fit(*factors, last_projection(tower).norm2)


def fit(
    config: AdaptConfig, adapter: Adapter, scalars: nn.ParameterDict, base: DualEncoder, pairs: Pairs, generator
) -> None:
    """Train the adapter, and the scalars of its loss, which are added to `scalars`."""
    loss_of = OBJECTIVES[config.method](config, adapter, scalars, base)
    parameters = [*adapter.parameters(), *scalars.parameters()]
    optimizer = torch.optim.AdamW(parameters, config.lr, weight_decay=config.weight_decay)
    n, batch = len(pairs.images), min(config.batch_size or BATCH, len(pairs.images))
    steps, step = config.epochs * (n // batch), 0
    adapter.train()
    with progress("pairs", steps * batch) as advance:
        for _ in range(config.epochs):
            order = torch.randperm(n, generator=generator)
            for rows in order[: n // batch * batch].split(batch):
                share = min(1.0, (step + 1) / (0.1 * steps + 1))
                for group in optimizer.param_groups:
                    group["lr"] = config.lr * share * 0.5 * (1 + math.cos(math.pi * step / steps))
                loss = loss_of(pairs.images[rows], pairs.texts[pairs.draw(rows, generator)])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                step += 1
                advance(batch)
            if not loss.isfinite():
                raise UserError("The loss is not finite.", "Lower --lr, or choose another --loss.")
    adapter.eval()


def shrink(adapter: Adapter, pairs: Pairs) -> float:
    """Scale the residuals of the means by the share with the best recall of pairs that were not trained on."""
    last = [p for module in (adapter.image, adapter.text) for p in module.residual[-1].parameters()]
    whole, recalls = [p.clone() for p in last], {}

    def scale(share: float) -> None:
        for p, full in zip(last, whole):
            p.copy_(share * full)

    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        scale(share)
        recalls[share] = sum(recall(pairs, *(g.mean for g in embed(adapter, pairs))).values())
    best = max(recalls, key=recalls.get)
    scale(best)
    return best


def _gaussian(config: AdaptConfig, adapter: Adapter, scalars: nn.ParameterDict, base: DualEncoder):
    prolip = loss_name(config) == "prolip"
    if prolip:
        bias = float(base.logit_bias) if base.options.match == "cosine" else PROLIP_BIAS
        scalars["logit_bias"] = nn.Parameter(torch.tensor(bias))
    else:
        # Not those that fit the frozen embeddings: from there u learns the other sign on scenes.
        scalars["scale"], scalars["shift"] = (nn.Parameter(torch.tensor(5.0)) for _ in range(2))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        image, text = adapter.image(x), adapter.text(y)
        scale = scalars["logit_scale"].exp()
        if prolip:
            own = prolip_loss(image, text, scale, scalars["logit_bias"], vib=config.vib).loss
        else:
            own = pairwise_match_loss(image, text, scale=scalars["scale"], shift=scalars["shift"], vib=config.vib).loss
        return own + config.clip * clip_loss(image.mean, text.mean, scale).loss

    return loss


def _loss_order(config: AdaptConfig, adapter: Adapter, scalars: nn.ParameterDict, base: DualEncoder):
    """In the order of the item's own contrastive loss, with the frozen embeddings."""
    scale = base.inverse_temperature()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits, own = scale * x @ y.T, torch.arange(len(x))
        losses = (F.cross_entropy(side, own, reduction="none") for side in (logits, logits.T))
        pairs = zip((adapter.image(x), adapter.text(y)), losses)
        return sum(order_loss(g.uncertainty().log(), of_item) for g, of_item in pairs)

    return loss


def _asymvlm(config: AdaptConfig, adapter: Adapter, scalars: nn.ParameterDict, base: DualEncoder):
    temperature = scalars["temperature"] = nn.Parameter(torch.tensor(1.0))
    return lambda x, y: asym_loss(x, adapter.text.eta(y), temperature, adapter.text.form)


def _probvlm(config: AdaptConfig, adapter: Adapter, scalars: nn.ParameterDict, base: DualEncoder):
    nll = published_probvlm_nll if loss_name(config) == "published" else None
    parameters = adapter.image.parameters_of, adapter.text.parameters_of
    return lambda x, y: probvlm_loss(parameters[0](x), parameters[1](y), x, y, config.cross, nll)


OBJECTIVES = {"gaussian": _gaussian, "loss-order": _loss_order, "asymvlm": _asymvlm, "probvlm": _probvlm}


def adapted_model(base: DualEncoder, options: dict, adapter: Adapter, scalars: nn.ParameterDict) -> DualEncoder:
    """The base with the adapter, and the scalars of the loss where it has some.

    Laplace keeps a sigmoid model's match probability, in which the expected cosine takes the cosine's place.
    """
    match = "distance" if "scale" in scalars else "cosine" if "logit_bias" in scalars else "none"
    if options["method"] == "laplace" and base.options.match == "cosine":
        match = "cosine"
    ranking = ADAPTERS[options["method"]].ranking
    model = DualEncoder(
        base.config | {"adapter": options, "match": match, "ranking": ranking, "objective": options["method"]}
    )
    given = base.state_dict() | {key: value.detach().reshape(1) for key, value in scalars.items()}
    model.load_state_dict({key: given.get(key, value) for key, value in model.state_dict().items()})
    model.adapter = adapter
    return model.eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def embed(adapter: Adapter, pairs: Pairs) -> tuple[Gaussian, Gaussian]:
    """The adapted images (N, D) and captions (M, D); without a module for them they are points."""
    found = []
    for i, module in enumerate((adapter.image, adapter.text)):
        given = pairs.layer[i] if pairs.layer else (pairs[i],)
        found.append(module(*given) if module else Gaussian(pairs[i], torch.full_like(pairs[i], POINT_LOG_VAR)))
    return tuple(found)


def recall(pairs: Pairs, image: Tensor, text: Tensor) -> dict[str, float]:
    """R@1 in percent of both directions, by the cosine of unit images (N, D) and captions (M, D)."""
    similarity = image @ text.T
    i2t = pairs.owner[similarity.argmax(1)] == torch.arange(len(image))
    t2i = similarity.argmax(0) == pairs.owner
    return {f"R@1 {name}": 100 * hit.double().mean().item() for name, hit in (("i2t", i2t), ("t2i", t2i))}


def zero_shot(model: DualEncoder, tokenizer, transforms, data: ZeroShotSet) -> float:
    """Top-1 accuracy in percent, by the means."""
    found = embed_classes(Embedder(model.eval(), tokenizer, transforms.evaluate, show=progress), data)
    return 100 * float(accuracy(true_ranks(found.images.mean, class_vectors(found.prompts.mean), found.labels), 1))


def temperatures(pairs: Pairs, image: Gaussian, text: Gaussian) -> list[tuple[float, float]]:
    """T and k of the cosines (`fit_temperature`) of images against all captions, and of captions against all images."""
    found = []
    for query, gallery in ((image, text), (text, image)):
        rows = torch.randperm(len(query), generator=torch.Generator().manual_seed(0))[: max(1, PAIRS // len(gallery))]
        logits = F.normalize(query.mean[rows], dim=1) @ F.normalize(gallery.mean, dim=1).T
        truth = pairs.owner[rows] if query is text else pairs.owner == rows[:, None]
        u = None if query.log_var.max() <= POINT_LOG_VAR else query.uncertainty()[rows]
        found.append(fit_temperature(logits, truth, u))
    return found

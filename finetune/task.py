"""Tasks: pairs of images and captions, or composed queries with their targets; a method has one of them.

A task finds its data, reads rows, augments a batch on the device, gathers what all ranks embedded as the method's
`Batch`, and validates a model.
"""

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from finetune.augment import Mix, TextIds, cut_out, draw_mix, drop_words, mix_images, size_augment_text
from finetune.config import Config
from finetune.data import PairBatch, Pairs, TupleBatch, Tuples, pairs_digest, shuffle_captions
from finetune.feature_cache import cache_features, cache_texts
from finetune.methods import METHODS
from finetune.methods.base import Batch
from probemb import distributed
from probemb.data.captions.dataset import HELD_OUT, CaptionDataset
from probemb.data.captions.find import find_captions
from probemb.data.compositions.find import find_compositions
from probemb.data.image_loader import refuse_too_many
from probemb.data.labelled import zero_shot_set
from probemb.evaluation.classification import accuracy, class_vectors, true_ranks
from probemb.evaluation.composed import KS as COMPOSED_KS
from probemb.evaluation.composed import embed_queries, measure_composed
from probemb.evaluation.embedding import Embedder, embed_classes
from probemb.evaluation.retrieval import evaluate_retrieval
from probemb.gaussian import Gaussian, at_least_float32
from probemb.losses.output import mixed, same_image, smooth
from probemb.machine import Device
from probemb.metrics.retrieval import KS
from probemb.models import (
    Augmentation,
    DualEncoder,
    Encoded,
    Transforms,
    check_images,
    check_single_embeddings,
    check_words,
    create_tokenizer,
    create_transforms,
)
from probemb.models.heads import size_augment_mask
from probemb.models.inputs import identity
from probemb.options import named_paths

Embedded = tuple[Encoded, Encoded]  # by both towers


class Task:
    """One kind of training examples. `validation` is None without a split for it.

    A subclass has

    find(split)                     the data
    digest()                        of what training batches are made of; a run must be resumed with the same
    rows()                          the training rows; raises UserError: settings that do not fit the data
    inputs(batch, model, step)      augmented images, tokens and the mask of image tokens, on the device, and the `Mix`
    gather(embedded, batch, mix, epoch, step, network)      the examples of all ranks, with gradient
    cached(split, cache)            a split with the features that `cache` gives for its images
    measure(model)                  validation, in percent
    """

    metric: ClassVar[str]  # of the validation, which selects the epoch
    unpaired = None  # a split without pairing

    def __init__(self, config: Config):
        """Find the data. Raises UserError: a split is missing."""
        self.config, self.method = config, METHODS[config.method]
        self.validation = self.find(config.data.validation) if config.data.validation else None
        self.train = self.find(config.data.train)
        named, templates = named_paths(config.evaluate.classes, "evaluate.classes"), config.evaluate.templates
        self.labelled = [(of.name, zero_shot_set(of.path, templates, config.data.exif)) for of in named]

    @property
    def splits(self) -> dict:
        """Those that there are, by the names of their attributes."""
        named = {name: getattr(self, name) for name in ("train", "validation", "unpaired")}
        return {name: split for name, split in named.items() if split is not None}

    def prepare(self, networks: list[DualEncoder], runs_on: Device) -> None:
        """Fit the data to the models. Raises UserError: they do not fit, or too much of a split is unusable."""
        data = self.config.data
        for split in self.splits.values():
            bad, share = split.images.bad, data.failure_share
            refuse_too_many(bad, len(split) + len(bad), split.source, share, "--data.failure-share")
            check_images(networks[0], split.images)
        if self.labelled:
            check_single_embeddings(networks[0], self.config.method)
        augmentation = Augmentation(self.config.augment.scale, hflip=self.config.augment.hflip)
        self.transforms = create_transforms(networks[0], augmentation, self.config.data.resize)
        self.tokenizer = create_tokenizer(networks[0])
        self.device, self.runs_on = torch.device(runs_on.name), runs_on
        if data.cache_features is not None and self.config.model.lock_image:
            cache = partial(
                cache_features, networks, folder=data.cache_features, resize=data.resize, device=self.device,
                batch_size=self.config.engine.eval_batch_size, workers=data.workers, failure_share=data.failure_share,
            )  # fmt: skip
            for name, split in self.splits.items():
                setattr(self, name, self.cached(split, cache))
            self.labelled = [(name, one._replace(images=cache(one.images))) for name, one in self.labelled]
            self.transforms = Transforms(identity, identity)

    def generator(self, step: int, what: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Random numbers of one use in one step, the same on all ranks: drawn for the whole batch."""
        numbers = np.random.SeedSequence([self.config.seed, step, 0, what]).generate_state(2, np.uint32)
        return torch.Generator(device).manual_seed(int(numbers[0]) << 31 | int(numbers[1]) >> 1)

    def embedder(self, model: DualEncoder) -> Embedder:
        """Of a model in evaluation mode."""
        data, batch_size = self.config.data, self.config.engine.eval_batch_size
        more = {"workers": data.workers, "max_bad": data.failure_share}
        return Embedder(model, self.tokenizer, self.transforms.evaluate, self.runs_on, batch_size, **more)

    def validate(self, model) -> dict[str, float]:
        """`measure`, nothing without a validation split."""
        return {} if self.validation is None else self.measure(model)

    def classify(self, model: DualEncoder) -> list[dict[str, float]]:
        """Zero-shot accuracy, in [0, 1], of a model in evaluation mode on each set of `evaluate.classes`."""
        found = []
        for name, data in self.labelled:
            one, prefix = embed_classes(self.embedder(model), data), f"{name}/" if name else ""
            ranks = true_ranks(one.images.mean, class_vectors(one.prompts.mean), one.labels)
            found.append({f"{prefix}zeroshot_top{k}": float(accuracy(ranks, k)) for k in (1, 5)})
        return found


def of_all_ranks(embedded: Embedded) -> tuple[Encoded, Encoded]:
    """Every rank's images and texts -> those of all ranks, in at least float32."""
    return distributed.gather_encoded(*(side.each(at_least_float32) for side in embedded))


class PairTask(Task):
    """Images with one of their captions."""

    metric = "rsum"
    TEXT, IMAGE, MIX, LOSS, CUTOUT, WORDS = range(6)  # uses of random numbers

    def __init__(self, config: Config):
        super().__init__(config)
        data = config.data
        if data.positives == "class":
            for captions in filter(None, (self.train, self.validation)):
                captions.class_numbers()  # refuses data without classes
        if config.noise_ratio:
            self.train = shuffle_captions(self.train, config.noise_ratio, config.seed)
        if data.unpaired is not None:
            where = {"images": data.unpaired_images, "exif": data.exif, "held_out": 0.0}
            self.unpaired = find_captions(data.unpaired, "train", **where)

    def find(self, split):
        data = self.config.data
        held_out = HELD_OUT if data.validation else 0.0
        return find_captions(data.path, split, data.images, data.format, exif=data.exif, held_out=held_out)

    def digest(self) -> str:
        return pairs_digest(self.train, self.unpaired)

    def prepare(self, networks, runs_on) -> None:
        """And cache the texts' features."""
        super().prepare(networks, runs_on)
        folder, batch_size = self.config.data.cache_features, self.config.engine.eval_batch_size
        for split in self.splits.values():
            check_words(networks[0], split)
        if folder is not None and self.config.model.lock_text:
            texts = [split.flat() for split in self.splits.values()]
            texts += [one.prompts for _, one in self.labelled]
            self.tokenizer = cache_texts(networks, chain(*texts), self.tokenizer, folder, self.device, batch_size)

    def cached(self, split, cache) -> CaptionDataset:
        return replace(split, located=cache(split.images))

    def rows(self) -> Pairs:
        config, inputs, unpaired = self.config, (self.transforms.train, self.tokenizer), None
        place = distributed.rank(), distributed.world_size()
        if self.unpaired is not None:  # another seed: in another order, even where the data are the same
            unpaired = Pairs(self.unpaired, *inputs, config.data.unpaired_batch, config.seed + 1, *place)
        by_class = config.data.positives == "class"
        groups = self.train.class_numbers() if by_class else range(len(self.train))
        self.groups = torch.tensor(groups, dtype=torch.int64, device=self.device)  # (N,): which images match alike
        return Pairs(self.train, *inputs, config.batch_size, config.seed, *place, unpaired=unpaired)

    def inputs(self, pairs: PairBatch, model, step):
        config, tokens, mask, mix, ids = self.config, pairs.tokens, None, None, TextIds.of(model.config)
        images = pairs.images.to(self.device, non_blocking=True)
        rows, total = _places(pairs, distributed.rank()), len(images) * distributed.world_size()
        if config.augment.cutout or config.mix.ratio:
            images = model.normalized(images)  # where grey is 0 and a mix of uint8 is not rounded
        if config.augment.cutout:
            place = torch.rand(total, 2, generator=self.generator(step, self.CUTOUT))[rows]
            images = cut_out(images, config.augment.cutout, place)
        if config.augment.word_dropping:
            draw = torch.rand(total, tokens.shape[1], generator=self.generator(step, self.WORDS))[rows]
            tokens = drop_words(tokens, draw, config.augment.word_dropping, ids)
        if config.mix.ratio:
            images, mix = self._mixed(images, step)
        if config.size_augment:
            everyone = tokens.new_zeros(total, tokens.shape[1])
            everyone[rows] = tokens
            text, image = (self.generator(step, what) for what in (self.TEXT, self.IMAGE))
            tokens = size_augment_text(everyone, config.size_augment, text, ids)[rows]
            mask = size_augment_mask(total, model.image_tower.n_tokens, config.size_augment, image)
            mask = mask[rows].to(self.device, non_blocking=True)
        return (images, model.cut_padding(tokens, self.device), mask), mix

    def _mixed(self, images: Tensor, step: int) -> tuple[Tensor, Mix]:
        """This rank's images, mixed, and how the whole batch is. Rank r has the partners of rank W − 1 − r."""
        rank, world = distributed.rank(), distributed.world_size()
        rng = np.random.default_rng([self.config.seed, step, 0, self.MIX])
        mix = draw_mix(self.config.batch_size, *images.shape[-2:], rng, self.config.mix)
        n, other = len(images), world - 1 - rank
        changed, theirs = (torch.nonzero(mix.lam[r * n : (r + 1) * n] != 1).flatten() for r in (rank, other))
        asked = images.index_select(0, (n - 1 - theirs).to(images.device, non_blocking=True))
        partners = distributed.swap(asked, other, len(changed))
        return mix_images(images, Mix(*(x[rank * n : (rank + 1) * n] for x in mix)), partners), mix

    def gather(self, embedded, pairs: PairBatch, mix, *, step, **now) -> Batch:
        """Labels are those of image numbers and mixing partners."""
        n, world, every = len(pairs.image_index), distributed.world_size(), of_all_ranks(embedded)
        words = distributed.gather(pairs.tokens.to(self.device)) if self.method.wants_words else None
        images, texts = every
        if unpaired := len(pairs.images) > n:
            order = torch.cat([_places(pairs, rank) for rank in range(world)]).argsort().to(self.device)
            every = [side.each(lambda x: x[order]) for side in every]
            words = None if words is None else words[order]
            images, texts = (side.each(lambda x: x[: n * world]) for side in every)
        numbers = torch.cat(distributed.all_of(torch.stack([pairs.image_index, pairs.pair_index], 1)))
        image, pair = numbers.T.contiguous()
        group = self.groups[image.to(self.device)]
        match = same_image(group, group)
        if mix is not None:
            match = mixed(match, *(x.to(self.device, non_blocking=True) for x in (mix.lam, mix.partner)))
        match = smooth(match, self.config.mix.smoothing)
        generator = self.generator(step, self.LOSS, self.device)
        batch = Batch(images, texts, match, image, pair, step=step, generator=generator, words=words, **now)
        if unpaired:
            batch.with_unpaired = replace(batch, images=every[0], texts=every[1])
        return batch

    def measure(self, model) -> dict[str, float]:
        """RSUM and recalls, and the weights of the ranking "tolerance", which are chosen on the split."""
        by_class = self.config.data.positives == "class"
        found = evaluate_retrieval(self.embedder(model), self.validation, self.config.ranking, by_class)
        ways = {f"{way}_r{k}": 100 * found[way][f"r@{k}"] for way in ("i2t", "t2i") for k in KS}
        chosen = {f"tolerance_{way}": weight for way, weight in found.get("tolerance", {}).items()}
        return {"rsum": found["rsum"]} | ways | chosen


def _places(pairs: PairBatch, rank: int) -> Tensor:
    """Positions of a rank's items in the whole batch, in which the pairs of all ranks precede the unpaired items."""
    n, more = len(pairs.image_index), len(pairs.images) - len(pairs.image_index)
    first = n * distributed.world_size() + more * rank
    return torch.cat([torch.arange(n) + n * rank, torch.arange(more) + first])


class ComposedTask(Task):
    """Composed queries and their targets.

    Every rank embeds its targets and those parts that are images or texts in its rows, however many; what is gathered
    is of one shape everywhere: the target and the k parts of every row.
    """

    metric = "r_precision"
    LOSS, CUTOUT, WORDS = range(3)  # uses of random numbers

    def find(self, split):
        o, path = self.config.compose, self.config.data.path
        where = {"setup": o.setup, "images": self.config.data.images, "lists": o.lists, "seed": o.seed}
        return find_compositions(path, split, o.parts, **where)

    def digest(self) -> str:
        return self.train.digest()

    def cached(self, split, cache):
        return replace(split, images=cache(split.images, crops=split.boxes()))

    def rows(self) -> Tuples:
        config, data, place = self.config, self.train, (distributed.rank(), distributed.world_size())
        repeats = max(config.compose.repeats, -(-config.batch_size // data.n_examples))
        inputs = self.transforms.train, self.tokenizer, config.batch_size, config.seed
        return Tuples(data, *inputs, *place, repeats=repeats)

    def inputs(self, batch: TupleBatch, model, step):
        """No token mask, and no images are mixed."""
        augment, rank, (b, k) = self.config.augment, distributed.rank(), batch.part_rows.shape
        rows, is_image = slice(rank * b, (rank + 1) * b), batch.part_rows >= 0
        images, tokens = batch.images.to(self.device, non_blocking=True), batch.tokens
        if augment.cutout:
            place = self._draw(step, self.CUTOUT, 1 + k, 2)[rows]
            images = model.normalized(images)
            images = cut_out(images, augment.cutout, torch.cat([place[:, 0], place[:, 1:][is_image]]))
        if augment.word_dropping:
            draw = self._draw(step, self.WORDS, k, tokens.shape[1])[rows][~is_image]
            if len(draw):
                tokens = drop_words(tokens, draw, augment.word_dropping, TextIds.of(model.config))
        return (images, model.cut_padding(tokens, self.device), None), None

    def _draw(self, step: int, what: int, *shape: int) -> Tensor:
        return torch.rand(self.config.batch_size, *shape, generator=self.generator(step, what))

    def gather(self, embedded, batch: TupleBatch, mix, *, step, **now) -> Batch:
        """Targets and parts of all ranks, and which targets are correct for which query."""
        b = len(batch.part_rows)
        images, texts = (side.gaussian.float() for side in embedded)
        place = batch.part_rows.to(self.device)
        place = torch.where(place >= 0, b + place, len(images) - 1 - place)
        rows = Gaussian.cat([images[:b, None], Gaussian.cat([images, texts])[place]], 1)  # (b, 1 + k, D)
        mean, log_var = distributed.gather_together([rows.mean, rows.log_var])
        numbers = distributed.all_of(torch.cat([batch.target_index[:, None], batch.concepts], 1))
        numbers = torch.cat(numbers).numpy()
        match = torch.from_numpy(self.train.matches(numbers[:, 1:], numbers[:, 0])).to(self.device).to(mean.dtype)
        targets, parts = Encoded(mean[:, 0], log_var[:, 0]), Gaussian(mean[:, 1:], log_var[:, 1:])
        generator = self.generator(step, self.LOSS, self.device)
        return Batch(targets, None, match, None, None, step=step, generator=generator, parts=parts, **now)

    def measure(self, model) -> dict[str, float]:
        """R-Precision and recalls of all queries."""
        data, o, embedder = self.validation, self.config.compose, self.embedder(model)
        gallery = embedder.images(data.images)
        queries = embed_queries(embedder, data, data.queries or data.sampled_queries(o.queries, o.seed))
        found = measure_composed(gallery, data, queries, o.ranking or model.composed_ranking)["all"]
        metrics = {"r_precision": "r_precision"} | {f"r{k}": f"r@{k}" for k in COMPOSED_KS}
        return {name: 100 * found[metric]["value"] for name, metric in metrics.items()}

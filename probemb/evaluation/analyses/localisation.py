"""Phrase localisation: the proposals of an image ranked by how well their crops, or their regions, fit a phrase.

A model that reads regions gets every proposal as an image of that region alone. Its ranking "attention" is then the
model's own score of the phrase's words with the region; "mean" is the cosine of both embeddings, as jWAE has it.

Source: jWAE §5.2; the protocol of Plummer et al. (IJCV 2017) and Wang et al.: an image's own phrases are looked
for among its proposals, and a proposal is right if its IoU with the phrase's box is at least 0.5.

P proposals of an image, Q phrases of an image, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from probemb.cli.device import loader_workers
from probemb.cross_attention import Tokens, attention_scores, unit_tokens
from probemb.data.boxes import PhraseDataset, iou
from probemb.data.boxes.geometry import Box, enclosing
from probemb.data.boxes.proposals import Proposals
from probemb.data.failures import BadSample
from probemb.data.pixels import stack
from probemb.data.workers import make_loader, read
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder, encode_images
from probemb.evaluation.kept_tokens import KeptTokens, TokenKeeper
from probemb.evaluation.predictors import query_scores
from probemb.evaluation.rankings import RankingOptions, ScoreRanker, make_ranker
from probemb.gaussian import Gaussian
from probemb.metrics.localisation import KS, THRESHOLD, chance_at
from probemb.models.match import MatchModel


@dataclass
class Localised:
    """Result of each phrase, in the order of `rows`.

    Attributes:
        rows: indices of the phrases in the data; image: (Q,) the image of each.
        first: by ranking, (Q, 10) indices of the first proposals, -1 where there are fewer.
        first_overlaps: by ranking, (Q, 10) their IoU, -1 where there are fewer.
        best_overlap: (Q,) the highest IoU of any proposal; chance: (Q, 3) recall of guessing at each of KS.
        u: (Q,) uncertainty of each phrase.
        scores: name -> (Q,), what tells a doubtful phrase; see `query_scores`.
        bad: (name, reason) of images that could not be read.
    """

    rows: list[int]
    image: Tensor
    first: dict[str, Tensor]
    first_overlaps: dict[str, Tensor]
    best_overlap: Tensor
    chance: Tensor
    u: Tensor
    scores: dict[str, Tensor]
    bad: list[tuple[str, str]] = field(default_factory=list)


def localise(
    embedder: Embedder, data: PhraseDataset, proposals: Proposals, rankings: Sequence[str], options: RankingOptions,
    several: str,
) -> Localised:  # fmt: skip
    """Embed every phrase and every proposal, and rank. Holds the crops, or the regions, of one image at a time.

    Args:
        rankings: names of `probemb.evaluation.rankings` that score pairs.
        several: "merged", a phrase with several boxes means the smallest box around them, or "any", each is right.

    Raises UserError: too many images that cannot be read; embeddings that are not finite.
    """
    with_tokens = "attention" in rankings
    keeper = TokenKeeper() if with_tokens else None
    texts = embedder.texts([phrase.text for phrase in data.phrases], "phrases", keeper)
    words = keeper.kept() if keeper else None
    of_image, parts, bad = data.by_image(), [], []
    rows: list[int] = []
    total = sum(len(boxes) for boxes, some in zip(proposals.boxes, of_image) if some)
    with embedder.show("proposals", total) as advance:
        for image, crops, reason in embedded_proposals(embedder, data, proposals, of_image, with_tokens):
            if advance:
                advance(len(proposals.boxes[image]))
            if crops is None:
                bad.append((data.image_ids[image], reason))
                refuse_too_many(bad, data, embedder.max_bad)
                continue
            some = of_image[image]
            boxes = torch.tensor(proposals.boxes[image])
            overlaps = torch.stack([phrase_overlaps(boxes, data.phrases[row].boxes, several) for row in some])
            index = torch.tensor(some)
            phrases = _Phrases(texts[index], None if words is None else words.take(index))
            parts.append(_rank(embedder, phrases, crops, overlaps, rankings, options))
            rows += some
    if not parts:
        raise UserError(f"No image of {data.source} could be read.", "Repair the data.")
    return _joined(parts, rows, data, bad)


def _joined(parts: list[dict], rows: list[int], data: PhraseDataset, bad: list[tuple[str, str]]) -> Localised:
    def whole(name: str, of: str | None = None) -> Tensor:
        return torch.cat([part[name] if of is None else part[name][of] for part in parts])

    by_ranking = {name: {of: whole(name, of) for of in parts[0][name]} for name in ("first", "first_overlaps")}
    return Localised(
        rows, torch.tensor([data.phrases[row].image for row in rows]), **by_ranking,
        best_overlap=whole("best_overlap"), chance=whole("chance"), u=whole("u"),
        scores={name: whole("scores", name) for name in parts[0]["scores"]}, bad=bad,
    )  # fmt: skip


def phrase_overlaps(proposals: Tensor, boxes: Sequence[Box], several: str) -> Tensor:
    """(P,) IoU of proposals (P, 4) with what a phrase means."""
    if several == "merged":
        boxes = [enclosing(boxes)]
    return iou(proposals, torch.tensor(boxes)).amax(dim=1)


class _Phrases(NamedTuple):
    """Phrases (Q, D), and their words where these are compared."""

    gaussian: Gaussian
    words: KeptTokens | None


class _Embedded(NamedTuple):
    """Proposals (P, D), and their tokens (P, T, D) where these are compared: those of a crop, or the one region."""

    gaussian: Gaussian
    tokens: Tokens | None

    @staticmethod
    def joined(parts: Sequence[_Embedded]) -> _Embedded:
        """Blocks of an image's proposals."""
        tokens = None if parts[0].tokens is None else Tokens(*map(torch.cat, zip(*(part.tokens for part in parts))))
        return _Embedded(Gaussian.cat([part.gaussian for part in parts]), tokens)


def _rank(
    embedder: Embedder, phrases: _Phrases, crops: _Embedded, overlaps_QP: Tensor, rankings: Sequence[str],
    options: RankingOptions,
) -> dict:  # fmt: skip
    """The fields of `Localised` for the phrases of one image."""
    total = overlaps_QP.shape[1]
    missing = max(0, max(KS) - total)
    found: dict = {"first": {}, "first_overlaps": {}}
    for name in rankings:
        scores_QP = _scores(name, phrases, crops, options)
        order = scores_QP.argsort(dim=1, descending=True, stable=True)[:, : max(KS)]
        found["first"][name] = pad(order, (0, missing), value=-1)
        found["first_overlaps"][name] = pad(overlaps_QP.gather(1, order), (0, missing), value=-1.0)
    good = (overlaps_QP >= THRESHOLD).sum(dim=1).tolist()
    texts, items = phrases.gaussian, crops.gaussian
    single = texts.mean.dim() == 2  # not several embeddings of an item
    return found | {
        "best_overlap": overlaps_QP.amax(dim=1),
        "chance": torch.tensor([[chance_at(n, total, min(k, total)) for k in KS] for n in good]),
        "u": _uncertainty(texts),
        "scores": query_scores(texts, items, MatchModel.of(embedder.model)) if single else {},
    }


def _scores(name: str, phrases: _Phrases, crops: _Embedded, options: RankingOptions) -> Tensor:
    """(Q, P) on the CPU, larger is closer."""
    if name == "attention":
        words = phrases.words.read(slice(None), options.device)
        images = Tokens(*(one.to(options.device) for one in crops.tokens))
        with torch.inference_mode():
            return attention_scores(images, words, options.attention).T.cpu()
    ranker = make_ranker(name, crops.gaussian, phrases.gaussian, options)
    if not isinstance(ranker, ScoreRanker):
        raise ValueError(f"{name} has no scores of pairs")
    return ranker.scores(slice(None)).T.cpu()


def _uncertainty(items: Gaussian) -> Tensor:
    """(N,) sum of the variances; their mean over several embeddings of an item."""
    u = items.uncertainty()
    return u if u.dim() == 1 else u.mean(dim=1)


# ------------------------------------------------------------------------------------------------------------- crops


def embedded_proposals(
    embedder: Embedder, data: PhraseDataset, proposals: Proposals, of_image: Sequence[Sequence[int]], with_tokens: bool
):
    """(image, its proposals embedded, "") of each image with phrases; (image, None, reason) if it is unreadable."""
    blocks = []
    for image, some in enumerate(of_image):
        count = len(proposals.boxes[image]) if some else 0
        blocks += [(image, first) for first in range(0, count, embedder.batch_size)]
    form = _Crops if proposals.features is None else _Regions
    dataset = form(data, proposals, blocks, embedder.transform, embedder.batch_size)
    workers = loader_workers(embedder.workers, len(blocks) * embedder.batch_size, embedder.device.name)
    parts: list[_Embedded] = []
    failed = ""
    with closing(read(make_loader(dataset, workers, batch_size=None))) as found:
        for image, last, inputs, reason in found:
            failed = failed or reason
            if not failed:
                parts.append(_embed(embedder, inputs, with_tokens))
            if last:
                yield image, (None if failed else _Embedded.joined(parts)), failed
                parts, failed = [], ""


def _embed(embedder: Embedder, inputs: Tensor, with_tokens: bool) -> _Embedded:
    if not with_tokens:
        return _Embedded(embedder.pixels([inputs]), None)
    tokens: list[Tokens] = []

    def encode(batch: Tensor) -> Gaussian:
        encoded = embedder.model.image_tower.encode(batch, want_tokens=True)
        tokens.append(unit_tokens(encoded.tokens, encoded.mask))
        return encoded.gaussian

    gaussian = encode_images(encode, [inputs], device=embedder.device)
    return _Embedded(gaussian, tokens[0])


class _Crops:
    """Map-style dataset of blocks: index -> (image, whether it is the image's last block, pixels or None, reason)."""

    def __init__(self, data: PhraseDataset, proposals: Proposals, blocks: list, transform, size: int):
        self.data, self.proposals, self.blocks, self.transform, self.size = data, proposals, blocks, transform, size

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int):
        image, first = self.blocks[index]
        boxes = self.proposals.boxes[image]
        last = first + self.size >= len(boxes)
        try:
            picture = self.data.images.open(image)
            scale = scale_of(picture, *self.data.sizes[image])
            some = boxes[first : first + self.size]
            pixels = stack([self.transform(crop(picture, box, scale)) for box in some])
        except BadSample as error:
            return image, last, None, str(error)
        except Exception as error:  # one image must not end an evaluation
            return image, last, None, f"cannot be transformed ({type(error).__name__})"
        return image, last, pixels, ""


class _Regions(_Crops):
    """The same with the features of proposals, (P, 1, W): each is an image of one region."""

    def __getitem__(self, index: int):
        image, first = self.blocks[index]
        rows = self.proposals.rows[image]
        last = first + self.size >= len(rows)
        try:
            features = self.proposals.features.open(image)
        except BadSample as error:
            return image, last, None, str(error)
        return image, last, features[rows[first : first + self.size], None], ""


def scale_of(picture, width: int, height: int) -> tuple[float, float]:
    """A picture's size over that of its annotation. Raises BadSample: their shapes differ by more than 5 %."""
    scale = picture.size[0] / width, picture.size[1] / height
    if abs(scale[0] / scale[1] - 1) > 0.05:
        raise BadSample(f"is {picture.size[0]} x {picture.size[1]}, but annotated as {width} x {height}")
    return scale


def crop(picture, box: Box, scale: tuple[float, float] = (1.0, 1.0)):
    """The pixels that a box covers at least in part, as a `PIL.Image`; `scale`: of the picture over the annotation."""
    left, top = int(box[0] * scale[0]), int(box[1] * scale[1])
    right, bottom = -int(-box[2] * scale[0] // 1), -int(-box[3] * scale[1] // 1)
    right, bottom = min(max(right, left + 1), picture.size[0]), min(max(bottom, top + 1), picture.size[1])
    return picture.crop((min(left, right - 1), min(top, bottom - 1), right, bottom))


def refuse_too_many(bad: list[tuple[str, str]], data: PhraseDataset, max_bad: float) -> None:
    if len(bad) > max_bad * len(data):
        shown = "; ".join(f"{name}: {why}" for name, why in bad[:3])
        raise UserError(
            f"{len(bad)} of {len(data)} images of {data.source} cannot be used ({shown}).",
            f"Repair the data, or allow more than {max_bad:.0%} with --max-bad.",
        )

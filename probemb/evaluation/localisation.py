"""Phrase localisation: the proposals of an image ranked by how well their crops, or their regions, fit a phrase.

For a model that reads regions every proposal is an image of that region alone. Source: jWAE §5.2; Plummer et al. (IJCV
2017): a proposal is right if its IoU with the phrase's box is at least 0.5.

P proposals of an image, Q phrases of an image, D dimensions.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from scipy.stats import hypergeom
from torch import Tensor
from torch.nn.functional import pad

from probemb.cross_attention import Tokens, attention_scores, unit_tokens
from probemb.data.boxes import Box, PhraseDataset, Proposals, enclosing, iou
from probemb.data.failures import BadSample
from probemb.data.image_loader import refuse_too_many
from probemb.data.images import stack
from probemb.data.workers import make_loader, read
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder, KeptTokens, encode_images
from probemb.evaluation.rankings import RankingOptions, scores_of
from probemb.gaussian import Gaussian
from probemb.machine import loader_workers

KS = (1, 5, 10)
THRESHOLD = 0.5  # of the IoU


class Localised(NamedTuple):
    """Results of the phrases `rows` of the data, (Q,) each.

    first, first_overlaps: by ranking, (Q, 10) the first proposals and their IoU, -1 where there are fewer;
    best_overlap: of any proposal; chance: (Q, 3) recall of guessing at each of KS; bad: (name, reason) of images that
    could not be read.
    """

    rows: list[int]
    image: Tensor
    first: dict[str, Tensor]
    first_overlaps: dict[str, Tensor]
    best_overlap: Tensor
    chance: Tensor
    u: Tensor
    bad: list[tuple[str, str]]


def localise(
    embedder: Embedder, data: PhraseDataset, proposals: Proposals, rankings: Sequence[str], options: RankingOptions,
    several: str,
) -> Localised:  # fmt: skip
    """Embed and rank. Several boxes of a phrase are "merged", or "any" is right. Raises UserError."""
    kept = (KeptTokens(), KeptTokens()) if "attention" in rankings else None
    texts = replace(embedder, kept=kept).texts([phrase.text for phrase in data.phrases], "phrases")
    of_image, device, parts, rows, bad = data.by_image(), options.device, [], [], []
    embedded = embedded_proposals(embedder, data, proposals, of_image, bad, with_tokens=kept is not None)
    for image, crops, tokens in embedded:
        some, boxes = torch.tensor(of_image[image]), torch.tensor(proposals.boxes[image])
        overlaps = torch.stack([phrase_overlaps(boxes, data.phrases[row].boxes, several) for row in of_image[image]])
        scores = {}
        for name in rankings:
            if name == "attention":
                of_crops = Tokens(*(one.to(device) for one in tokens))
                with torch.inference_mode():
                    scores[name] = attention_scores(of_crops, kept[1][some].read(device), options.attention).T.cpu()
            else:
                scores[name] = scores_of(name, crops, texts[some], options)(slice(None)).T.cpu()
        u = texts[some].uncertainty()
        parts.append({**_of_phrases(scores, overlaps), "u": u.view(len(some), -1).mean(1)})  # of several embeddings
        rows += of_image[image]
    if not parts:
        raise UserError(f"No image of {data.source} could be read.", "Repair the data.")
    image = torch.tensor([data.phrases[row].image for row in rows])
    return Localised(rows, image, **_joined(parts), bad=bad)


def _joined(parts: Sequence):
    """Tensors of several images, or dictionaries of these, as one."""
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(list(parts))


def phrase_overlaps(proposals: Tensor, boxes: Sequence[Box], several: str) -> Tensor:
    """(P,) IoU of proposals (P, 4) with what a phrase means."""
    if several == "merged":
        boxes = [enclosing(boxes)]
    return iou(proposals, torch.tensor(boxes)).amax(dim=1)


def _of_phrases(scores: dict[str, Tensor], overlaps_QP: Tensor) -> dict:
    """The fields of `Localised` that follow from the scores (Q, P) of one image's phrases."""
    total, most = overlaps_QP.shape[1], max(KS)
    first = {name: x.argsort(dim=1, descending=True, stable=True)[:, :most] for name, x in scores.items()}
    overlaps, missing = {name: overlaps_QP.gather(1, order) for name, order in first.items()}, max(0, most - total)
    good_Q1 = (overlaps_QP >= THRESHOLD).sum(1, keepdim=True).numpy()
    drawn = [min(k, total) for k in KS]  # any of them is right, without replacement
    return {
        "first": {name: pad(order, (0, missing), value=-1) for name, order in first.items()},
        "first_overlaps": {name: pad(one, (0, missing), value=-1.0) for name, one in overlaps.items()},
        "best_overlap": overlaps_QP.amax(dim=1),
        "chance": torch.from_numpy(hypergeom.sf(0, total, good_Q1, drawn)).float(),
    }


def recall_at(first_overlaps_QK: Tensor, k: int, threshold: float = THRESHOLD) -> Tensor:
    """(Q,) bool: one of the first k proposals is right."""
    return (first_overlaps_QK[:, :k] >= threshold).any(dim=1)


def embedded_proposals(
    embedder: Embedder, data: PhraseDataset, proposals: Proposals, of_image: Sequence[Sequence],
    bad: list[tuple[str, str]], title: str = "proposals", with_tokens: bool = False,
) -> Iterator[tuple[int, Gaussian, Tokens | None]]:  # fmt: skip
    """Image, proposals (P, D) and their tokens of each image with phrases; adds unreadable images to `bad`."""
    sizes = [len(boxes) if some else 0 for boxes, some in zip(proposals.boxes, of_image)]
    blocks = [(image, first) for image, n in enumerate(sizes) for first in range(0, n, embedder.batch_size)]
    dataset = _Proposals(data, proposals, blocks, embedder.transform, embedder.batch_size)
    workers = loader_workers(embedder.workers, len(blocks) * embedder.batch_size, embedder.device.name)
    parts, tokens, failed = [], [], ""

    def encode(batch: Tensor) -> Gaussian:
        encoded = embedder.model.image_tower(batch, want_tokens=True)
        tokens.append(unit_tokens(encoded.tokens, encoded.mask))
        return encoded.gaussian

    with (
        embedder.show(title, sum(sizes)) as advance,
        closing(read(make_loader(dataset, workers, batch_size=None))) as found,
    ):
        for image, last, inputs, reason in found:
            failed = failed or reason
            if not failed:
                with_theirs = partial(encode_images, encode, device=embedder.device)
                parts.append((with_theirs if with_tokens else embedder.pixels)([inputs]))
            if not last:
                continue
            advance(sizes[image])
            if failed:
                bad.append((data.image_ids[image], failed))
                refuse_too_many(bad, len(data), data.source, embedder.max_bad, "--max-bad")
            else:
                yield image, Gaussian.cat(parts), Tokens(*map(torch.cat, zip(*tokens))) if tokens else None
            parts, failed = [], ""
            tokens.clear()


class _Proposals:
    """Map-style dataset of blocks: index -> (image, whether it is the image's last block, inputs or None, reason).
    Inputs are pixels of crops (P, 3, H, W), or features (P, 1, W)."""

    def __init__(self, data: PhraseDataset, proposals: Proposals, blocks: list, transform, size: int):
        self.data, self.proposals, self.blocks, self.transform, self.size = data, proposals, blocks, transform, size

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int):
        image, first = self.blocks[index]
        boxes, some = self.proposals.boxes[image], slice(first, first + self.size)
        inputs, reason = None, ""
        try:
            if self.proposals.features is not None:
                inputs = self.proposals.features.open(image)[self.proposals.rows[image][some], None]
            else:
                picture = self.data.images.open(image)
                scale = scale_of(picture, *self.data.sizes[image])
                inputs = stack([self.transform(crop(picture, box, scale)) for box in boxes[some]])
        except BadSample as error:
            reason = str(error)
        return image, some.stop >= len(boxes), inputs, reason


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

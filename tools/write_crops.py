"""Write phrases with the regions they refer to, as images with captions to finetune on.

    python -m tools.write_crops --data data/flickr30k_entities --split train val --proposals boxes.json --top 200 \\
        --out data/phrases
    python -m tools.write_crops --data data/visual_genome --split all --out data/phrases         # the boxes themselves

A proposal whose IoU with a phrase's box is at least 0.7 becomes an image, and the phrase one of its captions (jWAE,
§5.2). OUT/SPLIT/*.tar hold KEY.jpg (the crop), KEY.txt (its phrases, one a line) and KEY.json ({"image", "box",
"class"}). Crops that share a phrase have one class, so that with `data.positives: class` they are not negatives of
each other's phrases. A split is written to a temporary folder and then renamed.
"""

import io
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from probemb.cli.command import Parser, run_command
from probemb.cli.ranges import Count, Share
from probemb.data.boxes import PhraseDataset, enclosing, find_phrases
from probemb.data.failures import BadSample
from probemb.data.shards.write import encode_captions, write_corpus
from probemb.errors import UserError
from probemb.evaluation.localisation import crop, phrase_overlaps, scale_of
from probemb.files import writing
from probemb.progress import progress
from tools.write_regions import find_proposals, refuse_top

SHARD = 1000  # crops in a tar
JPEG_QUALITY = 95


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.write_crops", description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="phrases with boxes: Flickr30k Entities or Visual Genome")
    parser.add_argument("--split", nargs="+", default=["train"], help="or all, of data without splits (default: train)")
    parser.add_argument("--images", help="the folder of the images, if it is not beside the data")
    parser.add_argument("--sample", type=Count, help="number of images to use (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--proposals", help="a JSON file with boxes, or grid (default: the phrases' own boxes)")
    parser.add_argument("--top", type=Count, help="number of the file's proposals to use per image (default: all)")
    parser.add_argument("--iou", type=Share, default=0.7, help="least IoU with the phrase's box (default: 0.7)")
    options = parser.parse_args(argv)
    refuse_top(options)
    for split in options.split:
        if (options.out / split).exists():
            raise UserError(f"{options.out / split} exists.", "Remove it, or choose another --out.")
    for split in options.split:
        data = find_phrases(options.data, None if split == "all" else split, options.images, options.sample)
        with writing(options.out / split):
            print(f"wrote {options.out / split}: {write_split(options, data, options.out / split)}", flush=True)
    return 0


def write_split(options: Namespace, data: PhraseDataset, folder: Path) -> str:
    """Write a split's shards; returns a summary of them."""
    if options.proposals is None:
        boxes = [list({enclosing(data.phrases[row].boxes): None for row in rows}) for rows in data.by_image()]
    else:
        boxes = find_proposals(options, data).boxes
    counts = {"captions": 0, "missed": 0}
    count = write_corpus(folder, crops(data, boxes, options.iou, counts), SHARD)
    return (
        f"{count:,} crops with {counts['captions']:,} captions; {counts['missed']:,} of "
        f"{len(data.phrases):,} phrases have no box with an IoU of {options.iou:g}"
    )


def crops(data: PhraseDataset, boxes, least: float, counts: dict[str, int]) -> Iterator[dict[str, bytes]]:
    """Yield samples by extension, and update the counts. Raises UserError: an image that cannot be read, no crop."""
    with progress("images", len(data)) as advance:
        for image, rows in enumerate(data.by_image()):
            advance(1)
            if not rows:
                continue
            phrases = [data.phrases[row] for row in rows]
            corners = torch.tensor(boxes[image])
            hits = torch.stack([phrase_overlaps(corners, phrase.boxes, "merged") >= least for phrase in phrases])
            counts["missed"] += int((~hits.any(dim=1)).sum())
            group = torch.arange(len(corners))
            for row in hits[hits.any(dim=1)]:
                group[torch.isin(group, group[row])] = group[row].min()
            try:
                picture = data.images.open(image)
                scale = scale_of(picture, *data.sizes[image])
            except BadSample as error:
                what = f"The image {data.image_ids[image]} cannot be used: it {error}."
                raise UserError(what, "Repair it, or leave it out.") from None
            for i in hits.any(dim=0).nonzero()[:, 0].tolist():
                texts = list(dict.fromkeys(phrase.text for phrase, hit in zip(phrases, hits[:, i]) if hit))
                counts["captions"] += len(texts)
                encoded = io.BytesIO()
                crop(picture, boxes[image][i], scale).save(encoded, "JPEG", quality=JPEG_QUALITY, subsampling=0)
                about = {"image": data.image_ids[image], "box": boxes[image][i]}
                about["class"] = f"{data.image_ids[image]}/{int(group[i])}"
                yield {"jpg": encoded.getvalue(), "txt": encode_captions(texts), "json": json.dumps(about).encode()}
    if not counts["captions"]:
        what = f"No box has an IoU of {least:g} with that of any phrase."
        raise UserError(what, "Give more proposals, or a lower --iou.")


if __name__ == "__main__":
    run_command(main)

"""Print the demo's results as one table: `python -m tools.demo demo/run`."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError

PROMPTS = (  # folder of results, filter, beginning of what was chosen on, title
    ("zeroshot", "single", "zero-shot", 'one prompt, "a photo of a {}."'),
    ("zeroshot", "all", "zero-shot", "CLIP's 80 prompts"),
    ("zeroshot", "topk", "few-shot", "their K most certain, K from other images (few-shot)"),
    ("captions", "all", "zero-shot", "80 captions of each class as prompts"),
    ("captions", "topk", "few-shot", "their K most certain, K from other images (few-shot)"),
)
RANKINGS = {"mean": "the means", "csd": "CSD", "tolerance": "a tolerance: CSD with the captions' variance subtracted"}


def main() -> int:
    parser = Parser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("demo/run"), help="the demo's run (demo/run)")
    run = parser.parse_args().run
    results = {file.parent.name: json.loads(file.read_text()) for file in sorted(run.glob("*/results.json"))}
    if "retrieval" not in results:
        raise UserError(f"{run} holds no results of the demo.", "Run `make demo` first, or name its run folder.")
    table = Table("measure", "with")
    for heading in ("percent", "gain ± SE"):
        table.add_column(heading, justify="right")
    for folder, name, chosen, title in PROMPTS:
        for row in results.get(folder, {"rows": []})["rows"]:
            if row["filter"] == name and row["note"].startswith(chosen):
                gain = f"{100 * row['gain']:+.2f} ± {100 * row['gain_se']:.2f}" if name == "topk" else ""
                table.add_row("zero-shot top-1", title, f"{100 * row['top1']:.2f}", gain)
    for row in results["retrieval"]["rows"]:
        if row["positives"] == "all true captions":
            value = f"{100 * row['i2t']['map_at_r']:.2f}"
            table.add_row("image → all true captions, mAP@R", RANKINGS[row["ranking"]], value, "")
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    run_command(main)

"""Export the deterministic part of a model to open_clip.

    python -m tools.export --model runs/x --out exported/x

The folder holds open_clip_config.json and open_clip_model.safetensors: a CLIP without the uncertainty branch, which
`open_clip.create_model_and_transforms("local-dir:exported/x")` and programs built on open_clip load.
"""

from __future__ import annotations

from pathlib import Path

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError


def main() -> int:
    parser = Parser(prog="python -m tools.export", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a run, a model folder, a .safetensors file or a hub name")
    parser.add_argument("--out", required=True, type=Path, help="an empty or new folder")
    options = parser.parse_args()
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UserError(f"{options.out} exists and is not an empty folder.", "Choose another --out.")

    from probemb.models import load_model
    from probemb.models.formats import WITHOUT_BIAS, export_open_clip

    model = load_model(options.model).model
    export_open_clip(model, options.out)
    print(f'{options.out}: open_clip.create_model_and_transforms("local-dir:{options.out}") loads it')
    if (bare := options.out / WITHOUT_BIAS).exists():
        print(f"{bare}: for the architecture under its own name, which has no logit bias in open_clip")
    if crop_pct := model.config["preprocess"].get("crop_pct"):
        size = model.image_size
        print(
            f"open_clip has no crop_pct: its preprocessing resizes to {size} pixels, and this model is evaluated with "
            f"the centre {size} of {int(size / crop_pct)}; probemb.load_model({str(options.out)!r}) does that too"
        )
    return 0


if __name__ == "__main__":
    run_command(main)

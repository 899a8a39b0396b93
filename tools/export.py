"""Export the means of a model to open_clip, or interpolate two models.

    python -m tools.export --model runs/x --out exported/x
    python -m tools.export --interpolate runs/pretrained runs/finetuned --weight 0.5 --out models/between

The first folder holds open_clip_config.json and open_clip_model.safetensors: a CLIP without the uncertainty branch,
which `open_clip.create_model_and_transforms("local-dir:exported/x")` and programs built on open_clip load. The second
is a model of this project, (1 - weight) RUN_A + weight RUN_B in every weight and scalar; where RUN_A is a point model,
such as the CLIP that RUN_B started from, the uncertainty branch is RUN_B's. Source: WiSE-FT (Wortsman et al. 2022),
which keeps accuracy on other distributions that finetuning loses.
"""

from pathlib import Path

from jsonargparse.typing import ClosedUnitInterval

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError
from probemb.options import flat

# In a model's configuration, what its training was and does not change what its weights mean.
OF_TRAINING = (
    *("name", "objective", "ranking", "composed_ranking", "max_logit_scale", "temperature_trained", "log_var_start"),
)
# What a point model has no use for.
OF_BRANCH = ("probabilistic", "n_unc_layers", "uncertainty", "covariance", "log_var_range", "uncertainty_bias")


def main() -> int:
    parser = Parser(prog="python -m tools.export", description=__doc__.splitlines()[0])
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", help="a run, a model folder, a .safetensors file or a hub name")
    models.add_argument("--interpolate", nargs=2, metavar=("RUN_A", "RUN_B"), help="two models of one architecture")
    parser.add_argument("--weight", type=ClosedUnitInterval, help="of RUN_B in --interpolate (default: 0.5)")
    parser.add_argument("--out", required=True, type=Path, help="an empty or new folder")
    options = parser.parse_args()
    if options.model and options.weight is not None:
        raise UserError("--weight is of two models, and --model names one.", "Leave it out, or use --interpolate.")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UserError(f"{options.out} exists and is not an empty folder.", "Choose another --out.")

    from probemb.models import load_model, save_model
    from probemb.models.formats import WITHOUT_BIAS, export_open_clip

    if options.interpolate:
        (a, b), weight = options.interpolate, 0.5 if options.weight is None else options.weight
        first, second = load_model(a).model, load_model(b).model
        interpolate(first, second, weight, (a, b))
        save_model(second, options.out)
        print(f"{options.out}: {1 - weight:g} {a} + {weight:g} {b}; every command takes it as --model")
        return 0
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


def interpolate(first, second, weight: float, names: tuple[str, str]) -> None:
    """Set the weights of `second` to (1 - weight) first + weight second; batch norms' statistics too, counters stay.

    Raises UserError: the two are not of one architecture, or read pixels or texts differently.
    """
    ignored = {*OF_TRAINING, *(OF_BRANCH if not first.probabilistic else ())}
    a, b = (flat({key: v for key, v in model.config.items() if key not in ignored}) for model in (first, second))
    if different := [key for key in {**a, **b} if a.get(key) != b.get(key)]:
        shown = "; ".join(f"{key}: {str(a.get(key))[:60]} and {str(b.get(key))[:60]}" for key in different[:3])
        what = f"{names[0]} and {names[1]} are not of one architecture ({shown})."
        raise UserError(what, "Name a run and one that started from it with the same head, D and uncertainty branch.")
    theirs = first.state_dict()
    for name, tensor in second.state_dict().items():
        if tensor.is_floating_point() and name in theirs:
            tensor.copy_(theirs[name].lerp(tensor, weight))


if __name__ == "__main__":
    run_command(main)

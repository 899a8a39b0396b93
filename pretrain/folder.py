"""The run folder: config.yaml, metrics.jsonl, tensorboard/, checkpoints/step-N/ and model/."""

from __future__ import annotations

from pathlib import Path

from pretrain.checkpoint import full_state_dict, latest_checkpoint, prune_checkpoints, save_checkpoint
from pretrain.config import Config, changed_keys
from pretrain.progress import RunLog, evaluation_line, train_line
from probemb.command import to_dict, to_yaml
from probemb.errors import UserError
from probemb.models import ProbabilisticCLIP, save_model

FREE_TO_CHANGE = ("out", "resume", "stop_at_step", "log_every", "save_every", "keep_checkpoints", "wandb", "evaluate")


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint to go on from, or None for a new run.

    Raises:
        UserError: the folder holds something that a new run would overwrite.
    """
    run = Path(config.out)
    earlier = latest_checkpoint(run)
    if config.resume:
        return earlier
    if earlier or (run / "config.yaml").exists():
        raise UserError(f"{run} already holds a run.", "Add --resume to go on with it, or choose another --out.")
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UserError(f"{run} already holds something else.", "Choose another --out.")
    return None


def refuse_another_run(config: Config, state: dict, data_identity: dict, earlier: Path) -> None:
    """Resuming goes on with the same data order, model and recipe.

    Raises:
        UserError: names what changed.
    """
    changed = changed_keys(state["data"], data_identity)
    if changed:
        raise UserError(
            f"The data is not what {earlier} was trained on: {', '.join(changed)} changed.",
            "Resume with the same shards, batch_size, lanes, window and seed, or start a new run with another --out.",
        )
    changed = changed_keys(state["config"], to_dict(config), ignore=(*FREE_TO_CHANGE, "engine", "data"))
    if changed:
        raise UserError(
            f"{earlier} belongs to a run with other settings: {', '.join(changed)} changed.",
            "Resume with the settings in the run folder's config.yaml (--config), or start a new run.",
        )


class RunFolder:
    """What a run writes; every rank holds one, as saving is collective, and rank 0 writes.

    Args:
        config: the resolved configuration.
        model: the model of the engine, for its configuration.
        data_identity: what the order of the samples depends on, kept for `refuse_another_run`.
        steps: length of the whole run.
        step: the step that it goes on from.
    """

    def __init__(self, config: Config, model: ProbabilisticCLIP, data_identity: dict, rank: int, steps: int, step: int):
        self.path, self.config, self.steps, self.is_main = Path(config.out), config, steps, rank == 0
        self.model_config, self.data_identity = model.config, data_identity
        self.log = None
        if self.is_main:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            self.log = RunLog(self.path, step, config.wandb, to_dict(config))

    def report(self, step: int, values: dict[str, float]) -> None:
        """One line for people and one for programs."""
        if self.log:
            self.log.write(step, values)
            line = evaluation_line if "zeroshot_top1" in values else train_line
            print(line(step, self.steps, values), flush=True)

    def save(self, engine, step: int, samples: int) -> None:
        """A checkpoint to resume from, and the weights alone in model/; collective."""
        state = {
            "samples": samples,
            "config": to_dict(self.config),
            "data": self.data_identity,
            "model": self.model_config,
        }
        where = save_checkpoint(engine, self.path, step, state)
        prune_checkpoints(self.path, self.config.keep_checkpoints)
        weights = full_state_dict(engine, prefix="model.")
        if self.is_main:
            save_model(_model_with(self.model_config, weights), self.path / "model", overwrite=True)
            print(f"step {step}/{self.steps} | saved {where} and {self.path / 'model'}", flush=True)

    def close(self) -> None:
        """Flush everything."""
        if self.log:
            self.log.close()


def _model_with(model_config: dict, weights: dict) -> ProbabilisticCLIP:
    import torch

    with torch.random.fork_rng():  # building draws random weights; training must not notice
        model = ProbabilisticCLIP(model_config)
    model.load_state_dict(weights)
    return model

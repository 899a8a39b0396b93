"""A `Trainer` as a run puts it together, in float64, without a run folder."""

from types import SimpleNamespace

from finetune.config import Config, check, with_method_file
from finetune.data import Loader
from finetune.methods import METHODS
from finetune.recipe import make_schedule
from finetune.task import ComposedTask, PairTask
from finetune.train import make_networks
from finetune.trainer import Joint, Position, State, Trainer
from probemb.cli.configuration import parse_config
from probemb.machine import CPU
from probemb.runs.preemption import Preemption

BATCH = 12
SMALL = (
    *("--epochs=2", "--swa-epochs=0", f"--batch_size={BATCH}", "--log_every=1", "--data.validation=null"),
    *("--optimizer.decay_epochs=1", "--optimizer.freeze_epochs=1", "--optimizer.lr=0.01", "--data.workers=0"),
    *("--model.name=ViT-Micro-32", "--no-model.pretrained", "--model.image_weights=null"),
)
DECODERS = ("--size-augment=0", "--loss.hidden=6", "--loss.word_width=5")  # small ones; whole captions


def configured(method: str, data="x", *words: str) -> Config:
    """With one epoch of all negatives, in methods that have such."""
    cls, words = METHODS[method], list(words)
    if hasattr(cls.Options, "warmup_epochs"):
        words.insert(0, "--loss.warmup_epochs=1")
    if cls.composes:
        words = ["--model.head=clip", "--no-model.embed_dim", "--batch_size=24", "--optimizer.name=adam", *words]
    own = cls.heads[0] if cls.heads else next((w[13:] for w in words if w.startswith("--model.head=")), None)
    base = [f"--method={method}", f"--data.path={data}", *SMALL, *words]
    config = parse_config(Config, "test", "", with_method_file(base))
    if (own or config.model.head) != "clip":
        config = parse_config(Config, "test", "", with_method_file([*base, "--model.embed_dim=8"]))
    check(config)
    return config


def make_trainer(config: Config, double: bool = True, **hooks) -> Trainer:
    """`hooks`: what the folder does."""
    method = METHODS[config.method]
    task = (ComposedTask if method.composes else PairTask)(config)
    networks = make_networks(config, None, print, task.train.texts if method.composes else None)
    task.prepare(networks, CPU)
    joint = Joint(networks[0], method(config.loss, networks[0], task.train, config.epochs), *networks[1:])
    joint = joint.double() if double else joint
    loader = Loader(task.rows())
    state = State.of(config, joint, Position())
    schedule = make_schedule(config, len(networks), loader.steps)
    folder = SimpleNamespace(**{"report": lambda *_: None, "save": lambda *_: None, "failed": False, **hooks})
    trainer = Trainer(state, task, loader, schedule, config, folder, Preemption())
    trainer.end_epoch = lambda *_: False
    return trainer

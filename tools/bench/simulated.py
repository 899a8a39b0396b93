"""One rank of a simulated run of many: time to start, memory, and collectives of a step, beside what the plan says.

    python -m tools.bench.simulated --ranks 1024 --stages 0 1 3

The rank is real: DeepSpeed's engine and the trainer's step, in a process of its own. The others are torch's fake
process group, whose collectives return at once and send nothing, so neither the loss nor the time of a step means
anything; shapes, memory, and the number and size of collectives do. Counted is a ring's traffic. "start" is making the
engine; that many ranks must also meet, which is not simulated.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from probemb.cli.command import Parser, run_command


class Traffic(TorchDispatchMode):
    """Bytes that a rank sends, collective by collective, as rings would, and how many collectives there are."""

    def __init__(self, world: int):
        super().__init__()
        self.world, self.bytes, self.calls = world, {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name, others = func.__name__.partition(".")[0], self.world - 1
            if "allgather" in name:
                sent = others * total(flat(args[1]))
            elif "reduce_scatter" in name:
                sent = others * total(flat(args[0]))
            elif "allreduce" in name:
                sent = 2 * others * total(flat(args[0])) // self.world
            elif name in ("broadcast_", "send"):
                sent = total(flat(args[0]))
            else:
                sent = 0 if name in ("barrier", "recv_") else float("nan")
            self.bytes[name] = self.bytes.get(name, 0) + sent
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def flat(x) -> list[torch.Tensor]:
    """The tensors in lists of lists."""
    return [x] if isinstance(x, torch.Tensor) else [t for part in x for t in flat(part)]


def total(tensors) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def main() -> None:
    parser = Parser(prog="python -m tools.bench.simulated", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024, help="of the simulated run (%(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="of the batch on each rank (%(default)s)")
    parser.add_argument("--model", default="ViT-Tiny-64", help="its name (%(default)s)")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 3], help="ZeRO stages (default: 0 1 3)")
    options = parser.parse_args()
    from rich.console import Console
    from rich.table import Table

    from tools.bench.order import in_a_process

    table, every = Table(title=f"rank 0 of {options.ranks}, {options.model}"), []
    for name in ("ZeRO", "start", "state (plan)", "sent a step (plan)", "collectives a step", "memory added"):
        table.add_column(name, justify="right")
    for stage in options.stages:
        found = in_a_process(simulate, options.ranks, options.rows, options.model, stage)
        every.append(found)
        mib = {name: value / 2**20 for name, value in found.items() if isinstance(value, (int, float))}
        table.add_row(
            str(stage),
            f"{found['start']:.1f} s",
            f"{mib['state']:.2f} ({mib['planned_state']:.2f}) MiB",
            f"{mib['sent']:.1f} ({mib['planned_sent']:.1f}) MiB",
            ", ".join(f"{count} {name.strip('_')}" for name, count in found["calls"].items()),
            f"{mib['added']:,.0f} MiB",
        )
    Console().print(table)
    print(f"{os.cpu_count()} CPU cores, torch {torch.__version__}")
    print(json.dumps(every))


def simulate(world: int, rows: int, name: str, stage: int) -> dict:
    """Rank 0 of `world` ranks: seconds to make the engine, bytes of its state, and a step's traffic."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pretrain.config import Config, Engine, Model
    from pretrain.engine.engine import import_deepspeed, make_engine
    from pretrain.objectives import PCMEPlusPlus
    from pretrain.plan import cost, memory, trace
    from pretrain.trainer import Trainer
    from probemb import create_model, distributed

    torch.set_num_threads(1)
    config = Config(
        batch_size=world * rows,
        loss=PCMEPlusPlus.Options(exchange="gather"),  # a ring would compute with what the fake group never receives
        model=Model(name=name, n_unc_layers=1),
        engine=Engine(zero_stage=stage, precision="fp32"),
    )
    plan = trace.build(config)
    setting = trace.Setting.of(config, world, plan.context_length, half=False, gpu=False)
    said = memory.memory(plan, setting)
    sent = cost.network(
        plan, replace(setting, gpu=True)
    )  # the fake group has a reduce-scatter, as NCCL and unlike gloo

    torch.manual_seed(0)
    model = create_model(name, n_unc_layers=1)
    before = resident()
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    deepspeed = import_deepspeed()
    began = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    distributed._control = dist.group.WORLD, dist.group.WORLD  # gloo's would wait for ranks that do not exist
    engine = make_engine(model, config, "fp32", torch.device("cpu"), persistent_elements=0)
    started = time.perf_counter()
    trainer = Trainer(engine, None, config, torch.device("cpu"), 10)
    images = torch.randn(rows, 3, model.image_size, model.image_size)
    tokens = torch.randint(1, 1000, (rows, model.context_length))
    trainer.train_step(images, tokens)
    with Traffic(world) as traffic:
        trainer.train_step(images, tokens)
    masters = engine.optimizer.single_partition_of_fp32_groups if stage in (1, 2) else []
    if stage == 3:
        masters = engine.optimizer.fp32_partitioned_groups_flat
    moments = [s for one in engine.optimizer.state.values() for key, s in one.items() if key.startswith("exp_avg")]
    weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    return {
        "stage": stage,
        "start": started - began,
        "state": total(weights) + total(masters) + total(moments),
        "planned_state": said.state,
        "sent": sum(traffic.bytes.values()),
        "planned_sent": sent["total"],
        "bytes": traffic.bytes,
        "calls": traffic.calls,
        "added": resident() - before,
    }


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    run_command(main)

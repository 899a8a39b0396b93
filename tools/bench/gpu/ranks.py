"""One rank of the check `devices`: a few steps on this rank's share of the batch; rank 0 writes the global losses.

torchrun --standalone --nproc-per-node 2 -m tools.bench.gpu.ranks FILE
"""

import json
import os
import sys
from pathlib import Path


def main(out: Path) -> None:
    import torch

    from probemb.distributed import mean_over_ranks, settle
    from tools.bench.gpu.devices import RANK_ROWS, RANK_STEPS
    from tools.bench.gpu.steps import TINY, Pool, configured, make_trainer, model_of, without_tf32

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    without_tf32()
    trainer = make_trainer(configured(TINY, RANK_ROWS), "fp32", device)
    model, losses, share = model_of(trainer), [], RANK_ROWS // world
    mine = slice(rank * share, (rank + 1) * share)
    for images, tokens in Pool.of(model, RANK_ROWS, device).batches(RANK_STEPS):
        terms = trainer.train_step(images[mine], tokens[mine])
        losses.append(mean_over_ranks({"loss": terms["loss"]}, device)["loss"])
    if rank == 0:
        out.write_text(json.dumps(losses))
    settle()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

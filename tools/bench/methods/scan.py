"""SCAN's loss, forward and backward, against its definition in a loop over captions, and the memory of both.

    python -m tools.bench.methods.scan --batch 128 --dim 1024
    python -m tools.bench.methods.scan --ranking 64 --images 5000 --captions 25000

The second ranks by attention as an evaluation does: rows of 64 of the images against all captions, from kept tokens.
"""

from __future__ import annotations

from probemb.cli.command import Parser, run_command

REGIONS, WORDS, SPREAD, LONGEST = 36, 13, 4, 30  # regions of an image, words of a caption (mean, deviation, at most)


def main() -> None:
    parser = Parser(prog="python -m tools.bench.methods.scan", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--direction", choices=("t2i", "i2t"), default="t2i")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranking", type=int, default=0, help="score as many images with all captions instead")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--captions", type=int, default=25000)
    options = parser.parse_args()
    rank(options) if options.ranking else time_loss(options)


def time_loss(options) -> None:
    """Print the loss's time and memory beside the loop's."""
    from probemb.losses import scan_loss
    from tools.bench.timing import assert_equal, peak_memory, report, time_in_turn

    b, d, losses = options.batch, options.dim, {"loop over captions": looped_loss, "probemb": scan_loss}
    makers = {name: lambda loss=loss: step(b, d, loss, options.direction) for name, loss in losses.items()}
    memory = {name: {"peak": f"{peak_memory(make) / 2**20:,.0f} MiB"} for name, make in makers.items()}
    variants = {name: make() for name, make in makers.items()}
    assert_equal(*variants.values(), atol=1e-4)
    title = f"SCAN's loss ({options.direction}), forward and backward, B = {b}, D = {d}, {REGIONS} regions"
    report(title, time_in_turn(variants, options.repeats), "loop over captions", "at most 0.05 of the loop's", memory)


def rank(options) -> None:
    """Print the time of a slice of the ranking, that of all rows at this speed, and what it adds to the memory."""
    import json
    import time

    from probemb.cross_attention import CrossAttention
    from probemb.evaluation.attention import AttentionScores
    from tools.bench.timing import device, machine

    n, m, rows = options.images, options.captions, min(options.ranking, options.images)
    images, texts = kept_tokens(n, options.dim, 0, regions=True), kept_tokens(m, options.dim, 1, regions=False)
    scores = AttentionScores(images, texts, CrossAttention(options.direction), device())
    scores(slice(0, 1))
    with AnonymousMemory() as memory:
        wall, cpu = time.perf_counter(), time.process_time()
        scores(slice(0, rows))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found = {
        "images": n, "captions": m, "rows": rows, "wall_s": round(wall, 2), "cpu_s": round(cpu, 2),
        "all_rows_cpu_s": round(cpu * n / rows), "added_MiB": round(memory.added / 2**20),
        "result_MiB": round(rows * m * 4 / 2**20, 1),
        "tokens_on_disk_MiB": round((images.values.nbytes + texts.values.nbytes) / 2**20),
    }  # fmt: skip
    print(f"ranking by attention ({options.direction}), D = {options.dim}; {machine()}\n{json.dumps(found)}")


def kept_tokens(n: int, d: int, seed: int, regions: bool):
    """Random tokens of n images or captions, on disk."""
    import torch

    from probemb.evaluation.kept_tokens import TokenKeeper

    g, keeper = torch.Generator().manual_seed(seed), TokenKeeper()
    for start in range(0, n, 250):
        b = min(250, n - start)
        lengths = (SPREAD * torch.randn(b, generator=g) + WORDS).round().clamp(6, LONGEST).long()
        mask = torch.ones(b, REGIONS, dtype=torch.bool) if regions else torch.arange(LONGEST) < lengths[:, None]
        keeper.add(torch.randn(*mask.shape, d, generator=g), mask)
    return keeper.kept()


class AnonymousMemory:
    """Bytes of its own that the process takes meanwhile; without the pages of mapped files, which the system drops."""

    added = 0

    def __enter__(self) -> AnonymousMemory:
        import threading

        self._before, self._stop = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.added = max(self.added, anonymous_bytes() - self._before)

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def anonymous_bytes() -> int:
    """Of this process now (Linux)."""
    from pathlib import Path

    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def step(b: int, d: int, loss, direction: str):
    """A closure of the loss and its gradients for random regions and captions of 6 to 30 words."""
    import torch

    from probemb.cross_attention import CrossAttention, Tokens, unit_tokens
    from tools.bench.timing import device

    g = torch.Generator().manual_seed(0)
    lengths = (SPREAD * torch.randn(b, generator=g) + WORDS).round().clamp(6, LONGEST).long()
    words = int(lengths.max())
    masks = torch.ones(b, REGIONS, dtype=torch.bool), torch.arange(words) < lengths[:, None]
    sides = [unit_tokens(torch.randn(*mask.shape, d, generator=g), mask) for mask in masks]
    leaves = [values.to(device()).requires_grad_() for values, _ in sides]
    masks = [mask.to(device()) for mask in masks]
    how = CrossAttention(direction)

    def run():
        out = loss(Tokens(leaves[0], masks[0]), Tokens(leaves[1], masks[1]), how=how, margin=0.2).loss
        return out, torch.autograd.grad(out, leaves)

    return run


def looped_loss(images, texts, how, margin):
    """The definition, one caption after the other with all images; every attended vector is made."""
    import torch
    from torch.nn import functional as F

    from probemb.losses import LossOutput

    columns = []
    for words, mask in zip(*texts):
        caption = words[: int(mask.sum())].expand(len(images.values), -1, -1).contiguous()
        context, queries = (images.values, caption) if how.direction == "t2i" else (caption, images.values)
        attention = F.leaky_relu(torch.bmm(context, queries.transpose(1, 2)), 0.1)
        attention = attention / (attention.square().sum(2, keepdim=True).sqrt() + 1e-8)
        attention = F.softmax(how.lambda_softmax * attention.transpose(1, 2), -1)  # (B, queries, context)
        attended = torch.bmm(attention, context)
        product = (queries * attended).sum(2)
        cosine = product / (queries.norm(dim=2) * attended.norm(dim=2)).clamp(min=1e-8)
        columns.append((how.lambda_lse * cosine).exp().sum(1).log() / how.lambda_lse)
    scores = torch.stack(columns, 1)
    own, others = scores.diag(), ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    rows = ((margin + scores - own[:, None]).clamp(min=0) * others).max(1).values.sum()
    return LossOutput(rows + ((margin + scores - own[None, :]).clamp(min=0) * others).max(0).values.sum())


if __name__ == "__main__":
    run_command(main)

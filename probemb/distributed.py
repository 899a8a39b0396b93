"""Collectives over ranks, with gradient where it is needed; all of them work in a single process too."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from probemb.errors import UserError
from probemb.files import writing
from probemb.gaussian import Gaussian

T = TypeVar("T")
_control: tuple[Any, Any] | None = None  # the default group, and the one of `control_group` beside it
_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process computes as the only rank; nothing is sent."""
    global _alone
    _alone = True
    try:
        yield
    finally:
        _alone = False


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() and not _alone else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() and not _alone else 1


def is_main() -> bool:
    return rank() == 0


def init_process_group(timeout_minutes: float = 30) -> None:
    """Join the group that the launcher describes (torchrun, deepspeed, srun), or form a group of one.

    The store has a prefix per restart by torchrun, which leaves the earlier keys in it: an init over them hangs.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and int(os.environ.get("WORLD_SIZE", "1")) > 1:  # each process would train alone
        what = f"The launcher set WORLD_SIZE to {os.environ['WORLD_SIZE']}, but not {', '.join(missing)}."
        raise UserError(what, "Start with torchrun, or set these, and LOCAL_RANK, for each process.")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    this_rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if world > 1 and port == 0:  # no rank could be reached
        what = "The launcher gave the ranks port 0 to meet at."
        raise UserError(what, "Use torchrun --standalone, or name a free port.")
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher, instead of rank 0
    try:
        store = dist.TCPStore(address, port, world, this_rank == 0 and not served, timeout)
        store = dist.PrefixStore(f"attempt{_attempt()}", store)
        dist.init_process_group(backend, store=store, rank=this_rank, world_size=world, timeout=timeout)
        control_group(timeout)
    except (dist.DistStoreError, dist.DistNetworkError, dist.DistBackendError) as error:
        what = f"Not all {world} ranks met at {address}:{port} within {timeout_minutes:g} minutes (engine.timeout)."
        remedy = "Look at the output of the others: one has failed, hangs, or cannot reach that address."
        raise UserError(what, remedy) from error


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """All ranks by gloo, for messages between hosts that wait for no GPU; None: the default group, if it is gloo's.

    Else collective at the first call, which sets the timeout.
    """
    global _control
    if dist.get_backend() == "gloo":
        return None
    if _control is None or _control[0] is not dist.group.WORLD:
        _control = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout)
    return _control[1]


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def connect_to_store(name: str) -> dist.Store | None:
    """Another connection to the store at which the ranks met, for keys under `name`; None if they met in no store."""
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size(), is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"attempt{_attempt()}/{name}", store)


def leave_process_group() -> None:
    """Destroy the process group, if there is one, once gloo's threads are idle.

    They release the last collective's tensors a moment later, with Python's lock, which torch holds while it waits for
    them: without the pause a rank may hang.
    """
    if dist.is_initialized():
        time.sleep(0.2)  # beside nccl, too: `control_group` is gloo's
        dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------------- with gradient


class _Gather(torch.autograd.Function):
    """All ranks' tensors along dimension 0; an item's gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out = x.new_empty(world_size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        n = grad.shape[0] // world_size()
        if dist.get_backend() == "gloo":  # older gloo has no reduce-scatter
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad[rank() * n : (rank() + 1) * n]
        own = grad.new_empty(n, *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad)
        return own


def gather(x: Tensor) -> Tensor:
    """(n, ...) on each of W ranks to (W n, ...) in rank order, with gradient; n must be the same on every rank."""
    return x if world_size() == 1 else _Gather.apply(x)


def gather_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each (n, …) tensor of this rank to (W n, …), with gradient, in one collective; all in the first one's type."""
    if world_size() == 1:
        return list(tensors)
    packed = torch.cat([x.flatten(1).to(tensors[0].dtype) for x in tensors], 1)
    columns = gather(packed).split([x[0].numel() for x in tensors], 1)
    return [rows.reshape(-1, *x.shape[1:]).to(x.dtype) for rows, x in zip(columns, tensors)]


def gather_pairs(image: Gaussian, text: Gaussian) -> tuple[Gaussian, Gaussian]:
    """All ranks' images and texts, (n, …, D) to (W n, …, D), with gradient, in one collective."""
    mean_i, log_var_i, mean_t, log_var_t = gather_together([image.mean, image.log_var, text.mean, text.log_var])
    return Gaussian(mean_i, log_var_i), Gaussian(mean_t, log_var_t)


def gather_encoded(image, text):
    """`gather_pairs` of `Encoded`; tokens of texts are padded to the longest of any rank, in one more collective."""
    if world_size() == 1:
        return image, text
    if text.tokens is not None:
        missing, pad = max(all_of(text.tokens.shape[1])) - text.tokens.shape[1], torch.nn.functional.pad
        text = text._replace(tokens=pad(text.tokens, (0, 0, 0, missing)), mask=pad(text.mask, (0, missing)))
        if text.features is not None:
            text = text._replace(features=pad(text.features, (0, 0, 0, missing)))
    gathered = iter(gather_together([x for x in (*image, *text) if x is not None]))
    return image.each(lambda _: next(gathered)), text.each(lambda _: next(gathered))


def swap(x: Tensor, other: int, n: int) -> Tensor:
    """Send (m, …) to another rank, which sends (n, …) here in the same call; with this rank itself, `x`."""
    if other == rank():
        return x
    received = x.new_empty(n, *x.shape[1:])
    both = (dist.isend, x.contiguous()), (dist.irecv, received)
    messages = [dist.P2POp(way, tensor, other) for way, tensor in both if len(tensor)]
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()
    return received


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's values."""
    if world_size() > 1:
        for x in tensors:
            dist.broadcast(x.detach(), 0)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each that is trained the mean of all ranks' gradients; one without a gradient has 0."""
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    if world_size() > 1 and trained:
        packed = torch.cat([p.grad.flatten() for p in trained]).div_(world_size())
        dist.all_reduce(packed)
        for p, mean in zip(trained, packed.split([p.numel() for p in trained])):
            p.grad.copy_(mean.view_as(p))


def sum_over_ranks(numbers: Sequence[Tensor | float | bool], device=None) -> Tensor:
    """Each number's () sum over all ranks, in float64 on the device; one collective."""
    numbers = [torch.as_tensor(x, dtype=torch.float64).detach().reshape(()) for x in numbers]
    packed = torch.stack([x.to(device, non_blocking=True) for x in numbers])
    if world_size() > 1:
        dist.all_reduce(packed)
    return packed


def begin_reading(x: Tensor) -> Callable[[], list]:
    """Starts to copy x to the host; the function waits for the copy, but not for what a GPU was given to do since."""
    host = x.to("cpu", non_blocking=True)
    if not x.is_cuda:
        return host.tolist
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list:
        copied.synchronize()
        return host.tolist()

    return read


def mean_over_ranks(values: dict[str, Tensor | float], device=None) -> dict[str, float]:
    """The mean of every scalar over the ranks, in one collective; every rank must pass the same names."""
    return dict(zip(values, (sum_over_ranks(list(values.values()), device) / world_size()).tolist()))


# --------------------------------------------------------------------- collective, between hosts, which wait for no GPU


def sum_host(numbers: list[int]) -> list[int]:
    packed = torch.tensor(numbers, dtype=torch.int64)
    if world_size() > 1:
        dist.all_reduce(packed, group=control_group())
    return packed.tolist()


def all_of(own: Any) -> list[Any]:
    if world_size() == 1:
        return [own]
    everyone = [None] * world_size()
    dist.all_gather_object(everyone, own, group=control_group())
    return everyone


def agree(failure: Exception | None) -> None:
    """If any rank failed, all raise the first one's error; collective."""
    for error in filter(None, all_of(failure)):
        raise error


def on_main(call: Callable[[], T], path: Path, remedy: str) -> T | None:
    """Run `call` on rank 0 and return its result there, None on the others; collective.

    Raises UserError, on all ranks: the one that `call` raised; for an OSError, that `path` cannot be written.
    """
    result = failure = None
    if is_main():
        try:
            with writing(path, remedy):
                result = call()
        except UserError as error:
            failure = error
    agree(failure)
    return result


def same_everywhere(what: str, value: str, remedy: str) -> None:
    """Refuse values that differ between ranks, as from a folder that is not shared; collective. Raises UserError."""
    first, *others = all_of(value)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise UserError(f"{what} is {first} for rank 0 and {other} for rank {rank}.", remedy)

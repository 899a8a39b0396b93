"""One forward and backward pass on fake tensors: bytes and FLOPs of any model, without its memory or its time.

Fake tensors have shapes, types and storages of a size, but no values; torch's own operators and autograd run on them.
They stand on the CPU, so that no GPU is needed. `Likeness` adds what a GPU does differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from weakref import finalize

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pretrain.config import Config, Loss
from pretrain.engine.engine import Towers
from pretrain.trainer import Forward, objective
from probemb import Gaussian
from probemb.models import create_model

# Autocast on a GPU runs these in float32, autocast on a CPU in the type of their input.
FLOAT32_ON_A_GPU = {"layer_norm", "group_norm", "norm", "softmax", "log_softmax", "softplus", "exp", "log", "pow", "sum"}


def build(config: Config) -> nn.Module:
    """The model of a pretraining configuration with fake weights, in a fraction of a second; draws no random number.

    Pretrained weights do not change shapes and are not looked at.

    Raises:
        UserError: the configuration names no model that can be built.
    """
    m = config.model
    with torch.random.fork_rng(devices=[]), init_empty_weights():
        model = create_model(m.name, embed_dim=m.embed_dim, n_unc_layers=m.n_unc_layers, head=m.head)
    with FakeTensorMode(allow_non_fake_inputs=True) as model.fake_mode:
        return model.to_empty(device="cpu")


@dataclass(frozen=True)
class Trace:
    """A pass forward and backward.

    Attributes:
        kept: bytes alive after the forward pass, the outputs among them.
        peak: most bytes alive at one moment, without parameters' gradients; `with_gradients`, if they stay.
        forward_flops, backward_flops: recomputation belongs to the backward pass.
    """

    kept: float
    peak: float
    with_gradients: float
    forward_flops: float
    backward_flops: float

    @property
    def flops(self) -> float:
        """Forward and backward."""
        return self.forward_flops + self.backward_flops

    def towards(self, other: Trace, share: float) -> Trace:
        """The trace at that share of the way to another one."""
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return Trace(*(a + share * (b - a) for a, b in pairs))


class Tracker(TorchDispatchMode):
    """Follows the storages that operators make until they are freed, and counts FLOPs of matrix products.

    Args:
        known: tensors that are there before and are not counted.
        parameters: whose gradients are told apart from everything else.
    """

    def __init__(self, known: Iterable[Tensor], parameters: Iterable[nn.Parameter] = ()):
        super().__init__()
        self.alive = self.peak = self.with_gradients = self.gradients = self.flops = 0
        self._storages = {t.untyped_storage()._cdata for t in known}
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in parameters]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # most calls are this one
            return torch.device("cpu")
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self._add(t.untyped_storage())
        return out

    def __exit__(self, *error):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*error)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.alive += storage.nbytes()
            self.with_gradients = max(self.with_gradients, self.alive)
            self.peak = max(self.peak, self.alive - self.gradients)
            finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self.alive -= nbytes

    def _accumulated(self, parameter: nn.Parameter) -> None:
        self.gradients += parameter.grad.untyped_storage().nbytes()


class Likeness(TorchFunctionMode):
    """Makes a pass on fake CPU tensors like one on real tensors: packed sequences are all of full length, and with
    `gpu`, autocast knows the operators that a GPU runs in float32."""

    def __init__(self, gpu: bool):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.gpu and name in FLOAT32_ON_A_GPU and torch.is_autocast_enabled("cpu"):
            args = [a.float() if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a for a in args]
        elif name == "_pack_padded_sequence":
            inputs, _, batch_first = args
            inputs = inputs.transpose(0, 1) if batch_first else inputs
            sizes = torch.empty(len(inputs), dtype=torch.int64)
            sizes.batch = inputs.shape[1]
            return inputs.flatten(0, 1), sizes
        elif name == "__getitem__" and hasattr(args[0], "batch"):  # nn.GRU reads the first of the sizes
            return args[0].batch
        elif name == "_pad_packed_sequence":
            data, sizes, batch_first, *_ = args
            padded = data.unflatten(0, (len(sizes), -1))
            lengths = torch.full((padded.shape[1],), len(sizes))
            return (padded.transpose(0, 1) if batch_first else padded), lengths
        elif name in ("gru", "lstm", "rnn_tanh", "rnn_relu") and isinstance(args[3], list):  # of a packed sequence
            data, sizes, hidden, weights, *options = args
            out, *last = func(data.unflatten(0, (len(sizes), -1)), hidden, weights, *options, False)  # not batch_first
            return out.flatten(0, 1), *last
        return func(*args, **kwargs)


def trace_towers(
    model: nn.Module, rows: int, half: bool, gpu: bool, checkpointing: bool = False, text_tokens: int | None = None
) -> Trace:
    """Both towers of a model of `build` over so many rows; `text_tokens` is the longest text's, by default the context."""
    with model.fake_mode, Likeness(gpu):
        images = torch.empty(rows, 3, model.image_size, model.image_size)
        tokens = torch.empty(rows, text_tokens or model.context_length, dtype=torch.int64)
        model.set_grad_checkpointing(checkpointing)
        towers = Towers(model, "bf16" if half else "fp32")
        return trace(lambda: towers(images, tokens), [images, tokens, *model.buffers()], list(model.parameters()))


def trace_loss(config: Loss, rows: int, world: int, embed_dim: int) -> Trace:
    """The loss of one rank's rows against all ranks' columns, from the Gaussians on."""
    with FakeTensorMode():
        leaves = [torch.empty(rows, embed_dim, requires_grad=True) for _ in range(4)]
        leaves.append(torch.empty(3, requires_grad=True))

        def forward() -> list[Tensor]:
            packed = torch.stack(leaves[:4], 1)
            everyone = packed.repeat(world, 1, 1) if world > 1 else packed
            mean_i, log_var_i, mean_t, log_var_t = everyone.unbind(1)
            gathered = Gaussian(mean_i, log_var_i), Gaussian(mean_t, log_var_t)
            return [objective(config, Forward.of(tuple(leaves)), *gathered, offset=0)[0]]

        return trace(forward, leaves)


def trace(forward: Callable[[], Sequence[Tensor]], known: list[Tensor], parameters: Sequence[nn.Parameter] = ()) -> Trace:
    """A forward pass, and the backward pass from all of its outputs; inside a fake mode."""
    with Tracker([*known, *parameters], parameters) as tracker:
        outputs = tuple(out for out in forward() if out.requires_grad)
        kept, forward_flops = tracker.alive, tracker.flops
        gradients = tuple(torch.empty_like(out) for out in outputs)
        # torch.autograd.backward is a function that `Likeness` would handle, and recomputed blocks would run without it.
        Variable._execution_engine.run_backward(outputs, gradients, False, False, (), True, True)
    for tensor in (*known, *parameters):
        tensor.grad = None
    return Trace(kept, tracker.peak, tracker.with_gradients, forward_flops, tracker.flops - forward_flops)

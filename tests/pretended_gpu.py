"""A GPU that is none: tensors are computed on the CPU, and say that they are on the device "gpu".

    def work(rank, world, ...):              # in a fresh process: what is registered stays
        with PretendedGPU() as gpu:
            model = gpu.move(model)
            ...

What mixes tensors of two devices raises `Mismatch`, as CUDA would; autograd is torch's own. Streams, pinned memory,
autocast and CUDA's own kernels are not pretended: `tests/gpu` is for those.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "gpu"
aten = torch.ops.aten


class Mismatch(RuntimeError):
    """Tensors, or tensors and a generator, are on different devices."""


class OnGPU(Tensor):
    """A tensor that says that it is on the GPU; `held` has its values."""

    @staticmethod
    def __new__(cls, held: Tensor):
        tensor = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=torch.device(NAME, 0),
        )  # fmt: skip
        tensor.held = held
        return tensor

    def __repr__(self) -> str:
        return f"OnGPU({self.held})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function} of a tensor on the pretended GPU, which is off")


needs_pretended_gpu = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends in Python",
)


def register() -> None:
    """The device, in this process."""

    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    torch.library.Library("_", "IMPL", "AutocastPrivateUse1").fallback(torch.library.fallthrough_kernel)


class PretendedGPU(TorchDispatchMode):
    """While it is on, tensors can be made on and moved to `device`."""

    INDEXING = frozenset(
        (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put_.default, aten.index_put.default,
         aten._index_put_impl_.default, aten._unsafe_index_put.default)
    )  # fmt: skip
    COPYING = frozenset((aten.copy_.default, aten._to_copy.default))
    PACKING = frozenset((aten._pack_padded_sequence.default, aten._pack_padded_sequence_backward.default))

    def __init__(self):
        super().__init__()
        register()
        self.device = torch.device(NAME, 0)
        self.generators: list[torch.Generator] = []
        self._plain = {}

    def __enter__(self):
        # What torch's Python layer would ask of the backend in C++.
        for name in ("tensor", "as_tensor"):
            self._replace(torch, name, self._made(getattr(torch, name)))
        self._replace(torch, "Generator", self._generator_type())
        tolist = Tensor.tolist
        self._replace(Tensor, "tolist", lambda x: tolist(x.cpu() if isinstance(x, OnGPU) else x))
        self._replace(Tensor, "new_tensor", lambda x, data: torch.tensor(data, dtype=x.dtype, device=x.device))
        self._replace(torch.inference_mode, "__enter__", enter_no_grad)
        self._replace(torch.inference_mode, "__exit__", exit_no_grad)
        return super().__enter__()

    def __exit__(self, *error):
        for (owner, name), value in self._plain.items():
            setattr(owner, name, value)
        self._plain.clear()
        return super().__exit__(*error)

    def move(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> nn.Module:
        """`module.to(device)`, that also gives `optimizers` the new parameters, as CUDA's does."""
        moved: dict[Tensor, Tensor] = {}
        for one in module.modules():
            for store in (one._parameters, one._buffers):
                for name, tensor in store.items():
                    if tensor is not None and tensor not in moved:
                        there = tensor.detach().to(self.device)
                        as_parameter = isinstance(tensor, nn.Parameter)
                        moved[tensor] = nn.Parameter(there, tensor.requires_grad) if as_parameter else there
                    store[name] = moved.get(tensor)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [moved.get(parameter, parameter) for parameter in group["params"]]
        return module

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        ours = [x for x in leaves if isinstance(x, OnGPU)]
        if function in self.PACKING:
            return self._pack(function, args, bool(ours))
        there = bool(ours)
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == NAME
            kwargs["device"] = torch.device("cpu")
        if function in self.COPYING:
            if function is aten.copy_.default:
                there = isinstance(args[0], OnGPU)
        elif ours:
            self._check(function, args, [x for x in leaves if isinstance(x, Tensor)])
        generators = [x for x in leaves if isinstance(x, self._plain[torch, "Generator"])]
        if any((x._cdata in [one._cdata for one in self.generators]) != there for x in generators):
            raise Mismatch(f"{function}: the generator is of another device")
        held = tree_map_only(OnGPU, lambda x: x.held, (args, kwargs))
        out = REPLACED.get(function, function)(*held[0], **held[1])
        if torch.Tag.inplace_view in function.tags and ours:
            with no_dispatch():
                function(*args, **kwargs)  # the new shape of the tensor that says that it is on the GPU
        if not there:
            return out
        known = {id(x.held): x for x in ours}  # what is written in place
        return tree_map_only(Tensor, lambda x: known.get(id(x)) if id(x) in known else OnGPU(x), out)

    def _check(self, function, args: tuple, tensors: list[Tensor]) -> None:
        """Refuse what CUDA refuses."""
        if function in self.INDEXING:
            for index in args[1]:
                if isinstance(index, OnGPU) and not isinstance(args[0], OnGPU):
                    raise Mismatch(f"{function}: the index is on the GPU, and what it indexes on the CPU")
            tensors = [x for x in (args[0], *args[2:3]) if isinstance(x, Tensor)]
        if any(not isinstance(x, OnGPU) and (x.ndim or x is args[0]) for x in tensors):
            shapes = ", ".join(f"{tuple(x.shape)} on {x.device.type}" for x in tensors)
            raise Mismatch(f"{function}: {shapes}")

    def _pack(self, function, args: tuple, ours: bool):
        """Lengths and sizes of packed sequences are on the CPU."""
        if isinstance(args[1], OnGPU):
            raise Mismatch(f"{function}: lengths are on the GPU")
        out = function(args[0].held if ours else args[0], *args[1:])
        if not ours:
            return out
        return (OnGPU(out[0]), out[1]) if isinstance(out, tuple) else OnGPU(out)

    def _replace(self, owner, name: str, value) -> None:
        self._plain[owner, name] = getattr(owner, name)
        setattr(owner, name, value)

    def _made(self, make):
        """torch.tensor and the like, which write to the device's memory past the dispatcher."""

        def made(*args, device=None, **kwargs):
            if device is not None and torch.device(device).type == NAME:
                return make(*args, **kwargs).to(self.device)
            return make(*args, device=device, **kwargs)

        return made

    def _generator_type(self):
        plain = torch.Generator

        def new(cls, device="cpu"):
            if torch.device(device).type != NAME:
                return plain(device)
            self.generators.append(plain())
            return self.generators[-1]

        return type("Generator", (), {"__new__": new})


def enter_no_grad(context) -> None:
    """In place of inference mode, whose tensors cannot be wrapped."""
    context.instead = torch.no_grad()
    context.instead.__enter__()


def exit_no_grad(context, *error) -> None:
    context.instead.__exit__(*error)


def gru_cell(gates, hidden, state, bias=None, hidden_bias=None):
    """A step of a GRU from its matrix products, as CUDA's kernel has it; and what its backward pass needs."""
    if bias is not None:
        gates, hidden = gates + bias, hidden + hidden_bias
    (reset, update, new), (hidden_reset, hidden_update, hidden_new) = gates.chunk(3, 1), hidden.chunk(3, 1)
    r, i = (reset + hidden_reset).sigmoid(), (update + hidden_update).sigmoid()
    n = (new + r * hidden_new).tanh()
    return n + i * (state - n), torch.cat([r, i, n, state, hidden_new], 1)


def gru_cell_backward(grad, workspace, has_bias):
    r, i, n, state, hidden_new = workspace.chunk(5, 1)
    grad_i, grad_n = grad * (state - n) * (1 - i) * i, grad * (1 - i) * (1 - n * n)
    grad_r = grad_n * hidden_new * (1 - r) * r
    gates, hidden = torch.cat([grad_r, grad_i, grad_n], 1), torch.cat([grad_r, grad_i, grad_n * r], 1)
    return gates, hidden, grad * i, *((gates.sum(0), hidden.sum(0)) if has_bias else (None, None))


REPLACED = {  # kernels that CPUs do not have
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}

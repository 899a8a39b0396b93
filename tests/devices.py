"""What a GPU would refuse, on a CPU: tensors that were made without naming the device of those that they meet."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Apart(TorchDispatchMode):
    """Raises where an operation mixes tensors of two devices; those without dimensions may be anywhere."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        if len({x.device for x in tensors}) > 1:
            raise RuntimeError(f"{operation} of tensors that are here and elsewhere")
        return operation(*args, **(kwargs or {}))


def elsewhere(call):
    """The same function, in which what names no device is made on another one."""

    def called(*args, **more):
        with torch.device("meta"), Apart():
            return call(*args, **more)

    return called

"""What a GPU would refuse, on a CPU: tensors that were made without naming the device of those that they meet."""

import torch


def elsewhere(call):
    """The same function, in which what names no device is made on another one, so that mixing both raises."""

    def called(*args, **more):
        with torch.device("meta"):
            return call(*args, **more)

    return called

"""The current device of a thread: where CUDA and Triton launch what that thread asks for."""

from __future__ import annotations

import torch


def enter_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread, with its context; nothing on a CPU.

    torch's own operations run on the device of their tensors. Triton launches on the thread's current device, which is
    the first GPU in a new thread: it compiles for the first GPU, and may find the tensors' memory unreadable.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # a call of CUDA's runtime gives the thread the device's context

"""Where the model runs and in which precision, decided once."""

import torch

import cog_rwkv_ops as ops

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(setting: str = "auto") -> torch.device:
    """``auto`` is CUDA where there is a device that the operators were built for, else the CPU.

    Raises ValueError where the named one is not there or the operators were not built for it.
    """
    cuda = torch.cuda.is_available()
    if setting == "auto":
        usable = cuda and ops.cuda_problem() is None
        return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")
    device = torch.device(setting)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device: {setting} is neither cpu nor cuda")
    if not cuda:
        raise ValueError(f"device: {setting} was asked for, but torch {torch.__version__} sees no CUDA device")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {setting} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    if problem := ops.cuda_problem():
        raise ValueError(f"device: {setting} was asked for, but {problem}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def why_not_cuda(setting: str) -> str | None:
    """Why ``choose_device`` leaves a CUDA device alone that is there; None where it does not, or was told to."""
    return ops.cuda_problem() if setting == "auto" and torch.cuda.is_available() else None


def choose_dtype(setting: str, device: torch.device) -> torch.dtype | None:
    """Dtype of the matrices: ``auto`` is float16 on CUDA; on the CPU it is None, the dtype in which each is stored
    (16-bit weights are read as such, arithmetic is float32). Raises ValueError for an unknown name."""
    if setting == "auto":
        return torch.float16 if device.type == "cuda" else None
    if setting not in DTYPES:
        raise ValueError(f"dtype: {setting!r} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[setting]

"""Where the model runs and in which precision, decided once."""

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(setting: str = "auto") -> torch.device:
    """``auto`` is CUDA where there is a device, else the CPU. Raises ValueError where the named one is not there."""
    cuda = torch.cuda.is_available()
    if setting == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    device = torch.device(setting)
    if device.type == "cuda" and not cuda:
        raise ValueError(f"device: {setting} was asked for, but torch {torch.__version__} sees no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {setting} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {setting} is neither cpu nor cuda")
    return device


def choose_dtype(setting: str, device: torch.device) -> torch.dtype | None:
    """Dtype of the matrices: ``auto`` is float16 on CUDA; on the CPU it is None, the dtype in which each is stored
    (16-bit weights are read as such, arithmetic is float32). Raises ValueError for an unknown name."""
    if setting == "auto":
        return torch.float16 if device.type == "cuda" else None
    if setting not in DTYPES:
        raise ValueError(f"dtype: {setting!r} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[setting]

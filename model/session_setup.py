"""From the settings to the sessions of a server."""

import atexit
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.memory import MIB, free_memory, free_ram
from model.rwkv7 import RWKV7
from model.sessions import Limits, Sessions
from model.settings import Settings
from model.tiers import StateTiers

SHARE = 0.125  # of what is free
DEVICE_MOST, HOST_MOST = 1024 * MIB, 4096 * MIB

WHOLE = 1 << 16  # bytes: tensors up to this size count whole
WINDOW = 1 << 12  # bytes of each of the WINDOWS parts of larger ones
WINDOWS = 16


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """32 hex digits for the weights of a checkpoint: names, shapes, dtypes, and samples of the bytes of all tensors.

    Samples, because all of a large checkpoint would take longer to hash than to load. Training changes every tensor,
    and the small ones count whole; what goes unseen is a change to a few rows of a large matrix by hand.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if len(data) <= WHOLE:
            digest.update(data.numpy().data)
            continue
        for n in range(WINDOWS):
            begin = (len(data) - WINDOW) * n // (WINDOWS - 1)
            digest.update(data[begin : begin + WINDOW].numpy().data)
    return digest.hexdigest()[:32]


def origin(checkpoint: Checkpoint, model: RWKV7, settings: Settings) -> dict[str, str]:
    """What decides the numbers in a state, by names that a person understands."""
    return {
        "model": fingerprint(checkpoint.tensors),
        "matrices": str(model.dtype).removeprefix("torch."),
        "state_dtype": settings.state_dtype,
        "start_token": str(settings.start_token).lower(),
    }


def open_sessions(settings: Settings, device: torch.device, origin: Mapping[str, str]) -> Sessions:
    """The sessions of a server whose states are made on ``device`` and are of ``origin``; closed when Python ends.

    Call it when all else has its memory. Raises SettingsError where the database cannot be used.
    """
    on_device, on_host = memory_for_sessions(settings, device)
    limits = Limits(settings.session_limit, settings.session_disk * MIB, settings.session_ttl, settings.session_wait)
    sessions = Sessions(
        StateTiers(on_device, on_host, device),
        limits,
        origin,
        settings.session_database,
        settings.session_durable,
        on_host,
    )
    atexit.register(sessions.close)  # Cog ends its worker as Python ends, and waits for it
    return sessions


def memory_for_sessions(settings: Settings, device: torch.device) -> tuple[int, int]:
    """Bytes on the device and on the host: as the settings say, or a share of what is free, with an upper limit."""
    on_device = 0
    if device.type == "cuda":
        spare = max(0, free_memory(device) - settings.reserve(device.type))
        on_device = _size(settings.session_device, DEVICE_MOST, spare)
    return on_device, _size(settings.session_host, HOST_MOST, free_ram())


def _size(wanted: int | None, most: int, spare: int) -> int:
    return min(most, int(spare * SHARE)) if wanted is None else wanted * MIB

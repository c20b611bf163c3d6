"""What calls leave on the heap of this process. glibc alone counts it; elsewhere tests with it are skipped."""

import ctypes
import gc
from collections.abc import Callable

import pytest
import torch


class _Info(ctypes.Structure):
    """``struct mallinfo2`` of <malloc.h>: ten sizes; of blocks in use, those mapped each and the others."""

    _fields_ = (
        *((f"skipped{n}", ctypes.c_size_t) for n in range(4)),
        ("hblkhd", ctypes.c_size_t),
        *((f"skipped{n}", ctypes.c_size_t) for n in range(5, 7)),
        ("uordblks", ctypes.c_size_t),
        *((f"skipped{n}", ctypes.c_size_t) for n in range(8, 10)),
    )


def left_by(call: Callable[[], object], times: int = 200) -> float:
    """Bytes of the heap that one call of many leaves in use. Up to a few are noise; the least block takes 32."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("this C library does not count its heap")
    mallinfo.restype = _Info

    def in_use() -> int:
        gc.collect()
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    threads = torch.get_num_threads()
    gc.freeze()  # what is there already need not be searched
    torch.set_num_threads(1)  # with more, small calls take a hundred times as long on a busy machine
    try:
        for _ in range(times):
            call()
        before = in_use()
        for _ in range(times):
            call()
        return (in_use() - before) / times
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()

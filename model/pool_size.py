"""As many rows of state as the memory has room for: decided, tried and filled at setup, so that no request finds none.

What is free after the weights, less a reserve for the steps themselves, holds the pool; of the rest the prefix cache
may have a part.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from model.config import Config
from model.device import DTYPES
from model.errors import RwkvError
from model.handle import Handle
from model.logs import get_logger
from model.memory import MIB, free_memory
from model.prefix_cache import PrefixCache
from model.sampling import Sampler, SamplingParams
from model.scheduler import TOGETHER, Part, Sequence
from model.settings import PREFIX, Settings
from model.state import StatePool, state_bytes
from model.step_graphs import StepGraphs
from model.stepper import Model, Stepper
from model.tiers import StateTiers

SHARE = 0.5  # of the free memory, for a pool whose size was not asked for
CACHE_SHARE = 0.25  # of what is still free then, for the prefix cache, but no more than
CACHE_MOST = 4096 * MIB  # on CUDA, and
CPU_STATES = 16  # on the CPU, where a process that grows is a surprise
# Free on CUDA once the largest steps have been made, for what other steps bring with them: the code of kernels, which
# the driver loads when they are first called, and blocks of other sizes. On an H200 15 MiB were too few.
SPARE = 64 * MIB

Made = tuple[StatePool, Sampler, StepGraphs | None]
T = TypeVar("T")

log = get_logger()


class NoRoomError(RwkvError):
    """Not one sequence fits beside the weights."""

    code = "E140"


def fit(
    model: Model, config: Config, settings: Settings, allowed: Tensor, careful: Model | None = None
) -> tuple[StatePool, Sampler, StepGraphs | None]:
    """A pool and its sampler, with as many rows as were asked for or as there is room for, and the graphs over it.

    On CUDA with so many that the largest steps have been made once, and something is left. ``allowed``: as for the
    sampler. ``careful``: as for the engine; a ``model`` that has one gets graphs for its steps.
    Raises NoRoomError, with the numbers, where there is no room for one row.
    """
    size = row_bytes(config, DTYPES[settings.state_dtype])
    rows = choose_rows(settings, size, free_memory(model.device), model.device)
    while isinstance(found := _try(model, config, settings, rows, allowed, careful), str):
        rows = _fewer(rows, model.device, found)
    return found


def _try(
    model: Model, config: Config, settings: Settings, rows: int, allowed: Tensor, careful: Model | None
) -> Made | str:
    """Those, or why there cannot be so many rows."""
    device = model.device
    try:
        pool = StatePool(config, rows, device, DTYPES[settings.state_dtype])
        sampler = Sampler(config.vocab, rows, device, allowed, tuned=settings.kernels == "tuned")
        if device.type == "cpu":
            return pool, sampler, None
        chunk = settings.chunk(device.type)
        graphs = in_a_thread(partial(_warm, model, pool, sampler, chunk, careful))
        free = free_memory(device)
    except RuntimeError as error:  # an operator that finds no memory raises just that, and prints why
        return str(error).partition("\n")[0]
    if free < SPARE:
        return f"the largest steps leave {free / MIB:.1f} MiB, {SPARE / MIB:.0f} MiB are wanted"
    return pool, sampler, graphs


def _warm(model: Model, pool: StatePool, sampler: Sampler, chunk: int, careful: Model | None) -> StepGraphs | None:
    """The graphs first: a capture begins with giving back what torch keeps, which is what a rehearsal is for."""
    with torch.cuda.device(model.device):
        graphs = StepGraphs(model, pool, chunk) if careful is not None else None
        rehearse(model, pool, sampler, chunk, careful, graphs)
    return graphs


def in_a_thread(call: Callable[[], T]) -> T:
    """``call()`` in a thread that ends with it, as the one before the engine's.

    torch has a cuBLAS handle for each thread, on an H200 with a workspace of 32 MiB, and gives that of a thread that
    has ended to the next one. So the engine's thread finds it made, instead of making another at a request.
    """
    with ThreadPoolExecutor(1) as one:
        return one.submit(call).result()


def choose_rows(settings: Settings, size: int, free: int, device: torch.device) -> int:
    """Rows of ``size`` bytes for a ``device`` of which ``free`` bytes are free."""
    reserve = settings.reserve(device.type)
    wanted = settings.rows(device.type)
    room = max(0, free - reserve) // size
    if room < 1:
        raise NoRoomError(
            f"no room for one sequence: its state and sampling take {size / MIB:.1f} MiB, {free / MIB:.1f} MiB are "
            f"free on {device} beside the weights, and {reserve / MIB:.0f} MiB of these are kept for the steps "
            f"({PREFIX}MEMORY_RESERVE)"
        )
    if settings.max_batch is None:
        return max(1, min(wanted, int(room * SHARE)))
    if room < wanted:
        log.warning(
            "pool_shrunk", wanted=wanted, rows=room, row_mib=round(size / MIB, 1), free_mib=free // MIB,
            reserve_mib=reserve // MIB,
        )  # fmt: skip
    return min(wanted, room)


def row_bytes(config: Config, dtype: torch.dtype) -> int:
    """What a row takes: its state, and the counts of its tokens in the sampler."""
    return state_bytes(config, dtype) + 4 * config.vocab


def open_cache(settings: Settings, pool: StatePool) -> PrefixCache | None:
    """The prefix cache for states of ``pool``, in memory that is free once all else is there.

    None where it is turned off or finds no room.
    """
    device, first = pool.wkv.device, pool.save(0)
    state = first.wkv.nbytes + first.shift.nbytes
    if settings.prefix_cache is not None:
        size = settings.prefix_cache * MIB
    else:
        spare = max(0, free_memory(device) - settings.reserve(device.type))
        size = min(CACHE_MOST if device.type == "cuda" else CPU_STATES * state, int(spare * CACHE_SHARE))
    if size < state:
        return None
    host = settings.prefix_cache_host * MIB if device.type == "cuda" else 0
    tiers = StateTiers(size, host, device)
    tiers.to_host(first)  # pins what there is to pin now, for later it would stop the device
    return PrefixCache(tiers, exact=device.type == "cpu")


def rehearse(
    model: Model,
    pool: StatePool,
    sampler: Sampler,
    chunk: int,
    careful: Model | None = None,
    graphs: StepGraphs | None = None,
) -> None:
    """The largest steps that can come, as the engine makes them, and those of one token of every row.

    The largest: chunks of as many prompts as go together, of which nothing is drawn yet, and a token of every other
    row, with all that sampling can do. The memory that they take stays with torch, for the steps to come. Raises
    RuntimeError where it is not there.
    """
    params = SamplingParams(top_p=0.5, top_k=50, presence_penalty=0.1, seed=0)
    stepper = Stepper(model, sampler, pool, careful, graphs)
    reading = min(TOGETHER, max(1, pool.rows - 1))
    for size in (chunk, 1):
        for care in (False, True) if careful is not None else (False,):
            lengths = [1] * (pool.rows - reading) + [size] * reading
            sequences = [
                Sequence([0] * length, params, 1, Handle(), row=row, careful=care) for row, length in enumerate(lengths)
            ]
            drawing = max(1, pool.rows - reading * (size > 1))
            parts = [Part(one, 0, one.prompt, draws=one.row < drawing) for one in sequences]
            stepper.launch(parts, set()).result()
    for row in range(pool.rows):
        stepper.end(row)


def _fewer(rows: int, device: torch.device, problem: str) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    free = free_memory(device)
    if rows == 1:
        raise NoRoomError(f"no room for a step of one sequence: {free / MIB:.1f} MiB are free on {device}: {problem}")
    log.warning("pool_shrunk", wanted=rows, rows=rows // 2, free_mib=free // MIB, problem=problem)
    return rows // 2

"""RWKV-7 "Goose": the forward pass over packed sequences, on the operators of ``cog_rwkv_ops``.

The formulas are those of the paper (arXiv:2503.14456, section 4) in the order in which it gives them. Shapes: N packed
tokens of B sequences, C = width = heads * head_size. Activations between the operators are float32 on every device;
matrices are kept in the model's dtype; vectors are float32. There is no device branch here.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

import cog_rwkv_ops as ops
from model.checkpoint import Checkpoint
from model.config import Config
from model.state import StatePool
from model.weights import Weights


@dataclass(frozen=True)
class Packed:
    """Which sequences the packed tokens belong to.

    Sequence i is tokens ``cu_seqlens[i]:cu_seqlens[i+1]`` and its state is row ``rows[i]`` of the pool; both are int64,
    of shapes [B + 1] and [B], on the model's device. The rows of a call differ from each other.
    """

    rows: Tensor
    cu_seqlens: Tensor


class TimeMix:
    """Token shift, the WKV-7 recurrence and its gate: the attention of RWKV-7."""

    def __init__(self, w: Weights, block: str) -> None:
        att = f"{block}att."
        self.mix = torch.stack([w.vector(f"{att}x_{name}") for name in "rwkvag"])
        self.receptance, self.key, self.value, self.output = (
            w.product(f"{att}{name}.weight") for name in ("receptance", "key", "value", "output")
        )
        self.decay = (*w.low_rank(f"{att}w1", f"{att}w2"), w.vector(f"{att}w0"))
        self.in_context_rate = (*w.low_rank(f"{att}a1", f"{att}a2"), w.vector(f"{att}a0"))
        self.gate = w.low_rank(f"{att}g1", f"{att}g2")
        # The first layer is where v_first comes from, so it has nothing to mix in.
        first = block == "blocks.0."
        self.value_mix = None if first else (*w.low_rank(f"{att}v1", f"{att}v2"), w.vector(f"{att}v0"))
        self.k_k, self.k_a, self.r_k = (w.vector(f"{att}{name}") for name in ("k_k", "k_a", "r_k"))
        self.norm = w.vector(f"{att}ln_x.weight"), w.vector(f"{att}ln_x.bias")

    def weights(self) -> tuple[Tensor, ...]:
        """All of them, in the order of ``ops.decode_``."""
        squares = self.receptance, self.key, self.value
        low_ranks = (*self.decay, *self.in_context_rate, *self.gate, *(self.value_mix or ()))
        return (self.mix, *squares, *low_ranks, self.k_k, self.k_a, self.r_k, *self.norm, self.output)

    def __call__(
        self, x: Tensor, v_first: Tensor | None, shift: Tensor, wkv: Tensor, seq: Packed
    ) -> tuple[Tensor, Tensor]:
        """x [N, C] -> (output [N, C], value of the first layer [N, C]); ``shift`` and ``wkv`` are updated in place."""
        x_r, x_w, x_k, x_v, x_a, x_g = ops.token_shift_(x, self.mix, shift, seq.rows, seq.cu_seqlens).unbind(0)
        r = ops.linear(x_r, self.receptance)
        k = ops.linear(x_k, self.key)
        v = ops.linear(x_v, self.value)
        w = ops.low_rank(x_w, *self.decay, activation="tanh")
        a = ops.low_rank(x_a, *self.in_context_rate, activation="none")
        g = ops.low_rank(x_g, *self.gate, None, activation="sigmoid")
        v_mix = None if self.value_mix is None else ops.low_rank(x_v, *self.value_mix, activation="none")
        k, v, minus_kk, kk_a = ops.time_mix_prepare(k, v, a, self.k_k, self.k_a, v_first, v_mix)
        y = ops.wkv7_(r, w, k, v, minus_kk, kk_a, wkv, seq.rows, seq.cu_seqlens)
        y = ops.time_mix_output(y, r, k, v, g, self.r_k, *self.norm)
        return ops.linear(y, self.output), v if v_first is None else v_first


class ChannelMix:
    """Token shift and a feed-forward network with a squared ReLU."""

    def __init__(self, w: Weights, block: str) -> None:
        ffn = f"{block}ffn."
        self.mix = w.vector(f"{ffn}x_k").unsqueeze(0)
        self.key = w.product(f"{ffn}key.weight")
        self.value_t = w.matrix_t(f"{ffn}value.weight")

    def weights(self) -> tuple[Tensor, ...]:
        """All of them, in the order of ``ops.decode_``."""
        return self.mix, self.key, self.value_t

    def __call__(self, x: Tensor, shift: Tensor, seq: Packed) -> Tensor:
        """x [N, C] -> [N, C]; ``shift`` is updated in place."""
        x_k = ops.token_shift_(x, self.mix, shift, seq.rows, seq.cu_seqlens)[0]
        return ops.squared_relu_linear(ops.linear(x_k, self.key), self.value_t)


class Block:
    """One layer: time mix and channel mix, each behind a layer norm and added to the residual stream."""

    def __init__(self, w: Weights, layer: int) -> None:
        name = f"blocks.{layer}."
        self.ln1 = w.vector(f"{name}ln1.weight"), w.vector(f"{name}ln1.bias")
        self.ln2 = w.vector(f"{name}ln2.weight"), w.vector(f"{name}ln2.bias")
        self.time_mix, self.channel_mix = TimeMix(w, name), ChannelMix(w, name)

    def weights(self) -> tuple[Tensor, ...]:
        """All of them, in the order of ``ops.decode_``."""
        return (*self.ln1, *self.time_mix.weights(), *self.ln2, *self.channel_mix.weights())

    def __call__(
        self, x: Tensor, v_first: Tensor | None, shift: Tensor, wkv: Tensor, seq: Packed
    ) -> tuple[Tensor, Tensor]:
        """x [N, C], shift [2, R, C], wkv [R, H, 64, 64] -> (x [N, C], v_first [N, C])."""
        y, v_first = self.time_mix(ops.layer_norm(x, *self.ln1), v_first, shift[0], wkv, seq)
        x = ops.add(x, y)
        x = ops.add(x, self.channel_mix(ops.layer_norm(x, *self.ln2), shift[1], seq))
        return x, v_first


class RWKV7:
    """An RWKV-7 language model whose weights lie on one device."""

    def __init__(self, config: Config, w: Weights, tuned: bool = False) -> None:
        self.config, self.device = config, w.device
        self.embedding = w.table("emb.weight")
        self.ln0 = w.vector("blocks.0.ln0.weight"), w.vector("blocks.0.ln0.bias")
        self.blocks = [Block(w, layer) for layer in range(config.layers)]
        self.ln_out = w.vector("ln_out.weight"), w.vector("ln_out.bias")
        self.head = w.product("head.weight")
        self._weights = [*(one for block in self.blocks for one in block.weights()), *self.ln_out, self.head]
        self._tuned = tuned and ops.can_forward(self._weights)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        progress: bool = True,
        host_embedding: bool = False,
        tuned: bool = False,
    ) -> "RWKV7":
        """Move a checkpoint to ``device``; matrices become ``dtype`` (None keeps the dtype in which each is stored).

        With ``host_embedding`` the embedding stays in pinned host memory, where a CUDA device reads a row a token.
        ``tuned``: on CUDA with 16-bit matrices, whole steps by ``ops.forward_``.
        """
        weights = Weights(checkpoint.tensors, torch.device(device), dtype, progress, host_embedding, pinned=tuned)
        try:
            return cls(checkpoint.config, weights, tuned)
        finally:
            weights.close()

    @property
    def tuned(self) -> bool:
        """Whether steps are made by ``ops.forward_``."""
        return self._tuned

    def careful(self) -> "RWKV7 | None":
        """The same weights by one operator after the other, whose sums and activations are float32; None where this
        one is that already."""
        if not self._tuned:
            return None
        other = copy.copy(self)
        other._tuned = False
        return other

    @property
    def vocab_size(self) -> int:
        """Rows of the head, those without a token included."""
        return self.config.vocab

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices."""
        return self.embedding.dtype

    @torch.inference_mode()
    def forward(self, ids: Tensor, pool: StatePool, rows: Tensor, cu_seqlens: Tensor, last_only: bool = True) -> Tensor:
        """Read ``ids`` and update the pool's ``rows`` in place.

        ids int64 [N], rows int64 [B] (all different), cu_seqlens int64 [B + 1], on the model's device; ids within
        0..vocab_size-1, which the caller sees to. Returns float32 logits: [B, vocab] of the last token of each
        sequence, each of which then holds one token or more, or [N, vocab] where ``last_only`` is false.
        """
        one_each = last_only and len(ids) == len(rows)
        if self._tuned:
            ends = None if one_each else cu_seqlens
            states = pool.shift, pool.wkv
            return ops.forward_(ids, self.embedding, *self.ln0, self._weights, *states, rows, ends, last_only)
        x = ops.layer_norm(ops.host_gather(self.embedding, ids).float(), *self.ln0)
        if one_each and ops.can_decode(x):  # the same in one call, bit for bit
            return ops.decode_(x, self._weights, pool.shift, pool.wkv, rows)
        seq = Packed(rows, cu_seqlens)
        v_first = None
        for layer, block in enumerate(self.blocks):
            x, v_first = block(x, v_first, pool.shift[layer], pool.wkv[layer], seq)
        if last_only:
            x = x.index_select(0, cu_seqlens[1:] - 1)
        return ops.linear(ops.layer_norm(x, *self.ln_out), self.head)

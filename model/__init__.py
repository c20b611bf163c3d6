"""The network and what keeps it busy: a checkpoint, its tokenizer, the forward pass, sampling and the engine.

Nothing here knows of HTTP or of Cog, and nothing here reaches below the public functions of ``cog_rwkv_ops``.
"""

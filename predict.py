"""What a client of the server sees: the inputs, the streamed text, the metrics. The work is done in model/.

Cog reads this file without running it: bounds have to be literals and descriptions single plain strings.
"""

from collections.abc import Iterator
from typing import Any

from cog import BaseRunner, CancelationException, ConcatenateIterator, Input, concurrent, streaming

import cancellation
from model.memory import leave_to_stay
from model.request import Request
from model.service import Reply, Service
from model.settings import Settings


class Runner(BaseRunner):
    """RWKV-7 text generation."""

    service: Service

    def setup(self, weights: str | None = None) -> None:
        """Load the model; ``weights`` is COG_WEIGHTS, a path or a URL, and goes before the settings."""
        cancellation.install()
        self.service = Service.build(Settings.read(weights))
        leave_to_stay()

    def healthcheck(self) -> bool:
        """Called by the server for /health-check; what it raises is shown there."""
        if problem := self.service.problem():
            raise RuntimeError(problem)
        return True

    @streaming
    @concurrent(max=512)
    async def run(
        self,
        prompt: str = Input(
            description="Text to continue, or with chat=true the message to answer.",
            min_length=1,
            max_length=2000000,
        ),
        system_prompt: str | None = Input(
            description="Instructions that stand before the conversation. Only with chat=true.",
            default=None,
            max_length=2000000,
        ),
        chat: bool = Input(description="Treat the prompt as a message of a user, and reply to it.", default=False),
        max_tokens: int = Input(description="The most tokens to generate.", default=256, ge=1, le=65536),
        temperature: float = Input(
            description="Randomness: 0 always takes the likeliest token, 1 keeps the probabilities of the model.",
            default=1.0,
            ge=0.0,
            le=5.0,
        ),
        top_p: float = Input(
            description="Draw from the likeliest tokens that together have this probability; 0 takes the likeliest.",
            default=0.5,
            ge=0.0,
            le=1.0,
        ),
        top_k: int = Input(
            description="Draw from so many of the likeliest tokens; 0: of all.", default=0, ge=0, le=65536
        ),
        presence_penalty: float = Input(
            description="Taken off the logit of each token that has been generated before.",
            default=0.0,
            ge=-2.0,
            le=2.0,
        ),
        frequency_penalty: float = Input(
            description="Taken off the logit of each token for each time that it has been generated.",
            default=0.0,
            ge=-2.0,
            le=2.0,
        ),
        penalty_decay: float = Input(
            description="Factor on the penalty counts at each token, so that old tokens count less; 1 keeps them.",
            default=0.996,
            ge=0.0,
            le=1.0,
        ),
        stop: list[str] = Input(
            description="Texts at which the reply ends; they are not part of it. At most 64, of 1 to 1000 characters.",
            default=[],
        ),
        seed: int | None = Input(
            description="The same seed gives the same text for the same request. Left out, each reply is different.",
            default=None,
            ge=0,
            le=9007199254740991,
        ),
        session: str | None = Input(
            description="A name that you choose for a conversation: begins it, or goes on where it ended.",
            default=None,
            min_length=1,
            max_length=256,
        ),
    ) -> ConcatenateIterator[str]:
        """Start a reply. Returns a generator, which Cog runs on a thread of its own and streams from as it goes."""
        request = Request.of(
            prompt=prompt, system_prompt=system_prompt, chat=chat, max_tokens=max_tokens, temperature=temperature,
            top_p=top_p, top_k=top_k, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
            penalty_decay=penalty_decay, stop=stop, seed=seed, session=session,
        )  # fmt: skip
        reply = self.service.reply(request)
        cancellation.current().then(reply.cancel)
        return _stream(reply, self.scope)


def _stream(reply: Reply, scope: Any) -> Iterator[str]:
    # The scope of a prediction is only to be found while run() runs: on this generator's thread it could be another's.
    try:
        yield from reply
    finally:
        for name, value in reply.close().items():  # ends it, where the reader has left
            scope.record_metric(name, value)
    if reply.finish_reason == "cancelled":
        raise CancelationException("cancelled by the client")

"""Text, stops and chat as a client gets them, and the numbers beside them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from model.tokenizer import Tokenizer
from tests.serving.orders import order, words
from tests.serving.server import Server


@pytest.mark.acceptance(16)
def test_plain_json_and_an_event_stream_give_the_same_text(stub: Server) -> None:
    for prompt in (order(words=40), "def f(x):", order(say="Hello🦩🔥𠮷, déjà vu"), "\n"):
        plain = stub.predict(prompt, max_tokens=100)
        streamed = stub.stream(prompt, max_tokens=100)
        assert "".join(plain["output"]) == streamed.text == "".join(streamed.final["output"])
        assert plain["status"] == streamed.final["status"] == "succeeded"


@pytest.mark.acceptance(1)
def test_any_number_of_tokens_gives_a_whole_beginning_of_the_text(stub: Server) -> None:
    ids = [33155, 3319, 167, 170, 28334, 241, 161, 175, 184]  # "Hello🦩🔥𠮷"
    decode = Tokenizer(None).decode
    for max_tokens in range(1, len(ids) + 1):
        streamed = stub.stream(order(ids=ids), max_tokens=max_tokens)
        assert streamed.text == decode(ids[:max_tokens])
        assert streamed.final["metrics"]["completion_tokens"] == max_tokens
    assert streamed.text == "Hello🦩🔥𠮷"


@pytest.mark.acceptance(3)
@pytest.mark.parametrize(
    ("ids", "stop", "text"),
    [
        ([4571, 261, 24281, 59], ["\nUser:"], " hi\n"),
        ([4571, 3328, 24281, 59], ["\nUser:"], " hi\n\n"),
        ([4571, 11, 33553], ["\nUser:"], " hi\nUsers"),
        ([4571, 261, 24281, 59], ["User", " hi\n\nUser:"], ""),
        ([4571, 261, 24281], ["\nUser:"], " hi\n\nUser"),
    ],
)
def test_a_reply_ends_before_its_stop_string(stub: Server, ids: list[int], stop: list[str], text: str) -> None:
    prediction = stub.predict(order(ids=ids), stop=stop)
    assert "".join(prediction["output"]) == text
    assert prediction["metrics"]["finish_reason"] == "stop"
    assert stub.stream(order(ids=ids), stop=stop).text == text


@pytest.mark.acceptance(3)
def test_a_long_stop_and_one_that_ends_inside_a_token(stub: Server) -> None:
    stop = words(40)[5:100]
    assert stub.text(order(words=40), stop=[stop]) == words(40)[:5]
    assert stub.text(order(say="wonderful"), stop=["onder"]) == "w"


def test_a_stop_string_completed_by_the_last_token_is_a_stop(stub: Server) -> None:
    ids = [4571, 261, 24281, 59]
    prediction = stub.predict(order(ids=ids), stop=["\nUser:"], max_tokens=len(ids))
    assert (prediction["metrics"]["finish_reason"], "".join(prediction["output"])) == ("stop", " hi\n")


@pytest.mark.acceptance(2)
def test_the_end_of_a_document_is_no_text(stub: Server) -> None:
    prediction = stub.predict(order(say=" done"), max_tokens=50)
    assert "".join(prediction["output"]) == " done"
    assert prediction["metrics"]["finish_reason"] == "stop"
    nothing = stub.predict(order(ids=[0]))
    assert (nothing["status"], "".join(nothing["output"])) == ("succeeded", "")
    assert nothing["metrics"]["completion_tokens"] == 0


def test_a_nul_in_the_prompt_is_text(stub: Server) -> None:
    assert stub.text("a\0b", max_tokens=9) != stub.text("ab", max_tokens=9)


@pytest.mark.acceptance(4)
def test_chat_has_its_stop_and_drops_one_leading_space(stub: Server) -> None:
    # The stub finds its order only at the beginning of the context, so a chat gets the text that depends on all of it.
    first = stub.text("Hi", chat=True, max_tokens=20)
    assert first == stub.text("User: Hi\n\nAssistant:", max_tokens=20)
    assert stub.text(" Hi\r\n", chat=True, max_tokens=20) == first
    assert stub.text("Hi", chat=True, system_prompt="Be brief.", max_tokens=20) == stub.text(
        "System: Be brief.\n\nUser: Hi\n\nAssistant:", max_tokens=20
    )


def test_metrics(stub: Server) -> None:
    for metrics in (
        stub.predict(order(words=30), max_tokens=20)["metrics"],
        stub.stream(order(words=30), max_tokens=20).final["metrics"],
    ):
        assert (metrics["completion_tokens"], metrics["finish_reason"]) == (20, "length")
        assert 1 < metrics["prompt_tokens"] < 15
        assert 0 < metrics["time_to_first_token"] < metrics["predict_time"]
        assert metrics["tokens_per_second"] > 20 / metrics["predict_time"] * 0.9


def test_metrics_of_predictions_that_run_together_are_not_mixed(stub: Server) -> None:
    def run(n: int) -> int:
        return stub.predict(order(words=200), max_tokens=n)["metrics"]["completion_tokens"]

    with ThreadPoolExecutor(16) as pool:
        counts = list(range(1, 33))
        assert list(pool.map(run, counts)) == counts


@pytest.mark.acceptance(11)
def test_the_same_request_again_gives_the_same_bytes(stub: Server) -> None:
    first = stub.text("def a():", temperature=0.0, max_tokens=40)
    stub.text("def b():", temperature=0.0, max_tokens=40)
    assert stub.text("def a():", temperature=0.0, max_tokens=40) == first
    assert stub.predict(order(words=9, fail="error", at=3))["status"] == "failed"
    with stub.open_stream(order(words=400, delay=0.01)) as events:
        next(event for event in events if event.name == "output")
    assert stub.text("def a():", temperature=0.0, max_tokens=40) == first

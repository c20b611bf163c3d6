"""script/predict and script/serve with a small runner: real Cog servers, started and stopped for real."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from script.cog_schema import ROOT
from script.server import OWN, CogServer, ServerError, free_port

RUNNER = """import time
from cog import BaseRunner, ConcatenateIterator, Input, concurrent, streaming


class Runner(BaseRunner):
    def setup(self) -> None:
        {setup}

    @streaming
    @concurrent(max=3)
    async def run(
        self,
        prompt: str,
        count: int = Input(default=3, ge=1, le=1000),
        fail: bool = False,
    ) -> ConcatenateIterator[str]:
        self.record_metric("count", count)
        return pieces(prompt, count, fail)


def pieces(prompt, count, fail):
    for index in range(count):
        if fail and index == 1:
            raise ValueError("failed as asked")
        yield f"{{prompt}}{{index}} "
        time.sleep(0.02)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A checkout whose predict.py is the small runner."""
    shutil.copytree(ROOT / "script", tmp_path / "script", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "cog.yaml").write_text('build:\n  sdk_version: "0.23.1"\nrun: "predict.py:Runner"\n')
    (tmp_path / "predict.py").write_text(RUNNER.format(setup="pass"))
    yield tmp_path


def client(checkout: Path, *arguments: str) -> list[str]:
    """The command that script/predict becomes after setting up."""
    return [sys.executable, "-P", "-m", "script", "predict", *arguments]


def environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


def predict(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = client(checkout, *arguments)
    return subprocess.run(command, env=environment(checkout), cwd=checkout.parent, capture_output=True, text=True)


def test_only_the_text_goes_to_stdout(checkout: Path) -> None:
    done = predict(checkout, "-i", "prompt=🦩", "-i", "count=4")
    assert done.stdout == "🦩0 🦩1 🦩2 🦩3 "
    assert done.returncode == 0
    assert "ready after" in done.stderr
    assert "count: 4\n" in done.stderr


def test_json_is_the_whole_prediction(checkout: Path) -> None:
    done = predict(checkout, "--json", "-i", "prompt=x", "-i", "count=2")
    prediction = json.loads(done.stdout)
    assert prediction["output"] == ["x0 ", "x1 "]
    assert prediction["status"] == "succeeded"
    assert prediction["metrics"]["count"] == 2
    assert done.returncode == 0


def test_a_failed_prediction_is_an_exit_code(checkout: Path) -> None:
    done = predict(checkout, "-i", "prompt=x", "-i", "fail=true")
    assert (done.stdout, done.returncode) == ("x0 ", 1)
    assert "failed as asked" in done.stderr


def test_a_wrong_input_is_refused_before_a_server_starts(checkout: Path) -> None:
    (checkout / "predict.py").write_text(RUNNER.format(setup="raise SystemExit"))
    done = predict(checkout, "-i", "prompt=x", "-i", "tokens=1")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr == "there is no input 'tokens'; the inputs are: prompt, count, fail\n"


def test_a_failing_setup_is_shown(checkout: Path) -> None:
    (checkout / "predict.py").write_text(RUNNER.format(setup="raise RuntimeError('no weights here')"))
    done = predict(checkout, "-i", "prompt=x")
    assert (done.stdout, done.returncode) == ("", 1)
    assert "SETUP_FAILED" in done.stderr
    assert "no weights here" in done.stderr


@pytest.fixture(autouse=True)
def hangups_end_programs() -> Iterator[None]:
    """What the tests start has SIGHUP's usual effect, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGHUP, 1)])
def test_a_signal_stops_the_server_too(checkout: Path, number: signal.Signals, times: int) -> None:
    command = client(checkout, "-i", "prompt=x", "-i", "count=1000")
    process = subprocess.Popen(command, env=environment(checkout), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == b"x0 "
    servers = children(process.pid)
    assert servers
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.wait(10) == 128 + number
    assert b"Traceback" not in process.stderr.read()
    wait_until_gone(servers)


def test_the_server_dies_with_a_client_that_is_killed(checkout: Path) -> None:
    command = client(checkout, "-i", "prompt=x", "-i", "count=1000")
    process = subprocess.Popen(command, env=environment(checkout), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.read(3) == b"x0 "
    servers = children(process.pid)
    process.kill()
    process.wait(10)
    wait_until_gone(servers)


def test_a_proxy_of_the_environment_is_not_asked(checkout: Path) -> None:
    proxies = dict.fromkeys(["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"], "http://127.0.0.1:9")
    done = subprocess.run(
        client(checkout, "-i", "prompt=x", "-i", "count=1"),
        env={**environment(checkout), **proxies, "NO_PROXY": "", "no_proxy": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("x0 ", 0), done.stderr


def test_an_argument_that_is_no_text_is_one_line(checkout: Path) -> None:
    command = [os.fsencode(part) for part in client(checkout, "-i")] + [b"prompt=caf\xe9"]
    done = subprocess.run(command, env=environment(checkout), capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("", "input 'prompt' is not UTF-8 text\n", 2)


def wait_until_gone(servers: set[int]) -> None:
    deadline = time.monotonic() + 5
    while any(map(runs, servers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process is there and not just waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(parent: int) -> set[int]:
    """All processes below `parent`."""
    found = {int(pid) for f in Path(f"/proc/{parent}/task").glob("*/children") for pid in f.read_text().split()}
    return found.union(*map(children, found))


@pytest.fixture
def served(checkout: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """What script/serve becomes after setting up, and its address."""
    port = free_port()
    variables = {**environment(checkout), "PORT": str(port)}
    command = [sys.executable, "-P", "-m", "script", "serve"]
    with (checkout / "log").open("w") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while status(url) != "READY":
        assert time.monotonic() < deadline and process.poll() is None, (checkout / "log").read_text()
        time.sleep(0.1)
    yield process, url
    process.kill()
    process.wait(30)


Served = tuple[subprocess.Popen[bytes], str]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_runs_in_the_foreground(checkout: Path, served: Served, number: signal.Signals) -> None:
    process, url = served
    answer = OWN.post(f"{url}/predictions", json={"input": {"prompt": "y", "count": 1}}).json()
    assert answer["output"] == ["y0 "]
    assert OWN.get(f"{url}/openapi.json").json()["info"]["version"] == "0.23.1"
    check_stop(checkout, process, number, limit=5)


@pytest.mark.parametrize("times", [1, 2])
def test_serve_stops_while_a_reply_runs(checkout: Path, served: Served, times: int) -> None:
    process, url = served
    asked = {"input": {"prompt": "y", "count": 1000}}
    with OWN.stream("POST", f"{url}/predictions", json=asked, headers={"Accept": "text/event-stream"}) as reply:
        assert reply.status_code == 200
        check_stop(checkout, process, signal.SIGINT, limit=10 if times == 1 else 5, times=times)


def check_stop(
    checkout: Path, process: subprocess.Popen[bytes], number: signal.Signals, limit: float, times: int = 1
) -> None:
    servers = children(process.pid)
    began = time.monotonic()
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.wait(limit) == 128 + number
    assert time.monotonic() - began < limit
    assert "Traceback" not in (checkout / "log").read_text()
    wait_until_gone(servers)


def status(url: str) -> str | None:
    try:
        return OWN.get(f"{url}/health-check").json()["status"]
    except httpx.TransportError:
        return None


def test_slots_come_from_the_decorator(checkout: Path) -> None:
    with CogServer(checkout) as server:
        assert '"num_slots":3' in server.text()


def test_a_garbled_predict_py_does_not_start(checkout: Path) -> None:
    source = RUNNER.format(setup="pass").replace("le=1000", "le=LIMIT")
    (checkout / "predict.py").write_text(source)
    done = predict(checkout, "-i", "prompt=x")
    assert done.returncode == 2
    assert "count: le=LIMIT is a name" in done.stderr


def test_a_server_that_dies_is_an_error(checkout: Path) -> None:
    server = CogServer(checkout, base={**os.environ, "PYTHONPATH": "/nowhere"}, python="/bin/false")
    with pytest.raises(ServerError, match="gone"):
        server.__enter__()

"""A checkpoint from a URL arrives whole or not at all."""

import hashlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from model import checkpoint, download
from model.errors import DownloadError
from tests import tiny
from tests.model.file_server import Site, serve

DATA = bytes(range(256)) * 4000


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(download, "BACKOFF", 0)
    with serve() as site:
        site.files["a/model.pth"] = DATA
        yield site


def fetch(site: Site, cache: Path, fragment: str = "") -> Path:
    return download.fetch(site.url("a/model.pth") + fragment, cache, progress=False)


def leftovers(cache: Path) -> list[str]:
    return [path.suffix for path in cache.rglob("*") if path.is_file() and path.suffix in (".pth", ".part")]


def test_the_file_arrives_and_is_fetched_once(site: Site, tmp_path: Path) -> None:
    path = fetch(site, tmp_path)
    assert path.read_bytes() == DATA and path.suffix == ".pth"
    assert fetch(site, tmp_path, f"#sha256={digest(DATA).upper()}") == path
    assert len(site.requests) == 1
    assert leftovers(tmp_path) == [".pth"]


def test_a_cut_download_goes_on_where_it_stopped(site: Site, tmp_path: Path) -> None:
    site.cuts = [300_000, 300_000]
    assert fetch(site, tmp_path).read_bytes() == DATA
    assert [asked for _, _, asked in site.requests] == [None, "bytes=300000-", "bytes=600000-"]


def test_a_later_process_goes_on_where_an_earlier_one_gave_up(site: Site, tmp_path: Path) -> None:
    site.cuts = [300_000]

    def give_up(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download.time, "sleep", give_up)
        with pytest.raises(KeyboardInterrupt):
            fetch(site, tmp_path)
    assert leftovers(tmp_path) == [".part"]
    assert fetch(site, tmp_path).read_bytes() == DATA
    assert site.requests[-1][2] == "bytes=300000-"


def test_a_part_that_is_whole_already_is_taken(site: Site, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download._Download, "_accept", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch(site, tmp_path)
    assert fetch(site, tmp_path).read_bytes() == DATA
    assert site.requests[-1][2] == f"bytes={len(DATA)}-"


@pytest.mark.parametrize(
    "new", [DATA[::-1], DATA[::-1] + b"more", DATA[:1000]], ids=["same length", "longer", "shorter"]
)
def test_a_file_that_changed_in_between_is_fetched_anew(site: Site, tmp_path: Path, new: bytes) -> None:
    site.cuts = [300_000]

    def change(_: float) -> None:
        site.files["a/model.pth"] = new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download.time, "sleep", change)
        assert fetch(site, tmp_path).read_bytes() == new


def test_a_server_that_ignores_if_range_does_not_mix_two_files(site: Site, tmp_path: Path) -> None:
    """It answers the range out of the new file under the new ETag."""
    site.cuts = [300_000]
    new = DATA[::-1]

    def change(_: float) -> None:
        site.files["a/model.pth"] = new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download.time, "sleep", change)
        patch.setattr("tests.model.file_server._Handler._start", lambda self, *_: _asked(self.headers))
        assert fetch(site, tmp_path).read_bytes() == new


def _asked(headers: object) -> int | None:
    wanted = headers.get("Range")  # type: ignore[attr-defined]
    return int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else None


@pytest.mark.parametrize("etag", ["", 'W/"weak"'], ids=["none", "weak"])
def test_without_a_strong_validator_it_starts_over(site: Site, tmp_path: Path, etag: str) -> None:
    site.etag, site.cuts = etag, [300_000]
    assert fetch(site, tmp_path).read_bytes() == DATA
    assert [asked for _, _, asked in site.requests] == [None, None]


def test_a_size_that_only_the_rest_of_a_file_names(site: Site, tmp_path: Path) -> None:
    site.chunked, site.cuts = True, [300_000]
    assert fetch(site, tmp_path).read_bytes() == DATA
    assert [asked for _, _, asked in site.requests] == [None, "bytes=300000-"]


def test_starting_over_is_no_progress(site: Site, tmp_path: Path) -> None:
    """A server without ranges that always breaks off in the same place is given up."""
    site.ranges, site.cuts = False, [300_000] * 20
    with pytest.raises(DownloadError, match="gave up after 5 attempts"):
        fetch(site, tmp_path)
    assert len(site.requests) == 5


def test_a_file_that_changes_with_each_answer_is_given_up(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.cuts = [300_000] * 50

    def change(_: float) -> None:
        site.files["a/model.pth"] = site.files["a/model.pth"][::-1]

    monkeypatch.setattr(download.time, "sleep", change)
    monkeypatch.setattr("tests.model.file_server._Handler._start", lambda self, *_: _asked(self.headers))
    with pytest.raises(DownloadError, match="gave up after 5 attempts"):
        fetch(site, tmp_path)


def test_a_server_without_ranges_is_asked_anew(site: Site, tmp_path: Path) -> None:
    site.ranges, site.cuts = False, [300_000]
    assert fetch(site, tmp_path).read_bytes() == DATA


def test_a_file_shorter_than_the_server_says_is_never_taken(site: Site, tmp_path: Path) -> None:
    site.length = len(DATA) + 1
    with pytest.raises(
        DownloadError, match=rf"E110 http://127.0.0.1:\d+/a/model.pth: found {len(DATA)} bytes, wanted {len(DATA) + 1}"
    ):
        fetch(site, tmp_path)
    assert ".pth" not in leftovers(tmp_path)


def test_an_answer_without_a_length_needs_a_digest(site: Site, tmp_path: Path) -> None:
    site.headers = {"Content-Length": ""}
    with pytest.raises(DownloadError, match="without a length"):
        fetch(site, tmp_path)
    assert fetch(site, tmp_path, f"#sha256={digest(DATA)}").read_bytes() == DATA


def test_a_wrong_digest_is_refused_and_the_file_thrown_away(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=f"found sha256 {digest(DATA)}, wanted {'0' * 64}"):
        fetch(site, tmp_path, f"#sha256={'0' * 64}")
    assert leftovers(tmp_path) == []


def test_another_digest_than_that_of_the_cached_file_fetches_it_anew(site: Site, tmp_path: Path) -> None:
    fetch(site, tmp_path)
    site.files["a/model.pth"] = DATA[::-1]
    assert fetch(site, tmp_path, f"#sha256={digest(DATA[::-1])}").read_bytes() == DATA[::-1]


def test_a_cached_file_that_lost_bytes_is_fetched_anew(site: Site, tmp_path: Path) -> None:
    path = fetch(site, tmp_path)
    path.write_bytes(DATA[:-1])
    assert fetch(site, tmp_path).read_bytes() == DATA


def test_a_missing_file_is_named_at_once(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"none\.pth: the server answered 404 Not Found"):
        download.fetch(site.url("a/none.pth?token=secret"), tmp_path, progress=False)
    assert len(site.requests) == 1


def test_passwords_and_queries_stay_out_of_messages(site: Site, tmp_path: Path) -> None:
    url = site.url("a/none.pth?token=secret").replace("://", "://me:hidden@")
    with pytest.raises(DownloadError) as error:
        download.fetch(url, tmp_path, progress=False)
    assert "secret" not in str(error.value) and "hidden" not in str(error.value)


def test_a_server_that_is_busy_is_asked_again(site: Site, tmp_path: Path) -> None:
    site.statuses = [503, 429, 500]
    assert fetch(site, tmp_path).read_bytes() == DATA


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download, "BACKOFF", 0)
    with pytest.raises(DownloadError, match="gave up after 5 attempts"):
        download.fetch("http://127.0.0.1:9/model.pth", tmp_path, progress=False)


def test_a_fragment_that_is_no_digest(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="wanted #sha256= and 64 hex digits"):
        download.fetch("https://example.org/model.pth#md5=1", tmp_path)


def test_a_full_disk_is_seen_before_the_download(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(DownloadError, match=f"found 10 bytes free in .*, wanted {len(DATA)}"):
        fetch(site, tmp_path)


def test_threads_that_want_one_file_fetch_it_once(site: Site, tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(site, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len(site.requests) == 1


def test_processes_that_want_one_file_fetch_it_once(site: Site, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=download.fetch, args=(site.url("a/model.pth"), tmp_path, False)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0] and len(site.requests) == 1


def test_progress_goes_to_stderr(site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    download.fetch(site.url("a/model.pth"), tmp_path)
    out, err = capfd.readouterr()
    assert out == "" and "model.pth" in err and "100%" in err


@pytest.mark.acceptance(14)
def test_a_checkpoint_loads_from_a_url(site: Site, tmp_path: Path) -> None:
    path = tiny.write(tiny.Shape(vocab=300), tmp_path / "tiny.safetensors")
    (tmp_path / "vocab.txt").write_text("")
    site.files["tiny.safetensors"] = path.read_bytes()
    loaded = checkpoint.load(site.url("tiny.safetensors"), cache=tmp_path / "cache", progress=False)
    assert loaded.config.vocab == 300 and loaded.vocab is None
    assert loaded.sha256 == digest(path.read_bytes())


@pytest.fixture
def hub(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    """The routes of a Hugging Face hub that a download of one file takes."""
    monkeypatch.setenv("HF_ENDPOINT", site.address)
    commit = "0123456789abcdef0123456789abcdef01234567"
    for revision in ("main", "v1"):
        site.files[f"org/some-model/resolve/{revision}/sub/model.pth"] = DATA
    site.headers = {"X-Repo-Commit": commit}
    return site


@pytest.mark.parametrize("name", ["org/some-model/sub/model.pth", "org/some-model@v1/sub/model.pth"])
def test_a_file_of_the_hub(hub: Site, tmp_path: Path, name: str) -> None:
    path = download.fetch(f"hf://{name}#sha256={digest(DATA)}", tmp_path, progress=False)
    assert path.read_bytes() == DATA
    asked = "v1" if "@" in name else "main"
    assert ("GET", f"org/some-model/resolve/{asked}/sub/model.pth", None) in hub.requests


def test_a_file_of_the_hub_with_a_wrong_digest(hub: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=f"found sha256 {digest(DATA)}"):
        download.fetch(f"hf://org/some-model/sub/model.pth#sha256={'0' * 64}", tmp_path, progress=False)


def test_a_reset_download_from_the_hub_is_tried_again(hub: Site, tmp_path: Path) -> None:
    hub.resets, hub.cuts = True, [300_000, 300_000]
    path = download.fetch("hf://org/some-model/sub/model.pth", tmp_path, progress=False)
    assert path.read_bytes() == DATA


def test_a_hub_that_always_resets_is_given_up_in_one_line(hub: Site, tmp_path: Path) -> None:
    hub.resets, hub.cuts = True, [300_000] * 50
    with pytest.raises(DownloadError, match=r"E110 hf://org/some-model/sub/model\.pth: .*gave up after 5") as error:
        download.fetch("hf://org/some-model/sub/model.pth", tmp_path, progress=False)
    assert "\n" not in str(error.value)
    assert len([asked for asked in hub.requests if asked[0] == "GET" and "resolve" in asked[1]]) == 5


def test_a_file_that_the_hub_does_not_have(hub: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"E110 hf://org/some-model/none\.pth: ") as error:
        download.fetch("hf://org/some-model/none.pth", tmp_path, progress=False)
    assert "\n" not in str(error.value)


def test_a_hub_that_nobody_serves_is_named_with_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download, "BACKOFF", 0)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:9 cannot be reached: .*Connection refused"):
        download.fetch("hf://org/some-model/sub/model.pth", tmp_path, progress=False)
    assert time.monotonic() - began < 10


def test_a_cached_file_needs_no_hub(hub: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download, "_reach_hub", lambda *_: pytest.fail("it asked"))
    snapshot = tmp_path / "models--org--some-model/snapshots" / hub.headers["X-Repo-Commit"]
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "sub/model.pth").write_bytes(DATA)
    name = f"org/some-model@{snapshot.name}/sub/model.pth"
    assert download.fetch(f"hf://{name}", tmp_path, progress=False).read_bytes() == DATA


def test_other_schemes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"ftp://x/y\.pth: found a URL of ftp://, wanted https://"):
        checkpoint.load("ftp://me:hidden@x/y.pth", cache=tmp_path)


def test_an_address_of_the_hub_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="wanted hf://org/repository/file"):
        download.fetch("hf://org/some-model", tmp_path)

"""Download of a checkpoint: resumed after a cut, checked before it counts, fetched once however many ask for it.

A file grows as ``<name>.part`` beside a note of what the server said it is, and takes its name only when it is whole.
``hf://`` URLs are left to huggingface_hub, which keeps a cache and credentials of its own.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
from filelock import FileLock
from tqdm import tqdm

from model.errors import DownloadError

ATTEMPTS = 5  # in a row without a byte of progress
BACKOFF = 0.5  # seconds before the second attempt; doubles with each
TIMEOUT = 30.0  # seconds without a byte
HUB_TRIES, HUB_TIMEOUT = 3, 3.0  # connections to the hub before a download from it, and the seconds each may take


def is_url(source: str) -> bool:
    """Whether ``source`` is fetched rather than opened."""
    return bool(re.match(r"[a-z][a-z\d+.-]*://", source, re.IGNORECASE))


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/cog-rwkv``, by default ``~/.cache/cog-rwkv``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cog-rwkv"


def fetch(source: str, cache: Path | None = None, progress: bool = True) -> Path:
    """The local file of an ``http(s)://`` or ``hf://org/repository[@revision]/file`` URL, downloaded where it must be.

    ``#sha256=<64 hex digits>`` at the end is compared with the file. A whole file that is in ``cache`` is used without
    asking the server again. ``cache`` None is ``default_cache()``, for ``hf://`` that of huggingface_hub. Raises
    DownloadError.
    """
    url, sha256 = _split_sha256(source)
    scheme = url.partition("://")[0].lower()
    if scheme == "hf":
        return _fetch_from_hub(url, sha256, cache, progress)
    if scheme not in ("http", "https"):
        raise DownloadError(f"{_shown(url)}: found a URL of {scheme}://, wanted https://, http://, hf:// or a path")
    return _Download(url, sha256, cache or default_cache(), progress).run()


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _split_sha256(source: str) -> tuple[str, str | None]:
    url, _, fragment = source.partition("#")
    if not fragment:
        return url, None
    match = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", fragment)
    if not match:
        raise DownloadError(f"{_shown(url)}: found #{fragment[:80]}, wanted #sha256= and 64 hex digits")
    return url, match[1].lower()


def _shown(url: str) -> str:
    """The URL for a message: without a password, and without the query that a signed one carries."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass
class _Note:
    """What the server said the file is, and what of it has come; kept beside the file."""

    url: str
    validator: str = ""  # a strong ETag or Last-Modified: what If-Range takes; "" where the server gives neither
    size: int | None = None  # None: it did not say
    sha256: str = ""  # of the whole file, once it is whole

    @classmethod
    def read(cls, path: Path) -> "_Note | None":
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def agrees(self, said: "_Note") -> bool:
        """Whether ``said`` can be the same file; a size that one of them does not know says nothing."""
        sizes = {self.size, said.size} - {None}
        return (self.url, self.validator) == (said.url, said.validator) and len(sizes) < 2

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class _Interrupted(Exception):
    """The attempt ended early; what has come so far stays."""


@dataclass
class _Download:
    """One URL on its way to one file of the cache."""

    url: str
    wanted_sha256: str | None
    cache: Path
    progress: bool
    file: Path = field(init=False)
    part: Path = field(init=False)
    note_path: Path = field(init=False)

    def __post_init__(self) -> None:
        name = re.sub(r"[^\w.-]", "_", unquote(urlsplit(self.url).path.rpartition("/")[2]))[-100:] or "checkpoint"
        self.file = self.cache / hashlib.sha256(self.url.encode()).hexdigest()[:16] / name
        self.part = self.file.with_name(f"{name}.part")
        self.note_path = self.file.with_name(f"{name}.json")

    def run(self) -> Path:
        """The whole, checked file. Others that want the same one, in this process or another, wait for it."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.file.with_name(f"{self.file.name}.lock")):
                if not self._is_there():
                    self._download()
        except OSError as error:
            raise DownloadError(
                f"{_shown(self.url)}: cannot be kept in {self.file.parent}: {error.strerror or error}"
            ) from None
        return self.file

    def _is_there(self) -> bool:
        note = _Note.read(self.note_path)
        if note is None or not self.file.is_file() or self.file.stat().st_size != note.size:
            return False
        return bool(note.sha256) and self.wanted_sha256 in (None, note.sha256)

    def _download(self) -> None:
        failures, most, limits = 0, 0, httpx.Timeout(TIMEOUT)
        with httpx.Client(follow_redirects=True, timeout=limits, headers={"Accept-Encoding": "identity"}) as client:
            while True:
                try:
                    note = self._attempt(client)
                    break
                except (_Interrupted, httpx.TransportError) as error:
                    # More than ever before, for what comes again after starting over is no progress.
                    failures = 1 if self._part_size() > most else failures + 1
                    most = max(most, self._part_size())
                    if failures >= ATTEMPTS:
                        raise DownloadError(
                            f"{_shown(self.url)}: {error or type(error).__name__}; gave up after {ATTEMPTS} attempts"
                        ) from None
                    time.sleep(BACKOFF * 2 ** (failures - 1))
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    raise DownloadError(f"{_shown(self.url)}: {error}") from None
        self._accept(note)

    def _part_size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _attempt(self, client: httpx.Client) -> _Note:
        """Fetch what is missing of the part; returns what the server says that the whole is."""
        note, have = _Note.read(self.note_path), self._part_size()
        if note is None or note.url != self.url or not note.validator or note.sha256:
            note, have = None, 0
        headers = {"Range": f"bytes={have}-", "If-Range": note.validator} if note and have else {}
        with client.stream("GET", self.url, headers=headers) as response:
            if response.status_code == 416:  # nothing lies beyond what is here, or the file has become another
                if note and response.headers.get("Content-Range") == f"bytes */{have}":
                    return note
                self.part.unlink(missing_ok=True)
                raise _Interrupted("the server's file is shorter than what came before")
            self._check_status(response)
            said = self._described(response)
            if response.status_code != 206:
                have = 0
            elif note is None or not note.agrees(said) or _range_start(response) != have:
                self.part.unlink(missing_ok=True)
                raise _Interrupted("the server's file changed in between")
            self._check_space(said, have)
            said.write(self.note_path)
            self._receive(response, have, said)
        return said

    def _check_status(self, response: httpx.Response) -> None:
        if response.status_code in (200, 206):
            return
        problem = f"the server answered {response.status_code} {response.reason_phrase}"
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise _Interrupted(problem)
        raise DownloadError(f"{_shown(self.url)}: {problem}, wanted the file; check the address")

    def _described(self, response: httpx.Response) -> _Note:
        """What this answer says of the whole file."""
        headers = response.headers
        if headers.get("Content-Encoding", "identity") != "identity":
            raise DownloadError(
                f"{_shown(self.url)}: found Content-Encoding {headers['Content-Encoding']}, wanted the file as it is"
            )
        etag = headers.get("ETag", "")
        validator = etag if etag.startswith('"') else headers.get("Last-Modified", "")
        total = (
            headers.get("Content-Range", "").rpartition("/")[2]
            if response.status_code == 206
            else headers.get("Content-Length", "")
        )
        size = int(total) if total.isdecimal() else None
        if size is None and headers.get("Transfer-Encoding") != "chunked" and self.wanted_sha256 is None:
            raise DownloadError(
                f"{_shown(self.url)}: found an answer without a length, in which a cut would not show; add #sha256="
            )
        return _Note(self.url, validator, size)

    def _check_space(self, said: _Note, have: int) -> None:
        free, missing = shutil.disk_usage(self.file.parent).free, (said.size or 0) - have
        if missing > free:
            raise DownloadError(
                f"{_shown(self.url)}: found {free} bytes free in {self.file.parent}, wanted {missing}; make room"
            )

    def _receive(self, response: httpx.Response, have: int, said: _Note) -> None:
        bar = tqdm(
            total=said.size,
            initial=have,
            desc=self.file.name,
            unit="B",
            unit_scale=True,
            disable=not self.progress,
            file=sys.stderr,
        )
        with bar, self.part.open("r+b" if have else "wb") as file:
            file.seek(have)
            for chunk in response.iter_raw():  # a chunk size would hold bytes back, and a cut would lose them
                file.write(chunk)
                bar.update(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        came = self._part_size()
        if said.size is not None and came < said.size:
            raise _Interrupted(f"found {came} bytes, wanted {said.size}")

    def _accept(self, note: _Note) -> None:
        """Check the part and give it its name."""
        size = self._part_size()
        if note.size is not None and size != note.size:
            self.part.unlink()
            raise DownloadError(
                f"{_shown(self.url)}: found {size} bytes, wanted {note.size}; it was thrown away, try again"
            )
        note.size, note.sha256 = size, file_sha256(self.part)
        if self.wanted_sha256 not in (None, note.sha256):
            self.part.unlink()
            raise DownloadError(
                f"{_shown(self.url)}: found sha256 {note.sha256}, wanted {self.wanted_sha256}; it was thrown away, "
                "check the digest or the address"
            )
        self.file.unlink(missing_ok=True)
        note.write(self.note_path)
        self.part.replace(self.file)


def _range_start(response: httpx.Response) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _fetch_from_hub(url: str, sha256: str | None, cache: Path | None, progress: bool) -> Path:
    """``hf://org/repository[@revision]/file`` through huggingface_hub; HF_ENDPOINT, HF_TOKEN and HF_HOME count."""
    match = re.fullmatch(r"hf://([^/]+/[^/@]+)(?:@([^/]+))?/(.+)", url, re.IGNORECASE)
    if not match:
        raise DownloadError(f"{url}: wanted hf://org/repository/file or hf://org/repository@revision/file")
    repository, revision, name = match.groups()
    path = _ask_hub(url, repository, revision, name, cache, progress)
    found = file_sha256(path) if sha256 else None
    if found != sha256:
        raise DownloadError(
            f"{url}: found sha256 {found}, wanted {sha256}; check the digest, or delete {path} and try again"
        )
    return path


def _ask_hub(url: str, repository: str, revision: str | None, name: str, cache: Path | None, progress: bool) -> Path:
    """The file in huggingface_hub's cache. It goes on by itself after some failures; a reset, say, it lets through."""
    import httpx2  # what huggingface_hub asks with
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # it takes long to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    bar = None if progress else _SilentBar
    endpoint = os.environ.get("HF_ENDPOINT")
    if not isinstance(try_to_load_from_cache(repository, name, cache, revision), str):
        _reach_hub(url, endpoint)
    for attempt in range(ATTEMPTS):
        try:
            return Path(
                hf_hub_download(repository, name, revision=revision, cache_dir=cache, endpoint=endpoint, tqdm_class=bar)
            )
        except httpx2.TransportError as error:
            problem = f"{_one_line(error)}; gave up after {ATTEMPTS} attempts"
            if attempt + 1 < ATTEMPTS:
                time.sleep(BACKOFF * 2**attempt)
        # RuntimeError is what its compiled downloader (hf_xet) raises.
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, RuntimeError) as error:
            raise DownloadError(f"{url}: {_one_line(error)}") from None
    raise DownloadError(f"{url}: {problem}")


def _reach_hub(url: str, endpoint: str | None) -> None:
    """Raise DownloadError with the cause where nothing listens: huggingface_hub would try for long and name none."""
    import httpx2
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return
    endpoint = endpoint or constants.ENDPOINT
    for attempt in range(HUB_TRIES):
        try:
            get_session().head(endpoint, timeout=HUB_TIMEOUT)
            return
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError, httpx2.UnsupportedProtocol) as error:
            problem = _one_line(error)
        except httpx2.HTTPError:  # it is there
            return
        if attempt + 1 < HUB_TRIES:
            time.sleep(BACKOFF * 2**attempt)
    raise DownloadError(f"{url}: {_shown(endpoint)} cannot be reached: {problem}; check HF_ENDPOINT and the network")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class _SilentBar(tqdm):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})

"""Gathers permissively licensed Python sources from where they are installed; it downloads nothing.

    python -m train.corpus --site VENV/lib/python3.11/site-packages --out local/corpus

takes the standard library of the Python that runs it and every distribution installed in `--site` whose metadata
names an MIT, BSD, Apache or PSF licence and no copyleft one, and writes `train.bin` and `heldout.bin` (UTF-8
documents, each ended by one zero byte) and `manifest.json` (package, version, licence, files, bytes, and why files
were dropped). Whole packages are held out, and training files that repeat their lines are dropped.
"""

import argparse
import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

HELD_OUT = ("flask", "werkzeug", "jinja2", "click", "marshmallow", "seaborn", "pydantic", "fastapi", "httpx", "attrs")
PACKAGE_CAP = 2_200_000  # bytes of one package: none may dominate
FILE_MIN, FILE_MAX = 200, 120_000
SKIPPED_FOLDERS = re.compile(
    r"tests?|testing|_?vendor(ed)?|extern|externals|third_?party|site-packages|node_modules|lib2to3|idlelib|turtledemo"
    r"|locales?|migrations|pydantic_v1",
    re.IGNORECASE,
)
GENERATED = re.compile(
    r"generated (by|from|code|file|automatically)|auto-?generated|do not (edit|modify)", re.IGNORECASE
)
PERMISSIVE = re.compile(r"\b(MIT|0?BSD|Apache|PSF|Python Software Foundation|Python-2\.0)", re.IGNORECASE)
OTHER = re.compile(
    r"GPL|General Public|\bMPL|Mozilla|EUPL|CeCILL|Commercial|Proprietary|Elastic|Business Source", re.IGNORECASE
)


def licence_of(dist: Distribution) -> str:
    """The licence a distribution's metadata declares, in one line; "" where it declares none."""
    meta = dist.metadata
    if "License-Expression" in meta:
        return meta["License-Expression"]
    classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    named = [c for c in classifiers if c != "OSI Approved"]
    if named or "License" not in meta:
        return "; ".join(named)
    return meta["License"].strip().split("\n")[0][:80]


def is_permissive(licence: str) -> bool:
    """True for MIT, BSD, Apache and PSF texts that name no copyleft or commercial licence."""
    return bool(PERMISSIVE.search(licence)) and not OTHER.search(licence)


def clean(path: Path) -> tuple[str, str]:
    """(text, "") of a file worth learning from, or ("", the reason for leaving it out)."""
    size = path.stat().st_size
    if size < FILE_MIN or size > FILE_MAX:
        return "", "size"
    try:
        text = path.read_bytes().decode("utf-8").lstrip("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    if "\0" in text or "\r" in text:
        return "", "control characters"
    if GENERATED.search(text[:1500]):
        return "", "generated"
    lines = text.split("\n")
    if max(map(len, lines)) > 400 or len(text) / len(lines) > 60:
        return "", "long lines"
    if sum(c.isdigit() for c in text) > 0.12 * len(text) or sum(c.isascii() for c in text) < 0.97 * len(text):
        return "", "data table"
    return text.rstrip() + "\n", ""


def line_keys(text: str) -> list[int]:
    """64-bit keys of the lines long enough to tell one file from another."""
    lines = {s for line in text.split("\n") if len(s := line.strip()) >= 24}
    return [int.from_bytes(hashlib.blake2b(s.encode(), digest_size=8).digest()) for s in sorted(lines)]


def standard_library() -> tuple[dict[str, str], list[Path]]:
    """Name, version and licence of the Python that runs, and its library's usable files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    entry = {"name": "python", "version": sysconfig.get_python_version(), "licence": "PSF-2.0"}
    return entry, [p for p in root.rglob("*.py") if usable(p.relative_to(root))]


def usable(relative: Path) -> bool:
    """Whether a file, named relative to where packages are installed, is no test and no copy of another's code."""
    if ".." in relative.parts or relative.name.startswith("test_"):
        return False
    return not any(SKIPPED_FOLDERS.fullmatch(part) for part in relative.parts[:-1])


def packages(sites: list[str]) -> Iterator[tuple[dict[str, str], list[Path]]]:
    """Each permissively licensed distribution in `sites` with its Python files; the standard library first."""
    yield standard_library()
    found = {dist.metadata["Name"].lower().replace("_", "-"): dist for dist in distributions(path=sites)}
    for name in sorted(found):
        licence = licence_of(found[name])
        files = [f for f in found[name].files or [] if f.suffix == ".py" and usable(Path(f))]
        if files and is_permissive(licence):
            entry = {"name": name, "version": found[name].version, "licence": licence}
            yield entry, [Path(str(f.locate())) for f in files]


@dataclass(frozen=True)
class Package:
    """A line of the manifest: what was kept of one distribution."""

    name: str
    version: str
    licence: str
    held_out: bool
    files: int
    bytes: int


class Corpus:
    """Collects documents, dropping copies and near copies, held-out packages first."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.held_lines: set[int] = set()
        self.reasons: Counter[str] = Counter()

    def novel(self, text: str, held: bool) -> str:
        """ "" where the text is new enough to keep, else the reason for dropping it."""
        keys = line_keys(text)
        if not keys:
            return "no lines"
        if not held and sum(k in self.held_lines for k in keys) > 0.2 * len(keys):
            return "repeats held-out lines"
        if sum(k in self.seen for k in keys) > 0.6 * len(keys):
            return "near copy"
        self.seen.update(keys)
        if held:
            self.held_lines.update(keys)
        return ""

    def take(self, files: list[Path], held: bool) -> list[str]:
        """The documents kept of one package, up to PACKAGE_CAP bytes, in an order that no name decides."""
        kept, size = [], 0
        for path in sorted(files, key=lambda p: hashlib.blake2b("/".join(p.parts[-4:]).encode()).digest()):
            text, reason = clean(path) if path.is_file() else ("", "missing")
            if not reason and size + len(text) > PACKAGE_CAP:
                reason = "package cap"
            reason = reason or self.novel(text, held)
            if reason:
                self.reasons[reason] += 1
                continue
            kept.append(text)
            size += len(text)
        return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--site", action="append", required=True, help="a site-packages folder; may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus()
    manifest: list[Package] = []
    entries = sorted(packages(args.site), key=lambda e: e[0]["name"] not in HELD_OUT)  # held-out packages first
    outputs = {held: (args.out / f"{'heldout' if held else 'train'}.bin").open("wb") for held in (True, False)}
    for entry, files in entries:
        held = entry["name"] in HELD_OUT
        texts = [text.encode() for text in corpus.take(files, held)]
        outputs[held].writelines(text + b"\0" for text in texts)
        manifest.append(Package(**entry, held_out=held, files=len(texts), bytes=sum(map(len, texts))))
        print(f"{entry['name']:32} {entry['version']:14} {entry['licence'][:40]:40} {len(texts):5} files", flush=True)
    for output in outputs.values():
        output.close()
    document = {"packages": [asdict(p) for p in manifest if p.files], "files_dropped": dict(corpus.reasons)}
    (args.out / "manifest.json").write_text(json.dumps(document, indent=1) + "\n")
    for held in (True, False):
        group = [p for p in manifest if p.held_out == held and p.files]
        print("held out" if held else "train", f"{len(group)} packages {sum(p.bytes for p in group) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

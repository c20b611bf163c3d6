"""Writes the model card, weights/README.md, from the results beside it: python -m train.card"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open

WEIGHTS = Path(__file__).parent.parent / "weights"
NAME = "rwkv7-python-9m"

INTRODUCTION = """# {name}

A small RWKV-7 language model that continues Python source code. It is real and trained here (`train/`), small enough
for git, and there so that the server runs anywhere, on a CPU too, without a download. It writes plausible Python with
docstrings; it does not know what your code is for.

- `{name}.safetensors`: {parameters:.2f} M parameters, {layers} layers of width {width}, heads of 64, {vocab} ids;
  bfloat16, {mib:.1f} MiB, tensors named and shaped as in the published RWKV-7 checkpoints
- `python-vocab.txt`: its vocabulary, {tokens} tokens of the World vocabulary in the same format, all 256 bytes among
  them; id 0 ends a document
- `training-data.json`, `training-log.json`, `results.json`: every package with its licence, the run, the numbers below
"""

DATA = """## Data

Python sources under MIT, BSD, Apache or PSF licences, by the packages' own metadata; tests, vendored copies, generated
files, tables and near copies are left out, and no package gives more than 2.2 MB. The licences are in
`training-data.json`.

Held out, whole: {held_out} Training files that share more than a fifth of their longer lines with these are left out.

Training: {training}
"""

SAMPLES = """## Samples

The first twelve of the completed heads, unedited, at the server's default temperature 1 and top_p 0.5. The head (`def`
and docstring) is a held-out package's; the rest is the model's, cut as above.
"""

MADE = """## How it was made

{steps} steps of {batch} x {length} tokens in {seconds:.0f} s on one NVIDIA H200: {tokens:.0f} M tokens, {epochs:.1f}
times through the training text. At the end {nats:.3f} nats a held-out token, over all held-out files, in the training
code's precision.
Adam (0.9, 0.99), peak rate {rate}, cosine to zero, weight decay 0.1 on matrices. Start values are the published
recipe's. The commands, and why it is made this way, are in [train/README.md](../train/README.md).
"""

LIMITS = """## Limits

- {parameters:.0f} M parameters: names and idioms of common libraries, no reasoning. Do not run what it writes unread.
- Python only. Other text is spelled in bytes and guessed badly; it has seen no chat, so `chat=true` makes no sense.
- End a prompt where a token may end: after `def f(x):`, not after the newline that follows. The vocabulary has tokens
  such as newline-and-indent; a prompt that ends in a bare newline says that no indent comes next.
- It may repeat itself, more so at a low temperature.
- The training text's licences are permissive, but a model can repeat what it has read: check long passages before you
  publish them.
"""


def numbers(results: dict[str, Any]) -> str:
    """The tables of bits per byte and of parsed completions."""
    lines = ["## Numbers", "", "Bits per byte of held-out packages (less is better):", ""]
    lines += ["| | this model | `xz -9` | order-5 byte n-gram |", "|---|---|---|---|"]
    for name, row in results["bits_per_byte"].items():
        model = f"**{row['model']:.3f}**" if "model" in row else ""
        label = f"{name}: {row['files']} files, {row['bytes'] / 1e6:.2f} MB"
        lines.append(f"| {label} | {model} | {row['xz -9']:.3f} | {row['order-5 n-gram']:.3f} |")
    lines += [
        "",
        f"{results['function_heads']} held-out function heads (`def` and docstring), completed and parsed:",
        "",
    ]
    lines += ["| share accepted by `ast.parse` | this model | order-5 byte n-gram |", "|---|---|---|"]
    for name, both in results["parsed"].items():
        for key, label in (("accepted", ""), ("accepted_with_statement", ", and with a statement of its own")):
            model, ngram = (both[who][key] for who in ("model", "order-5 n-gram"))
            lines.append(f"| {name}{label} | **{model:.1%}** | {ngram:.1%} |")
    return "\n".join([*lines, "", METHOD])


METHOD = """All from one command, `python -m train.evaluate` (train/README.md), through the served model on a {device}.
The model and the n-gram read each file whole from an empty context and predict its end too; the bytes are the file's.
`xz` packs the files end to end, which lets it use what they share. The n-gram model (five bytes of context,
interpolated modified Kneser-Ney) learnt from the same text. A completion ends before the first line that is not
indented, at the model's end of a document, or at 600 bytes, there cut to whole lines; both models are drawn from by the
server's sampler with the same seeds.
"""


def data(manifest: dict[str, Any], held_out: bool) -> str:
    """One group of packages in a sentence; the few held-out ones by name."""
    group = [p for p in manifest["packages"] if p["held_out"] == held_out]
    size, files = sum(p["bytes"] for p in group), sum(p["files"] for p in group)
    kinds: Counter[str] = Counter()
    for package in group:
        licence = package["licence"]
        kinds[next((k for k in ("Apache", "BSD", "MIT", "PSF") if k in licence), "PSF")] += 1
    counted = ", ".join(f"{name} {number}" for name, number in kinds.most_common())
    listed = ": " + ", ".join(f"{p['name']} {p['version']}" for p in group) if held_out else ""
    return f"{len(group)} packages, {files} files, {size / 1e6:.1f} MB (by first licence named: {counted}){listed}."


def main() -> None:
    """Reads the results in weights/ and writes the card beside them."""
    results, log, manifest = (
        json.loads((WEIGHTS / f"{name}.json").read_text()) for name in ("results", "training-log", "training-data")
    )
    path = WEIGHTS / f"{NAME}.safetensors"
    with safe_open(path, "pt") as tensors:
        shapes = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118 - no mapping
    parameters = sum(math.prod(shape) for shape in shapes.values()) / 1e6
    settings, last = log["settings"], log["log"][-1]
    parts = [
        INTRODUCTION.format(
            name=NAME,
            parameters=parameters,
            layers=settings["layers"],
            width=settings["width"],
            vocab=shapes["head.weight"][0],
            mib=path.stat().st_size / 2**20,
            tokens=len((WEIGHTS / "python-vocab.txt").read_text(encoding="utf-8").splitlines()),
        ),
        numbers(results).replace("{device}", results["device"].replace("cpu", "CPU").replace("cuda", "GPU")),
        DATA.format(held_out=data(manifest, True), training=data(manifest, False)),
        MADE.format(**(settings | last | {"tokens": last["tokens"] / 1e6, "nats": last["heldout_nats_per_token"]})),
        LIMITS.format(parameters=parameters),
        SAMPLES,
        *(f"````python\n{sample.rstrip()}\n````\n" for sample in results["samples"]),
    ]
    (WEIGHTS / "README.md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()

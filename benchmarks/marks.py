"""Tables in Markdown files, each between two marks, so that what made it can make it again."""

from pathlib import Path


def replace(file: Path, begin: str, end: str, text: str) -> None:
    """Put ``text`` between the marks in ``file``. Raises ValueError where it lacks them."""
    before, found, rest = file.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{file} lacks the lines {begin} and {end}")
    file.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])

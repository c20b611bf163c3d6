"""benchmarks/loading.py from its command line to its file, on the CPU with a small model."""

import json
from pathlib import Path

import pytest

from benchmarks import loading, synth_rwkv7


def test_a_row_is_measured_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(synth_rwkv7.SIZES, "small", (2, 128, 32, 32, 16, 64))
    saved = tmp_path / "rows.json"
    other = {"model": "small", "card": "another"}
    saved.write_text(json.dumps([other, {"model": "small", "card": "CPU", "gb_per_s": 0}]))
    arguments = ["--model", "small", "--loads", "2", "--requests", "3", "--device", "cpu"]
    loading.main([*arguments, "--keep", str(tmp_path), "--save", str(saved)])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(saved.read_text()) == [other, row]
    assert row["bytes"] == (tmp_path / "small-65536.pth").stat().st_size
    assert row["model"] == "small" and row["card"] == "CPU" and len(row["load_s"]) == 2
    for name in ("gb_per_s", "setup_s", "first_token_ms", "steady_first_token_ms"):
        assert row[name] > 0, name

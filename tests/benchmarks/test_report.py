"""A run's tables, CSV and charts, and the cost of a search, on the smallest of each."""

import csv

import pytest

pytest.importorskip("peft")

from benchmarks.report import write
from benchmarks.search_cost import markdown, search_cost
from capt.training import TrainConfig

from ..capt.tiny import save_llama, write_reviews


def benchmark(method, engine, samples, axis=None, value=None):
    info = {
        "setting": "shape, task x 2, train" + (f", over {axis} {value}" if axis else ""),
        "work": "train",
        "axis": axis,
        "value": value,
        "method": method,
        "engine": engine,
        "rounds": samples,
        "over_bare": samples[0] / 2.0,
        "over_products": samples[0],
        "products_seconds": 1.0,
        "samples_per_second": 1.0,
        "tokens_per_second": 10.0,
        "bytes_kept": 3e6,
        "least_bytes": 2e6,
        "peak_bytes": 4e6,
        "trained": 1234,
        "trained_bytes": 4936,
        "optimizer_bytes": 9872,
    }
    return {"group": info["setting"], "name": "test", "extra_info": info, "stats": {"median": samples[0]}}


RESULTS = {
    "machine_info": {"cpu": {"brand_raw": "a CPU"}, "threads": 2, "cpu_capability": "AVX2", "torch": "2", "gpu": None},
    "commit_info": {"id": "0123456789abcdef", "dirty": False},
    "datetime": "2026-01-02T03:04:05",
    "benchmarks": [
        benchmark("bare base", "transformers", [2.0, 2.0, 4.0]),
        benchmark("CaPT", "transformers", [3.0, 3.0, 6.0]),
        benchmark("CaPT", "fused", [1.5, 1.5, 3.0]),
        *(benchmark("CaPT", "fused", [n / 4.0], "N", n) for n in (2, 4)),
    ],
    "not_timed": [
        {"setting": "shape, task x 2, train", "method": "prefix", "engine": "transformers", "reason": "does nothing"}
    ],
}


def test_report_writes_tables_csv_and_charts(tmp_path):
    text = write(RESULTS, tmp_path, "run")
    assert text == (tmp_path / "run.md").read_text().rstrip("\n")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    header = next(line for line in lines if line[0] == "method")
    fused = dict(zip(header, next(line for line in lines if line[:2] == ["CaPT", "fused"]), strict=True))
    assert (fused["s"], fused["of bare"], fused["MB kept"], fused["of needed"]) == ("1.5", "0.75", "3.0", "1.50")
    assert ["CaPT", "1.50", "0.50", "0.75"] in lines  # method alone, engine alone, both
    assert ["CaPT, fused", "0.5 (3)", "1 (3)"] in lines
    assert next(line for line in lines if line[0] == "prefix")[2] == "not timed: does nothing"
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["bare base", "CaPT", "CaPT", "CaPT", "CaPT", "prefix"]
    assert rows[-1]["reason"] == "does nothing"
    for name in ("throughput", "memory", "scaling"):
        assert (tmp_path / f"run-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_search_cost_counts_every_length(tmp_path):
    config = TrainConfig(
        model=save_llama(tmp_path / "llama"),
        task="file",
        train_file=write_reviews(tmp_path / "reviews.csv"),
        label_words=["good", "bad"],
        template="{text} sentiment :",
        train_rows=16,
        batch_size=8,
        epochs=2,
        warmup_steps=0,
    )
    found = search_cost(config, [2, 3], {"capt": 0.1, "p-tuning-v2": 0.05}, "label-words")
    assert [(run["method"], run["length"]) for run in found["runs"]] == [
        ("capt", None),
        ("p-tuning-v2", 2),
        ("p-tuning-v2", 3),
    ]
    seconds = [run["seconds"] for run in found["runs"]]
    assert found["seconds"] == {"capt": seconds[0], "p-tuning-v2": pytest.approx(sum(seconds[1:]))}
    best = max(found["runs"][1:], key=lambda run: (run["validation"]["score"], -run["validation"]["loss"]))
    assert found["best_length"] == best["length"]
    assert [run["trained"] for run in found["runs"]] == [2 * 32, 2 * 2 * 2 * 16, 2 * 2 * 3 * 16]
    assert "(chosen)" in markdown(found)

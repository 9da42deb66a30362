"""Plans of the experiments: the grids, the search, resumption, tables, and the command line."""

import dataclasses
import json

import pytest

from capt import cli
from capt.experiments import FIGURES, METHODS, SUITES, TABLES, Bench, Plan, Row, reproduce
from capt.experiments import runner as reproduction
from capt.experiments.grids import rates_for
from capt.experiments.published import SCORES
from capt.experiments.runner import Runner, plan_grid
from capt.experiments.table import Entry, markdown
from capt.tasks import TASKS
from capt.training import TrainConfig

RUNNER = "capt.experiments.runner.run_cell"


@pytest.fixture
def plan(sources):
    settings = {"train_file": sources["reviews"], "max_steps": 2, "eval_steps": 1, "batch_size": 8, "max_length": 40}
    rows = (Row("CaPT", "capt"), Row("base alone", "bare"))
    rates = {"capt": (0.1, 0.01), "bare": (0.1,)}
    return Plan("tiny", "A title", sources["llama"], ("file",), rows, rates, "label-words", settings, seeds=2)


@pytest.fixture
def marks(monkeypatch):
    """In place of training: results whose validation score the test decides, by learning rate."""
    scores, ran = {}, []

    def run_cell(cell, bench):
        ran.append((cell.method, cell.config.learning_rate, cell.config.seed, dict(cell.options)))
        mark = {"score": scores.get(cell.config.learning_rate, 0.5), "loss": 1.0}
        trains = cell.method != "bare"
        return {
            "cell": cell.describe(),
            "metrics": {"validation": mark, "test": {"score": 0.25 + cell.config.seed / 10}},
            "base": ["llama", 2, 32],
            "majority": {"score": 0.5},
            "parameters": {"trainable": 64 * trains},
            "seconds": 30.0,
            "cpu_seconds": 15.0,
        }

    monkeypatch.setattr(RUNNER, run_cell)
    return scores, ran


# --- grids ------------------------------------------------------------------------------------------------------------


def test_grids_name_methods_and_tasks_that_exist():
    grids = [*TABLES.values(), *FIGURES.values()]
    assert set(TABLES) == {"1", "2", "3", "S2", "S3", "S4", "S5"}
    assert set(FIGURES) == {"6"}
    for grid in grids:
        assert {row.method for row in grid.rows} <= set(METHODS)
        assert set(grid.tasks) <= set(TASKS)
        assert len({row.label for row in grid.rows}) == len(grid.rows)
    for plans in SUITES.values():
        for plan in plans:
            assert len({len(plan.rates[row.method]) for row in plan.rows}) == 1
            TrainConfig(**plan.settings)


def test_the_paper_s_learning_rates():
    assert rates_for("t5", None, ["capt"]) == {"capt": (5, 1, 0.1)}
    assert rates_for("llama", None, ["capt"]) == {"capt": (7e-4, 5e-5, 1e-5)}
    assert rates_for("qwen2", None, ["capt"]) == {"capt": (1e-1, 5e-3, 5e-4, 1e-5)}
    for family in ("t5", "llama", "qwen2"):
        assert len({len(rates) for rates in rates_for(family, None, METHODS).values()}) == 1
    assert rates_for("bert", [0.5], ["capt", "lora"]) == {"capt": (0.5,), "lora": (0.5,)}
    with pytest.raises(ValueError, match="no learning rates were published for a base of model_type 'bert'"):
        rates_for("bert", None, ["capt"])


def test_the_paper_s_protocol(sources):
    bench = Bench()
    plan = plan_grid("table-1", TABLES["1"], sources["llama"], bench, table="1", settings={"epochs": 2.0})
    config = TrainConfig(**plan.settings)
    assert (config.optimizer, config.epochs, config.max_length, config.bf16) == ("adafactor", 2.0, 512, False)
    assert 16 <= config.batch_size <= 32
    assert config.patience is not None
    assert plan.rates["capt"] == (7e-4, 5e-5, 1e-5)


# --- search, seeds, resumption ----------------------------------------------------------------------------------------


def test_the_first_seed_searches_and_the_others_run_its_choice(plan, marks, tmp_path):
    scores, ran = marks
    scores[0.01] = 0.6
    done = reproduce([plan], tmp_path)
    assert done.whole
    assert ran == [("capt", 0.1, 0, {}), ("capt", 0.01, 0, {}), ("bare", 0.1, 0, {}), ("capt", 0.01, 1, {})]
    assert "| CaPT | 30.0 ± 7.1 | 30.0 | 64 | 1.5 |" in done.tables
    assert "| base alone | 25.0 | 25.0 | 0 | 0.5 |" in done.tables
    assert "| majority class | 50.0 | 50.0 | 0 |  |" in done.tables
    assert "| CaPT | lr 0.01 |" in done.tables
    assert "Learning rates tried: CaPT 0.1, 0.01; base alone 0.1." in done.tables
    assert (tmp_path / "table.md").read_text() == done.tables


def test_candidates_are_searched_with_the_learning_rates(plan, marks, tmp_path):
    _, ran = marks
    row = Row("CaPT, length searched", "capt", ({"length": 1}, {"length": 2}))
    done = reproduce([dataclasses.replace(plan, rows=(row,), seeds=1)], tmp_path)
    assert ran == [("capt", rate, 0, {"length": n}) for n in (1, 2) for rate in (0.1, 0.01)]
    assert "| CaPT, length searched | length 1, lr 0.1 |" in done.tables
    assert "| 64 | 2.0 |" in done.tables


def test_what_is_finished_is_not_run_again(plan, marks, tmp_path, monkeypatch):
    _, ran = marks
    finished = []
    write = reproduction.write_json

    def interrupted(path, content):
        if len(finished) == 2:
            raise KeyboardInterrupt
        write(path, content)
        finished.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(reproduction, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reproduce([plan], tmp_path)
    assert [path.is_file() for path in finished] == [True, True]
    before, stamps = len(ran), [path.stat().st_mtime_ns for path in finished]
    assert reproduce([plan], tmp_path).ran == 2
    assert len(ran) == before + 2
    assert [path.stat().st_mtime_ns for path in finished] == stamps
    assert reproduce([plan], tmp_path).ran == 0
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_a_file_that_is_damaged_or_another_cell_s(plan, marks, tmp_path):
    reproduce([plan], tmp_path)
    path = next((tmp_path / "tiny").glob("file--capt--lr=0.1--*.json"))
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"cell": whole["cell"] | {"method": "lora"}}))
    with pytest.raises(ValueError, match="holds another cell than its name says; delete it"):
        reproduce([plan], tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"is not JSON: .*; delete it to run the cell again"):
        reproduce([plan], tmp_path)


def test_no_cell_starts_when_time_is_over(plan, marks, tmp_path):
    done = reproduce([plan], tmp_path, minutes=0)
    assert (done.whole, done.ran) == (False, 0)
    assert "| CaPT |  |  |  |  |" in done.tables


def test_what_is_not_finite_is_not_chosen(plan, monkeypatch, marks, tmp_path):
    fake = reproduction.run_cell

    def run_cell(cell, bench):
        results = fake(cell, bench)
        lost = cell.config.learning_rate == 0.1
        return results | ({"metrics": {"validation": None, "test": None}} if lost else {})

    monkeypatch.setattr(RUNNER, run_cell)
    tables = reproduce([plan], tmp_path).tables
    assert "| CaPT | lr 0.01 |" in tables
    assert "| base alone | not finite |  |" in tables


def test_a_search_half_done_has_chosen_nothing(plan, marks, tmp_path):
    reproduce([plan], tmp_path)
    next((tmp_path / "tiny").glob("file--capt--lr=0.01--seed=0*")).unlink()
    tables = Runner([plan], tmp_path).write_table()
    assert "| CaPT |  |  |  |  |  |" in tables
    assert "| CaPT |  |\n" in tables
    assert "| base alone | 25.0 | 25.0 |" in tables


def test_seeds_that_are_not_finite_are_told(plan, monkeypatch, marks, tmp_path):
    fake = reproduction.run_cell

    def run_cell(cell, bench):
        lost = cell.config.seed == 1
        return fake(cell, bench) | ({"metrics": {"validation": None, "test": None}} if lost else {})

    monkeypatch.setattr(RUNNER, run_cell)
    assert "| CaPT | 25.0 (1 of 2 seeds finite) |" in reproduce([plan], tmp_path).tables


def test_trained_parameters_are_those_of_the_choice(plan, monkeypatch, marks, tmp_path):
    fake = reproduction.run_cell

    def run_cell(cell, bench):
        results = fake(cell, bench)
        n = cell.options["length"]
        mark = {"score": n / 10, "loss": 1.0}
        return results | {
            "metrics": {"validation": mark, "test": mark},
            "parameters": {"trainable": 32 * n},
        }

    monkeypatch.setattr(RUNNER, run_cell)
    row = Row("length searched", "capt", ({"length": 1}, {"length": 4}, {"length": 2}))
    tables = reproduce([dataclasses.replace(plan, rows=(row,), seeds=1)], tmp_path).tables
    assert "| length searched | 40.0 | 40.0 | 128 |" in tables


def test_published_numbers_stand_beside_those_of_their_base(plan):
    run = {
        "base": ["t5", 24, 1024],
        "metrics": {"test": {"score": 0.5}},
        "majority": {"score": 0.4},
        "parameters": {"trainable": 24576},
        "seconds": 1.0,
        "cpu_seconds": 1.0,
        "cell": {"options": {}, "config": {"learning_rate": 5.0}},
    }
    plan = dataclasses.replace(plan, table="1")
    lines = markdown(plan, {("CaPT", "file"): Entry([run], [run])}).splitlines()
    assert "| CaPT, published (T5-Large) |  | 84.03 | 0.003 % |  |  |" in lines
    assert "| base alone, published (T5-Large) |  |  |  |  |  |" in lines
    other = markdown(plan, {("CaPT", "file"): Entry([run | {"base": ["t5", 2, 32]}], [run | {"base": ["t5", 2, 32]}])})
    assert "not for a base of this size" in other
    assert "published (" not in other
    assert all(table in TABLES and 0 < score <= 100 for (table, *_), score in SCORES.items())


# --- before anything trains -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("file", "imdb")}, "unknown task 'imdb'"),
        ({"answer": "text"}, "answer 'text' does not fit LlamaForCausalLM"),
        ({"rows": (Row("x", "capt", ({"depth": (0, 7)},)),)}, "does not fit a base with 2 layers"),
        ({"rows": (Row("x", "capt", shots=400),)}, "shots must be between 1 and the 48 training rows, got 400"),
        ({"max_length": 1}, "nothing of 'text' is left"),
        ({"train_file": "nowhere.csv"}, r"nowhere\.csv: there is no such file"),
    ],
)
def test_what_does_not_fit_shows_before_the_first_cell(plan, marks, tmp_path, change, message):
    if not {"tasks", "answer", "rows"} & set(change):
        change = {"settings": {**plan.settings, **change}}
    with pytest.raises((ValueError, OSError), match=message):
        reproduce([dataclasses.replace(plan, **change)], tmp_path / "results")
    assert marks[1] == []
    assert not (tmp_path / "results").exists()


def test_a_missing_split_shows_before_the_first_cell(plan, marks, tmp_path):
    row = {"premise": "it rains", "hypothesis": "it is wet", "label": "entailment"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(9)))
    plan = dataclasses.replace(plan, tasks=("rte",), settings={"max_steps": 1})
    with pytest.raises(FileNotFoundError, match="data_dir has no val split"):
        reproduce([plan], tmp_path / "results", data_dir=str(tmp_path))
    (tmp_path / "val.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"val\.jsonl: the file holds no rows"):
        reproduce([plan], tmp_path / "results", data_dir=str(tmp_path))
    assert marks[1] == []


# --- the command line -------------------------------------------------------------------------------------------------


def flags(sources, tmp_path):
    settings = [f"train_file={sources['reviews']}", "max_steps=1", "eval_steps=1", "max_length=40", "batch_size=8"]
    return ["--tasks", "file", "--output", str(tmp_path / "results"), "--set", *settings]


def test_a_table_from_the_command_line(sources, tmp_path, capsys):
    command = ["reproduce", "--table", "S4", "--model", sources["llama"], "--seeds", "2", *flags(sources, tmp_path)]
    assert cli.main([*command, "--learning-rates", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert "## instance and task information alone" in out
    assert out.strip() == (tmp_path / "results/table.md").read_text().strip()
    assert len(err.splitlines()) == 6
    assert "capt: table-S4/file--instance-only--lr=0.1--seed=0: validation" in err
    assert len(list((tmp_path / "results/table-S4").iterdir())) == 6
    assert cli.main([*command, "--learning-rates", "0.1"]) == 0
    assert capsys.readouterr().err == ""
    damaged = next((tmp_path / "results/table-S4").glob("*seed=1*"))
    damaged.write_text("{")
    assert cli.main([*command, "--learning-rates", "0.1"]) == 2
    err = capsys.readouterr().err
    assert f"{damaged} is not JSON" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "7"], "invalid choice: '7'"),
        (["--table", "1", "--suite", "measured"], "not allowed with argument"),
        (["--table", "1"], "--table and --figure want a --model"),
        (["--suite", "measured", "--model", "x"], "--model is the suite's own, got 'x'"),
        (["--table", "1", "--model", "/nowhere"], "model '/nowhere' cannot be loaded"),
        (["--suite", "measured", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--suite", "measured", "--set", "epochs"], "--set epochs: NAME=VALUE is wanted"),
        (["--suite", "measured", "--set", "lead=1"], "--set lead=1: a cell or a method decides it"),
        (["--suite", "measured", "--set", "epoch=1"], "unknown field 'epoch'; did you mean 'epochs'?"),
        (["--suite", "measured", "--set", "batch_size=many"], "invalid int value: 'many'"),
        (["--suite", "measured", "--set", "batch_size=0"], "batch_size must be at least 1, got 0"),
        (["--table", "3", "--model", "MODEL", "--methods", "lora"], "--methods leaves no row: there are capt"),
    ],
)
def test_the_command_line_refuses_in_one_line(sources, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["reproduce", *(sources["llama"] if word == "MODEL" else word for word in arguments)])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_every_row_of_every_grid_fits_a_model(sources, tmp_path):
    """Builds each once; nothing trains."""
    bench = Bench()
    settings = {"train_file": sources["reviews"], "max_length": 150}
    for grid in [*TABLES.values(), *FIGURES.values()]:
        plan = plan_grid("grid", grid, sources["llama"], bench, tasks=("file",), settings=settings)
        Runner([plan], tmp_path, bench=bench).check()
    assert list(tmp_path.iterdir()) == []

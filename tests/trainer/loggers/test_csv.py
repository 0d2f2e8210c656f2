"""CSVLogger through its public face, on real files."""

import csv
from dataclasses import dataclass

import pytest

from hasten import HastenError
from hasten.trainer.loggers import CSVLogger
from tests.fork_here import fork_here


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_layout_and_values(tmp_path):
    logger = CSVLogger(tmp_path, name="digits")
    logger.log_metrics({"loss": 0.5}, step=0)
    logger.log_metrics({"loss": 0.25, "acc": 0.75}, step=10)
    logger.finalize("success")
    assert logger.log_dir == str(tmp_path / "digits" / "version_0")
    assert rows(tmp_path / "digits" / "version_0" / "metrics.csv") == [
        {"loss": "0.5", "step": "0", "acc": ""},
        {"loss": "0.25", "step": "10", "acc": "0.75"},
    ]


def test_own_name_and_next_versions(tmp_path):
    assert [CSVLogger(tmp_path).version for _ in range(3)] == [0, 1, 2]
    assert (tmp_path / "hasten_logs" / "version_2").is_dir()
    (tmp_path / "hasten_logs" / "version_7").mkdir()
    assert CSVLogger(tmp_path).version == 8


def test_without_a_name_the_versions_lie_in_save_dir(tmp_path):
    assert CSVLogger(tmp_path, name=None).log_dir == str(tmp_path / "version_0")


def test_named_version_is_used_as_it_is(tmp_path):
    logger = CSVLogger(tmp_path, version="baseline")
    logger.log_metrics({"a": 1.0})
    logger.save()
    assert (tmp_path / "hasten_logs" / "baseline" / "metrics.csv").exists()


def test_processes_that_start_at_once_get_versions_of_their_own(tmp_path):
    code = "import sys; from hasten.trainer.loggers.base import claim_version; from pathlib import Path\n"
    code += "sys.stdin.read(); print(*[claim_version(Path(sys.argv[1])) for _ in range(200)])"
    both = [fork_here(code, tmp_path) for _ in range(2)]
    for process in both:
        process.stdin.close()  # both start now
    claimed = [int(version) for process in both for version in process.stdout.read().split()]
    assert [process.wait() for process in both] == [0, 0]
    assert sorted(claimed) == list(range(400))


def test_rows_wait_for_the_flush_and_none_is_lost(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    path = tmp_path / "hasten_logs" / "version_0" / "metrics.csv"
    for step in range(9):
        logger.log_metrics({"loss": step}, step)
    assert not path.exists()
    for step in range(9, 25):
        logger.log_metrics({"loss": step}, step)
    assert len(rows(path)) == 20
    logger.save()
    logger.save()
    assert [int(row["step"]) for row in rows(path)] == list(range(25))


def test_the_file_is_copied_only_when_a_column_comes_new(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    path = tmp_path / "hasten_logs" / "version_0" / "metrics.csv"
    files = set()
    for step in range(100):
        logger.log_metrics({"val": 1.0, "val2": 2.0} if step >= 50 and step % 10 == 0 else {"loss": step}, step)
        files.add(path.stat().st_ino)
    assert len(files) <= 2
    table = rows(path)
    assert len(table) == 100
    assert table[0] == {"loss": "0.0", "step": "0", "val": "", "val2": ""}
    assert table[50] == {"loss": "", "step": "50", "val": "1.0", "val2": "2.0"}
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.csv"]


def test_a_run_that_goes_on_appends(tmp_path):
    for start in (0, 5):
        logger = CSVLogger(tmp_path, version=0)
        for step in range(start, start + 5):
            logger.log_metrics({"loss": step, "start": start} if start else {"loss": step}, step)
        logger.finalize("success")
    table = rows(tmp_path / "hasten_logs" / "version_0" / "metrics.csv")
    assert [int(row["step"]) for row in table] == list(range(10))
    assert [row["start"] for row in table] == [""] * 5 + ["5.0"] * 5


def test_hyperparameters_are_yaml(tmp_path):
    yaml = pytest.importorskip("yaml")

    @dataclass
    class Params:
        lr: float = 1e-3
        layers: tuple = (32, 32)
        name: str = "a: b #c"
        on: bool = True
        path: object = tmp_path

    logger = CSVLogger(tmp_path)
    logger.log_hyperparams(Params())
    logger.log_hyperparams({"seed": None, "optimizer": {"name": "adam", "betas": [0.9, 0.99]}})
    read = yaml.safe_load((tmp_path / "hasten_logs" / "version_0" / "hparams.yaml").read_text())
    assert read == {
        "lr": 0.001, "layers": [32, 32], "name": "a: b #c", "on": True, "path": str(tmp_path),
        "seed": None, "optimizer": {"name": "adam", "betas": [0.9, 0.99]},
    }  # fmt: skip


def test_prefix(tmp_path):
    logger = CSVLogger(tmp_path, prefix="fold1")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    assert "fold1-loss" in rows(tmp_path / "hasten_logs" / "version_0" / "metrics.csv")[0]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HastenError, match="file"):
        _ = CSVLogger(tmp_path / "file").version


def test_all_ranks_use_the_version_of_rank_0(tmp_path):
    class World:
        is_zero = False

        def broadcast(self, value):
            assert value is None
            return 3

    logger = CSVLogger(tmp_path)
    logger.agree(World())
    assert logger.log_dir.endswith("version_3")
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    assert not (tmp_path / "hasten_logs").exists()

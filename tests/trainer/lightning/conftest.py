"""These tests run in a process of their own: once Lightning is imported, a Trainer has Lightning's defaults.

`pytest tests/trainer/lightning` runs them; in a run with other tests, `tests/trainer/test_beside_lightning.py` does.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path, config):
    asked = [Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args]
    return None if all(path.is_relative_to(HERE) for path in asked) else True

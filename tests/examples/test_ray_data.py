"""examples/ray_data.py: each row once an epoch over the ranks, as many in each. Skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_data.py"
# Runs the example's own `main`, whose workers also note the rows of each batch.
NOTING = """
import json, os
import ray_data

def train(config):
    import ray.train
    import ray_data

    class Noting(ray_data.Part):
        def __iter__(self):
            ids = []
            for batch in super().__iter__():
                ids.append(batch["id"].tolist())
                yield batch
            rank = ray.train.get_context().get_world_rank()
            with open(os.path.join(config["folder"], f"seen-{rank}-{self.epoch}.json"), "w") as file:
                json.dump(ids, file)

    ray_data.Part = Noting
    ray_data.train(config)  # the example's own: this process imports it afresh

if __name__ == "__main__":
    ray_data.train = train
    ray_data.main()
"""


@pytest.mark.slow  # Ray starts a dozen processes
@pytest.mark.timeout(600)
def test_rows_of_ray_data_reach_the_ranks_once_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason="Ray is not installed: pip install 'ray[data,train]'")
    script = tmp_path / "noting.py"
    script.write_text(NOTING)
    done = subprocess.run(
        [sys.executable, script, "--folder", tmp_path],
        # Ray's processes import the example, as they would on machines that share a folder.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{EXAMPLE.parents[1] / 'src'}:{EXAMPLE.parent}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert not done.returncode, done.stdout + done.stderr
    found = re.search(r"^train_loss ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert found, done.stdout
    assert float(found[1]) < 0.5  # the labels' variance is 8/12
    orders = []
    for epoch in (1, 2, 3):
        parts = [json.loads((tmp_path / f"seen-{rank}-{epoch}.json").read_text()) for rank in range(2)]
        assert [list(map(len, part)) for part in parts] == [[16] * 20] * 2  # the same batches: no rank waits
        orders.append([row for part in parts for batch in part for row in batch])
        assert sorted(orders[-1]) == list(range(640))
    assert len(set(map(tuple, orders))) == 3

"""The task learns in one process: pytest test_task.py"""

import data
from task import Diabetes

from millpond.train import fit


def test_it_learns(tmp_path):
    data.main(tmp_path)
    folder = tmp_path / "data" / "csd0" / "patients"
    fitted = fit(Diabetes(), folder, tmp_path / "test", epochs=30, batch=1000, learning_rate=0.05)
    assert fitted.scores[-1]["r2"] > 0.3

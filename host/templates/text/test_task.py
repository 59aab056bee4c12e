"""The task learns in one process: pytest test_task.py"""

import data
from task import Sentiment

from millpond.train import fit


def test_it_learns(tmp_path):
    data.main(tmp_path)
    folder = tmp_path / "data" / "csd0" / "text"
    fitted = fit(Sentiment(), folder, tmp_path / "test", epochs=12, optimizer="AdamW", learning_rate=5e-3)
    assert fitted.scores[-1]["accuracy"] > 0.9

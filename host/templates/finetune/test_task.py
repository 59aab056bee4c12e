"""Adapters alone are trained, and learn: pytest test_task.py"""

import pytest

pytest.importorskip("transformers")

import data
import task

from millpond.train import fit


def test_they_learn(tmp_path, monkeypatch):
    data.main(tmp_path)
    monkeypatch.setattr(task, "__file__", str(tmp_path / "task.py"))
    model = task.Sentiment().model()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained < 0.05 * sum(p.numel() for p in model.parameters())
    folder = tmp_path / "data" / "csd0" / "text"
    fitted = fit(
        task.Sentiment(), folder, tmp_path / "test", epochs=10, optimizer="AdamW", learning_rate=5e-3
    )
    assert fitted.scores[-1]["accuracy"] > 0.85

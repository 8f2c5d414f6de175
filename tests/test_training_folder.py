"""The folder of a training: what it replaces comes back if the new one fails, and other people's files stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_keeping import tree, world  # noqa: F401  # a fixture

from headwise.errors import DataError, OutputError
from headwise.research.train.claim import OWN as TRAINING
from headwise.research.train.claim import claim as claim_training
from headwise.research.train.claim import held as training_in
from headwise.research.train.settings import TrainSettings
from headwise.runs import aside
from headwise.runs.settings import Settings


def test_a_training_that_is_replaced_keeps_what_is_not_ours(tmp_path: Path, world: Settings) -> None:  # noqa: F811
    out, asked = tmp_path / "out", TrainSettings(config=world.model, data=str(world.data))
    claim_training(out, asked, False)
    (out / "training.json").write_text("{}")
    (out / "mine.txt").write_text("mine")
    before = tree(out)
    with pytest.raises(DataError), training_in(out, asked):
        claim_training(out, asked, True)
        assert not (out / "training.json").exists()
        raise DataError("too short.")
    assert tree(out) == before, "the old training is back"
    aside.set_aside(out, TRAINING)  # killed here: only the user's file and the earlier training are left
    claim_training(out, asked, True)
    with training_in(out, asked):
        claim_training(out, asked, True)
    assert not (out / "training.json").exists() and (out / "mine.txt").exists()
    assert not (out / aside.PREVIOUS).exists()
    (out / "checkpoints" / "step-1").mkdir(parents=True)
    Path(str(world.data)).write_text("another text")
    with pytest.raises(OutputError, match=r"began with another .*text.txt; restore it"):
        claim_training(out, asked, False)

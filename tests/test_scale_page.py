"""What the pages about size say of measurements: slopes, ties, and which estimate a stage belongs to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import growth
import same_plan
import scale


def test_slopes_are_those_of_the_logarithms(tmp_path: Path) -> None:
    base, rows = growth.Size(64, 2, 128), []
    for tokens in (32, 64, 128):
        for repeat, took in enumerate((0.9, 1.1)):
            size = base._replace(tokens=tokens)._asdict()
            rows.append({**size, "repeat": repeat, "seconds": took * tokens**0.5, "stages": {"refit": 3.0}})
    found = {"base": base._asdict(), "growth": {"tokens": [32, 64, 128]}, "rows": rows}
    file = tmp_path / "growth.json"
    file.write_text(json.dumps(found | {"hardware": "some GPU", "date": "today", "commit": "abc"}))
    whole, refit = (line for line in growth.section(file) if line.startswith("| tokens"))
    assert whole.endswith("| 0.50 | 1.00 times |") and "32: 5.7 (5.1 to 6.2)" in whole
    assert refit.startswith("| tokens | refit |") and refit.endswith("| 0.00 | 1.00 times |")
    assert "each size at least 2 times" in growth.section(file)[-1]


def test_every_size_is_measured_once_a_repeat_the_smallest_first() -> None:
    found = growth.sizes(growth.BASE, growth.GROWTH)
    assert len(found) == len(set(found)) == sum(map(len, growth.GROWTH.values())) - 2, "the base is on every axis"
    assert found[0] == growth.BASE._replace(width=1024) and growth.BASE in found


@pytest.mark.parametrize(
    "more, tie",
    (
        ({}, True),
        ({"extra": 0.02}, False),
        ({"extra_of_first": 0.02}, False),
        ({"difference_low": 0.001}, False),
        ({"difference_high": -0.001}, False),
    ),
)
def test_plans_tie_by_both_prices_and_by_damage(more: dict[str, Any], tie: bool) -> None:
    row = {"extra": 0.001, "extra_of_first": 0.009, "difference_low": -0.002, "difference_high": 0.002}
    assert same_plan.ties(row | more) == tie


def test_stages_of_runs_are_compared_with_the_estimate_that_covers_them() -> None:
    rows = json.loads(scale.RESULT.read_text())["rows"]
    heavy = {
        stage["stage"]
        for row in rows
        for stage in row.get("stages", ())
        if stage["device_gib"] > 0.5 * row["device_gib"]
    }
    free = {stage for stage in heavy if not scale.estimated_as(stage)}
    assert not free - {"damage on calibration data", "conditioning", "saturation", "lags", "planning", "reshaping"}

"""The verdict: what is within a limit, what was not measured, exit codes, and how the report says it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from report_parts import check_page, make_dossier
from test_certificate import at, call, far, verdict

from headwise import api
from headwise.errors import HeadwiseError
from headwise.report import headline, model_card, render, status
from headwise.report._pictures import by_length
from headwise.runs.settings import Settings
from headwise.types.verdict import damage_limit


def test_a_verdict_is_within_uncertain_or_beyond_its_limit() -> None:
    good = verdict(at(512, 0.02), at(2048, 0.03))
    assert (good.state, good.quality_state, good.verified_up_to) == ("verified", "within limit", 2048)
    assert headline(good) == (
        "Sizes verified: its one check passed. "
        "Measured quality: +3.0% perplexity (+2.0% to +4.1%) up to 2,048 tokens, within the limit of 10%."
    )
    unsure = verdict(at(512, 0.02), at(2048, 0.09))
    assert (unsure.state, unsure.quality_state, unsure.passed) == ("partly verified", "uncertain", True)
    bad = verdict(at(512, 0.02), at(2048, 0.5))
    assert (bad.state, bad.quality_state, bad.passed) == ("not verified", "beyond limit", False)
    assert "+64.9% perplexity" in headline(bad) and "BEYOND the limit of 10%" in headline(bad)
    assert verdict(at(2048, math.nan)).quality_state == "beyond limit"
    assert verdict(at(2048, 0.03), max_loss="2%", limit=damage_limit("2%")).quality_state == "beyond limit"


def test_what_was_not_measured_is_not_certified() -> None:
    short = verdict(at(512, 0.02), at(2048, 0.03, rows=1))
    assert short.verified_up_to == 512 and short.state == "partly verified" and short.passed
    assert "Verified up to 512 of 2,048 tokens" in headline(short) and status(short) == "! partly verified"


def test_a_distance_that_the_source_cannot_bridge_says_nothing() -> None:
    found = verdict(at(2048, 0.01), retrieval=(far(64, 0.9, 0.85), far(256, 0.1, 0.0)))
    assert found.state == "verified" and found.reasons == ()
    assert verdict(at(2048, 0.01), retrieval=(far(64, 0.9, 0.5),)).state == "partly verified"


def test_limits_are_read_or_refused() -> None:
    assert damage_limit("2%") == pytest.approx(math.log(1.02)) and damage_limit("0.02") == 0.02
    with pytest.raises(HeadwiseError, match="did you mean 5%"):
        damage_limit("5")
    for text in ("", "much", "-1%", "0"):
        with pytest.raises(HeadwiseError, match="give a percentage of perplexity such as 2%, or nats such as 0.02"):
            Settings(model="x", max_loss=text or "%")


@pytest.mark.parametrize(("damage", "code"), [(0.01, 0), (0.09, 0), (0.5, 3)])
def test_commands_end_with_three_where_quality_is_beyond_the_limit(
    damage: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verdict(at(2048, damage))
    dossier = replace(make_dossier(), verdict=found)
    monkeypatch.setattr(api, "run", lambda *a, **k: dossier)
    monkeypatch.setattr(api, "verify", lambda *a, **k: found)
    for command in (["run", "embedded", "--budget", "kv=75%"], ["demo"]):
        assert call(*command, "--out", tmp_path / "run") == code
    assert call("verify", tmp_path) == code
    capsys.readouterr()
    assert call("run", "embedded", "--budget", "kv=75%", "--out", tmp_path / "run", "--json") == code
    assert json.loads(capsys.readouterr().out)["verdict"]["lengths"][0]["damage"] == damage


def test_the_report_draws_damage_over_length_and_names_what_is_missing() -> None:
    found = verdict(at(512, 0.02), at(2048, 0.5), retrieval=(far(64, 0.9, 0.85), far(256, 0.1, 0.0)))
    found = replace(found, not_measured=("Quality at 8,192 tokens: no text.",))
    dossier = replace(make_dossier(), verdict=found)
    data = by_length(found)
    assert data is not None and [value for value, _ in data.x.ticks or ()] == [512, 2048]
    assert data.across[0] == (pytest.approx(10), "limit 10%") and data.upright[0][0] == 512
    assert data.series[1].points[1][1] == pytest.approx(64.87, 0.01)
    page = render(dossier)
    check_page(page)
    assert (
        "✗ quality beyond limit" in page[: page.index("<section")]
        and "limit 10%" in page
        and "calibrated at 512" in page
    )
    for text in (page, model_card(dossier)):
        for fact in ("BEYOND", "the source does not retrieve at this distance", "Quality at 8,192 tokens: no text."):
            assert fact in text, fact

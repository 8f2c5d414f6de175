"""The calculators at the command line: answers in words, in JSON and drawn; errors that say what to type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwise.errors import HeadwiseError
from headwise.report import plots
from headwise.research.theory.command import app


def run(*words: str) -> str:
    """What a command prints; its error is raised, as the real command line does before it prints it."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*words: str) -> Any:
    return json.loads(run(*words, "--json"))


ALLOCATE = ("allocate", "--dim", "256", "--token-dim", "8")


def test_allocate_answers_in_words() -> None:
    assert "4 groups of 8 heads of dimension 8: 32 heads in all, 256 of 256 spent" in run(*ALLOCATE, "--ngram", "4")


def test_allocate_answers_programs() -> None:
    found = answer(*ALLOCATE, "--ngram", "4")
    assert found["groups"] == [{"lag": lag, "heads": 8, "dim": 8} for lag in (1, 2, 3, 4)]
    assert found["heads"] == 32 and found["spent"] == 256
    total = sum(term["dimension"] + term["heads"] + term["unserved"] for term in found["terms"])
    assert found["error"] == pytest.approx(total)


def test_options_reach_the_solver() -> None:
    stepped = answer("allocate", "--dim", "100", "--token-dim", "8", "--rho", "power:1", "--lags", "3", "--at-most",
                     "--head-step", "2", "--dim-step", "4")  # fmt: skip
    assert stepped["spent"] <= 100
    assert all(group["heads"] % 2 == 0 and group["dim"] % 4 == 0 for group in stepped["groups"])
    free = answer(*ALLOCATE, "--rho", "0,0,1", "--any-lags")
    assert {group["lag"] for group in free["groups"]} == {3}
    scaled, plain = (answer(*ALLOCATE, "--ngram", "4", "--norm", norm)["error"] for norm in ("2", "1"))
    assert scaled == pytest.approx(2 * plain)
    assert "serving no lag is best" in run("allocate", "--dim", "1", "--token-dim", "8", "--ngram", "2", "--at-most")


def test_groups_that_cannot_keep_the_bound_are_named() -> None:
    assert "fewer heads than the lag at lag 3:" in run("bound", "--token-dim", "8", *["--group", "2x8"] * 3)
    assert "fewer heads" not in run(*ALLOCATE, "--ngram", "4")


@pytest.mark.parametrize(("groups", "token_dim"), [("1", "16"), ("2", "8")])
def test_bound_shows_the_curve_over_heads(groups: str, token_dim: str) -> None:
    found = answer("bound", "--dim", "128", "--token-dim", token_dim, "--groups", groups)
    assert found["best"]["heads_per_group"] == 8
    assert [point["heads_per_group"] for point in found["curve"]][:5] == [1, 2, 4, 8, 16]
    words = run("bound", "--dim", "128", "--token-dim", token_dim, "--groups", groups)
    assert f"least at 8 heads of dimension {token_dim} per group" in words


def test_bound_of_given_groups() -> None:
    found = answer("bound", "--token-dim", "8", "--group", "8x8", "--group", "4X4", "--lags", "3")
    assert [(term["dimension"] > 0, term["unserved"] > 0) for term in found["terms"]] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert found["dim"] == 80
    assert "error at most 0.1658" in run("bound", "--token-dim", "16", "--group", "8x16")


def test_saturation_with_a_simulation() -> None:
    words = ("saturation", "--logit-bound", "0.5", "--lengths", "1,8,64,512", "--draws", "8")
    rows = answer(*words)
    assert [row["length"] for row in rows] == [1, 8, 64, 512]
    assert all(row["simulated_norm"] <= row["norm_bound"] for row in rows)
    assert rows[1]["head_error_aligned"] == rows[3]["head_error_aligned"]
    assert rows[3]["head_error_independent"] < rows[1]["head_error_independent"] / 4
    assert answer(*words) == rows, "same seed, same answer"
    assert "simulated: norm ~ L^-0.9" in run(*words)


def test_conditioning_says_where_it_is_infinite() -> None:
    rows = answer("conditioning", "--tokens", "64", "--head-dim", "64", "--heads", "1,4", "--draws", "3")
    assert [row["condition"] for row in rows] == [None, 3.0]
    assert rows[1]["simulated"] == pytest.approx(3.0, rel=0.2)
    assert "infinite up to a width of 64" in run("conditioning", "--tokens", "64", "--head-dim", "64")


DRAWN = [
    (*ALLOCATE, "--ngram", "4"),
    ("bound", "--dim", "128", "--token-dim", "16"),
    ("bound", "--token-dim", "16", "--group", "8x16"),
    ("saturation", "--logit-bound", "1", "--draws", "3"),
    ("conditioning", "--tokens", "16", "--head-dim", "16", "--draws", "3"),
]


@pytest.mark.parametrize("words", DRAWN, ids=lambda words: " ".join(words[:2]))
def test_everything_can_be_drawn(words: tuple[str, ...], tmp_path: Path) -> None:
    first, second, image = tmp_path / "one.svg", tmp_path / "new" / "two.svg", tmp_path / "three.PNG"
    assert "drawn:" in run(*words, "--plot", str(first))
    run(*words, "--plot", str(second), "--json")
    run(*words, "--plot", str(image))
    assert first.read_bytes() == second.read_bytes(), "the same bytes every time"
    assert "</text>" in first.read_text(), "text stays text"
    assert image.read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"one.svg", "new", "three.PNG"}, "nothing left behind"


def test_json_stays_json_when_something_is_drawn(tmp_path: Path) -> None:
    assert answer(*ALLOCATE, "--ngram", "4", "--plot", str(tmp_path / "a.svg"))["heads"] == 32


def test_a_drawing_is_not_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text("mine")
    with pytest.raises(HeadwiseError, match="exists.*--overwrite"):
        run(*ALLOCATE, "--ngram", "4", "--plot", str(path))
    assert path.read_text() == "mine"
    run(*ALLOCATE, "--ngram", "4", "--plot", str(path), "--overwrite")
    assert "<svg" in path.read_text()


def test_a_drawing_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwiseError, match="cannot be written.*choose another file"):
        run(*ALLOCATE, "--ngram", "4", "--plot", str(tmp_path / "file" / "a.svg"))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "32 heads" in run(*ALLOCATE, "--ngram", "4"), "tables need none"
    with pytest.raises(HeadwiseError, match=r'pip install "headwise\[plots\]"'):
        run(*ALLOCATE, "--ngram", "4", "--plot", str(tmp_path / "a.svg"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*ALLOCATE,), "say what to read: --ngram 4"),
        ((*ALLOCATE, "--ngram", "4", "--lags", "4"), "leave --rho and --lags away"),
        ((*ALLOCATE, "--rho", "geometric:0.5"), "--lags 8"),
        ((*ALLOCATE, "--ngram", "4", "--dim-step", "7"), "cannot be spent exactly.*252 and 259"),
        ((*ALLOCATE, "--ngram", "4", "--plot", "a.pdf"), r"end its name in .svg or .png"),
        (("bound", "--token-dim", "8"), "say what to bound"),
        (("bound", "--token-dim", "8", "--group", "8"), "'8' is no group.*8x16"),
        (("saturation", "--logit-bound", "1", "--lengths", "4,x"), "--lengths 4,16,64"),
        (("saturation", "--logit-bound", "1", "--draws", "1"), "at least 2"),
        (("conditioning", "--tokens", "8", "--head-dim", "0"), "at least 1"),
        (("conditioning", "--tokens", "8", "--head-dim", "8", "--heads", "1", "--plot", "a.svg"), "nothing to draw"),
    ],
)
def test_errors_say_what_to_type(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(HeadwiseError, match=says):
        run(*words)


def test_help_loads_no_numbers_and_no_drawing() -> None:
    code = (
        "import sys; from headwise.research.theory.command import app\n"
        "heavy = {'numpy', 'scipy', 'matplotlib', 'torch'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_figures_come_in_the_house_style() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure = plots.new_figure(5, 3)
    axes = figure.subplots(1, 2)[0]
    assert tuple(figure.get_size_inches()) == (5, 3)
    assert axes.plot([1, 2])[0].get_color() == plots.PALETTE[0], "lines take the palette unasked"
    assert not axes.spines["top"].get_visible()
    assert dict(matplotlib.rcParams) == before, "and nobody else's figures change"

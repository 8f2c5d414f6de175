"""Every experiment keeps its promises at the smallest size; results are kept safe; the evidence says what they say."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # experiments live beside the package
    sys.path.insert(0, str(ROOT))

from experiments import _judge, _lab, _ngram, _provenance, _sweep, a4_ngram  # noqa: E402

from headwise.errors import HeadwiseError, OutputError, UnknownNameError  # noqa: E402
from headwise.progress import silently  # noqa: E402
from headwise.report import plots  # noqa: E402
from headwise.research import reproduce  # noqa: E402

NAMES = _lab.experiments()
app = typer.Typer()
app.command()(reproduce.command)


def tiny(out: Path, **more: Any) -> _lab.Request:
    return _lab.Request(size="tiny", device="cpu", out=out, **more)


def ask(*arguments: object) -> Any:
    """What the command line answers."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_says_what_it_tests(name: str) -> None:
    module = _lab.load(name)
    assert module.CLAIM and len(module.TITLE) <= 60, "the page is made of these"
    assert (module.__doc__ or "").strip(), "the file says what it does"
    assert _lab.find(module.CLAIM) == _lab.find(name) == name, "found by claim and by name"
    if not name.startswith("q"):
        assert name.partition("_")[0].upper() == module.CLAIM


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_at_the_smallest_size(name: str, tmp_path: Path) -> None:
    if name == "b4_redesigns" and not importlib.util.find_spec("timm"):
        pytest.skip("timm is not installed")
    result = _lab.run(name, tiny(tmp_path), silently)
    module, found = _lab.load(name), result["found"]
    assert json.loads((tmp_path / f"{name}.json").read_text()) == result, "the file holds the result"
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"], "and nothing is left beside it"
    stored = {"claim", "size", "command", "arguments", "commit", "code", "inputs", "date", "hardware", "versions"}
    assert stored <= set(result) and result["code"] == _provenance.digest(name)
    judged = _lab.judged(name, found, {name: found})
    assert judged.verdict in (_judge.ANSWERS if name.startswith("q") else _judge.VERDICTS)
    assert judged.number and judged.because
    assert any(sign.isdigit() for sign in module.measured(found)), "what was measured is told in numbers"
    figure = plots.new_figure()
    module.draw(found, figure)
    assert figure.axes and all(axes.has_data() for axes in figure.axes)
    assert any(axes.get_xlabel() for axes in figure.axes) and any(axes.get_ylabel() for axes in figure.axes)
    plots.save(figure, tmp_path / "figure.svg")


def test_experiments_come_in_order(tmp_path: Path) -> None:
    for stem in ("b1_x", "a10_y", "a2_z", "q1_w", "_shared", "notes"):
        (tmp_path / f"{stem}.py").touch()
    assert _lab.experiments(tmp_path) == ("a2_z", "a10_y", "b1_x", "q1_w")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"no experiment is called 'a4_gram'\. Did you mean 'a4_ngram'\? Known: "
    ):
        _lab.find("a4_gram")


class TestKeeping:
    """Results are never lost or replaced by accident."""

    def test_an_existing_result_is_refused_before_any_work(self, tmp_path: Path) -> None:
        (tmp_path / "b1_gaussian.json").write_text("precious")
        with pytest.raises(OutputError, match=r"b1_gaussian\.json exists; add --overwrite or give another folder"):
            _lab.run("b1_gaussian", tiny(tmp_path), silently)
        assert (tmp_path / "b1_gaussian.json").read_text() == "precious"
        assert _lab.run("b1_gaussian", tiny(tmp_path, overwrite=True), silently)["claim"] == "B1"

    @pytest.mark.parametrize("out", [None, _lab.RESULTS])
    def test_a_small_result_never_lies_among_full_ones(self, out: Path | None) -> None:
        with pytest.raises(OutputError, match=r"holds full results, this one is tiny; give --out FOLDER"):
            _lab.check("a4_ngram", _lab.Request(size="tiny", out=out, overwrite=True))

    def test_wrong_sizes_devices_and_folders_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(HeadwiseError, match="no size is called 'huge'; give --size tiny, small, full"):
            _lab.check("a4_ngram", _lab.Request(size="huge", out=tmp_path))
        with pytest.raises(HeadwiseError, match="no device is called 'tpu'"):
            _lab.chosen("tpu")
        with pytest.raises(HeadwiseError, match="is no folder; give --assets"):
            _lab.check("a4_ngram", tiny(tmp_path, assets=tmp_path / "absent"))

    def test_a_killed_run_goes_on_where_it_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trained: list[str] = []
        measure = a4_ngram.measure

        def counted(task: Any, point: Any, *rest: Any) -> Any:
            if len(trained) == 2:
                raise KeyboardInterrupt
            trained.append(point.key)
            return measure(task, point, *rest)

        monkeypatch.setattr(a4_ngram, "measure", counted)
        with pytest.raises(KeyboardInterrupt):
            _lab.run("a4_ngram", tiny(tmp_path), silently)
        again: list[str] = []
        monkeypatch.setattr(
            a4_ngram, "measure", lambda task, point, *rest: again.append(point.key) or measure(task, point, *rest)
        )
        _lab.run("a4_ngram", tiny(tmp_path), silently)
        assert len(trained) == 2 and again and not set(trained) & set(again)

    def test_an_idle_gpu_is_not_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_lab, "chosen", lambda asked: "cuda")
        monkeypatch.setattr(_lab, "machine", {"cuda": "a GPU", "cpu": "a CPU"}.get)
        monkeypatch.setattr(_lab, "load", lambda name: a4_ngram)
        monkeypatch.setattr(a4_ngram, "run", lambda *_: {})
        for folder, counts, named in (("idle", [7, 7], "a CPU"), ("busy", [7, 9], "a GPU")):
            monkeypatch.setattr(_lab, "gpu_allocations", lambda device, left=counts: left.pop(0))
            assert _lab.run("a4_ngram", tiny(tmp_path / folder), silently)["hardware"] == named

    def test_parts_from_other_conditions_are_forgotten(self, tmp_path: Path) -> None:
        path = tmp_path / "parts.json"
        _lab.Parts(path, ["tiny", "code 1"])["a"] = (1, torch.tensor([2.0]))
        assert dict(_lab.Parts(path, ["tiny", "code 1"])) == {"a": [1, [2.0]]}
        assert not _lab.Parts(path, ["tiny", "code 2"])


class TestProvenance:
    """Which code made a result, and which of its values code wrote."""

    def test_a_page_says_when_other_code_made_a_result(self) -> None:
        page = (ROOT / "docs" / "EVIDENCE.md").read_text()
        for path in sorted(_lab.RESULTS.glob("*.json")):
            result = json.loads(path.read_text())
            section = page.split(f"\n### {_lab.load(path.stem).CLAIM}: ")[1].split("\n### ")[0]
            current = result.get("code") == _provenance.digest(path.stem) if "code" in result else False
            said = "Made by the present code" if current else "Made by earlier code"
            assert said in section, f"{path.stem}: type headwise reproduce --render"

    def test_the_digest_follows_the_code_that_a_run_reaches(self, tmp_path: Path, monkeypatch: Any) -> None:
        folder = tmp_path / "experiments"
        folder.mkdir()

        def of(body: str, shared: str) -> str:
            head = "from headwise import linalg\nfrom experiments._y import helped\nfrom experiments import _y\n"
            (folder / "x.py").write_text(f"{head}{body}")
            (folder / "_y.py").write_text(shared)
            _provenance._tree.cache_clear()
            _provenance._pieces.cache_clear()
            return _provenance.digest("x")

        monkeypatch.setattr(_provenance, "ROOT", tmp_path)
        body, shared = (
            "N = 1\ndef run():\n    return helped() + N\n",
            "def helped():\n    return _inner()\ndef _inner(): return 1\n",
        )
        first = of(body, shared)
        assert of(f"{body}def draw():\n    return 9\n", f"# a comment\n{shared}") == first, "drawing measures nothing"
        changed = {
            of(body.replace("N = 1", "N = 2"), shared),
            of(body, shared.replace("return 1", "return 2")),
            of(body.replace("helped()", "_y.other()"), f"{shared}def other(): return 1\n"),
            of(body.replace("N\n", "N + linalg.balanced\n"), shared),
        }
        assert len(changed - {first}) == 4
        _provenance._tree.cache_clear()
        _provenance._pieces.cache_clear()

    def test_inputs_are_known_by_their_hashes(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("one")
        _provenance.forget()
        first = _provenance.inputs() or {_provenance.used(tmp_path / "text.txt").name: _provenance.inputs()["text.txt"]}
        (tmp_path / "text.txt").write_text("two")
        _provenance.used(tmp_path / "text.txt")
        assert set(_provenance.inputs()) == {"text.txt"} and _provenance.inputs() != first

    def test_values_that_were_copied_by_hand_are_not_shown(self) -> None:
        models = {"deep": {"loss": [1.0], "seconds": 7.0}, "lean, equal time": {"loss": [0.5]}}
        kept = _provenance.shown({"models": models, "times_of_an_earlier_run": True})
        assert kept["models"] == {"deep": {"loss": [1.0]}}
        assert _provenance.shown({"models": models})["models"] == models and models["deep"]["seconds"] == 7.0


class TestCommand:
    """`headwise reproduce`."""

    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A checkout without results."""
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(reproduce, "repository", lambda: tmp_path)
        return tmp_path

    def test_the_list_says_what_is_measured(self, root: Path) -> None:
        _lab.run("b1_gaussian", tiny(root / "experiments" / "results"), silently)
        rows = {row["name"]: row for row in json.loads(ask("--json").stdout)}
        assert tuple(rows) == NAMES
        assert rows["b1_gaussian"]["measured"] and rows["b1_gaussian"]["verdict"].startswith(_judge.VERDICTS)
        assert rows["b1_gaussian"]["source"] == _lab.CLAIMS["b1_gaussian"].source and rows["b1_gaussian"]["number"]
        assert not rows["a5_induction"]["measured"] and rows["a5_induction"]["verdict"] == "not measured yet"
        assert "B1" in ask().stdout

    def test_one_runs_by_its_claim(self, root: Path) -> None:
        done = ask("B1", "--size", "tiny", "--device", "cpu", "--out", root / "out")
        assert done.exit_code == 0 and "verdict: " in done.stdout
        made = json.loads((root / "out" / "b1_gaussian.json").read_text())
        assert made["command"].startswith("headwise reproduce b1") and made["arguments"]["size"] == "tiny"

    def test_all_keeps_what_is_there(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ran: list[str] = []
        monkeypatch.setattr(_lab, "run", lambda name, *_: ran.append(name) or {"name": name})
        (root / "a4_ngram.json").touch()
        assert ask("all", "--size", "tiny", "--out", root, "--json").exit_code == 0
        assert ran == [name for name in NAMES if name != "a4_ngram"]

    def test_the_page_follows_the_results(self, root: Path) -> None:
        missing = ask("--check")
        assert (
            missing.exit_code == 1
            and "docs/EVIDENCE.md is missing; type: headwise reproduce --render" in missing.stderr
        )
        results = root / "experiments" / "results"
        _lab.run("b1_gaussian", tiny(results), silently)
        assert ask("--render").exit_code == 0
        page, figure = root / "docs" / "EVIDENCE.md", root / "docs" / "evidence" / "b1_gaussian.svg"
        assert _lab.CLAIMS["b1_gaussian"].says in page.read_text() and figure.exists()
        assert "Made by the present code" in page.read_text()
        assert "Not measured yet: run `headwise reproduce a5_induction`." in page.read_text()
        assert ask("--check").exit_code == 0
        text = (results / "b1_gaussian.json").read_text()
        for old, new in (('"draws": 8', '"draws": 9'), (_provenance.digest("b1_gaussian"), "0123456789abcdef")):
            (results / "b1_gaussian.json").write_text(text.replace(old, new))
            stale = ask("--check")
            assert stale.exit_code == 1 and "docs/EVIDENCE.md is stale from line" in stale.stderr
        (results / "b1_gaussian.json").write_text(text)
        figure.unlink()
        assert "docs/evidence/b1_gaussian.svg is missing" in ask("--check").stderr

    def test_without_a_checkout_it_says_what_to_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reproduce, "__file__", str(tmp_path / "site-packages" / "headwise" / "reproduce.py"))
        with pytest.raises(HeadwiseError, match="clone the repository"):
            reproduce.repository(tmp_path)

    def test_the_committed_page_is_current(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        done = ask("--check")
        assert done.exit_code == 0, done.stderr


class TestSweep:
    """The best number of heads, and how surely."""

    @staticmethod
    def compared(*errors: float) -> dict[str, Any]:
        spreads = (0.98, 1.0, 1.02, 1.01, 0.99), (1.02, 0.99, 0.98, 1.0, 1.01)  # neighbours do not vary together
        rows = [
            {"heads": 4 << place, "dim": 64 >> place, "error": [error * by for by in spreads[place % 2]]}
            for place, error in enumerate(errors)
        ]
        return _sweep.compare(rows)

    def test_chances_and_intervals(self) -> None:
        found = self.compared(3, 1, 2)
        assert found["best"] == 8 and _sweep.at(found, 8)["chance_best"] == 1
        assert sum(point["chance_best"] for point in found["points"]) == pytest.approx(1)
        assert all(point["low"] < point["error"] < point["high"] for point in found["points"])

    def test_seeds_that_would_settle_a_sweep(self) -> None:
        """Only a point that is neither worse nor equal asks for more, and a best rate at the edge for other rates."""

        def row(heads: int, *error: float, rate: float = 0.1) -> dict[str, Any]:
            return {"heads": heads, "error": error, "rate": rate, "rates": {"0.01": 1.0, "0.1": 0.5, "1.0": 1.0}}

        ours, worse, torn = row(8, 1.0, 1.01, 0.99), row(4, 2.0, 2.02, 1.97), row(16, 1.0, 1.02, 3.0)
        assert _sweep.seeds_for([worse, ours], 8) == ""
        assert "seeds instead of 3" in _sweep.seeds_for([worse, ours, torn], 8)
        edge = row(4, 2.0, 2.02, 1.97, rate=0.01)
        assert _sweep.seeds_for([edge, ours], 8) == "try learning rates beyond those tried for 4 heads"


class TestLayer:
    """The trainer computes what it says."""

    @pytest.mark.parametrize("positions", _ngram.POSITIONS)
    def test_heads_are_ordinary_attention(self, positions: str) -> None:
        torch.manual_seed(0)
        task, point = _ngram.Task((0.25,) * 4, length=12, scored=5), _ngram.Point(3, 4, positions)
        w = {name: torch.randn(2, *shape) for name, shape in _ngram.shapes(task, point).items()}
        x, _ = task.sample(_ngram.rotations(task, 2, torch.device("cpu")), 1)
        out = _ngram.Layer(task, point, torch.device("cpu")).forward(w, x)
        wanted = torch.zeros(5, 8)
        for head in range(3):
            q, k, v = (x[1, 0] @ w[name][1, head] for name in ("query", "key", "value"))
            for row, t in enumerate(range(7, 12)):
                logits = torch.stack([_logit(w, positions, head, q[t], k[s], t, s) for s in range(t + 1)])
                wanted[row] += logits.softmax(0) @ v[: t + 1] @ w["output"][1, head]
        torch.testing.assert_close(out[1, 0], wanted, rtol=1e-4, atol=1e-5)

    def test_targets(self) -> None:
        turns = _ngram.rotations(_ngram.Task((1.0,)), 2, torch.device("cpu"))
        x, y = _ngram.Task((0.5, 0.3), length=9, scored=4).sample(turns, 3)
        torch.testing.assert_close(y[:, :, -1], 0.5 * x[:, :, -2] + 0.3 * x[:, :, -3])
        assert torch.allclose(x.norm(dim=-1), torch.ones(()))
        x, y = _ngram.Task((1.0,), induction=True, length=9).sample(turns, 3)
        twin = (x[1, 2, :-1] == x[1, 2, -1]).all(-1).nonzero().item()
        assert torch.equal(y[1, 2, 0], x[1, 2, int(twin) + 1])

    def test_training_learns_and_repeats(self) -> None:
        task, effort = _ngram.Task((1.0,), length=8, scored=4), _ngram.Effort(60, 8, 2, 1, (0.03,), 4)
        first, again = (
            _ngram.measure(task, _ngram.Point(4, 8, "table"), effort, torch.device("cpu")) for _ in range(2)
        )
        assert first == again, "same seeds, same errors"
        assert max(first["error"]) < 0.5, "far better than answering nothing"


def _logit(w: dict[str, Any], positions: str, head: int, q: Any, k: Any, t: int, s: int) -> Any:
    """Seed 1's logit of one head, written out: content plus position."""
    if positions == "linear":
        return q @ k / 2 - _ngram.SLOW * w["slope"][1, head] * (t - s)
    if positions == "table":
        return q @ k / 2 + w["table"][1, head, t - s]
    pairs = [
        torch.complex((part + w[f"{name}_bias"][1, head])[:2], (part + w[f"{name}_bias"][1, head])[2:])
        for name, part in (("query", q), ("key", k))
    ]
    turns = torch.tensor([1.0, _ngram.ROTARY_BASE**-0.5]) * (t - s)
    turned = pairs[0] * torch.polar(torch.ones(2), turns)
    return (turned * pairs[1].conj()).real.sum() / math.sqrt(4)


def test_the_command_line_offers_it() -> None:
    cli = importlib.import_module("headwise.cli.commands")
    assert "reproduce" in CliRunner().invoke(cli.app, ["--help"]).stdout

"""Which attention path is chosen: all agree with plain attention, and the quickest is measured once per machine."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headwise.cli.commands import app
from headwise.fast import choice
from headwise.fast.choice import example
from headwise.fast.paths import Seen, decode_paths, eager, prefill_paths
from headwise.fast.table import cache_folder

pytestmark = pytest.mark.usefixtures("own_table")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(16, 16), (24, 8), (8, 40)])
def test_every_path_of_a_cpu_agrees_with_plain_attention(phase, qk_dim, v_dim):
    torch.manual_seed(0)
    places, tokens = 20, 1 if phase == "decode" else 20
    q, k, v = (torch.randn(2, h, t, d) for h, t, d in ((6, tokens, qk_dim), (2, places, qk_dim), (2, places, v_dim)))
    ends = torch.full((2,), places, dtype=torch.int32)
    for starts, window in ((ends * 0, None), (torch.tensor([0, 7], dtype=torch.int32), None), (ends * 0, 5)):
        seen = Seen(ends, starts, places, bool(starts.any()), window, scaling=0.3)
        logits = torch.einsum("bgstk,bglk->bgstl", q.view(2, 2, 3, tokens, qk_dim), k) * 0.3
        at, there = torch.arange(places - tokens, places)[:, None], torch.arange(places)
        hidden = (there > at) | (there <= at - (window or places)) | (there < starts[:, None, None])
        real = ~hidden.all(-1)  # of padding nobody asks
        logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
        want = torch.einsum("bgstl,bglv->btgsv", logits.softmax(-1), v).reshape(2, tokens, 6, v_dim)
        every = (decode_paths if phase == "decode" else prefill_paths)(q.device, qk_dim, v_dim)
        assert len(every) == (1 if phase == "decode" and qk_dim != v_dim else 2)
        for name, path in every.items():
            got = path(q, k, v, seen)
            assert torch.allclose(got[real.expand(2, -1)], want[real.expand(2, -1)], atol=1e-5), (name, window)


CASE = choice.Case(torch.device("cpu"), torch.float32, "decode", 4, 2, 16, 16, 64, 1)


def test_what_was_measured_is_kept_and_not_measured_again(own_table, monkeypatch):
    path = choice.quickest(CASE)
    row = json.loads(own_table.read_text())["rows"][CASE.key]
    assert set(row["ms"]) == {"eager", "fused"} and CASE.paths()[row["path"]] == path
    choice.forget()
    monkeypatch.setattr(choice, "measured", lambda case: pytest.fail("measured again"))
    assert choice.quickest(CASE) == path


def test_a_wrong_or_failing_kernel_is_never_chosen(monkeypatch):
    def fails(*given):
        raise RuntimeError("not on this machine")

    def lies(q, k, v, seen):
        return v[:, :1, :1].expand(-1, -1, q.shape[1], -1)

    paths = {"eager": eager, "fails": fails, "lies": lies}
    monkeypatch.setattr(choice.Case, "paths", lambda case: paths)
    with pytest.warns(UserWarning, match="the lies kernel is wrong by"):
        assert choice.quickest(CASE) is eager


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 3, "rows": {"a": 3}}', '{"version": 0}'])
def test_a_broken_table_is_measured_anew(own_table, content):
    own_table.parent.mkdir()
    own_table.write_text(content)
    warned = contextlib.nullcontext() if "0" in content else pytest.warns(UserWarning, match="measured anew")
    with warned:
        choice.quickest(CASE)
    assert CASE.key in json.loads(own_table.read_text())["rows"]


def test_a_table_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="cannot be"):
        assert choice.quickest(CASE)


def test_where_measurements_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "headwise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "headwise"


def test_the_command_shows_and_forgets(own_table):
    run = CliRunner().invoke
    assert "Nothing measured yet" in run(app, ["kernels"]).output
    choice.quickest(CASE)
    assert CASE.key in run(app, ["kernels"]).output
    assert set(json.loads(run(app, ["kernels", "--json"]).output)) == {CASE.key}
    assert json.loads(run(app, ["kernels", "--clear", "--json"]).output) == {} and not own_table.exists()


def test_kernels_are_built_where_none_is_known_and_then_chosen(monkeypatch):
    def fails(*given):
        built.append(given[0].shape)
        raise RuntimeError("not on this machine")

    built = []
    monkeypatch.setattr(choice.Case, "paths", lambda case: {"eager": eager, "split": fails, "split-128": fails})
    monkeypatch.setattr(choice.Case, "key", property(lambda case: f"{case.qk_dim}"))
    monkeypatch.setattr(choice, "example", lambda case: example(replace(case, device=torch.device("cpu"))))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    there = replace(CASE, device=torch.device("cuda"), rows=4)
    choice._table().put("24", "eager", {})
    chosen = []
    monkeypatch.setattr(choice, "quickest", chosen.append)
    choice.choose([there, replace(there, qk_dim=24), there, CASE])
    assert chosen == [there, replace(there, qk_dim=24), CASE]
    assert built == [(4, 4, 1, 16)] * 2, "once for every version of what was not measured, on a GPU alone"


def test_examples_are_as_long_as_caches_are(monkeypatch):
    monkeypatch.setattr(choice, "MOST_BYTES", 2**22)
    _, k, v, seen = example(replace(CASE, qk_dim=24, places=2**13, rows=8))
    assert k.shape[2] == v.shape[2] == seen.end and 0 < seen.end < 2**13 and seen.end % 256 == 0
    assert example(replace(CASE, places=32))[1].shape[2] == 32


def test_a_path_that_is_far_slower_is_not_timed_for_long():
    calls = []
    quick = choice.clock(lambda: calls.append(0), CASE)
    few = len(calls)
    assert choice.clock(lambda: calls.append(0), CASE, hopeless=0.0) > 0 and quick > 0
    assert len(calls) == few + 1 < 2 * few

"""Healing by several processes: the results of one process alone, with whole copies or shared weights, killed or not.

The processes are started once, as torchrun would, and do all of it one after the other; at the end they are killed
within a whole run, which one process then resumes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_distill import damaged, job_of

import headwise
from headwise import families, heal, processes
from headwise.checks import exactness
from headwise.cuts import reshape
from headwise.data import NOTHING
from headwise.families.bert import FAMILY as bert
from headwise.families.llama import FAMILY as llama
from headwise.heal import distill
from headwise.probes import fisher, gram
from headwise.runs.heal_options import Options
from headwise.tasks.causal import Causal
from headwise.tasks.embedding import TASK as Embedding
from headwise.types import Check, LayerKeep, Plan

STEPS, STOPPED = 20, 7  # of a healing; where the first process of all stops
PLAIN = Options(steps=STEPS, batch=256, rate=1e-3)
LEAN = replace(PLAIN, steps=6, lora=4, recompute=1)
CHAIN = replace(PLAIN, steps=6, tokens=1024)  # layers learn first
PARTS = replace(PLAIN, steps=6, micro=64)


def decoder(options=PLAIN, **more):
    """A healing whose source, cut model and rows are the same in every process."""
    torch.manual_seed(0)
    source = llama.tailor(llama.tiny())
    source.lm_head.weight.data *= 24  # a trained model has favourites
    return job_of(llama, Causal(), source, damaged(source, llama), options, **more)


def without_mlp(options):
    """The same of a model that lost a whole MLP: empty weights have no parts."""
    job = decoder(options)
    shape = llama.shape_of(job.source.config)
    layers = (replace(shape.layers[0], mlp_width=0), *shape.layers[1:])
    keep = (LayerKeep(mlp_channels=()), *[LayerKeep()] * (len(layers) - 1))
    plan = Plan("", shape, shape.with_layers(layers), keep, "", (), {}, 0.0, 0)
    moments = gram.collect(llama, job.source, job.rehearsal.inputs, True)
    return replace(job, cut=reshape(llama, job.source, plan, moments))


def encoder(options):
    """The same of a model whose rows differ in length: processes have different numbers of batches."""
    torch.manual_seed(0)
    source = bert.tailor(bert.tiny("bert"))
    job = job_of(bert, Embedding(source.config.hidden_size), source, damaged(source, bert), options)
    rows = job.calibration.inputs.clone()
    for row, ids in enumerate(rows):
        ids[8 * (1 + row % 3) :] = NOTHING
    return replace(job, calibration=job.calibration._replace(inputs=rows))


def run(folder, out, *options, **more):
    """A whole run of a tiny model whose dimensions are cut, so that there is much to heal, healed by distillation."""
    asked = dict(data=str(folder / "text.txt"), tokens=1024, eval_tokens=128, swap_tokens=0, length=32, device="cpu")
    asked["allow"] = ("qk", "v")
    healing = dict(heal="distill", heal_options=(f"steps={STEPS}", "batch=256", "rate=1e-3", *options))
    return headwise.run(str(folder / "tiny"), "kv=40%", folder / out, **asked, **healing, **more)


def save_tiny(folder):
    """A model whose attention matters, with a tokenizer, and a text: reading the standard library takes seconds."""
    (folder / "text.txt").write_text("".join(path.read_text() for path in Path(__file__).parent.glob("test_heal*.py")))
    torch.manual_seed(0)
    model = llama.tiny(vocab_size=4096, tie_word_embeddings=True)
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.self_attn.q_proj):
                linear.weight *= 4
        model.lm_head.weight *= 8
    model.save_pretrained(folder / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(families.locate("embedded")[0]) / name, folder / "tiny" / name)


def until(step, end):
    """Progress that calls `end` when a step has been done."""

    def track(items, label):
        for item in items:
            if not isinstance(label, str) and item == step:
                end()
            yield item

    return track


def stop():
    raise KeyboardInterrupt


def told(job):
    """What one is to compare: the curve, and a sum of the healed weights."""
    model, record = heal.healed("distill", job) if job.options.tokens else distill.heal(job)
    weights = sum(float(tensor.double().abs().sum()) for tensor in model.state_dict().values())
    return {**record.to_json(), "curve": [point.loss for point in record.curve], "weights": weights}


def prices():
    """Prices of bits from so little text that it is one batch, unless processes need more."""
    torch.manual_seed(0)
    source = llama.tailor(llama.tiny(vocab_size=4096))
    rows = torch.randint(3, 4096, (8, 32), generator=torch.Generator().manual_seed(1))
    found = fisher.collect(llama, source, rows, 0)
    return [float(price) for layer in found for name in "kv" for price in layer[f"{name}_price"].double().flatten()]


def worker(folder, killed_at):
    """All that several processes are asked for."""
    processes.begin("cpu")
    found = {
        "prices": prices(),
        "copies": told(decoder()),
        "shared": told(decoder(replace(PLAIN, shard=1))),
        "lean": told(decoder(replace(LEAN, shard=1))),
        "parts": told(decoder(replace(PARTS, shard=1))),
        "lengths": told(encoder(replace(PLAIN, steps=6, shard=1))),
        "empty": told(without_mlp(replace(PLAIN, steps=6, shard=1))),
        "chain": told(decoder(CHAIN, folder=folder / "chain")),
        "resumed": told(decoder(replace(PLAIN, shard=1), folder=folder / "one")),
    }
    if processes.index() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    processes.wait()
    kill = until(killed_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(folder, "two", "shard=1", track=kill)


@pytest.fixture(scope="module")
def alone():
    return told(decoder())


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A folder with a healing that one process stopped and two resumed, and with a run in which two were killed."""
    folder, seed = tmp_path_factory.mktemp("healing"), random.randrange(1 << 30)
    save_tiny(folder)
    with pytest.raises(KeyboardInterrupt):
        distill.heal(decoder(folder=folder / "one", track=until(STOPPED, stop)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder), str(random.Random(seed).randint(4, STEPS - 2))]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    workers = [
        subprocess.Popen(
            command, env={**os.environ, **told, "RANK": str(rank), "PYTHONPATH": path}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=240)[1].decode()[-3000:] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert (folder / "found.json").exists(), said
    assert {worker.returncode for worker in workers} == {-signal.SIGKILL}, (seed, said)
    return folder


@pytest.fixture(scope="module")
def found(several):
    return json.loads((several / "found.json").read_text())


def alike(one, other, rel=1e-4):
    assert one["curve"] == pytest.approx(other["curve"], rel=rel)
    assert one["divergence_after"] == pytest.approx(other["divergence_after"], rel=rel)
    assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


def test_two_processes_find_the_prices_of_one(found):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes: sums of several threads have another order
    try:
        assert found["prices"] == pytest.approx(prices(), rel=1e-12, abs=0), "a near tie would give another plan"
    finally:
        torch.set_num_threads(threads)


def test_two_processes_learn_as_one_does(found, alone):
    alike(found["copies"], alone)
    assert found["copies"]["processes"] == 2 and not found["copies"]["shared_weights"]


def test_shared_weights_change_nothing(found, alone):
    alike(found["shared"], alone)
    assert found["shared"]["shared_weights"]


@pytest.mark.parametrize("name", ["lean", "parts", "lengths", "empty"])
def test_shared_weights_go_with_everything_else(found, name):
    made = {"lengths": encoder, "empty": without_mlp}.get(name, decoder)
    alike(found[name], told(made({"lean": LEAN, "parts": PARTS}.get(name, replace(PLAIN, steps=6)))))


def test_layers_that_learn_first_are_the_same_in_all_processes(found):
    alike(found["chain"], one := told(decoder(CHAIN)), rel=1e-2)  # so little is left that rounding is seen
    assert [stage["tokens"] for stage in found["chain"]["stages"]] == [stage["tokens"] for stage in one["stages"]]
    assert "blockwise" in [stage["method"] for stage in one["stages"]]


def test_two_processes_resume_what_one_stopped(found, alone):
    alike(found["resumed"], alone)


def test_a_run_in_which_two_processes_were_killed_ends_as_one_that_was_not(several, monkeypatch):
    reloaded = Check("reloads", True, "not tried: a fresh process takes seconds", "")
    monkeypatch.setattr(exactness, "reload_check", lambda *told: reloaded)
    one, two = several / "alone", several / "two"
    steps = sorted(path.name for path in (two / "healing" / "distill").glob("step-*"))
    assert not (two / "heal.json").exists() and steps and steps[-1] < f"step-{STEPS:08d}"
    whole, resumed = run(several, "alone"), run(several, "two", "shard=1")
    moments = [load_file(path / "moments.safetensors") for path in (one, two)]
    for name, tensor in moments[0].items():
        torch.testing.assert_close(moments[1][name], tensor, rtol=1e-6, atol=1e-6 * float(tensor.abs().max()))
    healed = [json.loads((path / "heal.json").read_text()) for path in (one, two)]
    curves = [[point["loss"] for point in record["curve"]] for record in healed]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert healed[1]["divergence_after"] == pytest.approx(healed[0]["divergence_after"], rel=1e-4)
    assert resumed.plan == whole.plan
    assert (two / "distill" / "logs").is_dir() and not (two / "healing").exists()


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]))

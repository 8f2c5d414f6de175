"""Damage at equal stored bytes: our coded cache beside whatever a user would pick instead.

    python benchmarks/bits.py --model embedded --length 1024 --rows 32 --share 25% --share 12.5% \\
        --out benchmarks/results/bits-embedded.json
    python benchmarks/bits_page.py   # rewrite the tables of docs/BITS.md from the committed results

Every row is one method at one length: bytes of a text of that length as a share of a cache of 16 bits a number,
everything counted; damage as predicted, if the method predicts it; and damage as measured on held-out text, with a 95%
interval over rows of the difference to the source. Nothing is trained but in rows that say `healed`. Rows are written
one by one. Those that the file has from the same settings and commit are not measured again, and the probing is kept in
a hidden folder beside it. Of `--shares`, `ours` meets what `--budget kv=SHARE` means; `match` plans for the very bytes
that each rival took.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bits_library as library
import bits_plans as plans
import torch
from bits_bench import DTYPES, HEADS, Bench, Key, Table, join, say
from rival_caches import FIRST, Integers, Rival, rivals, whole_bytes

from headwise.checks import _lengths as lengths
from headwise.errors import HeadwiseError
from headwise.runs.settings import Settings

GROUPS = ("rivals", "library", "ours", "ablations", "beside", "rank", "match")
BESIDE = "12.5%"  # the share of which it is measured what first and newest tokens are worth
EQUAL_BITS = (4, 3, 2)


class Methods(Table):
    """How every method is measured; groups in the order in which they are."""

    def rivals(self) -> None:
        bench = self.benches["each head"]
        for name in self.asked.rival or rivals():
            self.rival(Key("rivals", name), bench, rivals()[name], lambda: bench.model)

    def rival(self, key: Key, bench: Bench, rival: Rival, model_of: Callable[[], Any], layers: Any = None) -> None:
        """A cache of someone else's on a model of ours."""
        if not (wanted := self.left(key)):
            return
        model = model_of()
        stored, blocks = layers or bench.layers, bench.family.blocks(model)

        def stream(ids: torch.Tensor) -> torch.Tensor:
            with rival.acting(blocks):
                return lengths.last_stream(bench.family, model, ids)

        self.measure(key, bench, lambda length: rival.stored_bytes(stored, length), stream, model, wanted)

    def library(self) -> None:
        bench = self.benches["each head"]
        for name in library.LIBRARY:
            key = Key("library", name)
            if not (wanted := self.left(key)):
                continue
            if why := library.refused(name, bench.model.config):
                self.refuse(key, wanted, why)
                continue
            held: list[library.Stored] = []

            def stream(ids: torch.Tensor, name: str = name, held: list[library.Stored] = held) -> torch.Tensor:
                found, one = library.stream(bench.family, bench.model, name, ids)
                held[:] = [one]
                return found

            def stored(length: int, held: list[library.Stored] = held) -> float:
                return held[0].at(bench.layers, length)

            try:
                self.measure(key, bench, stored, stream, bench.model, wanted)
            except Exception as error:  # whatever other people's code raises here; the next may work
                self.refuse(key, self.left(key), f"{type(error).__name__}: {error}")

    def ours(self) -> None:
        for kind in self.asked.heads or HEADS:
            for share in self.asked.share:
                self.share(Key("ours", f"ours, {kind}", share), self.benches[kind])

    def share(self, key: Key, bench: Bench) -> None:
        """One share of the cache, with every healing."""
        names = {how: _healed(key, how) for how in self.asked.heal}
        wanted = {how: self.left(name) for how, name in names.items()}
        if not any(wanted.values()):
            return
        try:
            fitted = bench.fitted(bench.plan(key.asked))
        except HeadwiseError as error:
            for how, name in names.items():
                self.refuse(name, wanted[how], error)
            return
        layers, predicted = fitted.plan.target.layers, fitted.plan.predicted_damage
        for how, name in names.items():
            if not wanted[how]:
                continue
            model, more = copy.deepcopy(fitted.model), {"predicted": predicted, "rehearsed": fitted.rehearsed}
            if how != "none":
                say(f"healing: {name.method}, {key.asked}")
                model, record = bench.healed(how, tuple(self.asked.heal_option), model)
                more = {"predicted": None, "rehearsed": record.rehearsed, "heal_tokens": record.tokens}
            model = bench.cast(model)
            size = _stored(layers)
            self.measure(name, bench, size, self.reads(bench, model), model, wanted[how], **more)

    def ablations(self) -> None:
        bench = self.benches["pooled"]
        for bits in EQUAL_BITS:
            key = Key("ablations", f"equal bits: {bits}")
            self.ablation(key, bench, lambda bits=bits: (bench.prices.equal_bits(bits), None))
        for share in self.asked.share:
            wanted = replace(bench.settings, budgets=(f"kv={share}",))

            def filled(wanted: Settings = wanted) -> Any:
                return bench.prices.water_filling(plans.limits_of(wanted, bench.source)), None

            def ranks(wanted: Settings = wanted) -> Any:
                return bench.prices.equal_ranks(plans.limits_of(wanted, bench.source)[0].limit)

            self.ablation(Key("ablations", "water-filling, rounded", share), bench, filled)
            self.ablation(Key("ablations", "equal ranks in 16 bits", share), bench, ranks)

    def beside(self) -> None:
        """One plan of ours with other numbers of tokens kept beside its codes."""
        bench, share = self.benches["pooled"], BESIDE if BESIDE in self.asked.share else self.asked.share[-1]
        for first, newest in ((FIRST, 1), (FIRST, 8), (FIRST, 16), (FIRST, 32), (FIRST, 64), (FIRST, 128), (0, 32)):
            key = Key("beside", f"first {first} whole, newest {newest} in 8 bits", share)
            if wanted := self.left(key):
                model = bench.cast(plans.built(bench.source, bench.probed, plan := bench.plan(share)))
                with plans.keeping(first, newest):
                    self.measure(key, bench, _stored(plan.target.layers), self.reads(bench, model), model, wanted)

    def ablation(self, key: Key, bench: Bench, planned: Callable[[], Any]) -> None:
        """A plan in our basis that the exact program did not make; in 16 bits if it has its own prediction."""
        if not (wanted := self.left(key)):
            return
        try:
            plan, ranked = planned()
        except HeadwiseError as error:
            return self.refuse(key, wanted, error)
        model = plans.built(bench.source, bench.probed, plan)
        model = bench.cast(model if ranked is None else plans.uncoded(bench.family, model))
        stored = _stored(plan.target.layers) if ranked is None else lambda length: plans.rank_bytes(plan, length)
        predicted = plan.predicted_damage if ranked is None else ranked
        self.measure(key, bench, stored, self.reads(bench, model), model, wanted, predicted=predicted)

    def rank(self) -> None:
        bench = self.benches["rank"]
        for share in self.asked.share:
            self.share(Key("rank", "rank cut, 16 bits", share), bench)
            for bits in (8, 4):
                self.rank_in(bits, share, bench)

    def rank_in(self, bits: int, share: str, bench: Bench) -> None:
        """A rank cut that leaves so much that its integers take the share."""
        key, coder = Key("rank", f"rank cut, int{bits} by token", share), Integers(bits)
        if not (wanted := self.left(key)):
            return
        share_of_one = coder.row_bytes(coder.group) / (2 * coder.group)
        kept = wished = float(share.rstrip("%")) / share_of_one
        if kept >= 100:
            return self.refuse(key, wanted, f"int{bits} alone takes less.")
        rival = Rival(key.method, coder)
        try:
            for _ in range(3):  # groups that are not full take more
                plan = bench.plan(f"{kept:.2f}%")
                took = rival.stored_bytes(plan.target.layers, 1) / whole_bytes(bench.layers, 1) / share_of_one
                kept *= min(1.0, wished / (100 * took))
            fitted = bench.fitted(plan)
        except HeadwiseError as error:
            return self.refuse(key, wanted, error)
        model = bench.cast(fitted.model)
        self.rival(key, bench, rival, lambda: model, fitted.plan.target.layers)

    def match(self) -> None:
        """Our exact plan in the bytes that every other method took."""
        bench = self.benches["pooled"]
        for row in list(self.found["rows"]):
            alone = row["group"] in ("rivals", "library", "ablations") and not row["asked"]
            if alone and "bytes" in row and (row["group"] != "ablations" or row["commit"] == self.commit):
                key, length = Key("match", "ours, pooled", row["method"]), row["length"]
                if length in self.left(key):
                    self.matched(key, bench, row["bytes"], length)

    def matched(self, key: Key, bench: Bench, size: float, length: int) -> None:
        try:
            plan = bench.solver.within(size, length)
        except HeadwiseError as error:
            return self.refuse(key, [length], error)
        model, layers = bench.cast(plans.built(bench.source, bench.probed, plan)), plan.target.layers
        stored, predicted = _stored(layers), plan.predicted_damage
        self.measure(key, bench, stored, self.reads(bench, model), model, [length], predicted=predicted)


def _stored(layers: Any) -> Callable[[int], float]:
    return lambda length: plans.stored_bytes(layers, length)


def _healed(key: Key, how: str) -> Key:
    return key if how == "none" else key._replace(method=f"{key.method}, healed ({how})")


def arguments() -> argparse.ArgumentParser:
    """What can be asked for; settings of a run have the names and defaults that are theirs there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--name", help="of the model on the page")
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--length", type=int, action="append", help="tokens of a held-out text; repeatable")
    parser.add_argument("--rows", type=int, default=32, help="held-out texts of each length")
    parser.add_argument("--share", action="append", help="of a cache of 16 bits, such as 25%%; repeatable")
    parser.add_argument("--only", action="append", choices=GROUPS)
    parser.add_argument("--rival", action="append", choices=list(rivals()), metavar="NAME")
    parser.add_argument("--join", type=Path, help="measure nothing: take groups (--only) from this other result")
    parser.add_argument("--heads", action="append", choices=list(HEADS), help="how our rows are made; repeatable")
    parser.add_argument("--rivals-from", type=Path, help="an earlier result whose rows of rivals are kept")
    parser.add_argument("--heal", action="append", help="none, refit, or another healing; repeatable")
    parser.add_argument("--heal-option", action="append", default=[], help="such as tokens=2000000")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--swap-tokens", type=int, default=8_192)
    parser.add_argument("--row-length", type=int, default=512, help="of the calibration")
    parser.add_argument("--context", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared", action="store_true", help="note that the machine has other work meanwhile")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def settings_of(asked: argparse.Namespace) -> Settings:
    """The settings of a run that would be asked the same; what was left out gets its default."""
    asked.length, asked.share = asked.length or [1024], asked.share or ["50%", "25%", "18.75%", "12.5%"]
    asked.heal = asked.heal or ["none", "refit"]
    return Settings(
        model=asked.model, data=asked.data, eval=asked.eval, budgets=("kv=50%",), heal=asked.heal[-1],
        heal_options=tuple(asked.heal_option), tokens=asked.tokens, swap_tokens=asked.swap_tokens,
        eval_tokens=(asked.rows + 1) * max(asked.length), length=asked.row_length, context=asked.context,
        device=asked.device, dtype=asked.dtype, seed=asked.seed,
    )  # fmt: skip


def main() -> None:
    """Measure what is missing."""
    asked = arguments().parse_args()
    if asked.join:
        return join(asked.out, asked.join, asked.only or ())
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    table = Methods(asked, settings_of(asked))
    for group in asked.only or GROUPS:
        getattr(table, group)()


if __name__ == "__main__":
    main()

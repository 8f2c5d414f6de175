"""Redesigns of timm models: more heads and fewer layers, by timm's own arguments. Needs timm, as test_timm.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

try:
    import timm  # noqa: F401
except Exception as error:  # torchvision beside another torch raises more than ImportError
    pytest.skip(f"timm cannot be imported ({error})", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1]))  # experiments live beside the package

from experiments import b4_redesigns  # noqa: E402

from headwise.errors import ModelError, ShapeError  # noqa: E402
from headwise.research import redesign  # noqa: E402


@pytest.mark.parametrize("row", b4_redesigns.TABLE, ids=lambda row: row.title)
def test_counts_are_those_of_the_paper_or_known_to_differ(row):
    found = b4_redesigns.counted(row)
    differ = {"XCiT-M": 46.4, "TNT-B": 44.0, "DaViT-B": 62.7, "ViT-B": 39.3}
    assert found["agrees"] == (None if row.title == "ViT-B" else row.title not in differ)
    assert round(found["millions"]["after"], 1) == (row.after if found["agrees"] else differ[row.title])
    assert row.before is None or round(found["millions"]["before"], 1) == row.before, "originals agree all"


def test_what_is_not_given_stays():
    made = redesign.redesign("timm:volo_d1_224", depth=(2, 1, 2, 1), device="meta")
    stock = redesign.build_of(redesign.stock("volo_d1_224"))
    assert redesign.build_of(made) == stock._replace(depth=(2, 1, 2, 1))
    eva = redesign.redesign("eva02_tiny_patch14_224", depth=2, heads=12)
    assert redesign.build_of(eva)[:3] == ((2,), (12,), (192,))
    with torch.no_grad():
        assert eva.eval()(torch.zeros(1, 3, 224, 224)).isfinite().all(), "it runs"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("vit_base_patch16_224", None, 14), "14 heads cannot share the width 768 .* that can are 12 and 16"),
        (("eva02_tiny_patch14_224", None, 96), "in multiples of 4; the nearest counts that can are 48"),
        (("davit_base", None, (4, 8, 15, 32)), "15 heads cannot share the width 512 .* are 8 and 16"),
        (("davit_base", 5), r"davit_base has 4 stages, with depth \(1, 1, 9, 1\); one number was given"),
        (("xcit_large_24_p16_224", (6, 6)), "has no stages, with depth 24; 2 numbers were given"),
        (("xcit_large_24_p16_224", 0), "depth 0 leaves nothing; give at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_those_that_can(arguments, says):
    with pytest.raises(ShapeError, match=says):
        redesign.redesign(*arguments, device="meta")


def test_other_models_are_refused_with_the_list():
    with pytest.raises(ModelError, match="ResNet models cannot be redesigned; those that can: .*Xcit.*VOLO"):
        redesign.redesign("resnet18", 4)
    with pytest.raises(ModelError, match="no model called 'xcit_larg'. Did you mean xcit_"):
        redesign.redesign("xcit_larg", 4)

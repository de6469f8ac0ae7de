"""Pictures in records and in the report: files that others read, the right classes, and no foreign markup."""

import base64
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from wellposed_lab.engine.experiment import Gallery
from wellposed_lab.engine.store import Record
from wellposed_lab.experiments.attack.run import SHOWN, attack_thumbnails, tones, two_coloured
from wellposed_lab.report.gallery import gallery_html

from wellposed.pages.images import png
from wellposed.robust.attacks import Attack, pgd


def read(content):
    with Image.open(BytesIO(base64.b64decode(content))) as picture:
        return torch.from_numpy(np.array(picture))


@pytest.mark.parametrize("shape", [(5, 7), (4, 6, 3), (1, 9)])
def test_files_are_read_back_as_they_were(shape):
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(read(base64.b64encode(png(pixels.numpy()))), pixels)


def test_tones_and_colours():
    colours = torch.rand(3, 4, 5)
    torch.testing.assert_close(tones(colours).float() / 255, colours.permute(1, 2, 0), atol=0.002, rtol=0)
    change = torch.tensor([[[0.0, 0.5]], [[0.0, -1.0]], [[0.0, 0.2]]])
    assert two_coloured(change).tolist() == [[[255, 255, 255], [33, 102, 172]]]  # of the colours the largest


def test_changed_images_come_first_with_their_classes():
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    u = torch.rand(30, 3, 2, 2)
    target = network(u).argmax(1)
    target[::3] = (target[::3] + 1) % 3
    found = pgd(network, u, target, 0.1)
    kept = attack_thumbnails(network, u, found, target, ("a", "b", "c"), 0.1)
    changed = (found.success & (network(u).argmax(1) == target)).nonzero()[:SHOWN, 0]
    assert len(changed) > 1 and len(kept["samples"]) == SHOWN and kept["scale"] == pytest.approx(0.1)
    for row, sample in zip(changed.tolist(), kept["samples"], strict=False):
        assert torch.equal(read(sample["clean"]), tones(u[row]))
        assert torch.equal(read(sample["attacked"]), tones(found.inputs[row]))
        assert sample["before"] == sample["target"] == "abc"[int(target[row])] != sample["after"]


def record(kept, model="pgd"):
    plain = {"values": (), "series": {}, "environment": {}, "started": "2026", "seconds": 1.0, "config": {}}
    return Record(id="1", suite="s", scale="default", task="t", model=model, size=None, seed=0, role="ours",
                  kind="run", facts={"gallery": kept} if kept else {}, **plain)  # fmt: skip


def test_the_report_shows_what_a_record_carries():
    found = Attack(torch.ones(1, 4), torch.tensor([True]), torch.eye(2)[1:], torch.ones(1), "fgsm")
    kept = attack_thumbnails(nn.Linear(4, 2), torch.zeros(1, 4), found, torch.tensor([0]), ("<b>no", "yes"), 0.1)
    gallery = Gallery("Attacked", ("none", "t"), "pgd", "A note.", "003 Figure 4.5")
    shown = gallery_html(gallery, [record(None), record(kept, "other"), record(kept)])
    assert shown.count("<img") == 3 and "003 Figure 4.5" in shown and "A note. Attack: fgsm, at 0.1." in shown
    assert '<span class="wrong">yes</span>' in shown and "<b>no" not in shown and "&lt;b&gt;no" in shown
    assert gallery_html(gallery, [record(None)]) is None


def test_what_is_no_picture_is_not_shown():
    sample = dict.fromkeys(("clean", "attacked", "difference"), "x' onerror='alert(1)")
    sample |= dict.fromkeys(("before", "after", "target"), "b")
    kept = {"at": 1, "scale": 1, "attack": "a", "samples": [sample]}
    assert "onerror" not in gallery_html(Gallery("g", ("t",), "pgd"), [record(kept)])

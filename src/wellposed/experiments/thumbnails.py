"""Small pictures that a record carries: attacked images as PNG in text, so that a report needs records alone."""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.forms.pictures.page import png
from wellposed.robust.attacks import Attack
from wellposed.robust.gallery import as_picture, strongest, telling

SHOWN = 8
RAISED, LOWERED = (178.0, 24.0, 43.0), (33.0, 102.0, 172.0)


def attack_thumbnails(
    network: nn.Module,
    clean: Tensor,
    attack: Attack,
    target: Tensor,  # (B,)
    classes: Sequence[str],
    at: float,
) -> dict[str, Any]:
    """Keeps a few images before and after an attack, their difference, and the classes that are given.

    Images that were right before and wrong after come first.

    Returns:
        Texts and numbers only: the point, the scale of the differences and, for every image, three PNG files in
        base64 with the classes.

    Example:
        >>> found = Attack(torch.ones(1, 4), torch.tensor([True]), torch.eye(2)[1:], torch.ones(1), "fgsm")
        >>> network = nn.Linear(4, 2)
        >>> kept = attack_thumbnails(network, torch.zeros(1, 4), found, torch.tensor([0]), ("no", "yes"), 0.1)
        >>> kept["scale"], kept["samples"][0]["after"]
        (1.0, 'yes')
    """
    with torch.no_grad():
        before = torch.cat([network(part) for part in clean.split(100)]).argmax(1)
    after = attack.outputs.argmax(1)
    rows = telling(before, attack, target)[:SHOWN].tolist()
    change = attack.inputs - clean
    scale = max(float(change[rows].abs().max()), 1e-12)
    samples = [
        {
            "clean": text(tones(clean[row])),
            "attacked": text(tones(attack.inputs[row])),
            "difference": text(two_coloured(change[row] / scale)),
            "before": classes[int(before[row])],
            "after": classes[int(after[row])],
            "target": classes[int(target[row])],
        }
        for row in rows
    ]
    return {"at": at, "scale": scale, "attack": attack.name, "samples": samples}


def tones(u: Tensor) -> Tensor:
    """Writes an input in [0, 1] as bytes, (height, width) with ink on white or (height, width, 3).

    Example:
        >>> tones(torch.tensor([0.0, 1.0, 0.5, 0.2]))
        tensor([[255,   0],
                [128, 204]], dtype=torch.uint8)
    """
    picture = as_picture(u).double().cpu().clamp(0, 1)
    return (255 * (picture if picture.dim() == 3 else 1 - picture)).round().to(torch.uint8)


def two_coloured(change: Tensor) -> Tensor:  # (height, width, 3)
    """Writes a change in [-1, 1] as bytes: red where it raises, blue where it lowers, white where nothing changed.

    Example:
        >>> two_coloured(torch.tensor([1.0, -1.0, 0.0, 0.0]))[0].tolist()
        [[178, 24, 43], [33, 102, 172]]
    """
    share = strongest(change).double().cpu()[..., None]
    ends = torch.where(share > 0, torch.tensor(RAISED), torch.tensor(LOWERED)).double()
    return (255 + share.abs().clamp(max=1) * (ends - 255)).round().to(torch.uint8)


def text(pixels: Tensor) -> str:
    """Writes bytes (height, width) or (height, width, 3) as a PNG file in base64.

    Example:
        >>> text(torch.zeros(2, 2, dtype=torch.uint8))[:11]
        'iVBORw0KGgo'
    """
    return base64.b64encode(png(pixels.numpy())).decode()

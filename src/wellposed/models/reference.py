"""Small trained models that come with the package, each with a card of what it is and what was measured."""

import importlib.resources
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import unknown_name
from wellposed.models.pretrained import Shared, from_pretrained, save_pretrained

FACTS = "card.json"  # beside the files of save_pretrained
HOME = Path(str(importlib.resources.files("wellposed.models") / "trained"))


@dataclass(frozen=True)
class ReferenceModel:
    """The card of a trained model.

    Args:
        name: for `load_reference`.
        title: what it is, in one sentence.
        data: what it was trained and measured on.
        measured: numbers on data that it has not seen, by what they are.
        certificate: what proves that every input has one equilibrium.
        parameters: numbers that were trained.
        command: that trains it anew.
        limits: what it should not be used for.
    """

    name: str
    title: str
    data: str
    measured: dict[str, float]
    certificate: str
    parameters: int
    command: str
    limits: str = ""

    @property
    def folder(self) -> Path:
        """Where its weights, its configuration and its card are."""
        return HOME / self.name

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.title}", f"data: {self.data}"]
        lines += [f"{what}: {value:.4g}" for what, value in self.measured.items()]
        return "\n".join([*lines, f"certificate: {self.certificate}", f"trained by: {self.command}"])

    def text(self) -> str:
        """Returns the card as Markdown, for `save_pretrained`."""
        rows = [f"| {what} | {value:.4g} |" for what, value in self.measured.items()]
        lines = [f"{self.title} Data: {self.data}.", "", "| measured on unseen data | |", "|---|---|", *rows, ""]
        lines += [f"Trained by `{self.command}`.", *(["", self.limits] if self.limits else [])]
        return "\n".join(lines)


def reference_models() -> dict[str, ReferenceModel]:
    """Returns the cards of all models that come with the package, by name.

    Example:
        >>> sorted(reference_models())
        ['addition', 'digits', 'digits-convolutional', 'digits-robust', 'digits-sparse', 'rolling-argmax']
    """
    return {place.parent.name: _read(place) for place in sorted(HOME.glob(f"*/{FACTS}"))}


def load_reference(name: str) -> Shared:
    """Loads a trained model that comes with the package, on the CPU; `reference_models` lists them.

    Example:
        >>> model = load_reference("addition")
        >>> model.certificate().holds
        True
    """
    if not (HOME / name / FACTS).is_file():
        raise unknown_name("reference model", name, reference_models())
    return from_pretrained(HOME / name)


def store_reference(model: Shared, card: ReferenceModel, home: Path = HOME) -> Path:
    """Writes a model and its card as `load_reference` reads them; returns their folder."""
    folder = home / card.name
    save_pretrained(model, folder, card=card.text())
    (folder / FACTS).write_text(json.dumps(asdict(card), indent=2) + "\n")
    return folder


def _read(place: Path) -> ReferenceModel:
    facts: dict[str, Any] = json.loads(place.read_text())
    return ReferenceModel(**facts)

"""The description on a package index: README, with links that work there.

Links to files of the checkout start from the address `Files` of `[project.urls]`. Where that is not set, they
become plain text, and pictures their description.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def for_index(text: str, files: str | None = None) -> str:
    """Replaces links to files of the checkout.

    Example:
        >>> for_index("[tour](docs/tour.md), ![loop](docs/loop.svg), [torch](https://pytorch.org)")
        'tour, *loop*, [torch](https://pytorch.org)'
        >>> for_index("[tour](docs/tour.md)", "https://example.invalid/files/")
        '[tour](https://example.invalid/files/docs/tour.md)'
    """
    if files is not None:
        return LINK.sub(lambda link: f"{link[1]}[{link[2]}]({files.rstrip('/')}/{link[3]})", text)
    return LINK.sub(lambda link: f"*{link[2]}*" if link[1] else link[2], text)


class IndexReadme(MetadataHookInterface):
    """Writes the field `readme`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Is called by hatchling with the table `project`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        files = metadata.get("urls", {}).get("Files")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, files)}

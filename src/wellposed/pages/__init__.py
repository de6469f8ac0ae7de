"""HTML pages that need no network: markup and frame, one style sheet, charts as SVG, pictures as PNG."""

"""HTML pages without scripts or a network: markup, one style sheet, charts as SVG."""

"""How forms are drawn."""

"""One file for each family of layers; importing it registers its rules."""

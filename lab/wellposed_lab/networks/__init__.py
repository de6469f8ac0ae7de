"""The networks that experiments train or compare with: by name, with the sizes of the papers, or trained already."""

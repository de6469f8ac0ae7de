"""The networks that experiments train or compare with: by name, in the sizes of the papers, or trained already."""

"""Every experiment of five papers on implicit deep learning as one command, beside the published numbers."""

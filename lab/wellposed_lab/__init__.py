"""Every experiment of five papers on implicit deep learning as one command, with our number beside the published one."""

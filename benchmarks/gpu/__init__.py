"""Tables of one GPU, each a function of `Sizes` that writes rows as it finds them; run by `gpu_check.py`."""

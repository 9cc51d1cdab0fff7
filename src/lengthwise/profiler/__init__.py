"""Runs the parts of a step on this machine, and writes the measurements that price plans."""

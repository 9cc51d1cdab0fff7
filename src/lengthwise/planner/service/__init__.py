"""Plans of steps: made in a process of their own, ahead of the steps that run them, and the same on all ranks."""

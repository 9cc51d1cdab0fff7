"""Steps whose ranks do not run free: in lock-step waves, or each as a pipeline of stages."""

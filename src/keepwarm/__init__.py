"""Keepwarm: prefill an agent's context once and keep it warm until the task is done."""

__version__ = "0.1.0"

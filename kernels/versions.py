"""Which versions beside this package are proven; needs nothing, so that whoever cannot import the others can ask."""

TRITON = "3.6.0"
"""Of RESOURCES.csv and of the corrected interpreter: registers and spills move between versions."""
VLLM = "0.32"
"""Whose private places vllm_plugin knows."""

"""Ways to move bytes over a link, one package each."""

SPOKEN = ("host_fd",)
"""The transports of this build, as every process says in its hello."""

"""Ways to move bytes over a link, one package each."""

SPOKEN = ("cuda_fd", "cuda_ipc", "host_fd", "collective", "stream")
"""The transports of this build, as every process says in its hello."""
